"""What happens inside an attention module: lenses that scale its scores, see its maps, or change what it hands on.

A lens works on torch's own calls while the module's forward runs (the product of queries and keys, the fused attention
call, the softmax), so that one implementation serves every family, fused or not, and no parameter is exchanged. A
classifier that has attention factors of its own looks through them in every pass; what `instrument` puts on comes on
top of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitadel.backbones.anatomy import ScoreSeam, SoftmaxAttention, attentions_of
from vitadel.errors import UserError

__all__ = ["Factor", "Lens", "noting", "refuse_silence", "scaled_scores"]

_PRODUCTS = (torch.Tensor.matmul, torch.matmul)  # `a @ b` arrives as the first
_SOFTMAXES = (torch.Tensor.softmax, torch.softmax, F.softmax)

Factor = Callable[[], float | Tensor]
"""What to multiply scores by, asked for in every run: one number, or one for each head."""

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@dataclass(frozen=True, eq=False)
class Lens:
    """What to do inside one attention module; several lenses on a module work together, whatever their order.

    `scale` is what scores are multiplied by at the module's seam; `see` is given (scores, probabilities) as the softmax
    takes and returns them, after every scaling; what `hand_on` makes of the probabilities is what the module goes on
    with. Both keep the module off fused attention, which shows neither. `more_prefix` is added to the module's
    `num_prefix_tokens`. With `backward_only` the scaling acts on gradients and not on values.
    """

    attention: SoftmaxAttention
    scale: Factor | None = None
    see: Callable[[Tensor, Tensor], None] | None = None
    hand_on: Callable[[Tensor], Tensor] | None = None
    more_prefix: int = 0
    backward_only: bool = False

    @property
    def name(self) -> str:
        return self.attention.name

    @property
    def needs_softmax(self) -> bool:
        """Whether it acts at the softmax, which fused attention hides."""
        return self.see is not None or self.hand_on is not None

    def attach(self, fired: Callable[[], object]) -> Callable[[], None]:
        """Put the lens on; the result takes it off again."""
        if self.scale is None and not self.needs_softmax:
            fired()  # a longer prefix leaves nothing to witness
        lens = replace(
            self,
            scale=None if self.scale is None else noting(fired, self.scale),
            see=None if self.see is None else noting(fired, self.see),
            hand_on=None if self.hand_on is None else noting(fired, self.hand_on),
        )
        inside = _Inside.of(self.attention)
        inside.lenses.append(lens)

        def detach() -> None:
            inside.lenses.remove(lens)
            if not inside.lenses:
                inside.leave()

        return detach


class _ValueAndSlope(torch.autograd.Function):
    """The first input's value with the second input's gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, slope: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, Tensor]:
        return None, grads[0]


