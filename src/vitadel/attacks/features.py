"""Label-free attack on features: the attack of Robustness Tokens (Pulfer et al., ECCV 2024)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.attacks.goals import deployed_fooled, fooled
from vitadel.attacks.per_sample import keep_samples, takes_arrays
from vitadel.attacks.pgd import PGD
from vitadel.attacks.steppers import Steepest, usual_length
from vitadel.attacks.threats import Linf
from vitadel.attacks.wrappers import with_restarts
from vitadel.backbones.anatomy import anatomy_of, backbone_of, blocks_of, prefix_tokens_of
from vitadel.backbones.classifier import check_pixels
from vitadel.backbones.classifier_head import project
from vitadel.errors import UserError, check_known
from vitadel.instrument.hooks import Edge, block_features, hooked, token_sequence
from vitadel.instrument.tokens import own_tokens
from vitadel.quantities import quantity_text
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Aim, Attack, Goal, Threat

AXES = ("token", "channel", "flat")
"""What a cosine compares in (batch, tokens, channels): each token, each channel over all tokens, or everything."""

KINDS = ("tokens", "pooled")
"""Class and patch tokens, or one vector per image: the input of the classifier, for CLIP its projection."""

_IMAGENET_STD = (0.229, 0.224, 0.225)
_ROUNDING = 1e-4  # in gray levels: how far below a whole number float32 may round it


def feature_cosine(features: Tensor, reference: Tensor, axis: str = "token") -> Tensor:
    """The mean cosine of two sets of features, one per image: (batch, tokens, channels), or (batch, channels) pooled.

    `axis` "token" compares token by token, the natural reading of the paper's Eq. 1; "channel" compares each channel
    over all tokens, as the released code does; "flat" compares all numbers of an image at once.
    """
    check_known("axis", axis, AXES)
    if features.shape != reference.shape:
        raise UserError(
            f"features of shapes {tuple(features.shape)} and {tuple(reference.shape)} cannot be compared: take both "
            "from models of one width, on images of one size."
        )
    here, there = (each[:, None] if each.dim() == 2 else each for each in (features, reference))
    if axis == "channel" and here.shape[1] == 1:
        raise UserError(
            "axis 'channel' compares channels over tokens, but these features are one token per image: the class "
            "token alone (class attention), or pooled. Use axis=token, or choose earlier blocks."
        )
    if axis == "flat":
        here, there = (each.flatten(1)[:, None] for each in (here, there))
    return F.cosine_similarity(here, there, dim=1 if axis == "channel" else 2).mean(1)


def final_features(model: nn.Module, x: Tensor, kind: str = "tokens") -> Tensor:
    """Class and patch tokens after the final norm, (batch, tokens, channels), with their graph.

    Registers and extra tokens are left out. Models that norm the mean of their tokens give the features of the last
    block. Kind "pooled" is the input of the classifier, (batch, channels), for a CLIP image tower its projection, as in
    the released code of Robustness Tokens.
    """
    (last,) = AwayFromFeatures(normed=True, kind=kind).features(model, x)[1]
    return last


def check_kind(kind: str, axis: str) -> None:
    """Check the names of features and axis, and that there are tokens for axis 'channel'."""
    check_known("features", kind, KINDS)
    check_known("axis", axis, AXES)
    if kind == "pooled" and axis == "channel":
        raise UserError(
            "axis 'channel' compares channels over tokens, but pooled features are one vector per image. Use "
            "axis=token, the axis of the embedding, or features=tokens."
        )


@dataclass(frozen=True)
class _FeatureAim:
    model: nn.Module
    x: Tensor
    y: Tensor
    clean: tuple[Tensor, ...]
    goal: AwayFromFeatures

    keep = keep_samples

    def evaluate(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        logits, features = self.goal.features(self.model, z)
        alike = [feature_cosine(here, there, self.goal.axis) for here, there in zip(features, self.clean, strict=True)]
        change = (z - self.x).square().flatten(1).mean(1)
        zero = logits[:, :0].sum(1)  # lets the pass counter, at the model's output, see this backward pass
        return zero - torch.stack(alike).mean(0) - self.goal.weight * change, self._fooled(z, logits)

    def _fooled(self, z: Tensor, logits: Tensor) -> Tensor:
        if self.goal.judged_as is None:
            return fooled(self.model, z, logits, self.y)
        return deployed_fooled(self.model, self.goal.judged_as(z, self.x), self.y)


@dataclass(frozen=True)
class AwayFromFeatures:
    """Minimize the cosine to the clean features plus `weight` times the mean squared change of the pixels.

    This is Eq. 4 with a plus, as in the paper's text and released code. Features are class and patch tokens of the
    blocks numbered by `blocks`, without registers and extra tokens; with `normed` after the model's final norm, as in
    the paper; with `kind` "pooled" one vector per image, as in `final_features`. `axis` is that of `feature_cosine`. At
    the clean image the cosine is 1 and has no gradient, so a search must not start there. Where `judged_as` maps (z, x)
    to another image, that image gets the verdict, in a pass of its own.
    """

    axis: str = "token"
    weight: float = 1.0
    blocks: tuple[int, ...] = (-1,)
    normed: bool = False
    kind: str = "tokens"
    judged_as: Callable[[Tensor, Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        check_kind(self.kind, self.axis)
        if not self.blocks:
            raise UserError("features need at least one block; give block numbers such as (-1,)")
        if self.kind == "pooled" and self.blocks != (-1,):
            raise UserError("features=pooled are those of the whole model; leave blocks out, or use features=tokens")

    forwards: ClassVar[int] = 1  # the clean features

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        there = len(blocks_of(model))
        if -min(self.blocks) > there:
            raise UserError(f"features of {-min(self.blocks)} blocks were requested, but the model has {there} blocks")
        with torch.no_grad():
            _, clean = self.features(model, x)
        return _FeatureAim(model, x, y, tuple(clean), self)

    def features(self, model: nn.Module, z: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits, and the chosen blocks' features as (batch, tokens, channels), from one pass."""
        if self.kind == "pooled":
            logits, vector = _pooled(model, z)
            return logits, [vector]
        row = anatomy_of(model)
        if self.normed and self.blocks == (-1,) and row.tokens is not None:
            logits, last = _leaving(model, row.tokens.leave, z)
            return logits, [_tokens(model, last)]
        with block_features(model, self.blocks) as seen, own_tokens(model) as own:
            logits = model(z)
        streams = [own(each) for each in seen]
        return logits, [_tokens(model, _after_norm(model, each) if self.normed else each) for each in streams]


