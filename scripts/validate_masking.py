"""Does `autoattack-fast` notice masked gradients, and leave honest models alone? Over the gallery of the diagnosis.

    python scripts/validate_masking.py --half open            # the half that thresholds may be chosen on
    python scripts/validate_masking.py --half held-out --compare
    python scripts/validate_masking.py --zoo --seeds 5        # false alarms: models of the zoo with several seeds
    python scripts/validate_masking.py --named --data cifar10 --compare --escalate --n 96
    python scripts/validate_masking.py --zoo --seeds 20 --probe   # only the probe, on all correct images: seconds
    python scripts/validate_masking.py --model deit_tiny_patch16_224 --weights FILE --data parquet:FILE --probe

The attack runs without escalation, unless --escalate is given: signs of masking would lead to AutoAttack, whose number
it then has, or a lower one, because both use the same random numbers. Images that it leaves are attacked by a transfer
from the model inside. With --compare, AutoAttack runs on the images that are left where the verdict is "ok" (of the
named models on all images), and must not break more than 1 image in 100 of all. Finished models are not attacked again.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitadel.adapters.adapted_model import open_model
from vitadel.attacks import make
from vitadel.attacks.autoattack.fast import AutoAttackFast
from vitadel.attacks.autoattack.fast_evidence import PROBE, SEARCH, FastEvidence
from vitadel.attacks.autoattack.sentinel_probe import Probe
from vitadel.attacks.per_sample import run_attack
from vitadel.attacks.threats import make_threat
from vitadel.attacks.wrappers import StageResult, next_stage
from vitadel.data.batches import Batch, read_batches
from vitadel.diagnosis.checks.attack_comparisons import Transferred
from vitadel.diagnosis.gallery import BROKEN_DEFENSES, HONEST_MODELS, BrokenDefense, held_out
from vitadel.diagnosis.gallery.entry import Build, before
from vitadel.diagnosis.gallery.inside import after_activations, k_winners
from vitadel.diagnosis.gallery.pixels import smooth_stairs, triangle
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import Cost, count_passes, judge
from vitadel.evaluation.engine.target import Target, open_target
from vitadel.quantities import read_quantity
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.run_folder import write_atomically, write_json
from vitadel.types import Attack

ROBUST, STANDARD = "4/255", "8/255"  # budgets for defenses around the robust and the standard model
HONEST = "1/255"  # for honest standard models, which nothing is left of at larger budgets
ZOO = ("robust", "pgd-at", "trades", "trades-awp", "mart", "tora", "standard", "ordinary")
NAMED: dict[str, Build] = {
    "triangle wave, period 2/255, amplitude 0.75/255": before(triangle(2, 1.5)),
    "k-winners, a tenth of the activations": after_activations(lambda: k_winners(0.1)),
    "steep staircase, 4/255 wide, sharpness 50": before(smooth_stairs(4, 50)),
}


@dataclass(frozen=True)
class Case:
    """A model, and for a broken defense the honest model inside, which attacks may transfer from."""

    name: str
    family: str
    eps: str
    make: Callable[[], nn.Module]
    inner: str | None = None
    seed: int = 0
    data: str = "shapes"

    @property
    def file(self) -> str:
        kind = "honest" if self.inner is None else "broken"
        return re.sub(r"[^a-z0-9.]+", "-", f"{kind} {self.name} {self.eps} {self.seed}") + ".json"


def gallery(half: str) -> Iterator[Case]:
    out = {each.name for each in (*held_out(BROKEN_DEFENSES), *held_out(HONEST_MODELS))}
    for entry in (*BROKEN_DEFENSES, *HONEST_MODELS):
        if half == "all" or (entry.name in out) == (half == "held-out"):
            if isinstance(entry, BrokenDefense):
                eps = STANDARD if entry.base.endswith("standard") else ROBUST
                yield Case(entry.name, entry.family, eps, entry.make, entry.base)
            else:
                standard = any(word in entry.name for word in ("standard", "ordinary", "CNN"))
                yield Case(entry.name, entry.family, HONEST if standard else ROBUST, entry.make)


def zoo(seeds: int) -> Iterator[Case]:
    for seed in range(seeds):
        for name in ZOO:
            eps = HONEST if name in ("standard", "ordinary") else ROBUST
            spec = f"zoo:shapes-{name}"
            yield Case(f"{spec} seed {seed}", "zoo", eps, lambda spec=spec: open_model(spec), seed=seed)


def given(name: str, weights: str | None, data: str, seeds: int) -> Iterator[Case]:
    """A model that is taken for honest."""
    for seed in range(seeds):
        opened = partial(open_model, name, {"weights": weights})
        yield Case(f"{name} seed {seed}", "given", HONEST, opened, seed=seed, data=data)


def named(base: str, data: str) -> Iterator[Case]:
    for name, build in NAMED.items():
        yield Case(name, "named", ROBUST, lambda build=build: build(copy.deepcopy(open_model(base))), base, data=data)


def images(target: Target, n: int, seed: int) -> Batch:
    indices, _ = target.selection(n, seed, None)
    (batch,) = read_batches(target.source, [indices.tolist()], target.preprocess)
    return batch


@dataclass(frozen=True)
class Attacked:
    """A model and the images that it classifies correctly."""

    model: nn.Module
    x: Tensor
    y: Tensor
    rng: SampleRNG
    eps: float

    def fooled(self, attack: Attack, places: Tensor, rng: SampleRNG | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Which of the images at `places` an attack breaks, judged on the model, and what it says about them."""
        if len(places) == 0:
            return torch.zeros(0, dtype=torch.bool), {}
        x, y = self.x[places], self.y[places]
        z, info = run_attack(attack, self.model, x, y, self.rng[places] if rng is None else rng)
        return ~judge(self.model, make_threat("linf", self.eps), x, z, y).held, info

    def left(self, name: str, places: Tensor) -> Tensor:
        return places[~self.fooled(make(name, eps=self.eps), places)[0]]

    def run_stages(self, attack: AutoAttackFast) -> tuple[dict[str, StageResult], dict[str, int]]:
        """The results of all stages, and what each of them costs in passes."""
        results: dict[str, StageResult] = {}
        costs: dict[str, int] = {}
        stages, last = attack.stages(self.rng), None
        while (stage := next_stage(stages, last)) is not None:
            rng = stage.own(self.rng[stage.places])
            with count_passes(self.model) as cost:
                last = StageResult(stage.places, *self.fooled(stage.attack, stage.places, rng))
            results[stage.name], costs[stage.name] = last, passes(cost)
        return results, costs


