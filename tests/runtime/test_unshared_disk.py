"""Two machines whose --out is not on a disk that they share: one message, and nothing hangs or is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from new_processes import run_together
from small_recipes import recipe
from vitadel.errors import UserError
from vitadel.evaluation.audit.audit import AuditRequest, run_audit
from vitadel.evaluation.engine.target import open_target
from vitadel.runtime.distributed import Processes, join_processes
from vitadel.training.run import run_harden

SHORT = {"data": {"limit": 16, "held_out": 10, "test": None}, "train": {"epochs": 1}, "validation": {"limit": 10}}


def audit_apart(folder: str) -> None:
    """An audit in which each process sees a folder of its own."""
    request = AuditRequest(attacks=("fgsm",), limit=8, batch_size=2)
    _with_message(folder, lambda processes, out: run_audit(_target(), request, processes, out=out))


def train_apart(folder: str) -> None:
    """A training that resumes from a checkpoint which only the first process sees."""
    _with_message(folder, lambda processes, out: run_harden(recipe(**SHORT), "small", processes, out=out, resume=True))


def _with_message(folder: str, work) -> None:
    processes = join_processes("cpu")
    own = Path(folder) / str(processes.rank)
    own.mkdir(exist_ok=True)
    os.chdir(own)
    try:
        work(processes, Path("run"))  # the same path, and not the same folder
    except UserError as error:
        (own / "message").write_text(str(error))
        os._exit(2)  # without waiting for the other process


def _target():
    return open_target("zoo:shapes-robust", "shapes")


def messages(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted(folder.glob("*/message"))]


@pytest.mark.slow
def test_an_audit_says_that_the_folder_is_not_shared(tmp_path):
    run_together(audit_apart, str(tmp_path), code=2)
    assert len(messages(tmp_path)) == 2
    for message in messages(tmp_path):
        assert "batches of stage 'clean' are missing" in message
        assert "a folder that all of them share" in message
    assert list((tmp_path / "0" / "run").rglob("*.npz"))  # its own batches are kept


@pytest.mark.slow
def test_a_training_says_that_the_folder_is_not_shared(tmp_path):
    run = tmp_path / "0" / "run"
    run_harden(recipe(**SHORT), "small", Processes(0, 1, torch.device("cpu")), out=run)
    before = (run / "checkpoint.pt").read_bytes()
    (run / "results.json").unlink()
    run_together(train_apart, str(tmp_path), code=None)
    assert any("does not see the checkpoint of the main process" in each for each in messages(tmp_path))
    assert (run / "checkpoint.pt").read_bytes() == before
