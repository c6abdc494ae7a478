"""What commands print of a finished run."""

from __future__ import annotations

import shlex

from run_folders import write_run
from vitadel.reporting.terminal import show_run


def test_the_terminal_rounds_as_the_page_and_prints_a_command_to_paste(tmp_path, capsys):
    words = ["audit", "deit_tiny_patch16_224", "--weights", "my weights.pt", "--data", "folder:photos"]
    run = write_run(
        tmp_path / "run",
        correct=[True] * 300,
        attacks={"fgsm": [place < 299 for place in range(300)]},
        model="deit_tiny_patch16_224",
        data="folder:photos",
        argv=words,
        findings=[{"check": "precheck", "verdict": "ok", "evidence": "", "advice": "", "title": ""}],
    )
    show_run(run)
    seen = capsys.readouterr().out
    assert "98.7 to 100.0" in seen  # of clean: Wilson's upper end is 1
    assert "98.1 to 99.9" in seen
    command = next(line for line in seen.splitlines() if line.startswith("next: "))
    assert "--weights 'my weights.pt'" in command
    assert shlex.split(command)[1:4] == ["vitadel", "diagnose", "deit_tiny_patch16_224"]
    assert "No protocol is known" not in seen
