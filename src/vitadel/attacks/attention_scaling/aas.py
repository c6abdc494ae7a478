"""Adaptive attention scaling (AAS): attack a model through scaled attention (Jain & Dutta, CVPR 2024).

Saturated softmax attention passes hardly any gradient. The paper scales the scores of every attention by factors that
move the features as far as possible from the original model's, and attacks the scaled model. It seems to judge success
on the scaled model, too, which says nothing about the deployed one. Here only the deployed model counts, and the plain
attack runs as well; `evaluation.audit.scaled_attention` counts as the paper does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from vitadel.attacks.attention_scaling.factors import (
    Calibration,
    Candidate,
    FactorSearch,
    search_factors_as_printed,
)
from vitadel.attacks.attention_scaling.gaps import Saturation, score_gaps
from vitadel.attacks.attention_scaling.objectives import Passes, Probe
from vitadel.attacks.fab import FAB
from vitadel.attacks.goals import Surrogate, changed, clearly_fooled, deployed, seen_through
from vitadel.attacks.losses import cross_entropy
from vitadel.attacks.minimal_norm.bisection import Bisection
from vitadel.attacks.minimal_norm.ddn import DDN
from vitadel.attacks.minimal_norm.deepfool import DeepFool
from vitadel.attacks.minimal_norm.fmn import FMN
from vitadel.attacks.per_sample import SampleInfo, images_and_info_of, images_of, merge_info, run_attack, takes_arrays
from vitadel.attacks.pgd import PGD
from vitadel.attacks.transfer.pna_patchout import PnaPatchOut
from vitadel.attacks.transfer.self_ensemble import SelfEnsemble
from vitadel.attacks.wrappers import Staged, not_fooled
from vitadel.backbones.anatomy import attentions_of
from vitadel.backbones.classifier import check_pixels
from vitadel.errors import UserError
from vitadel.instrument.attention import scaled_attention
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Ensemble, Threat

_UNIFORM = (0.1, 0.01, 0.001)  # the paper's fixed factors, which compete with the factors found by the search
_PROBE_STEPS = 10
_MOST_IMAGES = 64  # one batch
# A calibration costs at most as much as the attack on so many images can: half of a tenth of 500, because the attack
# costs less where images become misclassified early.
_BUDGET = 25
_STREAM = "rescaled"  # the random stream of a search through scaled attention


@dataclass(frozen=True)
class Rescaled:
    """An attack on the model with scaled attention, then the plain attack on the samples that are not fooled.

    `factors`: one number, or one per softmax attention. `others`: further ones, each for the samples that are not
    fooled through those before. With `backward_only` the forward pass is that of the deployed model and only gradients
    pass through scaled attention. With `literal` the search stops where the scaled model is fooled, as in the paper.
    Each part uses the random numbers that it uses alone, so all together are never weaker than one of them.

    With `paper_style` an audit also attacks the scaled model by itself and counts as the paper does, with `controls` it
    also runs attacks of the same cost. `calibration` says how the factors were found.
    """

    attack: Attack
    factors: float | tuple[float, ...] = 0.01
    backward_only: bool = False
    literal: bool = False
    paper_style: bool = False
    others: tuple[tuple[float, ...], ...] = ()
    controls: bool = False
    calibration: dict[str, Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = [self.factors] if isinstance(self.factors, int | float) else [*self.factors]
        wrong = [each for each in (*given, *chain(*self.others)) if not 0 < each < math.inf]
        if wrong:
            raise UserError(f"attention is scaled by finite factors above 0, usually at most 1; got {wrong[0]:g}")

    __call__ = images_of
    run_with_info = images_and_info_of

    def run(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, with_info: bool) -> tuple[Tensor, SampleInfo]:
        check_pixels(x)
        check_attention(model)
        z, info = self._through(self.factors, model, x, y, rng.stream(_STREAM), with_info)
        turns: list[Any] = [partial(self._through, each) for each in self.others]
        for number, turn in enumerate([*turns, partial(run_attack, self.attack)], 1):
            rest = not_fooled(model, z, y)
            if len(rest) == 0:
                break
            own = rng[rest].stream(_STREAM) if number <= len(self.others) else rng[rest]
            z = z.clone()  # an attack may have returned the clean images themselves
            z[rest], new = turn(model, x[rest], y[rest], own, with_info)
            merge_info(info, new, rest, len(x))
        return z, info

    def _through(
        self,
        factors: float | Sequence[float],
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        rng: SampleRNG,
        with_info: bool,
    ) -> tuple[Tensor, SampleInfo]:
        def change(inner: nn.Module) -> AbstractContextManager[None]:
            return scaled_attention(inner, factors, backward_only=self.backward_only)

        view = seen_through(model, lambda inner: changed(inner, change))
        if not self._gives_own_verdicts:
            view = Surrogate(view, deployed(model))
        return run_attack(self.attack, view, x, y, rng, with_info)

    @property
    def _gives_own_verdicts(self) -> bool:
        """With scaled gradients only, the logits are the deployed model's, so no second pass is needed."""
        return self.literal or self.backward_only

    def scaled(self, model: nn.Module) -> nn.Module:
        """The scaled model as a model of its own."""
        return changed(deployed(model), partial(scaled_attention, factors=self.factors))

    def passes(self) -> tuple[int, int]:
        gradients, forwards = self.attack.passes()
        through = 1 + len(self.others)
        # Every pass of the scaled model may need one of the deployed model.
        second = 0 if self._gives_own_verdicts else through * (gradients + forwards)
        runs = through + 1 + self.paper_style
        return runs * gradients, runs * forwards + second + through + self.paper_style


