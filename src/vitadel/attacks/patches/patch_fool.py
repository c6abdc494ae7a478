"""Patch-Fool: repaint the most attended patches and draw more attention to them (Fu et al., ICLR 2022).

Differences from the released code, which `paper=True` follows in all but the last: the attention term counts all chosen
patches (there only the first); conflicting gradients are projected with the squared norm (there with the norm, which
leaves them in conflict); the first adversarial iterate is kept (there the last iterate, adversarial or not); random
patches are distinct; the mild L2 ball is one per image (there one per channel). The paper's sparse variant, a few
pixels inside the patches, is not implemented.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import fooled, gradient
from vitadel.attacks.losses import cross_entropy
from vitadel.attacks.patches.patch_threat import Patches, PatchGrid, check_images, cut, patch_grid_of, pixel_mask
from vitadel.attacks.per_sample import keep_samples, takes_arrays
from vitadel.attacks.threats import L2, Linf
from vitadel.attacks.wrappers import with_restarts
from vitadel.errors import UserError, check_known
from vitadel.instrument.attention import attention_maps
from vitadel.instrument.hooks import frozen
from vitadel.instrument.tokens import OwnTokens, own_tokens
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Step, Threat

_SELECTIONS = ("attention", "saliency", "random")
_MILD: dict[str, type[Linf] | type[L2]] = {"linf": Linf, "l2": L2}
_FIFTH = 4  # the layer by which the paper chooses patches, counted from 0
_TINY = 1e-300  # smaller than the squared length of any gradient but zero


def token_maps(maps: Sequence[Tensor], tokens: int, batch: int, own: OwnTokens) -> list[Tensor]:
    """The attention maps between the tokens of the first block: (batch, heads, queries, tokens).

    Extra tokens are kept as queries and left out as keys.
    """
    fitting = [
        own(each, 3)
        for each in maps
        if len(each) == batch and each.shape[2] == each.shape[3] and own.fits(each.shape[3], tokens)
    ]
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

    Probabilities are clamped to the smallest normal number: the log of zero is -inf, and its gradient at a subnormal
    number overflows.
    """
    index = tokens[:, None, None, :].expand(-1, *attention.shape[1:3], -1)
    wide = torch.promote_types(attention.dtype, torch.float32)
    drawn = attention.gather(3, index).to(wide).mean(1)
    return drawn.clamp(min=torch.finfo(attention.dtype).tiny).log().mean((1, 2))


def without_conflict(grad: Tensor, main: Tensor, squared: bool = True) -> Tensor:
    """`grad` without its component against `main`, per sample, where the two conflict (PCGrad, Yu et al. 2020).

    The result is orthogonal to `main` there. Without `squared` the component is divided by the norm only.
    """
    ours, theirs = grad.flatten(1).double(), main.flatten(1).double()
    dot, square = (ours * theirs).sum(1), theirs.square().sum(1).clamp(min=_TINY)
    share = dot.clamp(max=0) / (square if squared else square.sqrt())
    return (ours - share[:, None] * theirs).to(grad.dtype).view_as(grad)


