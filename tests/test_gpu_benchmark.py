"""`benchmarks/gpu.py`, which users with a GPU run, prints all its rows, with everyone's work done."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

SMALL = ["--device=cpu", "--model=zoo:shapes-robust", "--batch=2", "--steps=1", "--images=4", "--rounds=1"]
SMALL += ["--jpeg", "40", "30", "--size=32", "--workers=0"]
NUMBER = r"-?\d+(\.\d+)?"
ROWS = {
    "forward pass, images per second": NUMBER,
    "gradient, memory": rf"{NUMBER} MB",
    **{
        f"{name}, {who}": r".* s, .* gradients"
        for name in ("PGD-1", "APGD-CE-1")
        for who in ("vitadel", "torchattacks")
    },
    **{f"AutoAttack (1 steps, 2 targets), {who}": r".* s, .* gradients" for who in ("vitadel", "torchattacks")},
    **{
        f"{kind}, {precision}, {who}": rf"{NUMBER} s, {NUMBER} images/s, {NUMBER} MB"
        for kind in ("standard training", "training with PGD-1")
        for precision in ("fp32", "bf16")
        for who in ("vitadel", "timm")
    },
    "input, added to a model of 10 ms per image": rf"{NUMBER} % of its time",
    "input, vitadel": rf"{NUMBER} images/s and core",
    "input, torchvision ImageFolder + DataLoader": rf"{NUMBER} images/s and core",
    "input, timm create_loader": rf"{NUMBER} images/s and core",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # timm leaves its files open
def test_all_rows_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("torchattacks")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import gpu

    tick, clock = 0.01, gpu.now
    monkeypatch.setattr(gpu, "now", lambda device: clock(device) // tick * tick)  # as coarse as such clocks can be
    monkeypatch.setattr(sys, "argv", ["gpu.py", *SMALL])
    gpu.main()
    said = capsys.readouterr().out
    found = dict(line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("| "))
    for name, expected in ROWS.items():
        assert re.fullmatch(expected, found[name]), (name, found[name])
