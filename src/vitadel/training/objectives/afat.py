"""AFAT (CVPR 2023; released as RSPC): align features of images with those of adversarially corrupted patches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitadel.attacks.patches.corruption_model import alignment, corrupted, credited_scores, keep_mask
from vitadel.attacks.patches.patch_threat import patches_in
from vitadel.attacks.patches.random_patches import check_noise, normalization_of, uniform_noise
from vitadel.errors import UserError
from vitadel.instrument.hooks import frozen
from vitadel.quantities import BELOW_ONE, NOT_NEGATIVE, POSITIVE, SHARE, check_ranges
from vitadel.runtime.rng import SampleRNG
from vitadel.training.objectives.cross_entropy import accuracy, cross_entropy
from vitadel.training.opponent_probe import (
    OpponentGain,
    gradient_lengths,
    gradient_share,
    opponent_gain,
    weight_of_share,
)
from vitadel.training.paired_features import Pair, pair_of, pair_with_fewer_tokens
from vitadel.training.patch_selector import Choose, PatchSelector
from vitadel.types import Attack

_LOSS_SCALE = 2.0**16  # of the selector's own loss, whose gradients would underflow in fp16


@dataclass(frozen=True)
class Afat:
    """CE(p(x), y) + weight * mean over blocks of |F(x) - F(x')|^2 (mean over elements); x' has some patches corrupted.

    Predictions for x' are not trained. One forward pass over [x', x], with gradients through both (`detach_clean`: only
    x'). A `share` of the patches (`patch_size` pixels, 0: the model's own) is corrupted: those chosen by a
    `PatchSelector` that maximizes the alignment term (`selector: alignment`) or CE(p(x'), y) ('cross-entropy', a second
    backward pass), or 'random' ones. `fill` is 'noise' (in the space of `noise`), 'zero' (the mean color), or 'drop',
    which removes the tokens and works for plain ViTs. `straight_through` is the gradient of the selection: 'identity',
    'clamp'ed to [-1, 1] as released, or only within the 'window' of scores from -1 to 1 (Hubara et al. 2016).
    `learning` is how the selector learns: 'straight-through' from its own choice, as in the paper, or 'credited' by the
    part of random patches in the damage (`credited_scores`), with a forward and backward pass of its own.
    `gradient_share` above 0 replaces `weight` by the one with which the alignment under random patches has this share
    of the gradient at the first step. With an `attack`, adversarial images take the place of clean ones everywhere:
    adversarial training with the alignment on top, which is not in the paper. For the other fields see `PatchSelector`
    and `paired_features`. Defaults are the paper's; docs/afat.md has the reasons.
    """

    weight: float = 5e-3
    gradient_share: float = 0.0
    attack: Attack | None = None
    share: float = 0.1
    selector: Literal["alignment", "cross-entropy", "random"] = "alignment"
    fill: Literal["noise", "zero", "drop"] = "noise"
    noise: str = "normalised"
    features: Literal["blocks", "attention"] = "blocks"
    detach_clean: bool = False
    same_paths: bool = False
    label_smoothing: float = 0.0
    patch_size: int = 0
    rounding: Literal["nearest", "quantile"] = "nearest"
    learning: Literal["straight-through", "credited"] = "straight-through"
    straight_through: Literal["identity", "clamp", "window"] = "identity"
    lr: float = 1e-4
    momentum: float = 0.9
    weight_decay: float = 0.05
    gradient: Literal["normalized", "normalised", "clipped"] = "normalized"
    grad_norm: float = 5.0
    patch_selector: PatchSelector = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_ranges(
            self,
            **dict.fromkeys(("share", "label_smoothing"), SHARE),
            **dict.fromkeys(("weight", "weight_decay", "patch_size"), NOT_NEGATIVE),
            **dict.fromkeys(("lr", "grad_norm"), POSITIVE),
            **dict.fromkeys(("momentum", "gradient_share"), BELOW_ONE),
        )
        check_noise(self.share or 1, 1, self.noise)
        if self.gradient_share > 0 and self.share == 0:
            raise UserError(
                f"gradient_share {self.gradient_share:g} needs corrupted patches, and share 0 corrupts none; set share "
                "above 0, as the paper's 0.1"
            )
        if self.fill == "drop" and self.share == 1:
            raise UserError("with fill: drop and share 1 no token would be left; choose a smaller share")
        if self.fill == "drop" and self.same_paths:
            raise UserError(
                "fill: drop needs a forward pass for each version of an image, so drop-path cannot drop the same paths "
                "in both; leave out same_paths"
            )
        if self.fill == "drop" and self.learning == "credited":
            raise UserError(
                "learning: credited needs noise of any strength, and a token is dropped or not; take fill: noise or "
                "zero, or learning: straight-through"
            )
        patch_selector = PatchSelector(
            share=self.share,
            rounding=self.rounding,
            side=self.patch_size,
            trained=self.selector != "random",
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            gradient=self.gradient,
            grad_norm=self.grad_norm,
            probe=self._probe,
            calibrate=self._calibrated if self.gradient_share > 0 else None,
        )
        object.__setattr__(self, "patch_selector", patch_selector)

    @property
    def companion(self) -> tuple[str, PatchSelector]:
        return "opponent", self.patch_selector

    def __call__(self, model: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = x if self.attack is None else z
        rng = self.patch_selector.rng(x)
        keep, term = self._kept(model, x), None
        if self.learning == "credited" and keep.requires_grad:
            term, keep = self._credited(model, x, y, rng), keep.detach()
        maximizes_ce = self.selector == "cross-entropy" and keep.requires_grad
        used = keep.detach().requires_grad_() if maximizes_ce else keep
        pair = self._pair(model, x, used, rng)
        natural = cross_entropy(pair.clean, y, self.label_smoothing).mean()
        apart = self._apart(pair)
        loss = natural + self._weight() * apart
        if maximizes_ce:
            corrupted_loss = cross_entropy(pair.altered, y, self.label_smoothing).mean()
            (gradient,) = torch.autograd.grad(_LOSS_SCALE * corrupted_loss, used, retain_graph=True)
            # Gradients that overflow are set to 0; in the loss they would spoil the model's own.
            term = (keep * (gradient / _LOSS_SCALE).nan_to_num(0.0, 0.0, 0.0)).sum()
        if term is not None:
            # The selector's gradient enters as a product with constants: the model is not trained on these predictions.
            loss = loss + term - term.detach()
        return {
            "loss": loss,
            "natural": natural.detach(),
            "alignment": apart.detach(),
            "accuracy": accuracy(pair.altered, y),
            "clean_accuracy": accuracy(pair.clean, y),
        }

    def _weight(self) -> float:
        """The weight of the alignment; `weight` until the first step of a training has calibrated it."""
        calibrated = self.patch_selector.weight
        return self.weight if calibrated is None else calibrated

    def _apart(self, pair: Pair) -> Tensor:
        return alignment(
            [altered for altered, _ in pair.features],
            [clean.detach() if self.detach_clean else clean for _, clean in pair.features],
        )

    def _kept(self, model: nn.Module, x: Tensor) -> Tensor:
        """1 for patches to keep, 0 for those to corrupt, with gradients for a patch selector that is trained."""
        if self.selector == "random":
            return self._random(model, x, self.patch_selector.rng(x))
        scores = self.patch_selector.scores(model, x)
        if self.straight_through == "window":
            scores = torch.where(scores.abs() <= 1, scores, scores.detach())
        keep = keep_mask(scores, self.patch_selector.count(scores.shape[1]))
        if self.straight_through == "clamp" and keep.requires_grad:
            keep.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return keep

    def _credited(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG) -> Tensor:
        """A term whose gradient teaches the selector, from passes of the frozen model."""
        bare: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        scores = self.patch_selector.scores(model, x)

        def damage(keep: Tensor) -> Tensor:
            pair = self._pair(bare, x, keep, rng)
            if self.selector == "cross-entropy":
                return _LOSS_SCALE * cross_entropy(pair.altered, y, self.label_smoothing).mean()
            return _LOSS_SCALE * self._apart(pair)

        with frozen(bare):
            term = credited_scores(scores, damage, self.patch_selector.count(scores.shape[1]), rng.stream("credit"))
        return term.nan_to_num(0.0, 0.0, 0.0) / _LOSS_SCALE

    def _probe(
        self, model: nn.Module, images: Sequence[tuple[Tensor, Tensor]], choose: Choose | None, key: int
    ) -> tuple[float, OpponentGain | None]:
        """The alignment's share of the gradient, and the gain of a selector that is trained."""

        lengths = self._gradient_lengths(model, images, choose, key, self._weight())
        return gradient_share(lengths), None if choose is None else opponent_gain(
            model, images, choose, self._pair, key
        )

    def _calibrated(self, model: nn.Module, images: Sequence[tuple[Tensor, Tensor]], key: int) -> float:
        """The weight with which the alignment under random patches has the wanted share of the gradient."""
        weight = weight_of_share(self.gradient_share, self._gradient_lengths(model, images, None, key, 1.0))
        if weight is None:
            raise UserError(
                "objective.gradient_share: the alignment has no gradient at the first step, so no weight gives it a "
                "share; check that images differ from their corrupted versions, or set objective.weight"
            )
        return weight

    def _gradient_lengths(
        self, model: nn.Module, images: Sequence[tuple[Tensor, Tensor]], choose: Choose | None, key: int, weight: float
    ) -> tuple[float, float]:
        """Of the cross-entropy and of the weighted alignment, on clean images."""

        def by_chance(x: Tensor) -> Tensor:
            return self._random(model, x, SampleRNG.of_pixels(x, key))

        def losses(pair: Pair, y: Tensor) -> tuple[Tensor, Tensor]:
            return cross_entropy(pair.clean, y, self.label_smoothing).mean(), weight * self._apart(pair)

        return gradient_lengths(model, images, choose or by_chance, self._pair, losses, key)

    def _random(self, model: nn.Module, x: Tensor, rng: SampleRNG) -> Tensor:
        patches = math.prod(patches_in(x, self.patch_selector.side_for(model, x)))
        return (rng.stream("patches").permutation(patches) >= self.patch_selector.count(patches)).to(x.dtype)

    def _pair(self, model: nn.Module, x: Tensor, keep: Tensor, rng: SampleRNG) -> Pair:
        side = self.patch_selector.side_for(model, x)
        if self.fill == "drop":
            return pair_with_fewer_tokens(model, x, keep, self.patch_selector.count(keep.shape[1]), self.features)
        if self.fill == "zero":
            painted = normalization_of(model)[0].to(x).expand_as(x)
        else:
            painted = uniform_noise(model, x, rng.stream("noise"), self.noise)
        return pair_of(model, corrupted(x, keep, painted, side), x, self.features, self.same_paths)