def check_attention(model: nn.Module) -> None:
    """Refuse a model without softmax attention before anything is computed."""
    try:
        found = attentions_of(model)
    except UserError as unknown:
        raise UserError(f"{unknown} If it has no softmax attention, leave out the prefix (aas+, scale:).") from unknown
    if not found:
        raise UserError(
            f"{type(model).__name__} has no softmax attention to scale, so this attack would be the plain one; leave "
            "out the prefix (aas+, scale:)"
        )


@dataclass(frozen=True)
class AAS:
    """Search universal factors on calibration images, then attack through them.

    `search`, `objective`, `ascent_steps` and `pace` are those of `FactorSearch`. With `select` its result competes with
    uniform factors of 0.1, 0.01 and 0.001, by how many calibration images a short PGD through each breaks on the
    deployed model, then by that model's loss. So many `finalists` run on the attacked images: the winner first, then
    candidates that break calibration images which those before and the plain probe do not, then the others. By default
    all of them if the model's attention is saturated, so that none breaks an image that the attack does not; else only
    the first two kinds, at most two in all; and only the winner if the attack is an ensemble. Without `images` the
    calibration takes as many as cost no more than the attack on 25 images can, at most 64.
    """

    attack: Attack
    backward_only: bool = False
    search: str = "both"
    objective: str = "lpips"
    images: int | None = None
    ascent_steps: int = 10
    pace: float = 0.3
    select: bool = True
    finalists: int | None = None
    paper_style: bool = False
    controls: bool = False

    def __post_init__(self) -> None:
        _check_counts(images=self.images, steps=self.ascent_steps, finalists=self.finalists)
        self._settings  # noqa: B018 - reports an unknown search or objective
        if self.controls:
            _check_restartable(self.attack)

    @property
    def _settings(self) -> FactorSearch:
        return FactorSearch(self.search, self.objective, self.ascent_steps, self.pace)

    @property
    def calibration_images(self) -> int:
        return _MOST_IMAGES if self.images is None else self.images

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        raise UserError(_UNPREPARED)

    def passes(self) -> tuple[int, int]:
        """The passes of the attack itself on saturated attention; the calibration is shared by all samples."""
        return self._passes(saturated=True)

    def usual_passes(self) -> tuple[int, int]:
        """On attention that is not saturated."""
        return self._passes(saturated=False)

    def _passes(self, saturated: bool) -> tuple[int, int]:
        candidates = self._settings.most_candidates + len(_UNIFORM) if self.select else 1
        usual = candidates if self._runs_all(saturated) else self._usual_finalists
        return self._through((1.0,), ((1.0,),) * (min(candidates, self.finalists or usual) - 1)).passes()

    def _runs_all(self, saturated: bool) -> bool:
        """Whether every candidate runs on the attacked images if `finalists` does not say how many."""
        return saturated and not _is_ensemble(self.attack)

    @property
    def _usual_finalists(self) -> int:
        return 1 if _is_ensemble(self.attack) else 2

    def _through(self, factors: tuple[float, ...], others: tuple[tuple[float, ...], ...] = ()) -> Rescaled:
        return Rescaled(self.attack, factors, self.backward_only, False, self.paper_style, others, self.controls)

    def prepared(self, model: nn.Module, calibration: Calibration, seed: int = 0) -> Rescaled:
        """The attack through the factors found; losses and `select` use the labels."""
        check_attention(model)
        rng, passes = SampleRNG.of_samples(seed, [0]).stream("aas factors"), Passes()
        probe = Probe(innermost_threat(self.attack), seed, self.backward_only)
        x, y = _first_batch(calibration)
        if self.images is None:
            x, y = _spread(x, y, self._affordable(len(attentions_of(model))))
            calibration = [(x, y)]
        with frozen(model):
            gaps = score_gaps(model, x)
            passes.add(len(x), 0, 1)
            saturation = Saturation.of(model, gaps)
            found = self._settings.find(model, calibration, rng, passes, probe=probe, gaps=gaps)
            ranked, finalists = found, found[:1]
            if self.select:
                ranked, adding, rest = self._most_harmful(model, x, y, found, probe, passes)
                if self.finalists is not None or self._runs_all(saturation.is_saturated):
                    finalists = [*adding, *rest][: self.finalists]
                else:
                    finalists = adding[: self._usual_finalists]
        record = {
            "search": self.search,
            "objective": self.objective,
            "images": len(x) if self.images is None else self.images,
            "gradients": passes.gradients,
            "forwards": passes.forwards,
            "saturation": {"is_saturated": saturation.is_saturated, **vars(saturation), "rows": list(saturation.rows)},
            "finalists": [each.name for each in finalists],
            **_margin(ranked, self.objective, self.select),
            "candidates": [vars(each) | {"factors": list(each.factors)} for each in ranked],
        }
        winner, *others = (each.factors for each in finalists)
        return replace(self._through(winner, tuple(others)), calibration=record)

    @property
    def _probe_steps(self) -> int:
        """No more than the attack takes: with FGSM's budget there is none for ten steps."""
        return max(1, min(_PROBE_STEPS, self.attack.passes()[0]))

    def _affordable(self, attentions: int) -> int:
        """As many images as a calibration may have, for its cost not to be above that of the attack on `_BUDGET`."""
        attack = _cost(*Rescaled(self.attack, 1.0, self.backward_only).passes())
        search = _cost(*self._settings.cost(attentions))
        if self.select:
            search += (4 + len(_UNIFORM)) * _cost(self._probe_steps, 1)
        return max(1, min(_MOST_IMAGES, _BUDGET * attack // search))

    def _most_harmful(
        self, model: nn.Module, x: Tensor, y: Tensor, found: list[Candidate], probe: Probe, passes: Passes
    ) -> tuple[list[Candidate], list[Candidate], list[Candidate]]:
        """All candidates, the most harmful first and the plain attack last; of them the winner and those that break
        images which the plain probe and the ones before do not; and the others.
        """
        attentions = len(found[0].factors)
        uniform = [Candidate(f"uniform {factor:g}", (factor,) * attentions) for factor in _UNIFORM]
        plain = Candidate("plain", (1.0,) * attentions)
        fooled: dict[str, Tensor] = {}

        def measured(candidate: Candidate) -> Candidate:
            z = probe(model, x, y, candidate.factors, self._probe_steps)
            passes.add(len(x), self._probe_steps, 1)
            with torch.no_grad():
                logits = model(z)
            fooled[candidate.name] = clearly_fooled(logits, y)
            loss = float(cross_entropy(logits, y).double().mean())
            return replace(candidate, loss=loss, broken=int(fooled[candidate.name].sum()))

        unscaled = measured(plain)
        tried = [measured(each) for each in (*found, *uniform)]
        ranked = sorted(tried, key=lambda each: (each.broken, each.loss), reverse=True)
        adding, rest = ranked[:1], list[Candidate]()
        covered = fooled[plain.name] | fooled[adding[0].name]
        for each in ranked[1:]:
            if any(_same(each.factors, other.factors) for other in (plain, *adding, *rest)):
                continue  # it would do again what one before it does
            (adding if bool((fooled[each.name] & ~covered).any()) else rest).append(each)
            covered = covered | fooled[each.name]
        return [*ranked, unscaled], adding, rest


@dataclass(frozen=True)
class PrintedAAS:
    """Algorithm 1 of the paper as printed: additive noise, raw gradients of equation 3, the last factors.

    The search stops where the scaled model is fooled; the plain attack runs on what the deployed model withstands.
    """

    attack: Attack
    images: int = 1280
    ascent_steps: int = 10
    paper_style: bool = False

    def __post_init__(self) -> None:
        _check_counts(images=self.images, steps=self.ascent_steps)

    @property
    def calibration_images(self) -> int:
        return self.images

    @takes_arrays
    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        raise UserError(_UNPREPARED)

    def passes(self) -> tuple[int, int]:
        """The passes of the attack itself; the calibration is shared by all samples."""
        return self._through((1.0,)).passes()

    def _through(self, factors: tuple[float, ...]) -> Rescaled:
        return Rescaled(self.attack, factors, literal=True, paper_style=self.paper_style)

    def prepared(self, model: nn.Module, calibration: Calibration, seed: int = 0) -> Rescaled:
        check_attention(model)
        rng, passes = SampleRNG.of_samples(seed, [0]).stream("aas factors"), Passes()
        with frozen(model):
            factors = search_factors_as_printed(model, calibration, rng, self.ascent_steps, passes=passes)
        record = {
            "search": "algorithm 1 as printed",
            "objective": "eq3",
            "images": self.images,
            "gradients": passes.gradients,
            "forwards": passes.forwards,
            "finalists": ["printed"],
            "winner": "printed",
            "candidates": [vars(Candidate("printed", factors)) | {"factors": list(factors)}],
        }
        return replace(self._through(factors), calibration=record)


_UNPREPARED = (
    "aas must find its factors on calibration images first, which are not the attacked ones: call "
    "attack.prepared(model, [(images, labels), ...]) and use what it returns; `vitadel audit` does so by itself"
)


_WITHOUT_RANDOMNESS = (FAB, DDN, FMN, Bisection, DeepFool, SelfEnsemble)


def _check_restartable(attack: Attack) -> None:
    """Refuse an attack that starts at the clean image and draws nothing: all its restarts would be the same."""
    inner = getattr(attack, "attack", None)
    if inner is not None:
        _check_restartable(inner)
    elif (
        isinstance(attack, _WITHOUT_RANDOMNESS)
        or (isinstance(attack, PGD) and not attack.random_start)
        or (isinstance(attack, PnaPatchOut) and not attack.patchout)
    ):
        raise UserError(
            "controls=true compares with restarts of the plain attack, and this one starts at the clean image, so all "
            "restarts would be the same; take an attack with a random start such as pgd-20, or leave out controls"
        )


def _check_counts(**counts: int | None) -> None:
    given = {name: count for name, count in counts.items() if count is not None}
    wrong = [f"{name}={count}" for name, count in given.items() if count < 1 or count != int(count)]
    if wrong:
        raise UserError(f"aas needs at least 1 calibration image, step and finalist, got {', '.join(wrong)}")


def _cost(gradients: int, forwards: int) -> int:
    """In forward passes: a backward pass takes about as long as two."""
    return 3 * gradients + forwards


def _first_batch(calibration: Calibration) -> tuple[Tensor, Tensor]:
    first = next(iter(calibration), None)
    if first is None or next(iter(calibration), None) is None:
        raise UserError(
            "aas must iterate over its calibration images twice: give a list of (images, labels), not an empty one "
            "or an iterator"
        )
    return first


def _spread(x: Tensor, y: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """So many images of a batch, evenly spread: data are often sorted by class."""
    count = min(count, len(x))
    places = torch.arange(count, device=x.device) * len(x) // count
    return x[places], y[places]


def _margin(ranked: Sequence[Candidate], objective: str, select: bool) -> dict[str, Any]:
    """Which candidate won, and by how much over the next one with different factors."""
    winner, *others = ranked
    second = next((each for each in others if not _same(each.factors, winner.factors)), None)
    result: dict[str, Any] = {"winner": winner.name, "runner_up": second and second.name}
    if second is not None and select:
        assert None not in (winner.loss, second.loss, winner.broken, second.broken)
        result["margin"] = {
            "broken": winner.broken - second.broken,  # type: ignore[operator]
            "deployed cross-entropy": winner.loss - second.loss,  # type: ignore[operator]
        }
    elif second is not None and winner.value is not None and second.value is not None:
        result["margin"] = {objective: winner.value - second.value}
    return result


def _same(first: Sequence[float], second: Sequence[float]) -> bool:
    return all(abs(one - other) <= 1e-6 * other for one, other in zip(first, second, strict=True))


def innermost_threat(attack: Attack) -> Threat:
    inner = getattr(attack, "attack", None) or next(iter(getattr(attack, "attacks", ())), None)
    if inner is not None:
        return innermost_threat(inner)
    threat: Threat = attack.threat  # type: ignore[attr-defined]
    return threat


def aas(
    attack: Attack,
    search: str = "both",
    objective: str = "lpips",
    images: int | None = None,
    steps: int = 10,
    pace: float = 0.3,
    select: bool = True,
    finalists: int | None = None,
    paper_style: bool | None = None,
    controls: bool = False,
    *,
    backward_only: bool = False,
) -> Attack:
    style = _counts_as_paper(attack, paper_style)
    return AAS(attack, backward_only, search, objective, images, steps, pace, select, finalists, style, controls)


def aas_paper(attack: Attack, images: int = 1280, steps: int = 10, paper_style: bool | None = None) -> Attack:
    return PrintedAAS(attack, images, steps, _counts_as_paper(attack, paper_style))


def scale(attack: Attack, factor: float = 0.01, paper_style: bool | None = None, sharpen: bool = False) -> Attack:
    if factor > 1 and not sharpen:
        raise UserError(
            f"attention is scaled by a factor above 0 and at most 1, got {factor:g}: larger ones saturate the softmax "
            f"further. To do so all the same, as the paper's table 1 does, write scale:{factor:g}(sharpen=true)+."
        )
    return Rescaled(attack, factor, paper_style=_counts_as_paper(attack, paper_style))


def _counts_as_paper(attack: Attack, asked: bool | None) -> bool:
    """As asked; by default not around an ensemble, which would run once more in full."""
    return not _is_ensemble(attack) if asked is None else asked


def _is_ensemble(attack: Attack) -> bool:
    """Whether an attack is, or wraps, several."""
    inner = getattr(attack, "attack", None)
    return isinstance(attack, Ensemble | Staged) or (inner is not None and _is_ensemble(inner))
