"""Fit the chance that later stages of `autoattack-fast` break a sample (`attacks/autoattack/prospects.py`).

    python scripts/fit_prospects.py record zoo:shapes-standard@linf:1/255x300 --out runs/prospects
    python scripts/fit_prospects.py fit --out runs/prospects
    python scripts/fit_prospects.py simulate --out runs/held-out

`record` runs the whole search, without giving up anything, and writes for each sample what was known when it could be
given up and which stage broke it. `fit` prints the coefficients, fitted on all recorded cases and, to see what they
are worth, without one model in turn. `simulate` draws audits from recorded samples and counts how often the bound on
what was missed holds. Cases are written MODEL@NORM:EPSxIMAGES; an EPS of left0.5 is the one at which PGD-10 leaves half
of the images. A MODEL of small:NAME is one of `small_models.py`. --data names other data than shapes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import Case
from numpy.typing import NDArray
from small_models import SmallModel, balanced_eps, small_model

from vitadel.attacks.autoattack.fast import STAGES, AutoAttackFast, most_missed
from vitadel.attacks.autoattack.fast_evidence import AUDIT, SEARCH, FastEvidence
from vitadel.attacks.autoattack.prospects import FEATURES, chance_of
from vitadel.attacks.threats import make_threat
from vitadel.attacks.wrappers import StageResult
from vitadel.data.batches import read_batches
from vitadel.evaluation.engine.target import open_target
from vitadel.instrument.hooks import frozen
from vitadel.quantities import read_quantity
from vitadel.runtime.rng import SampleRNG

_FIRST = STAGES.index("targets")  # the last stage before the chance is judged
_INFO = ("fell_in", "features", "missing", "restarts", "kept_alive")
_AUDITS = 200
_RIDGE = 1e-2  # of the squared weights, for standardized features


def images_of(case: Case, data: str, data_root: str | None, options: dict[str, Any], seed: int) -> SmallModel:
    """The model and the images of a case."""
    if case.model.startswith("small:"):
        return small_model(case.model.removeprefix("small:"), case.limit, data)
    target = open_target(case.model, data, data_root=data_root, model_options=options)
    indices, _ = target.selection(case.limit, seed, None)
    (batch,) = read_batches(target.source, [indices.tolist()], target.preprocess)
    return SmallModel(target.model, batch.x, batch.y)


def record(case: Case, small: SmallModel, batch_size: int, seed: int) -> dict[str, Any]:
    """The info of the whole search on the correctly classified images."""
    share = case.eps.removeprefix("left")
    eps = read_quantity(case.eps, "eps") if share == case.eps else balanced_eps(small, case.norm, float(share))
    fast = AutoAttackFast(make_threat(case.norm, eps), least_chance=0.0)
    parts: list[dict[str, Any]] = []
    for rows in torch.arange(len(small.x)).split(batch_size):
        with frozen(small.model), torch.no_grad():
            rows = rows[small.model(small.x[rows]).argmax(1) == small.y[rows]]
        rng = SampleRNG.of_samples(seed, rows)
        _, info = fast.search.run_with_info(small.model, small.x[rows], small.y[rows], rng)
        parts.append({"index": rows.numpy(), **{name: info[name].numpy() for name in _INFO}})
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return whole | {"images": len(small.x), "model": case.model, "norm": case.norm, "eps": eps}


def fit_logistic(x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """Intercept and weights by Newton's method, with a small penalty on the weights of standardized features."""
    mean, spread = x.mean(0), x.std(0) + 1e-12
    rows = np.column_stack([np.ones(len(x)), (x - mean) / spread])
    weights = np.zeros(rows.shape[1])
    penalty = _RIDGE * len(x) / 100 * np.diag([0.0, *np.ones(x.shape[1])])
    for _ in range(50):
        chance = 1 / (1 + np.exp(-rows @ weights))
        slope = rows.T @ (y - chance) - penalty @ weights
        bend = (rows * (chance * (1 - chance))[:, None]).T @ rows + penalty
        weights = weights + np.linalg.solve(bend, slope)
    plain = weights[1:] / spread
    return np.array([weights[0] - plain @ mean, *plain])


def load(path: Path) -> tuple[str, NDArray[Any], NDArray[Any]] | None:
    """The model, features, and whether a later stage broke the sample, of those that may be given up.

    None for a case in which runs towards targets break so many samples that none is given up.
    """
    with np.load(path) as kept:
        fell = torch.from_numpy(kept["fell_in"])
        left = ((fell < 0) | (fell > _FIRST)).numpy() & np.isfinite(kept["features"]).all(1)
        info = {
            "fell_in": fell,
            "given_up": torch.from_numpy(left),
            "audited": torch.zeros(len(fell), dtype=torch.bool),
        }
        if FastEvidence({SEARCH: StageResult(torch.arange(len(fell)), fell >= 0, info)}).gave_up_too_many:
            return None
        return str(kept["model"]), kept["features"][left], kept["fell_in"][left] > _FIRST


def log_loss(weights: NDArray[Any], x: NDArray[Any], y: NDArray[Any]) -> float:
    """The sum of -log(chance of what happened)."""
    score = np.column_stack([np.ones(len(x)), x]) @ weights
    return float(np.logaddexp(0, np.where(y, -score, score)).sum())


