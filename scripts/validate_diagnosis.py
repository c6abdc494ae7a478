"""Does `vitadel diagnose` find the broken defenses of the gallery, and leave honest models alone?

    python scripts/validate_diagnosis.py --half open                     # the half that thresholds may be chosen on
    python scripts/validate_diagnosis.py --half held-out --out runs/validate-diagnosis
    python scripts/validate_diagnosis.py --only ripples --only CNN       # names or families that contain this
    python scripts/validate_diagnosis.py --half held-out --part broken --weak --without-attacks
    python scripts/validate_diagnosis.py --part untrained --images 24 --eps 1/255    # CNNs of torchvision
    python scripts/validate_diagnosis.py --part named --data cifar10 --eps 4/255     # those of validate_masking.py

For every broken defense: what it hides from PGD-20, as the share of all images that another attacker breaks (transfer
from the model inside; Square) and PGD-20 leaves. If that is more than 5 points: the first check of `quick` that is
raised; with --weak whatever it hides, so that recall is a curve over strength. For every honest model: all checks that
are raised; and for CNNs of torchvision with random weights, whose own answers are taken for the labels. Results are
kept in files, so a run can be killed and started again.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torchvision.models
from torch import Tensor, nn
from validate_masking import NAMED

from vitadel.adapters.adapted_model import open_model
from vitadel.attacks import make
from vitadel.attacks.settings import training_form
from vitadel.diagnosis.examination import LEVELS, Examination
from vitadel.diagnosis.gallery import BROKEN_DEFENSES, HONEST_MODELS, BrokenDefense, HonestModel, held_out
from vitadel.diagnosis.gallery.entry import ROBUST
from vitadel.diagnosis.run import CHECKS, Check, DiagnosisRequest, examination_of, run_checks
from vitadel.evaluation.engine.target import open_target
from vitadel.findings import OK
from vitadel.quantities import read_quantity
from vitadel.runtime.distributed import join_processes
from vitadel.runtime.run_folder import write_atomically, write_json
from vitadel.statistics import wilson

HIDES = 0.05
"""Recall counts defenses that hide more than this share of all images from PGD-20."""
PARTS = ("hides", "broken", "honest", "untrained", "named")
UNTRAINED = ("resnet18", "mobilenet_v2", "densenet121", "vgg11")
_SQUARE = "square(queries=100,rescale_schedule=true)"
_base = cache(open_model)


def build(defense: BrokenDefense) -> nn.Module:
    return defense.build(copy.deepcopy(_base(defense.base)))


@cache
def _first_examination(images: int) -> Examination:
    target = open_target(_base(ROBUST), "shapes")
    return examination_of(target, DiagnosisRequest(limit=images), join_processes("cpu"))[0]


def examination(model: nn.Module, images: int) -> Examination:
    torch.manual_seed(0)  # some broken defenses draw from torch's generator
    opened = open_target(model, "shapes").model
    return replace(_first_examination(images), model=opened, _robust={})


def hidden(defense: BrokenDefense, images: int) -> dict[str, Any]:
    """How many images other attackers break, and how many of these PGD-20 leaves: what the defense hides.

    The attackers come in the order of their cost, until one shows that something is hidden.
    """
    e = examination(build(defense), images)
    attackers: dict[str, Callable[[], Tensor]] = {
        "transfer": lambda: _broken_by_transfer(defense, e),
        "square": lambda: _broken_by_square(e),
    }
    row: dict[str, Any] = {"clean": e.share(e.correct), "hides": 0.0, "found by": "", "breaks": 0.0}
    for name, attack in attackers.items():
        broken = attack()
        left = int(broken.sum()) - e.broken_among(broken, "pgd-20")
        if left / images >= row["hides"]:
            row |= {"hides": left / images, "found by": name, "breaks": e.share(broken)}
        if row["hides"] > HIDES:
            break
    return row


def _broken_by_square(e: Examination) -> Tensor:
    """Of the images nearest to another class, a third of all."""
    top = e.logits.topk(2, dim=1).values
    near = (top[:, 0] - top[:, 1]).masked_fill(~e.correct, torch.inf).argsort()[: len(e.x) // 3]
    exposed = torch.zeros_like(e.correct).index_fill(0, near, True) & e.correct
    return exposed & ~e.robust_among(exposed, _SQUARE)


@cache
def _crafted(base: str, images: int) -> Tensor:
    """Adversarial examples of the honest model inside."""
    return examination(_base(base), images).craft(training_form(make("pgd-20")), _base(base))


def _broken_by_transfer(defense: BrokenDefense, e: Examination) -> Tensor:
    """Judged on a defense that has seen nothing else."""
    fresh = examination(build(defense), len(e.x))
    return e.correct & (fresh.logits_of(_crafted(defense.base, len(e.x))).argmax(1) != e.y)


def without_attacks() -> list[Check]:
    """The checks that compare no attacks, which take seconds."""
    return [check for check in CHECKS if not check.attacks(LEVELS["quick"]) and check.identifier != "unbounded-attack"]


def raised(e: Examination, checks: Sequence[Check] = CHECKS, *, all_checks: bool) -> dict[str, Any]:
    """The checks that are raised: all, or the first."""
    start, found, evidence = time.process_time(), [], {}
    for batch in [list(checks)] if all_checks else [[check] for check in checks]:
        diagnosis = run_checks(e, batch)
        for finding in diagnosis.findings:
            if finding.verdict != OK:
                found.append(finding.check)
                evidence[finding.check] = finding.as_dict()["evidence"]
        found += [f"failed: {name}" for name in diagnosis.failed]
        if found and not all_checks:
            break
    seconds = round(time.process_time() - start, 1)
    return {"raised": found, "evidence": evidence, "checks": len(checks), "cpu_seconds": seconds}


def random_cnn(name: str, images: int, eps: float) -> Examination:
    """A CNN of torchvision with random weights, examined on its own answers.

    They would all be one class: the last bias makes the mean logits of other images equal, which spreads them.
    """
    torch.manual_seed(0)
    net = getattr(torchvision.models, name)(num_classes=10).eval()
    target = open_target(net, "shapes")
    e = examination_of(target, DiagnosisRequest(limit=images, eps=eps), join_processes("cpu"))[0]
    *_, last = (module for module in net.modules() if isinstance(module, nn.Linear))
    with torch.no_grad():
        last.bias -= torch.cat([e.model(x) for x, _ in e.other_images(128)]).mean(0)

    def answered(count: int) -> list[tuple[Tensor, Tensor]]:
        return [(x, e.logits_of(x).argmax(1)) for x, _ in e.other_images(count)]

    return replace(e, y=e.logits_of(e.x).argmax(1), other_images=answered, _robust={})


def named(name: str, base: str, data: str, images: int, eps: float) -> Examination:
    target = open_target(NAMED[name](copy.deepcopy(_base(base))), data)
    return examination_of(target, DiagnosisRequest(limit=images, eps=eps), join_processes("cpu"))[0]


class Results:
    """Rows by name, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}

    def get(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if name not in self.rows:
            self.rows[name] = compute()
            write_json(self.path, self.rows)
            print(self.path.stem, name, json.dumps(self.rows[name]), flush=True)
        return self.rows[name]


Member = BrokenDefense | HonestModel


def chosen(members: Sequence[Any], half: str, only: Iterable[str]) -> list[Any]:
    names = {each.name for each in held_out(members)}
    kept = [each for each in members if half == "all" or (each.name in names) == (half == "held-out")]
    return [each for each in kept if not only or any(word in (each.family, *each.name.split(", ")) for word in only)]


def share_text(hits: int, n: int) -> str:
    low, high = wilson(hits, n)
    return f"{hits} of {n} ({100 * low:.0f} to {100 * high:.0f} %)" if n else "none"


def recall_table(rows: Sequence[tuple[BrokenDefense, dict[str, Any], dict[str, Any] | None]]) -> str:
    lines = [
        "| family | broken defense | strength | clean | attacker | breaks | PGD-20 misses | first check raised |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for defense, hides, found in rows:
        clean, breaks, missed = (f"{100 * hides[key]:.0f} %" for key in ("clean", "breaks", "hides"))
        strength = "" if defense.strength is None else f"{defense.strength:g}"
        first = "not run" if found is None else ", ".join(found["raised"]) or "none"
        cells = (defense.family, defense.kind, strength, clean, hides["found by"], breaks, missed, first)
        lines.append("| " + " | ".join(cells) + " |")
    counted = [found for _, hides, found in rows if found is not None and hides["hides"] > HIDES]
    hits = sum(bool(found["raised"]) for found in counted)
    lines += ["", f"Recall, of those that hide more than {100 * HIDES:.0f} points: {share_text(hits, len(counted))}."]
    return "\n".join(lines)


def alarm_table(rows: Sequence[tuple[HonestModel, dict[str, Any]]]) -> str:
    lines = ["| family | honest model | checks | raised | processor seconds |", "|---|---|---|---|---|"]
    for model, found in rows:
        cells = (
            model.family,
            f"{model.name}: {model.about}",
            found["checks"],
            ", ".join(found["raised"]) or "none",
            found["cpu_seconds"],
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    alarms = sum(bool(found["raised"]) for _, found in rows)
    return "\n".join([*lines, "", f"False alarms: {share_text(alarms, len(rows))}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("open", "held-out", "all"), default="open")
    parser.add_argument(
        "--only", action="append", default=[], help="a family, kind or name; may be given several times"
    )
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: the first three")
    parser.add_argument("--eps", default="8/255", help="for --part untrained and named")
    parser.add_argument("--base", default="zoo:cifar10-trades", help="for --part named")
    parser.add_argument("--data", default="shapes", help="for --part named")
    parser.add_argument("--without-attacks", action="store_true", help="only checks that take seconds")
    parser.add_argument("--check", action="append", default=[], help="only these checks")
    parser.add_argument("--weak", action="store_true", help="also broken defenses that hide little or nothing")
    parser.add_argument("--out", type=Path, default=Path("runs/validate-diagnosis"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    parts = options.part or PARTS[:3]
    hides, broken, honest, without_training, by_name = (Results(options.out / f"{name}.json") for name in PARTS)
    tables = []
    checks = without_attacks() if options.without_attacks else CHECKS
    checks = [each for each in checks if not options.check or each.identifier in options.check]
    defenses: list[BrokenDefense] = chosen(BROKEN_DEFENSES, options.half, options.only)
    for each in defenses:
        if "hides" in parts:
            hides.get(each.name, lambda each=each: hidden(each, options.images))
        if "broken" in parts and (options.weak or hides.rows.get(each.name, {"hides": 0.0})["hides"] > HIDES):
            broken.get(
                each.name,
                lambda each=each: raised(examination(build(each), options.images), checks, all_checks=False),
            )
    done = [each for each in defenses if each.name in hides.rows]
    tables.append(recall_table([(each, hides.rows[each.name], broken.rows.get(each.name)) for each in done]))
    models: list[HonestModel] = chosen(HONEST_MODELS, options.half, options.only)
    for each in models if "honest" in parts else []:
        honest.get(
            each.name, lambda each=each: raised(examination(each.make(), options.images), checks, all_checks=True)
        )
    for name in (name for name in UNTRAINED if "untrained" in parts and (not options.only or name in options.only)):
        e = random_cnn(name, options.images, read_quantity(options.eps, "eps"))
        without_training.get(
            name, lambda e=e: raised(e, checks, all_checks=True) | {"pgd-10": e.share(e.robust("pgd-10"))}
        )
    for name in (each for each in NAMED if "named" in parts and (not options.only or each in options.only)):
        e = named(name, options.base, options.data, options.images, read_quantity(options.eps, "eps"))
        by_name.get(name, lambda e=e: raised(e, checks, all_checks=True))
    seen = [model for model in models if model.name in honest.rows]
    tables.append(alarm_table([(model, honest.rows[model.name]) for model in seen]))
    page = "\n\n".join(tables) + "\n"
    write_atomically(options.out / f"{options.half}.md", page.encode())
    print(page)


if __name__ == "__main__":
    main()
