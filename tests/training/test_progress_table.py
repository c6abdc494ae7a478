"""What a person sees of a training: a table that grows on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from vitadel.training import metrics as module
from vitadel.training.metrics import ProgressTable, open_progress_table

STEP = {"loss": 2.0, "accuracy": 0.25, "eps": 8 / 255}
EPOCH = {"validation_clean": 0.5, "validation_robust": 0.25}


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 100 columns; what was written to it last."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100, color_system=None, _environ={})
    monkeypatch.setattr(module, "Console", lambda **_: console)
    return written


def test_on_a_terminal_a_table_grows_by_a_row_per_epoch_above_a_bar(terminal):
    with open_progress_table(steps=6, epochs=2, shown=True) as seen:
        assert seen.live is not None
        seen.note("4 BatchNorm layers [of the loss]")
        for step in (1, 2, 3):
            seen.add_step(step, {**STEP, "loss": float(step)}, 60.0)
        seen.add_epoch(0, EPOCH, best=True)
        seen.add_step(4, STEP, 60.0)
        seen.live.refresh()
    reported = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())  # without what moves the cursor
    assert "4 BatchNorm layers [of the loss]" in reported  # as it is: no markup
    last = [line.rstrip() for line in reported.replace("\r", "\n").splitlines() if line.strip()]
    rows = [line.split() for line in last if line.lstrip().startswith("1/2")]
    assert rows
    assert rows[-1] == ["1/2", "2.000", "50.0", "%", "25.0", "%", "best"]  # the mean of its three steps
    assert any(line.startswith("epoch") and "robust, held out" in line for line in last)
    assert "step 4/6, loss 2.000, accuracy in training 25.0 %, eps 8/255, 2:00 left" in reported


def test_elsewhere_epochs_are_lines_and_steps_only_now_and_then(capsys, monkeypatch):
    later, real = 0.0, time.monotonic
    monkeypatch.setattr(module.time, "monotonic", lambda: real() + later)
    with open_progress_table(steps=6, epochs=2, shown=True) as seen:
        assert seen.live is None
        seen.add_step(1, STEP, 1.0)
        assert capsys.readouterr().err == ""
        later = 31.0
        seen.add_step(2, STEP, 1.0)
        assert capsys.readouterr().err == ("step 2/6, loss 2.000, accuracy in training 25.0 %, eps 8/255, 0:04 left\n")
        seen.add_epoch(0, {"validation_clean": 0.5}, best=False)
        seen.add_epoch(1, {}, best=False)  # resumed at its end: no step of it was seen
    assert capsys.readouterr().err.splitlines() == [
        "epoch 1/2: loss 2.000, accuracy in training 25.0 %, eps 8/255, held out: clean 50.0 %",
        "epoch 2/2: no loss yet, eps 8/255",
    ]


def test_processes_that_are_not_the_first_say_nothing(capsys, terminal):
    with open_progress_table(steps=2, epochs=1, shown=False) as seen:
        seen.note("hello")
        seen.add_step(1, STEP, 1.0)
        seen.add_epoch(0, EPOCH, best=True)
    assert capsys.readouterr() == ("", "")
    assert terminal.getvalue() == ""


def test_only_the_last_epochs_are_in_view():
    seen = ProgressTable(steps=100, epochs=40, shown=False)
    for epoch in range(40):
        seen.add_epoch(epoch, EPOCH, best=False)
    assert [row[0] for row in seen.rows] == [f"{number}/40" for number in range(26, 41)]
