"""The way of a plain run through the package: how many files it enters, and how often it changes package."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

# What a plain run may enter: files, and changes of package between first entries.
WALKS = {
    "audit zoo:shapes-robust --limit 12 --attacks fgsm --no-precheck": (55, 27),
    "harden shapes/trades train.epochs=1 train.batch_size=32 data.limit=64 data.held_out=16 audit.limit=4 "
    "validation.limit=4": (72, 36),
    "diagnose zoo:shapes-robust --limit 16": (60, 30),
}
WALK = """
import sys, threading
import matplotlib.figure, pyarrow.parquet, timm, torch, torchvision  # not traced: they call millions of functions
from pathlib import Path
from dataclasses import replace
import vitadel
from vitadel.cli.main import main
if sys.argv[1] == "diagnose":  # shorter searches take the same way
    from vitadel.diagnosis import examination
    shorter = {"steps": 2, "restarts": 2, "queries": 20, "directions": 1, "student_epochs": 1}
    examination.LEVELS["quick"] = replace(examination.LEVELS["quick"], **shorter)
else:  # the likely time is estimated, which a fast machine leaves out
    from vitadel.evaluation.audit import audit
    from vitadel.evaluation.engine import cost
    audit.SHORT = cost.SHORT = 0.0
root, entered = Path(vitadel.__file__).parent, {}
def enter(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_flags & 1 and code.co_filename not in entered:  # 1: a function, no body of a module
        entered[code.co_filename] = None
threading.settrace(enter)
sys.settrace(enter)
try:
    main()
finally:
    sys.settrace(None)
    threading.settrace(None)
    print(*(f"WALK {Path(name).relative_to(root)}" for name in entered if Path(name).is_relative_to(root)), sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", WALKS)
def test_a_plain_run_enters_few_files(command: str, tmp_path: Path):
    """A feature that is not used adds no file to the way of a plain run."""
    ran = subprocess.run(
        [sys.executable, "-c", WALK, *command.split(), "--out", str(tmp_path / "run")], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    way = [line.removeprefix("WALK ") for line in ran.stdout.splitlines() if line.startswith("WALK ")]
    if "evaluation/engine/cost.py" not in way:  # a training without a correct image has no time to estimate
        way.append("evaluation/engine/cost.py")
    packages = [Path(name).parts[0] if "/" in name else "" for name in way]
    changes = sum(here != before for here, before in pairwise(packages))
    most_files, most_changes = WALKS[command]
    assert len(way) <= most_files, "\n".join(way)
    assert changes <= most_changes, "\n".join(way)
    assert {"cli/main.py", "evaluation/engine/run.py", "reporting/page.py"} <= set(way)
