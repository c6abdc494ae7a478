"""How many images `audit --within POINTS` takes, and how often its interval covers the truth.

    vitadel audit zoo:shapes-robust --limit 3000 --attacks pgd-10 --out runs/recorded
    python benchmarks/looks.py runs/recorded --points 5

Verdicts are recorded once, on many images; then 1,000 audits are simulated on random, class-balanced samples of them.
A sample is drawn with replacement from the recorded images of each class, so their share of robust images is the truth.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from vitadel.sequential import Plan, fixed_size, make_plan


def recorded(run: Path) -> list[np.ndarray]:
    """Whether each image withstood all attacks, class by class."""
    table = pq.read_table(run / "samples.parquet")
    names = [name for name in table.column_names if name.startswith("held:")]
    robust = np.logical_and.reduce([table.column(name).to_numpy() for name in ("clean_correct", *names)])
    labels = table.column("label").to_numpy()
    return [robust[labels == label] for label in np.unique(labels)]


def simulate(plan: Plan, classes: list[np.ndarray], rng: np.random.Generator) -> tuple[int, float, float]:
    """Size and interval of one audit."""
    rounds = -(-plan.looks[-1] // len(classes))
    order = np.stack([rng.choice(each, rounds) for each in classes], 1)
    hits, n = rng.permuted(order, axis=1).ravel().cumsum(), plan.looks[0]
    while (further := plan.next_look(int(hits[n - 1]), n)) is not None:
        n = further
    return (n, *plan.interval(int(hits[n - 1]), n))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--points", type=float, nargs="+", default=[2.0, 5.0])
    parser.add_argument("--times", type=int, default=1_000)
    parser.add_argument("--available", type=int, default=10_000, help="images of the data set")
    given = parser.parse_args()
    classes = recorded(given.run)
    truth = float(np.mean([each.mean() for each in classes]))
    print(f"recorded: {sum(map(len, classes))} images, robust {100 * truth:.1f} %")
    print("| points | images, mean | 5 % to 95 % | fixed size | covered | least coverage of the plan |")
    print("|---|---|---|---|---|---|")
    for points in given.points:
        plan, rng = make_plan(points, given.available), np.random.default_rng(0)
        sizes, low, high = map(
            np.asarray, zip(*(simulate(plan, classes, rng) for _ in range(given.times)), strict=True)
        )
        covered = float(((low <= truth) & (truth <= high)).mean())
        ends = " to ".join(f"{value:,.0f}" for value in np.quantile(sizes, (0.05, 0.95)))
        print(
            f"| {points:g} | {sizes.mean():,.0f} | {ends} | {fixed_size(points / 100):,} | {100 * covered:.1f} % | "
            f"{100 * plan.coverage().min():.2f} % |"
        )


if __name__ == "__main__":
    main()
