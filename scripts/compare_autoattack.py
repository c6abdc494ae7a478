"""Is our AutoAttack as strong as torchattacks'? Both on the same images, compared sample by sample.

    python scripts/compare_autoattack.py                                  # 500 images, the standard version: hours
    python scripts/compare_autoattack.py --limit 500 --steps 20 --queries 300

torchattacks' own `AutoAttack` runs its parts with 10 steps instead of 100, and Square with another schedule; here its
parts are put together as in the paper (Croce & Hein 2020, arXiv:2003.01690). Only images that the model gets right are
attacked. Ends with exit code 1 if ours leaves more than one sample in 500 more standing. The result is written after
every batch, so that an interrupted run has still compared something.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from vitadel.amounts import amount_text, read_amount
from vitadel.attacks import Linf
from vitadel.attacks.autoattack import autoattack
from vitadel.backbones.load import load_model
from vitadel.data.shapes import Shapes
from vitadel.evaluation.judge import judge
from vitadel.evaluation.metering import Cost, metered
from vitadel.runtime.draws import Draws
from vitadel.runtime.rundir import write_json

ALLOWED = 1 / 500  # how many samples more than theirs may hold against ours, as a share of those attacked

Run = Callable[[nn.Module, Tensor, Tensor, Draws], Tensor]


@dataclass(frozen=True)
class Settings:
    """What both sides get."""

    model: str
    eps: float
    limit: int
    steps: int
    targets: int
    queries: int
    batch_size: int
    seed: int


def ours(settings: Settings) -> Run:
    return autoattack(Linf(settings.eps), settings.steps, settings.targets, settings.queries)


def theirs(settings: Settings) -> Run:
    library = import_module("torchattacks")

    def run(model: nn.Module, x: Tensor, y: Tensor, draws: Draws) -> Tensor:
        common = {"norm": "Linf", "eps": settings.eps, "seed": settings.seed}
        classes = {"n_classes": settings.targets + 1, "steps": settings.steps}
        with torch.random.fork_rng():  # every part seeds torch's global generator
            attack = library.MultiAttack(
                [
                    library.APGD(model, **common, steps=settings.steps, loss="ce"),
                    library.APGDT(model, **common, **classes),
                    library.FAB(model, **common, **classes, multi_targeted=True),
                    library.Square(model, **common, n_queries=settings.queries, p_init=0.8, resc_schedule=False),
                ]
            )
            found: Tensor = attack(x, y)
        return found

    return run


@dataclass
class Side:
    """What one library did."""

    broken: list[int] = field(default_factory=list)
    void: list[int] = field(default_factory=list)  # proposals beyond box or budget, which count for nothing
    cost: Cost = field(default_factory=Cost)

    def attack(self, run: Run, model: nn.Module, ball: Linf, batch: tuple[Tensor, Tensor, Tensor], seed: int) -> None:
        index, x, y = batch
        with metered(model) as cost:
            z = run(model, x, y, Draws.of_samples(seed, index))
        verdict = judge(model, ball, x, z, y)
        self.broken += index[~verdict.held].tolist()
        self.void += index[verdict.void].tolist()
        self.cost = Cost(self.cost.gradients + cost.gradients, self.cost.forwards + cost.forwards)


def summary(settings: Settings, attacked: list[int], us: Side, them: Side, complete: bool) -> dict[str, object]:
    mine, other = set(us.broken), set(them.broken)
    sets = {
        "only_ours_breaks": sorted(mine - other),
        "only_theirs_breaks": sorted(other - mine),
        "both_break": sorted(mine & other),
        "both_hold": sorted(set(attacked) - mine - other),
    }
    n = len(attacked)
    deficit = len(sets["only_theirs_breaks"]) - len(sets["only_ours_breaks"])
    return {
        "complete": complete,
        "settings": asdict(settings),
        "attacked": n,
        "ours": {"held": n - len(mine), "void": us.void, **asdict(us.cost)},
        "theirs": {"held": n - len(other), "void": them.void, **asdict(them.cost)},
        "counts": {name: len(members) for name, members in sets.items()},
        "as_strong": deficit <= max(1, n * ALLOWED),
        **sets,
    }


def show(settings: Settings, attacked: int, us: Side, them: Side) -> None:
    title = (
        f"{settings.model}, Linf {amount_text(settings.eps)}, {attacked} attacked, {settings.steps} steps, "
        f"{settings.targets} targets, {settings.queries} queries"
    )
    table = Table("", title=title, title_justify="left")
    for heading in ("held", "only it breaks", "both break", "void", "gradients / image", "forwards / image"):
        table.add_column(heading, justify="right")
    both = set(us.broken) & set(them.broken)
    for name, side in (("vitadel", us), ("torchattacks", them)):
        counts = (attacked - len(side.broken), len(set(side.broken) - both), len(both), len(side.void))
        passes = (f"{total / max(attacked, 1):.1f}" for total in (side.cost.gradients, side.cost.forwards))
        table.add_row(name, *map(str, counts), *passes)
    Console().print(table)


def right_ones(model: nn.Module, settings: Settings, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """The images of one batch that the model gets right, with their place in the data."""
    index = torch.arange(start, min(start + settings.batch_size, settings.limit))
    pixels, y, _ = Shapes().render(index)
    x = pixels.float() / 255
    with torch.no_grad():
        right = model(x).argmax(1) == y
    return index[right], x[right], y[right]


def compare(settings: Settings, out: Path) -> bool:
    """Both attacks batch by batch; whether ours is as strong as is asked."""
    model, ball = load_model(settings.model), Linf(settings.eps)
    us, them, attacked = Side(), Side(), list[int]()
    sides = ((us, ours(settings), model), (them, theirs(settings), copy.deepcopy(model)))
    told: dict[str, object] = {}
    for start in range(0, settings.limit, settings.batch_size):
        batch = right_ones(model, settings, start)
        attacked += batch[0].tolist()
        for side, run, subject in sides:
            side.attack(run, subject, ball, batch, settings.seed)
        told = summary(settings, attacked, us, them, complete=start + settings.batch_size >= settings.limit)
        write_json(out / "comparison.json", told)
        print(f"{len(attacked)} attacked: {told['counts']}", flush=True)
    show(settings, len(attacked), us, them)
    print(out / "comparison.json")
    return bool(told["as_strong"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="zoo:shapes-robust")
    parser.add_argument("--limit", type=int, default=500, help="how many images of the shapes test split to look at")
    parser.add_argument("--eps", type=lambda text: read_amount(text, "eps"), default=8 / 255)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--targets", type=int, default=9)
    parser.add_argument("--queries", type=int, default=5000)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", "0")))
    parser.add_argument("--out", type=Path, default=Path("runs/compare-autoattack"))
    given = vars(parser.parse_args())
    out, threads = given.pop("out"), given.pop("threads")
    if threads:
        torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    return 0 if compare(Settings(**given), out) else 1


if __name__ == "__main__":
    sys.exit(main())
