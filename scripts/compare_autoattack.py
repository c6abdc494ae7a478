"""Is our AutoAttack as strong as torchattacks'? Both on the same images, compared sample by sample.

    python scripts/compare_autoattack.py                                  # 500 images, the standard version: hours
    python scripts/compare_autoattack.py --limit 500 --steps 20 --queries 300
    python scripts/compare_autoattack.py zoo:cifar10-trades --data parquet:test.parquet --audit runs/audit-of-it

torchattacks' own `AutoAttack` runs its parts with 10 steps instead of 100, and Square with another schedule; here its
parts are put together as in the paper (Croce & Hein 2020, arXiv:2003.01690). Only images that the model gets right are
attacked. With `--audit`, ours is not run again: its verdicts are those of an audit by `autoattack` alone, made before
on the same model, images and budget. Ends with exit code 1 if ours leaves more than one sample in 500 more standing.
The result is written after every batch, and an interrupted run goes on from there.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path

import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from vitadel.attacks import Linf
from vitadel.attacks.autoattack.standard import autoattack
from vitadel.data.batches import read_batches
from vitadel.evaluation.engine.stages import Cost, count_passes, judge
from vitadel.evaluation.engine.target import Target, open_target
from vitadel.quantities import quantity_text, read_quantity
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.run_folder import write_json

ALLOWED = 1 / 500  # how many samples more than theirs may hold against ours, as a share of those attacked

Run = Callable[[nn.Module, Tensor, Tensor, SampleRNG], Tensor]


@dataclass(frozen=True)
class Settings:
    """What both sides get."""

    model: str
    data: str
    eps: float
    limit: int
    steps: int
    targets: int
    queries: int
    batch_size: int
    seed: int
    audit: str | None = None


def ours(settings: Settings) -> Run:
    return autoattack(Linf(settings.eps), settings.steps, settings.targets, settings.queries)


def theirs(settings: Settings) -> Run:
    library = import_module("torchattacks")

    def run(model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG) -> Tensor:
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
        with count_passes(model) as cost:
            z = run(model, x, y, SampleRNG.of_samples(seed, index))
        verdict = judge(model, ball, x, z, y)
        self.broken += index[~verdict.held].tolist()
        self.void += index[verdict.void].tolist()
        self.cost = Cost(self.cost.gradients + cost.gradients, self.cost.forwards + cost.forwards)


def summary(
    settings: Settings, attacked: list[int], us: Side, them: Side, batches_done: int, complete: bool
) -> dict[str, object]:
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
        "batches": batches_done,
        "settings": asdict(settings),
        "attacked": n,
        "ours": {"held": n - len(mine), "void": us.void, **asdict(us.cost)},
        "theirs": {"held": n - len(other), "void": them.void, **asdict(them.cost)},
        "counts": {name: len(members) for name, members in sets.items()},
        "as_strong": deficit <= max(1, n * ALLOWED),
        **sets,
    }


@dataclass
class Progress:
    """What an interrupted comparison has so far."""

    batches: int = 0
    attacked: list[int] = field(default_factory=list)
    us: Side = field(default_factory=Side)
    them: Side = field(default_factory=Side)

    @classmethod
    def read(cls, path: Path, settings: Settings) -> Progress:
        found = json.loads(path.read_text()) if path.exists() else {}
        if found.get("settings") != asdict(settings):
            return cls()

        def side(name: str, broken: list[int]) -> Side:
            cost = Cost(found[name]["gradients"], found[name]["forwards"])
            return Side(sorted(broken + found["both_break"]), found[name]["void"], cost)

        us, them = side("ours", found["only_ours_breaks"]), side("theirs", found["only_theirs_breaks"])
        return cls(found["batches"], sorted({*us.broken, *them.broken, *found["both_hold"]}), us, them)


def read_audit(folder: Path, settings: Settings, target: Target) -> Side:
    """What an audit says that `autoattack` broke, as it is in the paper; the whole cost is its own."""
    length = (settings.steps, settings.targets, settings.queries)
    assert length == (100, 9, 5000), f"audits run autoattack with 100 steps, 9 targets, 5,000 queries, not {length}"
    results = json.loads((folder / "results.json").read_text())
    (entry,) = (entry for entry in results["attacks"] if entry["name"] == "autoattack")
    alone = entry["counts"] == "this attack alone" or results["attacks"][0] is entry
    assert alone, f"{folder}: autoattack ran on what others left"
    assert results["threat"]["norm"] == "linf", f"{folder}: in another norm"
    assert abs(results["threat"]["eps"] - settings.eps) < 1e-9, f"{folder}: at another eps"
    assert results["precision"] == "fp32", f"{folder}: in another precision"
    assert results["model"]["fingerprint"] == target.model_fingerprint(), f"{folder}: of another model"
    samples = pq.read_table(folder / "samples.parquet").to_pydict()
    chosen = target.selection(settings.limit, settings.seed, skip_bad=False)[0].tolist()
    assert samples["index"] == chosen, f"{folder}: of other images"
    rows = zip(samples["index"], samples["clean_correct"], samples["held:autoattack"], strict=True)
    broken = [index for index, right, held in rows if right and not held]
    return Side(broken, cost=Cost(entry["gradient_calls"], entry["forward_calls"]))


def show(settings: Settings, attacked: int, us: Side, them: Side) -> None:
    title = (
        f"{settings.model}, Linf {quantity_text(settings.eps)}, {attacked} attacked, {settings.steps} steps, "
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


def compare(settings: Settings, out: Path) -> bool:
    """Both attacks batch by batch; whether ours is as strong as is asked."""
    target, ball = open_target(settings.model, settings.data), Linf(settings.eps)
    path = out / "comparison.json"
    saved = Progress.read(path, settings)
    us, them, attacked = saved.us, saved.them, saved.attacked
    whole = None if settings.audit is None else read_audit(Path(settings.audit), settings, target)
    model, twin = target.model, copy.deepcopy(target.model)
    chosen = target.selection(settings.limit, settings.seed, skip_bad=False)[0].tolist()
    chunks = [chosen[at : at + settings.batch_size] for at in range(0, len(chosen), settings.batch_size)]
    left = read_batches(target.source, chunks[saved.batches :], target.preprocess)
    for done, read in enumerate(left, start=saved.batches + 1):
        with torch.no_grad():
            right = model(read.x).argmax(1) == read.y
        batch = (read.indices[right], read.x[right], read.y[right])
        attacked += batch[0].tolist()
        if whole is None:
            us.attack(ours(settings), model, ball, batch, settings.seed)
        else:
            us = Side([index for index in whole.broken if index in set(attacked)], cost=whole.cost)
        them.attack(theirs(settings), twin, ball, batch, settings.seed)
        found = summary(settings, attacked, us, them, done, complete=done == len(chunks))
        write_json(path, found)
        print(f"{len(attacked)} attacked: {found['counts']}", flush=True)
    show(settings, len(attacked), us, them)
    print(path)
    return bool(summary(settings, attacked, us, them, len(chunks), complete=True)["as_strong"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="zoo:shapes-robust")
    parser.add_argument("--data", default="shapes")
    parser.add_argument("--limit", type=int, default=500, help="how many images, class-balanced")
    parser.add_argument("--eps", type=lambda text: read_quantity(text, "eps"), default=8 / 255)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--targets", type=int, default=9)
    parser.add_argument("--queries", type=int, default=5000)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", "0")))
    parser.add_argument("--audit", metavar="FOLDER", help="where ours was run before")
    parser.add_argument("--out", type=Path, default=Path("runs/compare-autoattack"))
    given = vars(parser.parse_args())
    out, threads = given.pop("out"), given.pop("threads")
    if threads:
        torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    return 0 if compare(Settings(**given), out) else 1


if __name__ == "__main__":
    sys.exit(main())
