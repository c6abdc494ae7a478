"""The same verdicts however the work is cut: one process or two, undisturbed or killed, any batch size."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import vitadel
from new_processes import Running, program, run_together, signaled_at, start
from vitadel.runtime.run_folder import RunFolder

AUDIT = [
    "audit",
    "zoo:shapes-standard",
    "--limit=48",
    "--batch-size=8",
    "--attacks=fgsm,pgd-4(restarts=2),autoattack(steps=3,targets=2,queries=6)",
    "--eps=1/255",
    "--no-precheck",  # its findings in several processes are compared by the command of the docs below
]  # without --device: processes must join on a machine without an accelerator, too
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def timeless(value):
    """Results without what a clock says."""
    if isinstance(value, dict):
        return {key: timeless(entry) for key, entry in value.items() if key != "seconds"}
    return [timeless(entry) for entry in value] if isinstance(value, list) else value


def outcome(folder: Path) -> tuple[str, bytes]:
    results = json.loads((folder / "results.json").read_text())
    assert results["complete"]
    return json.dumps(timeless(results), indent=2), (folder / "samples.parquet").read_bytes()


def begin(out: Path, *more: str) -> Running:
    return start(program, *AUDIT, f"--out={out}", *more)


def pieces(out: Path) -> int:
    return len(list(out.glob("partial/*/*.npz")))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    begin(out).finish()
    return outcome(out)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_agree_with_one_byte_for_byte(tmp_path, undisturbed, processes):
    run_together(program, *AUDIT, f"--out={tmp_path / 'run'}", processes=processes)
    assert outcome(tmp_path / "run") == undisturbed


@pytest.mark.slow
def test_the_command_of_the_docs_agrees_with_one_process_byte_for_byte(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "auditing.md").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("torchrun "))
    words = [*line.split(), "--limit", "16"]  # fewer than the docs have
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:], "--out", str(tmp_path / "launched")]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    start(program, *words[words.index("vitadel") + 1 :], "--out", str(tmp_path / "alone")).finish()
    assert outcome(tmp_path / "launched") == outcome(tmp_path / "alone")


@pytest.mark.slow
def test_killed_three_times_and_resumed_agrees_byte_for_byte(tmp_path, undisturbed):
    out = tmp_path / "killed"
    chance = random.Random(0)
    for _ in range(3):
        words, before = [*AUDIT, f"--out={out}", "--resume"], pieces(out)
        moment = chance.choice(("os.fsync", "os.replace", "os.chmod")), chance.randrange(6, 9)  # files are half written
        start(signaled_at, signal.SIGKILL, *moment, program, *words).finish(-signal.SIGKILL)
        assert pieces(out) >= before + 2
        assert not RunFolder(out).complete
    assert "found again" in begin(out, "--resume").finish().stderr
    assert outcome(out) == undisturbed
    assert not list(out.rglob(".*")), "no temporary file is left behind"


@pytest.mark.slow
def test_batch_size_changes_nothing_but_rounding(tmp_path):
    held = {}
    for size in (1, 7, 64):
        out = tmp_path / str(size)
        vitadel.audit(
            "zoo:shapes-robust", attacks="pgd-3", eps="6/255", limit=200, batch_size=size, out=out, device="cpu"
        )
        table = pq.read_table(out / "samples.parquet").to_pydict()
        held[size] = (table["index"], table["clean_correct"], table["held:pgd-3"])
    for size in (7, 64):
        assert held[size][:2] == held[1][:2]
        different = sum(a != b for a, b in zip(held[size][2], held[1][2], strict=True))
        assert different <= 1  # 1 in 200


@pytest.mark.slow
def test_interrupted_by_control_c_says_how_to_go_on(tmp_path, undisturbed):
    out = tmp_path / "stopped"
    moment = signal.SIGINT, "vitadel.runtime.run_folder.FolderCache.save", 2
    reported = start(signaled_at, *moment, program, *AUDIT, f"--out={out}").finish(130).stderr
    assert pieces(out)
    assert "Traceback" not in reported
    assert f"--out={out} --resume" in reported
    begin(out, "--resume").finish()
    assert outcome(out) == undisturbed