def left_out_loss(cases: list[tuple[str, NDArray[Any], NDArray[Any]]], columns: list[int]) -> float:
    """The log loss of each model's samples under a fit to the other models."""
    total = 0.0
    for model in sorted({name for name, _, _ in cases}):
        x, y = (np.concatenate([each[k] for each in cases if each[0] != model]) for k in (1, 2))
        weights = fit_logistic(x[:, columns], y)
        total += sum(log_loss(weights, each[1][:, columns], each[2]) for each in cases if each[0] == model)
    return total


def fit(cases: list[tuple[str, NDArray[Any], NDArray[Any]]]) -> None:
    """Print the coefficients, what each feature is worth on models left out, and how well calibrated they are."""
    x, y = (np.concatenate([each[k] for each in cases]) for k in (1, 2))
    rate = np.array([np.log(y.mean() / (1 - y.mean()))])
    print(f"{len(y)} samples of {len({name for name, _, _ in cases})} models, {int(y.sum())} broken later")
    print(f"log loss of a constant: {log_loss(rate, x[:, []], y):.2f}")
    every = list(range(len(FEATURES)))
    for columns in ([0], *([0, other] for other in every[1:]), every):
        weights = fit_logistic(x[:, columns], y)
        names = ", ".join(
            f"{FEATURES[column]} {weight:+.3f}" for column, weight in zip(columns, weights[1:], strict=True)
        )
        print(
            f"{weights[0]:+.3f}, {names}: log loss {log_loss(weights, x[:, columns], y):.2f}, "
            f"on models left out {left_out_loss(cases, columns):.2f}"
        )
        chance = 1 / (1 + np.exp(-np.column_stack([np.ones(len(x)), x[:, columns]]) @ weights))
        for least in (0.001, 0.002, 0.005, 0.01):
            given_up = chance < least
            print(
                f"    below {least}: {given_up.mean():.1%} of the samples, {int(y[given_up].sum())} broken, "
                f"{chance[given_up].sum():.2f} expected"
            )


def simulate(cases: list[tuple[str, NDArray[Any], NDArray[Any]]], rounds: int, seed: int) -> None:
    """How often the bound covers what is missed, in audits of samples drawn with replacement from the recorded ones.

    Samples are audited as `autoattack-fast` does, of an audit in which all recorded ones were correct; no audit is
    replaced by a whole search, whatever it finds.
    """
    x, y = (np.concatenate([each[k] for each in cases]) for k in (1, 2))
    chance = chance_of(torch.from_numpy(x)).numpy()
    rng = np.random.default_rng(seed)
    for least in (AutoAttackFast.least_chance, 0.05, 1.0):
        covered, missing, bounds = 0, 0, []
        for _ in range(rounds):
            rows = rng.integers(len(y), size=len(y))
            info = {
                "fell_in": torch.from_numpy(np.where(y[rows], _FIRST + 1, -1)),
                "given_up": torch.from_numpy(chance[rows] < least),
            }
            info["audited"] = info["given_up"] & torch.from_numpy(rng.random(len(rows)) < AutoAttackFast.audited_share)
            unseen = info["given_up"] & ~info["audited"]
            info["fell_in"][unseen] = -1
            results = {SEARCH: StageResult(torch.arange(len(rows)), info["fell_in"] >= 0, info)}
            more = FastEvidence(results).more_to_audit(most_missed(AutoAttackFast.most_missed, len(rows)))
            places = torch.from_numpy(rng.permutation(unseen.nonzero().squeeze(1).numpy())[:more]).sort().values
            broken = torch.from_numpy(y[rows])
            results[AUDIT] = StageResult(places, broken[places], {})
            evidence = FastEvidence(results)
            missed = int(broken[evidence.unseen].sum())
            covered += missed <= evidence.missed_at_most
            missing += missed > 0
            bounds.append(evidence.missed_at_most / len(rows))
        print(
            f"given up below {least:g}: {covered} of {rounds} audits covered; {missing} missed something; the bound is "
            f"{100 * np.mean(bounds):.2f} % of the samples to decide about, on average"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "fit", "simulate"))
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--data", default="shapes")
    parser.add_argument("--data-root")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE, an argument of load_model")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/prospects"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.what != "record":
        read = {path.stem: load(path) for path in sorted(given.out.glob("*.npz"))}
        print("without", ", ".join(name for name, case in read.items() if case is None) or "none")
        cases = [case for case in read.values() if case is not None]
        fit(cases) if given.what == "fit" else simulate(cases, _AUDITS, given.seed)
        return
    for text in given.cases:
        case = Case.read(text)
        path = given.out / f"{case.file_name}.npz"
        if path.exists():
            continue
        options = dict(each.split("=", 1) for each in given.option)
        start = time.process_time()
        small = images_of(case, given.data, given.data_root, options, given.seed)
        kept = record(case, small, given.batch_size, given.seed)
        np.savez(path, **kept)
        left = (kept["fell_in"] < 0) | (kept["fell_in"] > _FIRST)
        broken = kept["fell_in"] > _FIRST
        stages = np.bincount(kept["fell_in"][kept["fell_in"] >= 0], minlength=len(STAGES))
        print(
            f"{text}: eps {kept['eps']:.4g}, {len(kept['index'])} of {kept['images']} correct, {int(left.sum())} left "
            f"after two stages, {int(broken.sum())} broken later, by stage {stages.tolist()}, "
            f"{time.process_time() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