def _pooled(model: nn.Module, z: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the input of the classifier in float32 or better; of distilled models the mean of both inputs."""
    backbone: Any = backbone_of(model)
    found = backbone.get_classifier()
    heads = found if isinstance(found, tuple) else (found,)
    given: list[Tensor] = []
    with hooked(model, [Edge("head", head, given.append, before=True) for head in heads]):
        logits: Tensor = model(z)
    vector = project(backbone, torch.stack(given[-len(heads) :]).mean(0))
    if vector.dim() != 2:
        raise UserError(
            f"features=pooled need one vector per image, but the head of {type(backbone).__name__} is given "
            f"{tuple(vector.shape)}: the model was built without pooling. Use features=tokens."
        )
    return logits, vector.to(torch.promote_types(vector.dtype, torch.float32))


def _leaving(model: nn.Module, name: str, z: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the output of the final norm, where extra tokens have been dropped."""
    norm, found = backbone_of(model).get_submodule(name), list[Tensor]()
    with hooked(model, [Edge(name, norm, found.append)]):
        logits: Tensor = model(z)
    return logits, found[-1]


def _after_norm(model: nn.Module, features: Tensor) -> Tensor:
    norm = getattr(backbone_of(model), "norm", None)
    width = getattr(norm, "normalized_shape", features.shape[-1:])
    if not isinstance(norm, nn.Module) or tuple(width) != tuple(features.shape[-1:]):
        raise UserError(
            f"normed=true needs a final norm that fits the blocks' width, {features.shape[-1]}; this model has "
            f"{f'one of width {width[-1]}' if isinstance(norm, nn.Module) else 'none'}. Use the last blocks only, or "
            "normed=false."
        )
    out: Tensor = norm.forward(features)  # without its hooks: `extra_tokens` would drop tokens twice
    return out


def _tokens(model: nn.Module, features: Tensor) -> Tensor:
    """(batch, tokens, channels) without registers, in float32 or better."""
    features = token_sequence(model, features)
    registers = getattr(backbone_of(model), "reg_token", None)
    if isinstance(registers, Tensor):
        patches = prefix_tokens_of(model)
        features = torch.cat([features[:, : patches - registers.shape[1]], features[:, patches:]], dim=1)
    return features.to(torch.promote_types(features.dtype, torch.float32))


@dataclass(frozen=True)
class _AimWithImageTerm:
    model: nn.Module
    x: Tensor
    y: Tensor
    aim: Aim
    goal: WithImageTerm

    def keep(self, chosen: Tensor) -> Aim:
        return replace(self, x=self.x[chosen], y=self.y[chosen], aim=self.aim.keep(chosen))

    def evaluate(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        loss, fooled_here = self.aim.evaluate(z, progress)
        change = (z - self.x).square().flatten(1).mean(1)
        if self.goal.judged_as is not None:
            fooled_here = deployed_fooled(self.model, self.goal.judged_as(z, self.x), self.y)
        return loss - self.goal.weight * change, fooled_here


@dataclass(frozen=True)
class WithImageTerm:
    """Another goal minus `weight` times the mean squared change of the pixels: how the released code of Robustness
    Tokens attacks labels, with its routine for features. `judged_as` is that of `AwayFromFeatures`."""

    goal: Goal
    weight: float = 1.0
    judged_as: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def forwards(self) -> int:
        return self.goal.forwards

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        return _AimWithImageTerm(model, x, y, self.goal(model, x, y), self)


@dataclass(frozen=True)
class _Region:
    """A threat's ball with a lower bound on each image's PSNR, and Gaussian noise as random start.

    `units` are the units of budget, noise and steps in each channel, in pixels.
    """

    threat: Threat
    psnr: float
    noise: float
    units: tuple[float, ...]

    @property
    def eps(self) -> float:
        return self.threat.eps

    def project(self, z: Tensor, x: Tensor) -> Tensor:
        reach = self.eps * self._unit(x)  # every norm's ball lies in this cube: no effect with units of 1
        z = self.threat.project(z, x).clamp(x - reach, x + reach).clamp(0, 1)
        if self.psnr <= 0:
            return z
        error = (z.double() - x.double()).square().flatten(1).mean(1).clamp(min=1e-30)
        shrink = (10 ** (-self.psnr / 10) / error).sqrt().view(-1, *[1] * (x.ndim - 1))
        return torch.where(shrink < 1, x + (z - x) * (shrink * (1 - 1e-6)).to(x.dtype), z)

    def random(self, x: Tensor, rng: SampleRNG, surface: bool = False) -> Tensor:
        noise = rng.stream("gaussian start").normal(*x.shape[1:]).to(x.dtype)
        if not isinstance(self.threat, Linf):  # there a length is that of the whole perturbation, not of a pixel
            length = self.threat.size(noise, torch.zeros_like(noise)).clamp(min=1e-12)
            noise = noise / length.view(-1, *[1] * (x.ndim - 1)).to(x.dtype)
        return self.project(x + self.noise * self._unit(x) * noise, x)

    def ascent(self, grad: Tensor, z: Tensor) -> Tensor:
        return self.threat.ascent(grad, z) * self._unit(z)

    def size(self, z: Tensor, x: Tensor) -> Tensor:
        return self.threat.size(z, x)

    def _unit(self, like: Tensor) -> Tensor:
        return torch.tensor(self.units, dtype=like.dtype, device=like.device).view(-1, 1, 1)


def effective_eps(eps: float) -> str:
    """A budget of `paper=true`, in normalized units, in pixels for red, green and blue."""
    levels = ", ".join(f"{255 * eps * unit:.2f}" for unit in _IMAGENET_STD)
    return f"{quantity_text(eps)} in normalised units = {levels} /255 in pixels"


@dataclass(frozen=True)
class FeatureAttack:
    """PGD on `AwayFromFeatures` from the projection of x + length * N(0, 1); the default `length` is `usual_length`.

    In norms other than Linf the noise as a whole has the length, as a step does.

    `psnr` > 0 keeps every image's mean squared error at or below 10^(-psnr/10) by shrinking its perturbation: at 40 dB
    the root mean square is at most 2.55/255, a tighter bound than an Linf budget of 8/255. `quantize` truncates the
    perturbation to whole gray levels, towards zero, so it stays in the budget, the box and above the PSNR; verdicts
    during the search are then on the truncated image.

    `paper` follows the effective numbers of the released code: budget, steps and noise are in units of ImageNet's
    standard deviations, so that 8/255 means 1.83, 1.79 and 1.80 gray levels in red, green and blue; and the result is
    floored to whole levels (-1.8 becomes -2), within the stated budget. Not reproduced: the code clips to the range of
    the normalized batch, not to the box [0, 1]; it does not project the start; it stops when the mean error of a batch
    reaches 40 dB, which never happens with that budget (43 dB); pixels can lose a level to float rounding.
    """

    threat: Threat
    goal: AwayFromFeatures | WithImageTerm = field(default_factory=AwayFromFeatures)
    steps: int = 30
    length: float | None = None
    psnr: float = 0.0
    quantize: bool = False
    paper: bool = False
    stop_when_fooled: bool = True
    effective_eps: str | None = field(default=None, init=False)  # recorded, as eps is not in pixels

    @property
    def pixels_per_unit(self) -> float:
        """The largest unit of the budget in pixels: 1, less for `paper`."""
        return max(_IMAGENET_STD) if self.paper else 1.0

    def __post_init__(self) -> None:
        if self.psnr < 0:
            raise UserError(f"psnr is in decibels, 0 switches it off; got {self.psnr:g}, try 40")
        if self.paper and not isinstance(self.threat, Linf):
            raise UserError(f"paper=true is an attack in Linf, got a threat in {type(self.threat).__name__}")
        if self.paper:
            object.__setattr__(self, "effective_eps", effective_eps(self.threat.eps))

    @takes_arrays
    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        check_pixels(x)
        goal = replace(self.goal, judged_as=self._proposal) if self._judges_apart() else self.goal
        length = usual_length(self.threat, max(self.steps, 1)) if self.length is None else self.length
        region = _Region(self.threat, self.psnr, length, _IMAGENET_STD if self.paper else (1.0,))
        search = PGD(region, goal, Steepest(length), self.steps, stop_when_fooled=self.stop_when_fooled)
        return self._proposal(search(model, x, y, rng), x.detach())

    def _proposal(self, z: Tensor, x: Tensor) -> Tensor:
        """The image that the attack returns for `z`."""
        levels = (z - x) * 255
        if self.paper:
            whole = torch.floor(levels + _ROUNDING)
        elif self.quantize:
            whole = torch.trunc(levels + _ROUNDING * levels.sign())
        else:
            return z
        return self.threat.project(x + whole / 255, x)

    def _judges_apart(self) -> bool:
        return self.stop_when_fooled and (self.quantize or self.paper)

    def passes(self) -> tuple[int, int]:
        return self.steps, self.goal.forwards + (self.steps if self._judges_apart() else 0)


RELEASED_STEP = 0.01
"""In units of ImageNet's standard deviations."""


def released_attack(threat: Threat, goal: Goal, steps: int, *, stop_when_fooled: bool = True) -> FeatureAttack:
    """An attack on another goal than features as the released code runs it: `paper` of `FeatureAttack`."""
    return FeatureAttack(
        threat, WithImageTerm(goal), steps, RELEASED_STEP, paper=True, stop_when_fooled=stop_when_fooled
    )


def features(
    threat: Threat,
    steps: int = 30,
    step: float | None = None,
    axis: str = "token",
    weight: float = 1.0,
    blocks: int = 1,
    normed: bool = False,
    features: str = "tokens",
    psnr: float = 0.0,
    quantize: bool = False,
    paper: bool = False,
    stop_when_fooled: bool = True,
    restarts: int = 1,
) -> Attack:
    """`blocks` is the number of last blocks to use; `features` is tokens or pooled, as in `final_features`.

    With `paper` only steps, features, stopping and restarts can be set. Its cosine is over tokens, channel by channel,
    and for pooled features over the embedding, as in its code for OpenCLIP.
    """
    if paper:
        own = (step, axis, weight, blocks, normed, psnr, quantize)
        if own != (None, "token", 1.0, 1, False, 0.0, False):
            raise UserError(
                "paper=true sets step, axis, weight, blocks, normed, psnr and quantize itself; leave them out, or "
                "leave paper out and set them one by one"
            )
        step, axis, normed = RELEASED_STEP, "token" if features == "pooled" else "channel", True
    goal = AwayFromFeatures(axis, weight, tuple(range(-blocks, 0)), normed, features)
    attack = FeatureAttack(threat, goal, steps, step, psnr, quantize, paper, stop_when_fooled)
    return with_restarts(attack, restarts)
