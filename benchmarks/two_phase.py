"""Simulate two-phase estimates: how often their intervals cover the truth, and what they save at equal width.

    python benchmarks/two_phase.py

Each row is an audit of n images: a cheap attack leaves a share of them, of which the expensive one breaks a part; it is
run on `sampled` random ones. `cost` is that of the estimate over that of an ordinary audit whose interval is as wide,
in passes (a gradient counts two), with `apgd-ce(steps=20)` as the cheap attack and AutoAttack as the expensive one.
"""

from __future__ import annotations

import numpy as np

from vitadel.attacks.parse import make
from vitadel.two_phase import two_phase_interval

ROUNDS = 100_000
CASES = [
    (n, share, broken, sampled)
    for n in (1_000, 10_000)
    for share in (0.3, 0.6, 0.9)
    for broken in (0.01, 0.05, 0.2)
    for sampled in (100, 400)
]


def main() -> None:
    cheap, expensive = (2 * g + f for g, f in (make(name).passes() for name in ("apgd-ce(steps=20)", "autoattack")))
    print("| n | left | broken of these | sampled | covered | points either way | cost |")
    print("|---|---|---|---|---|---|---|")
    least = 1.0
    for n, share, broken, sampled in CASES:
        rng = np.random.default_rng(0)
        left = rng.binomial(n, share, ROUNDS)
        fragile = rng.binomial(left, broken)
        size = np.minimum(sampled, left)
        seen = rng.hypergeometric(fragile, left - fragile, size)
        low, high = two_phase_interval(np.full(ROUNDS, n), left, size, seen)
        robust = share * (1 - broken)
        covered, width = float(((low <= robust) & (robust <= high)).mean()), float((high - low).mean())
        full = robust * (1 - robust) * (2 * 1.96 / width) ** 2
        cost = (n * cheap + sampled * expensive) / (full * robust * expensive)
        least = min(least, covered)
        shares = f"{100 * share:.0f} % | {100 * broken:.0f} % | {sampled} | {100 * covered:.2f} %"
        print(f"| {n:,} | {shares} | {50 * width:.2f} | {cost:.2f} |")
    print(f"least coverage: {100 * least:.2f} % of {ROUNDS:,} audits each")


if __name__ == "__main__":
    main()
