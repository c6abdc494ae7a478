"""SIGTERM and SIGUSR1, by which clusters announce preemption: the state is saved, the command ends, and goes on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from command_line import vitadel
from small_recipes import recipe
from vitadel.cli.main import _preemption_as_interrupt
from vitadel.errors import Interrupted
from vitadel.runtime.distributed import join_processes
from vitadel.runtime.run_folder import FolderCache
from vitadel.training import loop
from vitadel.training.run import run_harden

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


@pytest.mark.slow
def test_a_training_preempted_ten_times_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    changes = {
        "train": {"epochs": 4, "checkpoint_every": 100},
        "plugins": {"weight_average": {"decay": 0.9}},
        "validation": {"every": 4, "limit": 10},
        "audit": {"limit": 4},
    }

    def harden(folder: str, resume: bool = False) -> None:
        run_harden(recipe(**changes), "small", join_processes("cpu"), out=tmp_path / folder, resume=resume)

    harden("undisturbed")
    lives, real = 0, loop._Trainer.take_step

    def preempted(self, parts):
        if lives <= 10:
            os.kill(os.getpid(), SIGNALS[lives % 2])
            os.kill(os.getpid(), signal.SIGTERM)  # clusters repeat themselves: the step must still be finished
        real(self, parts)

    monkeypatch.setattr(loop._Trainer, "take_step", preempted)
    for lives in range(1, 12):
        with _preemption_as_interrupt():
            if lives <= 10:
                with pytest.raises(Interrupted):
                    harden("preempted", resume=True)
                step = torch.load(tmp_path / "preempted" / "checkpoint.pt", weights_only=True)["step"]
                assert step == lives
            else:
                harden("preempted", resume=True)
    for name in ("best", "last"):
        expected, found = (
            load_file(tmp_path / run / "weights" / f"{name}.safetensors") for run in ("undisturbed", "preempted")
        )
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_preempted_audit_keeps_its_batches_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    words = ["audit", "--limit=4", "--batch-size=2", "--attacks=fgsm", "--no-precheck", f"--out={tmp_path / 'run'}"]
    saved, save = [], FolderCache.save

    def preempted(cache, stage, batch, record):
        save(cache, stage, batch, record)
        saved.append((stage, batch))
        if len(saved) == 1:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(FolderCache, "save", preempted)
    usual = signal.getsignal(number)
    said = vitadel(*words, code=130)
    assert f"--out={tmp_path / 'run'} --resume" in said.stderr
    assert signal.getsignal(number) == usual
    vitadel(*words, "--resume")
    assert saved == [("clean", 0), ("clean", 1), ("00 fgsm", 0), ("00 fgsm", 1)]


def _sleep(started: Event) -> None:
    started.set()
    while True:
        time.sleep(0.1)  # not for long: Python calls no handler in a sleep that begins just after the signal


def test_workers_are_still_ended_by_sigterm():
    with _preemption_as_interrupt():
        context = multiprocessing.get_context("fork")
        started = context.Event()
        worker = context.Process(target=_sleep, args=(started,))
        worker.start()
        assert started.wait(300)
        worker.terminate()
        worker.join(300)
    assert worker.exitcode == -signal.SIGTERM
