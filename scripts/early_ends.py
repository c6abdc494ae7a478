"""Do the runs of `autoattack-fast` that end early break the same samples as whole ones, and what do they save?

    python scripts/early_ends.py small:patterns20-vit-standard@left0.5x200 small:cifar-vit-standard@l2:left0.5x300

The search runs twice on the same images, with the same random numbers and without giving up any of them: once with
endless patience. A forward counts one pass, a gradient two. Cases are those of `fit_prospects.py`, of small models.
"""

from __future__ import annotations

import argparse
import math

import torch
from cases import Case
from small_models import balanced_eps, small_model

from vitadel.attacks.autoattack.fast import STAGES, AutoAttackFast
from vitadel.attacks.threats import make_threat
from vitadel.evaluation.engine.stages import count_passes
from vitadel.runtime.rng import SampleRNG


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", help="small:NAME@[NORM:]left0.5xIMAGES")
    parser.add_argument("--data", default="cifar10", help="spec of CIFAR-10")
    given = parser.parse_args()
    late_stages = "broken by targets, best targets, restarts, kept alive"
    heads = ("case", "correct", "left", late_stages, "only by whole runs", "only by early ends", "times fewer passes")
    print("|", " | ".join(heads), "|")
    print("|---|---|---|---|---|---|---|", flush=True)
    for text in given.cases:
        case = Case.read(text)
        small = small_model(case.model.removeprefix("small:"), case.limit, given.data)
        threat = make_threat(case.norm, balanced_eps(small, case.norm, float(case.eps.removeprefix("left"))))
        with torch.no_grad():
            rows = (small.model(small.x).argmax(1) == small.y).nonzero()[:, 0]
        fell, costs = [], []
        for patience in (math.inf, AutoAttackFast.patience):
            search = AutoAttackFast(threat, least_chance=0.0, patience=patience).search
            with count_passes(small.model) as cost:
                _, info = search.run_with_info(small.model, small.x[rows], small.y[rows], SampleRNG.of_samples(0, rows))
            fell.append(info["fell_in"])
            costs.append(2 * cost.gradients + cost.forwards)
        late = torch.bincount(fell[0][fell[0] >= 0], minlength=len(STAGES))[3:7].tolist()
        whole, early = (each < 0 for each in fell)
        counts = (len(rows), int(whole.sum()), late, int((early & ~whole).sum()), int((whole & ~early).sum()))
        row = (f"{text}, eps {threat.eps:.2g}", *counts, f"{costs[0] / costs[1]:.2f}")
        print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
