"""Compare `audit --curve` with separate audits at its budgets: robust accuracy, and passes.

    python benchmarks/curve_audits.py                                    # zoo:shapes-robust, 100 images
    python benchmarks/curve_audits.py --model zoo:cifar10-trades --data cifar10 --data-root DIR --limit 100

One run measures the curve, then audits of the same images with the same attacks, one for each budget of the table. A
forward counts one pass, a gradient two. Goals: at most one point apart at each budget, and at most 1.6 times the passes
of one audit; `ratio` is over the audit at that budget, and the last line is over the dearest of them.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import vitadel
from vitadel.quantities import read_quantity


def passes_of(results: dict[str, Any]) -> int:
    return sum(2 * entry["gradient_calls"] + entry["forward_calls"] for entry in results["attacks"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:shapes-robust")
    parser.add_argument("--data", default="shapes")
    parser.add_argument("--data-root", default=None)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--norm", default="linf")
    parser.add_argument("--eps", type=lambda text: read_quantity(text, "eps"), default=8 / 255)
    parser.add_argument(
        "--attacks", default="autoattack-fast", help="of the audits; the curve adds its minimal-norm one"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    settings = {"attacks": given.attacks, "limit": given.limit, "norm": given.norm, "seed": given.seed}
    settings |= {"data_root": given.data_root, "device": "cpu"}
    start = time.process_time()
    curve = vitadel.audit(given.model, given.data, eps=given.eps, curve=True, **settings)
    cost, seconds, dearest = passes_of(curve), time.process_time() - start, 0
    print(f"{given.model}, n = {curve['data']['n']}, curve: {cost:,} passes, {seconds:.0f} s of processor time")
    print("| eps | robust by the curve | robust by its own audit | apart | passes of the audit | curve over it |")
    print("|---|---|---|---|---|---|", flush=True)
    for row in curve["curve"]["budgets"]:
        alone = vitadel.audit(given.model, given.data, eps=row["eps"], **settings)
        passes, n = passes_of(alone), alone["data"]["n"]
        held, dearest = alone["worst_case"]["held"], max(dearest, passes)
        apart = 100 * (row["held"] - held) / n
        numbers = f"{row['held']} of {n} | {held} of {n} | {apart:+.1f} points | {passes:,} | {cost / passes:.2f}"
        print(f"| {row['eps_text']} | {numbers} |", flush=True)
    print(f"curve over the dearest audit: {cost / dearest:.2f} times the passes")


if __name__ == "__main__":
    main()
