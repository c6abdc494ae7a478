"""The only place where hooks are set and modes are switched, always undone when the `with` block ends.

Two kinds of site: an `Edge` sees what enters or leaves a module, a `Lens` what happens inside an attention module. A
lens works on torch's own calls while the module's forward runs (the product of queries and keys, the fused attention
call, the softmax), so that one implementation serves every family, fused or not, and no parameter is exchanged.

With gradient checkpointing the forward runs again during the backward pass: call backward inside the block then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitadel.backbones.anatomy import ScoreSeam, SoftmaxAttention
from vitadel.errors import Mistake

__all__ = ["Edge", "Lens", "Record", "frozen", "hooked"]

_PRODUCTS = (torch.Tensor.matmul, torch.matmul)  # `a @ b` arrives as the first
_SOFTMAXES = (torch.Tensor.softmax, torch.softmax, F.softmax)

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Edge:
    """`act` sees the first input of a module (`before`) or its output; what it returns, if anything, replaces it.

    With `first` it stands before the hooks that are on the module already, which then see what it returned.
    """

    name: str
    module: nn.Module
    act: Callable[[Tensor], Tensor | None]
    before: bool = False
    first: bool = False

    def attach(self, fired: Callable[[], object]) -> Callable[[], None]:
        """Set the hook; the result takes it off again."""
        act = _noting(fired, self.act)

        def enter(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            changed = act(args[0])
            return None if changed is None else (changed, *args[1:])

        def leave(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            return act(output)

        if self.before:
            return self.module.register_forward_pre_hook(enter, prepend=self.first).remove
        return self.module.register_forward_hook(leave, prepend=self.first).remove


@dataclass(frozen=True, eq=False)
class Lens:
    """What to do inside one attention module; several lenses on a module work together, whatever their order.

    `scale` multiplies scores at the module's seam; `see` is given (scores, probabilities) as the softmax takes and
    returns them, after every scaling; what `hand_on` makes of the probabilities is what the module goes on with. Both
    keep the module off fused attention, which shows neither. `more_prefix` is added to the module's
    `num_prefix_tokens`. With `backward_only` the scaling acts on gradients and not on values.
    """

    attention: SoftmaxAttention
    scale: Callable[[Tensor], Tensor] | None = None
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
            scale=None if self.scale is None else _noting(fired, self.scale),
            see=None if self.see is None else _noting(fired, self.see),
            hand_on=None if self.hand_on is None else _noting(fired, self.hand_on),
        )
        inside = _Inside.of(self.attention)
        inside.lenses.append(lens)

        def detach() -> None:
            inside.lenses.remove(lens)
            if not inside.lenses:
                inside.leave()

        return detach


def _noting(fired: Callable[[], object], act: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    def noted(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        fired()
        return act(*args, **kwargs)

    return noted


class _ValueAndSlope(torch.autograd.Function):
    """The first input's value with the second input's gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, slope: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, Tensor]:
        return None, grads[0]


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
            return func(self._scaled(args[0], ScoreSeam.CONTENT), *args[1:], **kwargs)
        if func in _PRODUCTS and ScoreSeam.CONTENT not in self.met:
            return self._product(func(*args, **kwargs))
        if func in _SOFTMAXES and ScoreSeam.WHOLE not in self.met:
            self.met.add(ScoreSeam.WHOLE)
            return self._softmax(func, args, kwargs)
        return func(*args, **kwargs)

    def _scaled(self, scores: Tensor, seam: ScoreSeam) -> Tensor:
        """Through every scaling lens if this is the module's seam; scaled queries make scaled scores."""
        if seam is self.attention.seam:
            for lens in self.lenses:
                scores = scores if lens.scale is None else lens.scale(scores)
        return scores

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


@contextmanager
def hooked(model: nn.Module, sites: Sequence[Edge | Lens]) -> Iterator[None]:
    """Attach all sites, and take them off at the end, also after an error.

    If `model` (the module that the user calls) has run to its end inside the block and a site has seen nothing of it,
    that is a `Mistake`: what was wanted there would be silently missing.
    """
    silent = dict(enumerate(site.name for site in sites))
    runs: list[nn.Module] = []
    with ExitStack() as undo:
        undo.callback(model.register_forward_hook(lambda module, _args, _output: runs.append(module)).remove)
        for place, site in enumerate(sites):
            undo.callback(site.attach(partial(silent.pop, place, None)))
        yield
    if runs and silent:
        raise Mistake(
            f"{type(model).__name__} ran, but nothing was seen at {', '.join(map(repr, silent.values()))}: "
            "these modules were skipped, or run compiled. Inside the block, call the plain model, without "
            "torch.compile, so that its own modules run."
        )


@contextmanager
def frozen(model: nn.Module) -> Iterator[nn.Module]:
    """Every module in eval mode and no parameter requiring a gradient; each gets its own flag back afterwards."""
    training = [(module, module.training) for module in model.modules()]
    learning = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.eval()
        for parameter, _ in learning:
            parameter.requires_grad_(False)
        yield model
    finally:
        # By the model's own method first: some modules (LeViT's attention) keep a cache per mode and drop it there.
        model.train(training[0][1])
        for module, flag in training:
            module.training = flag
        for parameter, flag in learning:
            parameter.requires_grad_(flag)


class Record(Sequence[Tensor]):
    """What was seen at a list of sites, in their order; a later run of the model replaces what an earlier one left."""

    def __init__(self, what: str, names: Sequence[str]) -> None:
        self.what = what
        self.names = tuple(names)
        self._seen: dict[int, Tensor] = {}

    def put(self, place: int, tensor: Tensor) -> None:
        self._seen[place] = tensor

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, place: int) -> Tensor: ...
    @overload
    def __getitem__(self, place: slice) -> list[Tensor]: ...
    def __getitem__(self, place: int | slice) -> Tensor | list[Tensor]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(f"{len(self)} {self.what}, no number {place}")
        seen = self._seen.get(place % len(self))
        if seen is None:
            raise Mistake(f"no {self.what} yet at '{self.names[place]}': run the model inside the `with` block first")
        return seen