@dataclass
class _Adam:
    """Gradient ascent by Adam (Kingma & Ba 2015); the rate is multiplied by `decay` every `every` steps."""

    rate: float
    decay: float
    every: int
    mean: Tensor
    square: Tensor

    keep = keep_samples

    def move(self, z: Tensor, grad: Tensor, turn: int) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * grad
        self.square = 0.999 * self.square + 0.001 * grad.square()
        mean, square = self.mean / (1 - 0.9 ** (turn + 1)), self.square / (1 - 0.999 ** (turn + 1))
        return z + self.rate * self.decay ** (turn // self.every) * mean / (square.sqrt() + 1e-8)


@dataclass(frozen=True)
class _PatchBatch:
    """The samples under attack: clean images, labels and, per sample, the numbers of the chosen patches."""

    x: Tensor
    y: Tensor
    picked: Tensor
    grid: PatchGrid

    keep = keep_samples

    @property
    def area(self) -> Tensor:
        """The chosen patches as a mask of pixels."""
        empty = torch.zeros(len(self.x), self.grid.patches, dtype=torch.bool, device=self.x.device)
        return pixel_mask(empty.scatter(1, self.picked, True), self.x, self.grid.side)


@dataclass(frozen=True)
class PatchFool:
    """Adam on the content of `patches` patches, maximizing the cross-entropy and the attention to them.

    The patches are chosen on the clean image: those with the most attention in attention number `layer`, those with the
    largest gradient ("saliency"), or random ones. Only layers with the tokens of the first block count; the attention
    term uses the second to the middle one of them. The default `layer` is 4, counted from 0, or the last one. With an
    `alpha` of 0 only the cross-entropy is maximized, on any model with patches. With `mild` the change also stays in a
    ball of that norm with the given threat's eps; otherwise only an eps of zero counts: no change.
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
            raise UserError(f"decay multiplies the rate and must be from 0 to 1, got {self.decay:g}; try 0.95")
        check_known("selection of patches", self.select, _SELECTIONS)
        if self.layer is not None and (self.select != "attention" or self.layer != int(self.layer)):
            raise UserError(
                f"layer is the number of an attention map, from 0, and needs select=attention; got {self.layer:g} and "
                f"select={self.select}"
            )
        check_known("mild norm", self.mild, ("none", *_MILD))
        if self.mild != "none" and not isinstance(self.threat, _MILD[self.mild]):
            raise UserError(
                f"mild={self.mild} takes its radius from eps, which is given in the norm {type(self.threat).__name__}; "
                f"give it in the same norm: --norm {self.mild}, with an eps that fits it"
            )

    def rules(self, model: nn.Module, x: Tensor) -> Threat:
        """The patch threat of the images; it depends on the model's grid."""
        return self._patches(patch_grid_of(model, x))

    def _patches(self, grid: PatchGrid) -> Patches:
        if self.patches > grid.patches:
            raise UserError(f"Patch-Fool was asked for {self.patches} patches, but an image has {grid.patches}")
        return Patches(self.patches, grid.side, None if self.mild == "none" else self.threat)

    @takes_arrays
    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        check_images(x)
        x = x.detach()
        if self.threat.eps == 0:
            return x.clone()
        grid = patch_grid_of(model, x)
        rules, rng = self._patches(grid), SampleRNG.of_pixels(x) if rng is None else rng
        with frozen(model):
            batch = _PatchBatch(x, y, self._select(model, x, y, grid, rng.stream("select")), grid)
            return self._search(model, batch, rules, self._start(batch, rules, rng.stream("start")))

    def _select(self, model: nn.Module, x: Tensor, y: Tensor, grid: PatchGrid, rng: SampleRNG) -> Tensor:
        """Numbers of the chosen patches, (batch, patches), the most important one first."""
        if self.select == "random":
            if self.paper:  # with replacement: there may be fewer distinct patches
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
            scores = self._chosen_map(fitting).float().mean((1, 2))[:, grid.prefix :]
        return scores.argsort(dim=1, descending=True, stable=True)[:, : self.patches]

    def _chosen_map(self, maps: Sequence[Tensor]) -> Tensor:
        if self.layer is None:
            return maps[min(_FIFTH, len(maps) - 1)]
        if self.layer >= len(maps):
            raise UserError(
                f"Patch-Fool was asked for layer {self.layer:g}, but {len(maps)} attention maps are between patches: "
                f"choose one from 0 to {len(maps) - 1}"
            )
        return maps[int(self.layer)]

    def _start(self, batch: _PatchBatch, rules: Patches, rng: SampleRNG) -> Tensor:
        if rules.mild is not None:
            content = rules.mild.random(batch.x, rng)
        else:
            content = rng.uniform(*batch.x.shape[1:]).to(batch.x.dtype)
        return torch.where(batch.area, content, batch.x)

    def _search(self, model: nn.Module, batch: _PatchBatch, rules: Patches, z: Tensor) -> Tensor:
        step: Step = _Adam(self.rate, self.decay, self.every, torch.zeros_like(z), torch.zeros_like(z))
        found = z.clone()
        place = torch.arange(len(z), device=z.device)  # of the samples not fooled yet
        for turn in range(self.steps):
            wrong, grad = self._step_direction(model, batch, z)
            if bool(wrong.any()):
                found[place[wrong]] = z[wrong]
                rest = ~wrong
                place, z, grad, batch, step = place[rest], z[rest], grad[rest], batch.keep(rest), step.keep(rest)
                if len(place) == 0:
                    return found
            z = rules.project(step.move(z, grad, turn), batch.x)
        found[place] = z
        return found

    def _step_direction(self, model: nn.Module, batch: _PatchBatch, z: Tensor) -> tuple[Tensor, Tensor]:
        """(fooled, ascent direction): one forward pass, one full backward pass and a shorter one for each layer."""
        leaf = z.detach().clone().requires_grad_()
        # Backward inside the block: a model that recomputes its forward pass must recompute it inside, too.
        with torch.enable_grad(), self._maps(model) as (maps, own):
            logits = model(leaf)
            terms = self._attention_terms(maps, batch, own) if self.alpha else []
            # After the terms: a pass of the deployed model behind a surrogate would replace the maps.
            wrong = fooled(model, leaf.detach(), logits, batch.y)
            if self.paper:
                wrong = torch.zeros_like(wrong)
            if len(wrong) and bool(wrong.all()):
                return wrong, torch.zeros_like(z)
            sideways = [gradient(term, leaf, again=True) for term in terms]
            main = gradient(cross_entropy(logits, batch.y), leaf) * batch.area
        drawn = [without_conflict(grad * batch.area, main, squared=not self.paper) for grad in sideways]
        return wrong, main + self.alpha * sum(drawn, torch.zeros_like(main))

    @contextmanager
    def _maps(self, model: nn.Module) -> Iterator[tuple[Sequence[Tensor], OwnTokens]]:
        """Attention maps, or none with an alpha of 0, so that attention stays fused."""
        seen: AbstractContextManager[Sequence[Tensor]] = attention_maps(model) if self.alpha else nullcontext(())
        with seen as maps, own_tokens(model) as own:
            yield maps, own

    def _attention_terms(self, maps: Sequence[Tensor], batch: _PatchBatch, own: OwnTokens) -> list[Tensor]:
        fitting = token_maps(maps, batch.grid.tokens, len(batch.x), own)
        # Layers 1 to 5 of 12, counted from 0; the second one for models of two or three layers.
        layers = fitting[1 : max(len(fitting) // 2, 2)]
        targets = batch.grid.prefix + (batch.picked[:, :1] if self.paper else batch.picked)
        return [attention_drawn(layer, targets) for layer in layers]

    def passes(self) -> tuple[int, int]:
        """Not counted: each step's backward passes from the attention terms, through the layers before them."""
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
    return with_restarts(search, restarts)