class _Witnessed(torch.autograd.Function):
    """The first input, with the second one kept for the backward pass: gradient checkpointing counts what is kept, and
    so notices (and refuses) a second run without the factor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, number: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors
        return grads[0], None


class _Inside:
    """Stands in place of an attention module's forward while lenses are on it."""

    def __init__(self, attention: SoftmaxAttention) -> None:
        self.attention = attention
        self.forward = cast(Callable[..., Tensor], attention.module.forward)
        self.covered = attention.module.__dict__.get("forward")  # another tool's wrapper, as a rule nothing
        self.lenses: list[Lens] = []

    @classmethod
    def of(cls, attention: SoftmaxAttention) -> _Inside:
        """The one that stands there already, or a new one."""
        own = attention.module.__dict__
        if not isinstance(own.get("forward"), _Inside):
            own["forward"] = cls(attention)
        return cast(_Inside, own["forward"])

    def leave(self) -> None:
        own = self.attention.module.__dict__
        if own.get("forward") is not self:
            return  # something else wraps us by now; without lenses we only pass calls on
        if self.covered is None:
            del own["forward"]
        else:
            own["forward"] = self.covered

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        lenses = tuple(self.lenses)
        ahead = tuple(lens for lens in lenses if not lens.backward_only)
        value = self._run(ahead, args, kwargs)
        if len(ahead) == len(lenses):
            return value
        # What is to be seen belongs to the values, and was seen in the first pass.
        slope = self._run(tuple(replace(lens, see=None) for lens in lenses), args, kwargs)
        return cast(Tensor, _ValueAndSlope.apply(value.detach(), slope))

    def _run(self, lenses: Sequence[Lens], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        module = self.attention.module
        with ExitStack() as stack:
            more = sum(lens.more_prefix for lens in lenses)
            if more:
                stack.enter_context(_attribute(module, "num_prefix_tokens", cast(int, module.num_prefix_tokens) + more))
            if any(lens.needs_softmax for lens in lenses) and hasattr(module, "fused_attn"):
                stack.enter_context(_attribute(module, "fused_attn", False))
            stack.enter_context(_Calls(self.attention, lenses))
            return self.forward(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Meets torch's calls during one run of an attention module's forward."""

    def __init__(self, attention: SoftmaxAttention, lenses: Sequence[Lens]) -> None:
        super().__init__()
        self.attention = attention
        self.lenses = lenses
        self.met: set[ScoreSeam] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._fused(func, args, kwargs)
        if func in _PRODUCTS and ScoreSeam.CONTENT not in self.met:
            return self._product(func(*args, **kwargs))
        if func in _SOFTMAXES and ScoreSeam.WHOLE not in self.met:
            self.met.add(ScoreSeam.WHOLE)
            return self._softmax(func, args, kwargs)
        return func(*args, **kwargs)

    def _factors(self, seam: ScoreSeam) -> list[float | Tensor]:
        """What the scaling lenses say, if this is the module's seam."""
        return [lens.scale() for lens in self.lenses if lens.scale is not None and seam is self.attention.seam]

    def _scaled(self, scores: Tensor, seam: ScoreSeam) -> Tensor:
        for number in self._factors(seam):
            scores = scores * _fitting(number, scores)
        return scores

    def _fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The kernel scales scores anyway, so a plain number costs nothing; others go over the queries, there and back,
        which is a few percent of a pass."""
        query: Tensor = args[0]
        scale = kwargs.get("scale")
        for number in self._factors(ScoreSeam.CONTENT):
            if _is_plain(number):
                scale = (1 / math.sqrt(query.shape[-1]) if scale is None else scale) * float(number)
                if query.requires_grad:
                    query = cast(Tensor, _Witnessed.apply(query, _fitting(number, query)))
            else:
                query = query * _fitting(number, query)
        return func(query, *args[1:], **(kwargs if scale is None else kwargs | {"scale": scale}))

    def _product(self, product: Tensor) -> Tensor:
        if product.dim() != 4 or product.shape[1] != self.attention.heads:
            return product  # not the scores yet: a low-rank adapter around the projections, for example
        self.met.add(ScoreSeam.CONTENT)
        return self._scaled(product, ScoreSeam.CONTENT)

    def _softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        scores = self._scaled(args[0], ScoreSeam.WHOLE)
        probabilities: Tensor = func(scores, *args[1:], **kwargs)
        for lens in self.lenses:
            if lens.see is not None:
                lens.see(scores, probabilities)
        for lens in self.lenses:
            probabilities = probabilities if lens.hand_on is None else lens.hand_on(probabilities)
        return probabilities


@contextmanager
def _attribute(module: nn.Module, name: str, value: int) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def noting(fired: Callable[[], object], act: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    def noted(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        fired()
        return act(*args, **kwargs)

    return noted


def _fitting(number: float | Tensor, scores: Tensor) -> Tensor:
    """As scores (or queries), which are (batch, heads, ..., ...), can be multiplied by it."""
    if not isinstance(number, Tensor):
        # As a tensor, so that gradient checkpointing notices (and refuses) a second run without the factor.
        return torch.tensor(number, dtype=torch.promote_types(scores.dtype, torch.float32))
    return number.to(scores).view(-1, 1, 1) if number.dim() else number  # half precision must not be promoted


def _is_plain(number: float | Tensor) -> bool:
    """Whether it is one positive number that needs no gradient, and can be read without waiting for a GPU. Some
    kernels take the largest score before they scale, which goes wrong with negative numbers."""
    if isinstance(number, Tensor) and (number.dim() or number.requires_grad or number.device.type != "cpu"):
        return False
    return float(number) > 0


@contextmanager
def scaled_scores(backbone: nn.Module, factors: Tensor) -> Iterator[None]:
    """One run of a backbone whose pre-softmax scores are multiplied, one factor per softmax attention."""
    parts = attentions_of(backbone)
    silent = dict(enumerate(part.name for part in parts))
    with ExitStack() as undo:
        for place, part in enumerate(parts):
            lens = Lens(part, partial(factors.select, 0, place))
            undo.callback(lens.attach(partial(silent.pop, place, None)))
        yield
    refuse_silence(backbone, silent.values())


def refuse_silence(model: nn.Module, names: Iterable[str]) -> None:
    """A `UserError` if there are names of modules that ran unseen: what was wanted there would be silently missing."""
    unseen = ", ".join(map(repr, names))
    if unseen:
        raise UserError(
            f"{type(model).__name__} ran, but nothing was seen at {unseen}: "
            "these modules were skipped, or run compiled. Inside the block, call the plain model, without "
            "torch.compile, so that its own modules run."
        )