def attacked(case: Case, n: int) -> Attacked:
    torch.manual_seed(0)  # defenses that draw from torch's generator
    target = open_target(case.make().eval(), case.data)
    model, batch = target.model.eval(), images(target, n, case.seed)
    with torch.no_grad():
        right = model(batch.x).argmax(1) == batch.y
    rng = SampleRNG.of_samples(case.seed, batch.indices[right].tolist())
    return Attacked(model, batch.x[right], batch.y[right], rng, read_quantity(case.eps, "eps"))


def verdict_of(evidence: FastEvidence) -> str:
    if evidence.searched == 0:
        return "nothing robust"
    if evidence.signs:
        return "escalated" if evidence.escalation else "signs"
    return "doubts" if evidence.doubts else "ok"


def measure(case: Case, settings: dict[str, Any], n: int, compare: bool, queries: int = 0) -> dict[str, Any]:
    row: dict[str, Any] = {"name": case.name, "family": case.family, "eps": case.eps, "n": n, "inner": case.inner}
    start = time.process_time()
    try:
        target = attacked(case, n)
        every = torch.arange(len(target.x))
        results, costs = target.run_stages(AutoAttackFast(make_threat("linf", target.eps), **settings))
    except UserError as error:
        return row | {"verdict": "refused", "reasons": [str(error)]}
    evidence = FastEvidence(results)
    broken = torch.cat([result.samples[result.fooled] for result in results.values()])
    left = every[~torch.isin(every, broken)]
    row |= {"clean": len(every), "fast": len(left), "verdict": verdict_of(evidence), "passes": costs}
    row |= {"reasons": evidence.signs if evidence.searched else [], "doubts": evidence.doubts}
    row |= {"stages": {name: int(result.fooled.sum()) for name, result in results.items()}}
    row |= {"kept promise": known(evidence.kept_promise), "wild steps": known(evidence.wild_steps)}
    row |= {"ahead": evidence.ahead, "given up": evidence.given_up, "unseen": len(evidence.unseen)}
    row |= {"sentinels": evidence.sentinels, "fast seconds": round(time.process_time() - start, 1)}
    if case.inner is not None:
        transfer = Transferred(make("pgd-20", eps=target.eps), open_model(case.inner))
        row["transfer breaks of these"] = int(target.fooled(transfer, left)[0].sum())
    if queries and row["verdict"] == "ok":
        square = make(f"square(queries={queries},rescale_schedule=true)", eps=target.eps)
        row["square breaks of these"] = int(target.fooled(square, left)[0].sum())
    if case.family == "named":
        transfer_alone = int((~target.fooled(transfer, every)[0]).sum())
        row |= {"pgd-20": len(target.left("pgd-20", every)), "transfer": transfer_alone}
        row |= {"square": len(target.left("square(queries=200,rescale_schedule=true)", every))}
    if compare and case.inner is not None and (row["verdict"] == "ok" or case.family == "named"):
        both = target.left("autoattack", every if not evidence.escalation else broken.unique())
        row["autoattack breaks of these"] = 0 if evidence.escalation else int((~torch.isin(left, both)).sum())
        row["autoattack"] = len(both) + (len(left) if evidence.escalation else 0)
    return row | {"seconds": round(time.process_time() - start, 1)}


