"""The doctor's confusion table: every liar of the gallery and the honest models, and which checks they raise.

    python benchmarks/doctor.py                            # all, some 40 minutes on one core
    python benchmarks/doctor.py --images 24 --without-attacks --only "bit depth" memory

Prints a table in Markdown, for docs/doctor.md, and leaves the verdicts with their numbers in `--out`. A liar is
caught if every check that must see it, and was run, is raised.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from vitadel.adapters.opening import open_model
from vitadel.backbones.load import load_model, zoo_names
from vitadel.diagnosis.doctor import CHECKS, Check, examine
from vitadel.diagnosis.examination import LEVELS
from vitadel.diagnosis.finding import OK
from vitadel.diagnosis.gallery import GALLERY
from vitadel.diagnosis.visit import Appointment, examination_of
from vitadel.evaluation.subject import open_subject
from vitadel.runtime.environment import environment
from vitadel.runtime.processes import join_processes
from vitadel.runtime.rundir import write_json

HONEST = tuple(name for name in zoo_names() if name.startswith("zoo:shapes-"))


def visited(model: nn.Module, plan: Appointment, checks: Sequence[Check]) -> dict[str, Any]:
    subject = open_subject(model, "shapes")
    begun = time.monotonic()
    processes = join_processes("cpu")
    examined = examine(examination_of(subject, plan, processes)[0], checks)
    return {
        "raised": {f.check: f.verdict for f in examined.findings if f.verdict != OK},
        "examined": [f.check for f in examined.findings],
        "findings": [f.as_dict() for f in examined.findings],
        "not_examined": dict(examined.not_examined),
        "seconds": round(time.monotonic() - begun, 1),
    }


def is_cheap(check: Check, level: str) -> bool:
    return not check.attacks(LEVELS[level]) and sum(check.own(LEVELS[level])) < 10


def row(name: str, told: dict[str, Any], expected: tuple[str, ...] | None) -> str:
    raised = told["raised"]
    marked = [f"**{check}**" if expected and check in expected else check for check in raised]
    if expected is None:
        result = "false alarm" if raised else "clear"
    else:
        asked = [check for check in expected if check in told["examined"]]
        result = "caught" if asked and all(check in raised for check in asked) else "missed" if asked else "not asked"
    return f"| {name} | {result} | {', '.join(marked) or 'none'} | {told['seconds']:.0f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--level", default="quick")
    parser.add_argument("--without-attacks", action="store_true", help="only checks that take a few passes")
    parser.add_argument("--only", nargs="+", help="names of liars or honest models")
    parser.add_argument("--out", type=Path, help="a JSON file for verdicts and numbers")
    options = parser.parse_args()
    checks = [check for check in CHECKS if not options.without_attacks or is_cheap(check, options.level)]
    plan = Appointment(level=options.level, limit=options.images)
    chosen = options.only
    kept: dict[str, Any] = {"environment": environment(join_processes("cpu").device, 1), "images": options.images}
    print("| model | verdict | raised (expected ones in bold) | time |\n|---|---|---|---|")
    for name in HONEST:
        if chosen is None or name in chosen:
            kept[name] = visited(open_model(name), plan, checks)
            print(row(name, kept[name], None), flush=True)
    for liar in GALLERY:
        if chosen is None or liar.name in chosen:
            kept[liar.name] = visited(liar.lie(load_model(liar.patient)), plan, checks)
            print(row(liar.name, kept[liar.name], liar.seen_by), flush=True)
    if options.out is not None:
        write_json(options.out, kept)


if __name__ == "__main__":
    main()
