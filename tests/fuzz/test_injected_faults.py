"""A run that is killed, or whose disk fails, at any write: resumed, it ends with the same results as undisturbed.

`VITADEL_FAULTS=20` tries 20 places of each kind of run and fault instead of a few.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import material
import pytest

import command_line

PLACES = int(os.environ.get("VITADEL_FAULTS", "2"))
KINDS = ("audit", "attack", "corruptions", "harden", "probe")
FAULTS = ("kill", "terminate", "no space", "input/output error", "clock")
_CLOCKS = ("time", "monotonic", "perf_counter")


def timeless(value):
    """Results without what a clock says, and without the folder's name."""
    if isinstance(value, dict):
        return {key: timeless(entry) for key, entry in value.items() if "second" not in key and key != "spec"}
    return [timeless(entry) for entry in value] if isinstance(value, list) else value


def outcome(folder: Path) -> dict[str, object]:
    files = [path for pattern in ("*.parquet", "images/*", "weights/*.safetensors") for path in folder.glob(pattern)]
    content: dict[str, object] = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    content["results.json"] = json.dumps(timeless(json.loads((folder / "results.json").read_text())), indent=2)
    return content


def words_of(kind: str, out: Path) -> list[str]:
    batches = [] if kind in ("harden", "probe") else ["--batch-size", "2"]
    return [*material.RUNS[kind], *batches, "--out", str(out)]


def _ahead(clock):
    return clock() + 1e6


def inject(fault: str, place: int) -> None:
    """Let write number `place` of this process fail, where the finished file would get its name."""
    rename, count = os.replace, 0

    def replaced(source, target):
        nonlocal count
        count += 1
        if count == place:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            elif fault == "no space":
                raise OSError(errno.ENOSPC, "No space left on device")
            elif fault == "input/output error":
                raise OSError(errno.EIO, "Input/output error")
            else:
                for name in _CLOCKS:
                    setattr(time, name, partial(_ahead, getattr(time, name)))
        rename(source, target)

    os.replace = replaced


def in_child(words: list[str], fault: str, place: int) -> int:
    """Run the command with the fault in a forked process, which has torch already; return its wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        inject(fault, place)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        command_line.vitadel(*words, cwd=material.inputs())
        code = 0
    finally:
        os._exit(code)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The outcome of each kind, and how often it writes."""
    found = {}

    def of(kind: str):
        if kind not in found:
            folder, writes, rename = tmp_path_factory.mktemp(kind) / "run", [], os.replace
            os.replace = lambda source, target: (writes.append(target), rename(source, target))
            try:
                command_line.vitadel(*words_of(kind, folder), cwd=material.inputs())
            finally:
                os.replace = rename
            found[kind] = (outcome(folder), len(writes))
        return found[kind]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_disturbed_run_ends_with_the_same_results(undisturbed, tmp_path, kind, fault):
    expected, writes = undisturbed(kind)
    number = (FAULTS.index(fault) + 1) * 7919
    places = {1 + (number + step * max(1, writes // PLACES)) % writes for step in range(PLACES)}
    disturbed = 0
    for place in sorted(places):
        folder = tmp_path / f"run-{place}"
        status = in_child(words_of(kind, folder), fault, place)
        disturbed += status != 0
        command_line.vitadel(*words_of(kind, folder), "--resume", cwd=material.inputs())
        found = outcome(folder)
        assert found.keys() == expected.keys()
        assert [name for name in expected if found[name] != expected[name]] == [], f"{fault} at write {place}"
        assert not (folder / "partial").exists()
        assert not [path for path in folder.rglob(".*.????????") if path.is_file()]
        shutil.rmtree(folder)
    assert bool(disturbed) == (fault != "clock")
