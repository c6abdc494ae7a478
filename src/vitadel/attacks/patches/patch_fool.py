"""Patch-Fool: repaint the patches that others attend to, and draw attention to them (Fu et al. 2022, ICLR).

Where paper and released code differ from what the method means, the meaning is done: the attention term counts all
chosen patches (there only the first), conflicting gradients are projected with the squared norm (there with the norm,
which leaves them in conflict), the first adversarial iterate is kept (there the last iterate, adversarial or not),
random patches are distinct, and the mild L2 ball is one per image (there one per channel). `paper=True` follows the
released code in all but the last. The paper's sparse variant, a few pixels inside the patches, is not part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import fooled, gradient
from vitadel.attacks.losses import cross_entropy
from vitadel.attacks.patches.random_patches import Patches, PatchGrid, check_images, cut, patch_grid_of, pixel_mask
from vitadel.attacks.threats import L2, Linf
from vitadel.attacks.wrappers import repeated
from vitadel.errors import UserError, nearest_names
from vitadel.instrument.attention import attention_maps
from vitadel.instrument.hooks import frozen
from vitadel.instrument.tokens import OwnTokens, own_tokens
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Step, Threat

__all__ = ["PatchFool", "attention_drawn", "patch_fool", "token_maps", "without_conflict"]

_SELECTIONS = ("attention", "saliency", "random")
_MILD: dict[str, type[Linf] | type[L2]] = {"linf": Linf, "l2": L2}
_FIFTH = 4  # the layer that the paper chooses patches by, counted from 0
_NOTHING = 1e-300  # below every squared length of a gradient that is not zero


def token_maps(maps: Sequence[Tensor], tokens: int, batch: int, own: OwnTokens) -> list[Tensor]:
    """Of all attention maps those between the tokens of the first block: (batch, heads, queries, tokens).

    Extra tokens attend like all others, and are no place to look at.
    """
    all_tokens = tokens + own.extra
    fitting = [own(each, 3) for each in maps if (len(each), *each.shape[2:]) == (batch, all_tokens, all_tokens)]
    if not fitting:
        raise UserError(
            "Patch-Fool follows the attention between patches, and this model has none: none of its "
            f"{len(maps)} attention maps is between the {tokens} tokens of its first block (XCiT attends over "
            "channels, Swin inside windows). Use patch-fool(select=saliency,alpha=0), patches-random or "
            "patches-learned, which need no attention."
        )
    return fitting


def attention_drawn(attention: Tensor, tokens: Tensor) -> Tensor:
    """How much all queries attend to the given tokens, (batch, count): mean log of the heads' mean, one per sample.

    Probabilities are floored at the smallest normal number of their type: the log of an underflowed one is -inf, and
    the slope of a subnormal one overflows.
    """
    index = tokens[:, None, None, :].expand(-1, *attention.shape[1:3], -1)
    wide = torch.promote_types(attention.dtype, torch.float32)
    drawn = attention.gather(3, index).to(wide).mean(1)
    return drawn.clamp(min=torch.finfo(attention.dtype).tiny).log().mean((1, 2))


def without_conflict(grad: Tensor, main: Tensor, squared: bool = True) -> Tensor:
    """`grad` without its component against `main` where the two disagree (PCGrad, Yu et al. 2020), per sample.

    Afterwards the two are orthogonal there; unless `squared`, when the component is divided by the norm only.
    """
    ours, theirs = grad.flatten(1).double(), main.flatten(1).double()
    dot, square = (ours * theirs).sum(1), theirs.square().sum(1).clamp(min=_NOTHING)
    share = dot.clamp(max=0) / (square if squared else square.sqrt())
    return (ours - share[:, None] * theirs).to(grad.dtype).view_as(grad)


@dataclass
class _Adam:
    """Adam (Kingma & Ba 2015), upwards, whose rate falls by `decay` every `every` steps."""

    rate: float
    decay: float
    every: int
    mean: Tensor
    square: Tensor

    def move(self, z: Tensor, grad: Tensor, turn: int) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * grad
        self.square = 0.999 * self.square + 0.001 * grad.square()
        mean, square = self.mean / (1 - 0.9 ** (turn + 1)), self.square / (1 - 0.999 ** (turn + 1))
        return z + self.rate * self.decay ** (turn // self.every) * mean / (square.sqrt() + 1e-8)

    def keep(self, chosen: Tensor) -> Step:
        return replace(self, mean=self.mean[chosen], square=self.square[chosen])


@dataclass(frozen=True)
class _Scene:
    """What the search is about: clean images, labels and, per sample, the numbers of the chosen patches."""

    x: Tensor
    y: Tensor
    picked: Tensor
    grid: PatchGrid

    @property
    def area(self) -> Tensor:
        """The chosen patches as pixels."""
        empty = torch.zeros(len(self.x), self.grid.patches, dtype=torch.bool, device=self.x.device)
        return pixel_mask(empty.scatter(1, self.picked, True), self.x, self.grid.side)

    def keep(self, chosen: Tensor) -> _Scene:
        return replace(self, x=self.x[chosen], y=self.y[chosen], picked=self.picked[chosen])


@dataclass(frozen=True)
class PatchFool:
    """Adam on the content of `patches` patches, along the cross-entropy and the attention they draw.

    The patches are chosen on the clean image: those that all tokens attend to most in attention number `layer`, those
    with the largest gradient ("saliency"), or any. Layers whose tokens are not those of the first block are left out;
    of the others, the second to the middle one take part. Without a `layer` it is number 4, counted from 0, or the last
    that there is. With an `alpha` of 0 only the cross-entropy is climbed, on any model with patches. With `mild` the
    change also stays in a ball of that norm, whose radius is the given threat's eps; otherwise only an eps of zero
    counts, which forbids any change.
    """

    threat: Threat
    patches: int = 1
    steps: int = 250
    select: str = "attention"
    mild: str = "none"
    alpha: float = 0.002
    rate: float = 0.2
    decay: float = 0.95
    every: int = 10
    layer: int | None = None
    paper: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if min(self.patches, self.steps, self.every) < 1:
            raise UserError(
                "Patch-Fool needs at least 1 patch, 1 step and a decay every 1 step, "
                f"got {self.patches}, {self.steps} and {self.every}"
            )
        if not 0 <= self.decay <= 1:
            raise UserError(f"decay is what the rate is multiplied by, from 0 to 1, got {self.decay:g}; try 0.95")
        if self.select not in _SELECTIONS:
            near = nearest_names(self.select, _SELECTIONS) or "."
            raise UserError(f"unknown selection of patches {self.select!r}{near} Known: {', '.join(_SELECTIONS)}.")
        if self.layer is not None and (self.select != "attention" or self.layer != int(self.layer)):
            raise UserError(
                f"layer is the number of an attention map, from 0, and only select=attention looks at one; got "
                f"{self.layer:g} and select={self.select}"
            )
        if self.mild != "none" and self.mild not in _MILD:
            near = nearest_names(self.mild, ["none", *_MILD]) or "."
            raise UserError(f"unknown mild norm {self.mild!r}{near} Known: none, {', '.join(_MILD)}.")
        if self.mild != "none" and not isinstance(self.threat, _MILD[self.mild]):
            raise UserError(
                f"mild={self.mild} takes its radius from eps, which is given in the norm {type(self.threat).__name__}; "
                f"give it in the same norm: --norm {self.mild}, with an eps that fits it"
            )

    def rules(self, model: nn.Module, x: Tensor) -> Threat:
        """What the proposals obey; known only with the model, whose grid it is about."""
        return self._patches(patch_grid_of(model, x))

    def _patches(self, grid: PatchGrid) -> Patches:
        if self.patches > grid.patches:
            raise UserError(f"Patch-Fool was asked for {self.patches} patches, but an image has {grid.patches}")
        return Patches(self.patches, grid.side, None if self.mild == "none" else self.threat)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        check_images(x)
        x = x.detach()
        if self.threat.eps == 0:
            return x.clone()
        grid = patch_grid_of(model, x)
        rules, rng = self._patches(grid), SampleRNG.of_pixels(x) if rng is None else rng
        with frozen(model):
            scene = _Scene(x, y, self._select(model, x, y, grid, rng.stream("select")), grid)
            return self._search(model, scene, rules, self._start(scene, rules, rng.stream("start")))

    def _select(self, model: nn.Module, x: Tensor, y: Tensor, grid: PatchGrid, rng: SampleRNG) -> Tensor:
        """Numbers of the chosen patches, (batch, patches), the most important one first."""
        if self.select == "random":
            if self.paper:  # with replacement: a patch drawn twice leaves fewer to repaint
                return rng.integers(grid.patches, self.patches)
            return rng.permutation(grid.patches)[:, : self.patches]
        if self.select == "saliency":
            with torch.enable_grad():
                leaf = x.clone().requires_grad_()
                scores = cut(gradient(cross_entropy(model(leaf), y), leaf).abs(), grid.side).sum(2)
        else:
            with torch.no_grad(), attention_maps(model) as maps, own_tokens(model) as own:
                model(x)
                fitting = token_maps(maps, grid.tokens, len(x), own)
            scores = self._looked_at(fitting).float().mean((1, 2))[:, grid.prefix :]
        return scores.argsort(dim=1, descending=True, stable=True)[:, : self.patches]

    def _looked_at(self, maps: Sequence[Tensor]) -> Tensor:
        if self.layer is None:
            return maps[min(_FIFTH, len(maps) - 1)]
        if self.layer >= len(maps):
            raise UserError(
                f"Patch-Fool was asked for layer {self.layer:g}, but {len(maps)} attention maps are between patches: "
                f"choose one from 0 to {len(maps) - 1}"
            )
        return maps[int(self.layer)]

    def _start(self, scene: _Scene, rules: Patches, rng: SampleRNG) -> Tensor:
        if rules.mild is not None:
            content = rules.mild.random(scene.x, rng)
        else:
            content = rng.uniform(*scene.x.shape[1:]).to(scene.x.dtype)
        return torch.where(scene.area, content, scene.x)

    def _search(self, model: nn.Module, scene: _Scene, rules: Patches, z: Tensor) -> Tensor:
        step: Step = _Adam(self.rate, self.decay, self.every, torch.zeros_like(z), torch.zeros_like(z))
        found = z.clone()
        place = torch.arange(len(z), device=z.device)  # where the samples still searched for stand in the batch
        for turn in range(self.steps):
            wrong, grad = self._look(model, scene, z)
            if bool(wrong.any()):
                found[place[wrong]] = z[wrong]
                rest = ~wrong
                place, z, grad, scene, step = place[rest], z[rest], grad[rest], scene.keep(rest), step.keep(rest)
                if len(place) == 0:
                    return found
            z = rules.project(step.move(z, grad, turn), scene.x)
        found[place] = z
        return found

    def _look(self, model: nn.Module, scene: _Scene, z: Tensor) -> tuple[Tensor, Tensor]:
        """(who is fooled and leaves, where to go): one forward pass, one whole backward pass and one for each layer."""
        leaf = z.detach().clone().requires_grad_()
        # Backward inside the block: a model that recomputes its forward pass there must do so as it ran first.
        with torch.enable_grad(), self._watched(model) as (maps, own):
            logits = model(leaf)
            terms = self._attention_terms(maps, scene, own) if self.alpha else []
            # After the terms: asking the deployed model behind a surrogate replaces the maps.
            wrong = fooled(model, leaf.detach(), logits, scene.y)
            if self.paper:
                wrong = torch.zeros_like(wrong)
            if len(wrong) and bool(wrong.all()):
                return wrong, torch.zeros_like(z)
            sideways = [gradient(term, leaf, again=True) for term in terms]
            main = gradient(cross_entropy(logits, scene.y), leaf) * scene.area
        drawn = [without_conflict(grad * scene.area, main, squared=not self.paper) for grad in sideways]
        return wrong, main + self.alpha * sum(drawn, torch.zeros_like(main))

    @contextmanager
    def _watched(self, model: nn.Module) -> Iterator[tuple[Sequence[Tensor], OwnTokens]]:
        """With an alpha of 0 nobody looks at maps, and attention may stay fused."""
        seen: AbstractContextManager[Sequence[Tensor]] = attention_maps(model) if self.alpha else nullcontext(())
        with seen as maps, own_tokens(model) as own:
            yield maps, own

    def _attention_terms(self, maps: Sequence[Tensor], scene: _Scene, own: OwnTokens) -> list[Tensor]:
        fitting = token_maps(maps, scene.grid.tokens, len(scene.x), own)
        # For 12 layers 1 to 5, counted from 0; a model of two or three layers has its second one take part.
        layers = fitting[1 : max(len(fitting) // 2, 2)]
        targets = scene.grid.prefix + (scene.picked[:, :1] if self.paper else scene.picked)
        return [attention_drawn(layer, targets) for layer in layers]

    def passes(self) -> tuple[int, int]:
        """Besides, each step has a backward pass from every attention term, through the layers before it only."""
        return self.steps + (self.select == "saliency"), int(self.select == "attention")


def patch_fool(
    threat: Threat,
    patches: int = 1,
    steps: int = 250,
    select: str = "attention",
    mild: str = "none",
    paper: bool = False,
    alpha: float = 0.002,
    rate: float | None = None,
    decay: float = 0.95,
    every: int = 10,
    layer: int | None = None,
    restarts: int = 1,
) -> Attack:
    rate = (0.22 if paper else 0.2) if rate is None else rate
    search = PatchFool(threat, patches, steps, select, mild, alpha, rate, decay, every, layer, paper=paper)
    return repeated(search, restarts)
