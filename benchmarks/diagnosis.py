"""Confusion table of the diagnosis: every broken defense and the honest models, and which checks they raise.

    python benchmarks/diagnosis.py                                      # all, some 20 minutes on one core
    python benchmarks/diagnosis.py --only "bit depth" memory            # these, as another process may do the others
    python benchmarks/diagnosis.py --seed 7 --out runs/diagnosis-7         # on other images; --norm and --eps as well
    python benchmarks/diagnosis.py --images 24 --without-attacks        # only what takes a few passes
    python benchmarks/diagnosis.py --only zoo:cifar10-trades --data parquet:test.parquet
    python benchmarks/diagnosis.py --table                              # nothing but the tables of what is there

Every verdict is a file of the folder `--out`, written as soon as it is known; what is there does not run again, so the
script can be stopped and restarted. At the end it prints the tables in Markdown, for docs/results.md. A defense is
caught if every check that it must raise, and that was run, is raised. One thread; times are processor times.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitadel.adapters.adapted_model import open_model
from vitadel.backbones.checkpoints import zoo_names
from vitadel.diagnosis.checks import OK
from vitadel.diagnosis.examination import LEVELS
from vitadel.diagnosis.gallery import BROKEN_DEFENSES
from vitadel.diagnosis.run import CHECKS, Check, DiagnosisRequest, examination_of, run_checks
from vitadel.evaluation.engine.run import environment
from vitadel.evaluation.engine.target import open_target
from vitadel.quantities import quantity_text, read_quantity
from vitadel.runtime.distributed import join_processes
from vitadel.runtime.run_folder import write_json

HONEST = tuple(name for name in zoo_names() if name.startswith("zoo:shapes-"))
DEFENSES = {defense.name: defense for defense in BROKEN_DEFENSES if defense.raises}
OUT = Path("runs/diagnosis")
SHAPES = "shapes"


def build(name: str) -> nn.Module:
    return DEFENSES[name].make() if name in DEFENSES else open_model(name)


def diagnose(name: str, data: str, plan: DiagnosisRequest, checks: Sequence[Check]) -> dict[str, Any]:
    processes = join_processes("cpu")
    target = open_target(build(name), data)
    start = time.process_time()
    e = examination_of(target, plan, processes)[0]
    diagnosis = run_checks(e, checks)
    done = {finding.check for finding in diagnosis.findings}
    attacked = any(check.attacks(e.level) for check in checks if check.identifier in done)
    return {
        "model": name,
        "data": data,
        **settings(plan, checks),
        "clean": e.share(e.correct),
        "plain attack": e.share(e.robust(e.level.plain)) if attacked else None,  # cached
        "raised": {f.check: f.verdict for f in diagnosis.findings if f.verdict != OK},
        "findings": [f.as_dict() for f in diagnosis.findings],
        "not_examined": dict(diagnosis.not_examined),
        "seconds": round(time.process_time() - start, 1),
        "environment": environment(processes.device, 1),
    }


def settings(plan: DiagnosisRequest, checks: Sequence[Check]) -> dict[str, Any]:
    """Settings that two comparable verdicts share."""
    return {
        "level": plan.level,
        "images": plan.images,
        "norm": plan.norm,
        "eps": quantity_text(plan.eps),
        "seed": plan.seed,
        "checks": [check.identifier for check in checks],
    }


def is_cheap(check: Check, level: str) -> bool:
    return not check.attacks(LEVELS[level]) and sum(check.own_cost(LEVELS[level])) < 10


def kept_in(folder: Path, name: str) -> Path:
    return folder / (re.sub(r"[^\w-]+", "-", name).strip("-") + ".json")


def is_done(path: Path, wanted: Mapping[str, Any]) -> bool:
    """Whether a verdict is there; one with other settings ends the script."""
    if not path.is_file():
        return False
    kept = json.loads(path.read_text())
    other = [key for key, value in wanted.items() if kept[key] != value]
    if other:
        raise SystemExit(f"{path} was made with other {', '.join(other)}; choose another --out, or remove it")
    return True


def verdict(kept: Mapping[str, Any]) -> str:
    raised = kept["raised"]
    if kept["model"] not in DEFENSES:
        return "false alarm" if raised else "clear"
    asked = [check for check in DEFENSES[kept["model"]].raises if check in kept["checks"]]
    if not asked:
        return "not asked"
    return "caught" if all(check in raised for check in asked) else "missed"


def row(kept: Mapping[str, Any]) -> str:
    name, plain = kept["model"], kept["plain attack"]
    expected = DEFENSES[name].raises if name in DEFENSES else ()
    marked = [f"**{check}**" if check in expected else check for check in kept["raised"]]
    shares = ["" if share is None else f"{100 * share:.0f} %" for share in (kept["clean"], plain)]
    cells = [name, verdict(kept), *shares, ", ".join(marked) or "none", f"{kept['seconds']:.0f} s"]
    return f"| {' | '.join(cells)} |"


def tables(kept: Sequence[Mapping[str, Any]]) -> str:
    """Honest models first, then broken defenses, then how many of each were judged correctly."""
    honest = sorted((one for one in kept if one["model"] not in DEFENSES), key=lambda one: str(one["model"]))
    broken = [one for name in DEFENSES for one in kept if one["model"] == name]
    parts = []
    for title, group in (("honest model", honest), ("broken defense", broken)):
        head = f"| {title} | verdict | clean | after pgd | raised | time |\n|---|---|---|---|---|---|"
        parts.append("\n".join([head, *map(row, group)]))
    clear, caught = ([verdict(one) for one in group] for group in (honest, broken))
    parts.append(
        f"Honest models: {clear.count('clear')} of {len(clear)} clear. "
        f"Broken defenses: {caught.count('caught')} of {len(caught)} caught by every check that they must raise."
    )
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int)
    parser.add_argument("--level", default="quick")
    parser.add_argument("--norm", default="linf")
    parser.add_argument("--eps", default="8/255")
    parser.add_argument("--seed", type=int, default=0, help="chooses other images")
    parser.add_argument("--without-attacks", action="store_true", help="only checks that take a few passes")
    parser.add_argument("--only", nargs="+", help="names of broken defenses or models of the zoo", metavar="NAME")
    parser.add_argument(
        "--data", default=SHAPES, help="for honest models; broken defenses are made of models of shapes"
    )
    parser.add_argument("--out", type=Path, default=OUT, help=f"a folder of verdicts ({OUT})")
    parser.add_argument("--table", action="store_true", help="only print the tables of what is there")
    options = parser.parse_args()
    unknown = set(options.only or ()) - set(DEFENSES) - set(zoo_names())
    if unknown:
        parser.error(f"neither a broken defense nor a model of the zoo: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    eps = read_quantity(options.eps, "eps")
    plan = DiagnosisRequest(level=options.level, limit=options.images, norm=options.norm, eps=eps, seed=options.seed)
    checks = [check for check in CHECKS if not options.without_attacks or is_cheap(check, options.level)]
    wanted = settings(plan, checks)
    names = [] if options.table else options.only or [*HONEST, *DEFENSES]
    if not options.table:  # all verdicts of a folder share one table
        for path in options.out.glob("*.json"):
            is_done(path, wanted)
    images = {name: SHAPES if name in DEFENSES else options.data for name in names}
    todo = [name for name in names if not is_done(kept_in(options.out, name), wanted | {"data": images[name]})]
    for name in todo:
        kept = diagnose(name, images[name], plan, checks)
        write_json(kept_in(options.out, name), kept)
        print(row(kept), flush=True)
    print(f"\n{tables([json.loads(path.read_text()) for path in sorted(options.out.glob('*.json'))])}")


if __name__ == "__main__":
    main()