def probe(case: Case, n: int) -> dict[str, Any]:
    """What the probe alone says, on all images that are classified correctly."""
    start = time.process_time()
    target = attacked(case, n)
    every, right = torch.arange(len(target.x)), torch.zeros(len(target.x), dtype=torch.bool)
    _, info = target.fooled(Probe(make_threat("linf", target.eps)), every)
    unbroken = {"fell_in": torch.full((len(every),), -1), "missing": torch.zeros(len(every))}
    evidence = FastEvidence({SEARCH: StageResult(every, right, unbroken), PROBE: StageResult(every, right, info)})
    medians = {name: part.median(0).values.tolist() for name, part in evidence.kept_from.items()}
    kept = {name: [round(share, 3) for share in shares] for name, shares in medians.items()}
    row = {"name": case.name, "family": case.family, "eps": case.eps, "n": n, "inner": case.inner, "clean": len(every)}
    row |= {"verdict": "signs" if evidence.signs else "ok", "reasons": evidence.signs, "kept": kept}
    return row | {"one hot": known(evidence.one_hot), "seconds": round(time.process_time() - start, 1)}


def known(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


def passes(cost: Cost) -> int:
    """A forward pass counts as one, a gradient as two."""
    return cost.forwards + 2 * cost.gradients


def summary(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| family | model | eps | n | clean | left | verdict | signs or doubts | transfer breaks | AutoAttack breaks |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        signs = "; ".join(row["reasons"] or row.get("doubts", []))
        cells = [row["family"], row["name"], row["eps"], row["n"], row.get("clean", ""), row.get("fast", "")]
        cells += [row["verdict"], signs, row.get("transfer breaks of these", "")]
        lines.append("| " + " | ".join(map(str, [*cells, row.get("autoattack breaks of these", "")])) + " |")
    for honest in (False, True):
        part = [row for row in rows if (row["inner"] is None) == honest]
        counts = {word: sum(row["verdict"] == word for row in part) for word in sorted({r["verdict"] for r in part})}
        text = ", ".join(f"{count} {word}" for word, count in counts.items())
        lines.append(f"\n{'honest' if honest else 'broken'}: {len(part)} models: {text}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("open", "held-out", "all"), default="held-out")
    parser.add_argument("--zoo", action="store_true")
    parser.add_argument("--named", action="store_true", help="three defenses around --base, on --data")
    parser.add_argument("--base", default="zoo:cifar10-trades")
    parser.add_argument("--model", help="this model, which is taken for honest, on --data")
    parser.add_argument("--weights", help="for --model")
    parser.add_argument("--data", default="shapes", help="for --named and --model")
    parser.add_argument("--seeds", type=int, default=5, help="for --zoo and --model")
    parser.add_argument("--probe", action="store_true", help="no attack, only what is measured on sentinels")
    parser.add_argument("--n", type=int, default=24)
    parser.add_argument("--eps", help="another budget than that of the case")
    parser.add_argument("--escalate", action="store_true", help="run all of AutoAttack where there are signs")
    parser.add_argument("--fast", default="{}", help="settings of the attack as JSON, e.g. with fewer steps")
    parser.add_argument("--compare", action="store_true", help="run AutoAttack where the verdict is ok")
    parser.add_argument("--square", type=int, default=0, help="its queries where the verdict is ok")
    parser.add_argument("--only", action="append", default=[], help="names or families; may be given several times")
    parser.add_argument("--skip-honest", action="store_true")
    parser.add_argument("--skip-broken", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/validate-masking"))
    options = parser.parse_args()
    settings = json.loads(options.fast) | {"escalate": options.escalate}
    if options.named:
        cases = named(options.base, options.data)
    elif options.model:
        cases = given(options.model, options.weights, options.data, options.seeds)
    else:
        cases = zoo(options.seeds) if options.zoo else gallery(options.half)
    rows = []
    for case in cases:
        if options.only and not any(word in case.name or word == case.family for word in options.only):
            continue
        if (options.skip_honest and case.inner is None) or (options.skip_broken and case.inner is not None):
            continue
        if options.eps:
            case = replace(case, eps=options.eps)
        path = options.out / case.file
        if not path.exists():
            done = (
                probe(case, options.n)
                if options.probe
                else measure(case, settings, options.n, options.compare, options.square)
            )
            write_json(path, done)
            print(path.read_text(), flush=True)
        rows.append(json.loads(path.read_text()))
        write_atomically(options.out / "table.md", summary(rows).encode())
    print(summary(rows))


if __name__ == "__main__":
    main()
