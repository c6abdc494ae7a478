"""`--second-phase N`: the last attack runs on N random images that the others leave correct; the rest is estimated.

See `vitadel.two_phase` for the estimator and its intervals.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitadel.attacks.parse import make, needs_known_family
from vitadel.attacks.settings import settings_of
from vitadel.errors import UserError
from vitadel.evaluation.engine.attack_preparation import calibrate
from vitadel.evaluation.engine.stages import MemberResult, RunContext, attack_stage, rules_of
from vitadel.evaluation.engine.verdicts import Verdicts, samples_table
from vitadel.quantities import interval_text
from vitadel.runtime.rng import SampleRNG
from vitadel.two_phase import total_broken, two_phase_interval
from vitadel.types import Attack

if TYPE_CHECKING:
    from vitadel.evaluation.audit.audit import AuditRequest, AuditWork
    from vitadel.evaluation.engine.run import Run

ESTIMATOR = "two-phase difference estimator: all images by the first attacks, a random part of the rest by the last"


@dataclass
class SecondPhase:
    """The procedure of an audit with `--second-phase`; what it finds is kept until the results are written."""

    request: AuditRequest
    left: int = 0
    chosen: Tensor | None = None  # indices
    broken: int = 0

    def __post_init__(self) -> None:
        request = self.request
        if request.second_phase is None or request.second_phase < 1:
            raise UserError(f"--second-phase takes a number of images of at least 1, got {request.second_phase}")
        if request.protocol is not None:
            raise UserError(
                f"--second-phase estimates the worst case, but the protocol {request.protocol} needs every attack on "
                "all images; leave out one of them"
            )
        request.check_alone("--second-phase", "--within", "--compare-with", "--independent")
        attacks = request.make_attacks()
        if len(attacks) < 2:
            raise UserError(
                f"--second-phase needs two attacks or more, a cheap one first and the expensive one last, got "
                f"{', '.join(request.attacks)}. Try --attacks apgd-ce,autoattack."
            )
        for name, attack in attacks:
            if rules_of(attack) is not None:
                raise UserError(f"--second-phase estimates the worst case within the budget, but {name} has its own")

    def attack(
        self,
        work: AuditWork,
        context: RunContext,
        verdicts: Verdicts,
        indices: Tensor,
        findings: list[dict[str, Any]],
    ) -> tuple[list[tuple[str, Attack]], list[MemberResult]]:
        """Run the first attacks on all images and the last one on a random part of those still correct."""
        request = self.request
        *first, name = request.attacks
        alone = replace(work, request=replace(request, attacks=tuple(first), second_phase=None), procedure=None)
        prepared, members = alone.attack(context, verdicts, indices, findings)
        robust = verdicts.index[verdicts.robust]
        # The same images whatever the batch size: those whose keyed draws are smallest.
        draws = SampleRNG.of_samples(context.seed, robust).stream("second phase").bits()
        assert request.second_phase is not None
        self.left, self.chosen = len(robust), robust[draws.argsort()[: request.second_phase]].sort().values
        attack = make(name, eps=request.eps, norm=request.norm)
        settings = settings_of(attack)
        attack = calibrate(attack, context, work.target, indices, request.calibration)
        settings |= {**settings_of(attack), "norm": request.norm, "eps": work.settings["eps"], "seed": request.seed}
        stage = f"{len(first):02d} {name}"
        results = attack_stage(context, stage, attack, request.threat, self.chosen, needs_known_family(name))
        fell = self.chosen[~torch.isin(self.chosen, results[-1].held)]
        self.broken = len(fell)
        verdicts.append(name, settings, verdicts.robust & ~torch.isin(verdicts.index, fell), results)
        return [*prepared, (name, attack)], [*members, *results]

    def finish(self, run: Run, results: dict[str, Any], verdicts: Verdicts) -> dict[str, Any]:
        """The results with the estimate in place of the worst case, and the field `two_phase`."""
        assert self.chosen is not None
        n, sampled = len(verdicts.index), len(self.chosen)
        run.write("samples.parquet", samples_table(verdicts, {"second_phase": torch.isin(verdicts.index, self.chosen)}))
        value = self.left / n * (1 - self.broken / max(sampled, 1))
        low, high = (float(end) for end in two_phase_interval(n, self.left, sampled, self.broken))
        fewest, most = total_broken(self.left, sampled, self.broken)
        worst = {"held": round(value * n), "n": n, "robust_accuracy": value, "ci95": [low, high]}
        last = {**results["attacks"][-1], **worst, "counts": "estimated, after this and all earlier attacks"}
        name = self.request.attacks[-1]
        sentence = f"An estimate: {name} was run on {sampled:,} random images of the {self.left:,} that the earlier "
        sentence += f"attacks leave correct, and broke {self.broken:,}. Of these {n:,} images, "
        sentence += f"{interval_text([(self.left - most) / n, (self.left - fewest) / n])} are robust (exact interval)."
        if sampled == self.left:
            sentence = (
                f"{name} was run on all {self.left:,} images that the earlier attacks leave correct: no estimate."
            )
        found = {
            "estimator": ESTIMATOR,
            "left": self.left,
            "sampled": sampled,
            "broken": self.broken,
            "held_of_these_images": [self.left - most, self.left - fewest],
            "sentence": sentence,
        }
        attacks = [*results["attacks"][:-1], last]
        return {**results, "attacks": attacks, "worst_case": {**worst, "estimator": ESTIMATOR}, "two_phase": found}
