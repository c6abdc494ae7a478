"""The same verdicts however the work is cut: one process or two, undisturbed or killed, any batch size."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import vitadel

AUDIT = [
    "audit",
    "zoo:shapes-standard",
    "--limit=96",
    "--batch-size=8",
    "--attacks=fgsm,pgd-4(restarts=2)",
    "--eps=1/255",
    "--device=cpu",
]
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


def start(launcher: list[str], out: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", *launcher, "vitadel", *AUDIT, f"--out={out}", *more]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    process = start([], out)
    assert process.wait() == 0, process.stderr.read().decode()
    return outcome(out)


def test_two_processes_agree_with_one_byte_for_byte(tmp_path, undisturbed):
    launcher = ["torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"]
    process = start(launcher, tmp_path / "two")
    _, told = process.communicate()
    assert process.returncode == 0, told.decode()
    assert outcome(tmp_path / "two") == undisturbed


def test_killed_three_times_and_resumed_agrees_byte_for_byte(tmp_path, undisturbed):
    out = tmp_path / "killed"
    chance = random.Random(0)
    seen = 0
    for _ in range(3):
        process = start([], out, "--resume")
        deadline = time.monotonic() + 120
        # Wait until this life has finished a few pieces of its own, then kill it wherever it is.
        while len(list(out.glob("partial/*/*.npz"))) < seen + 2 and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(chance.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen = len(list(out.glob("partial/*/*.npz")))
        assert 0 < seen < 3 * 12
        assert (
            not json.loads((out / "results.json").read_text())["complete"] if (out / "results.json").exists() else True
        )
    process = start([], out, "--resume")
    _, told = process.communicate()
    assert process.returncode == 0, told.decode()
    assert b"found again" in told
    assert outcome(out) == undisturbed
    assert not list(out.rglob(".*.npz*")), "temporary files are cleaned up with the pieces"


def test_batch_size_changes_nothing_but_rounding(tmp_path):
    held = {}
    for size in (1, 7, 64):
        out = tmp_path / str(size)
        vitadel.audit(
            "zoo:shapes-robust", attacks="pgd-5", eps="6/255", limit=60, batch_size=size, out=out, device="cpu"
        )
        table = pq.read_table(out / "samples.parquet").to_pydict()
        held[size] = (table["index"], table["clean_correct"], table["held:pgd-5"])
    for size in (7, 64):
        assert held[size][0] == held[1][0]
        different = sum(a != b for a, b in zip(held[size][2], held[1][2], strict=True))
        assert different <= 60 / 200 + 1


def test_interrupted_by_control_c_says_how_to_go_on(tmp_path, undisturbed):
    out = tmp_path / "stopped"
    process = start([], out)
    while not list(out.glob("partial/*/*.npz")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in told
    assert f"--out={out} --resume" in told.decode()
    process = start([], out, "--resume")
    assert process.wait() == 0
    assert outcome(out) == undisturbed
