"""Hooks inside attention modules: scale scores, observe or edit attention maps.

A hook acts on torch's own calls while the module's forward runs (the product of queries and keys, the fused attention
call, the softmax). One implementation serves every family, fused or not, and no parameter is exchanged. A classifier
with attention factors of its own uses these hooks in every pass; hooks of `instrument` come on top of them.
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

_PRODUCTS = (torch.Tensor.matmul, torch.matmul)  # `a @ b` arrives as the first
_SOFTMAXES = (torch.Tensor.softmax, torch.softmax, F.softmax)

Factor = Callable[[], float | Tensor]
"""Returns what to multiply scores by, in every run: one number, or one for each head."""

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@dataclass(frozen=True, eq=False)
class AttentionHook:
    """What to do inside one attention module; several hooks on a module combine in any order.

    `scale`: factor on the scores at the module's seam. `observe`: called with (scores, probabilities) as the softmax
    takes and returns them, after all scaling. `edit`: maps the probabilities to those that the module continues with.
    Both turn fused attention off, which shows neither. `extra_prefix` is added to the module's `num_prefix_tokens`.
    With `backward_only` the scaling acts on gradients and not on values.
    """

    attention: SoftmaxAttention
    scale: Factor | None = None
    observe: Callable[[Tensor, Tensor], None] | None = None
    edit: Callable[[Tensor], Tensor] | None = None
    extra_prefix: int = 0
    backward_only: bool = False

    @property
    def name(self) -> str:
        return self.attention.name

    @property
    def needs_softmax(self) -> bool:
        """Whether it acts at the softmax, which fused attention hides."""
        return self.observe is not None or self.edit is not None

    def attach(self, fired: Callable[[], object]) -> Callable[[], None]:
        """Attach the hook, which calls `fired` whenever it acts; the result detaches it."""
        if self.scale is None and not self.needs_softmax:
            fired()  # a longer prefix acts without any call
        hook = replace(
            self,
            scale=None if self.scale is None else _notify_before(fired, self.scale),
            observe=None if self.observe is None else _notify_before(fired, self.observe),
            edit=None if self.edit is None else _notify_before(fired, self.edit),
        )
        forward = _HookedForward.of(self.attention)
        forward.hooks.append(hook)

        def detach() -> None:
            forward.hooks.remove(hook)
            if not forward.hooks:
                forward.restore()

        return detach


class _ValueWithGradient(torch.autograd.Function):
    """The first input's value with the second input's gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, slope: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, Tensor]:
        return None, grads[0]


class _SaveFactor(torch.autograd.Function):
    """Return the first input and save the second for the backward pass.

    Gradient checkpointing counts saved tensors, so it detects (and refuses) a second run without the factor.
    """

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


class _HookedForward:
    """Replaces the forward of an attention module while hooks are attached to it."""

    def __init__(self, attention: SoftmaxAttention) -> None:
        self.attention = attention
        self.forward = cast(Callable[..., Tensor], attention.module.forward)
        self.covered = attention.module.__dict__.get("forward")  # another tool's wrapper; usually None
        self.hooks: list[AttentionHook] = []

    @classmethod
    def of(cls, attention: SoftmaxAttention) -> _HookedForward:
        """The existing one of this module, or a new one."""
        own = attention.module.__dict__
        if not isinstance(own.get("forward"), _HookedForward):
            own["forward"] = cls(attention)
        return cast(_HookedForward, own["forward"])

    def restore(self) -> None:
        own = self.attention.module.__dict__
        if own.get("forward") is not self:
            return  # another wrapper covers this one, which only passes calls on when it has no hooks
        if self.covered is None:
            del own["forward"]
        else:
            own["forward"] = self.covered

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooks = tuple(self.hooks)
        in_forward = tuple(hook for hook in hooks if not hook.backward_only)
        value = self._run(in_forward, args, kwargs)
        if len(in_forward) == len(hooks):
            return value
        # Observers belong to the values, which the first run gave.
        slope = self._run(tuple(replace(hook, observe=None) for hook in hooks), args, kwargs)
        if isinstance(value, tuple):  # with attention maps behind the output
            return (_ValueWithGradient.apply(value[0].detach(), slope[0]), *value[1:])
        return _ValueWithGradient.apply(value.detach(), slope)

    def _run(self, hooks: Sequence[AttentionHook], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.attention.module
        with ExitStack() as stack:
            extra = sum(hook.extra_prefix for hook in hooks)
            if extra:
                prefix = cast(int, module.num_prefix_tokens) + extra
                stack.enter_context(_attribute(module, "num_prefix_tokens", prefix))
            if any(hook.needs_softmax for hook in hooks) and hasattr(module, "fused_attn"):
                stack.enter_context(_attribute(module, "fused_attn", False))
            stack.enter_context(_Calls(self.attention, hooks))
            # torch's own forward hides its calls from modes, and without gradients it is one kernel.
            if type(module) is nn.MultiheadAttention and hooks:
                return _multihead_attention(module, *args, **kwargs)
            return self.forward(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Intercepts torch's calls during one run of an attention module's forward."""

    def __init__(self, attention: SoftmaxAttention, hooks: Sequence[AttentionHook]) -> None:
        super().__init__()
        self.attention = attention
        self.hooks = hooks
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
        """The factors of the scaling hooks, if this is the module's seam."""
        return [hook.scale() for hook in self.hooks if hook.scale is not None and seam is self.attention.seam]

    def _scaled(self, scores: Tensor, seam: ScoreSeam) -> Tensor:
        for number in self._factors(seam):
            scores = scores * _as_multiplier(number, scores)
        return scores

    def _fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass a plain number to the kernel, which scales scores anyway; multiply the queries by any other factor,
        which costs a few percent of a pass."""
        if any(hook.needs_softmax for hook in self.hooks):
            return self._unfused(*args, **kwargs)
        query: Tensor = args[0]
        scale = kwargs.get("scale")
        for number in self._factors(ScoreSeam.CONTENT):
            if _is_plain(number):
                scale = (1 / math.sqrt(query.shape[-1]) if scale is None else scale) * float(number)
                if query.requires_grad:
                    query = cast(Tensor, _SaveFactor.apply(query, _as_multiplier(number, query)))
            else:
                query = query * _as_multiplier(number, query)
        return func(query, *args[1:], **(kwargs if scale is None else kwargs | {"scale": scale}))

    def _unfused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The fused call in separate steps, for modules that cannot be switched: the softmax is visible."""
        if is_causal or enable_gqa:
            raise UserError(f"'{self.attention.name}' attends causally or with shared keys, which vision models do not")
        scores = self._scaled(query @ key.mT, ScoreSeam.CONTENT)
        scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return F.dropout(self._softmax(torch.softmax, (scores, -1), {}), dropout_p) @ value

    def _product(self, product: Tensor) -> Tensor:
        if product.dim() != 4 or product.shape[1] != self.attention.heads:
            return product  # not the scores yet: a low-rank adapter around the projections, for example
        self.met.add(ScoreSeam.CONTENT)
        return self._scaled(product, ScoreSeam.CONTENT)

    def _softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        scores = self._scaled(args[0], ScoreSeam.WHOLE)
        probabilities: Tensor = func(scores, *args[1:], **kwargs)
        for hook in self.hooks:
            if hook.observe is not None:
                hook.observe(scores, probabilities)
        for hook in self.hooks:
            probabilities = probabilities if hook.edit is None else hook.edit(probabilities)
        return probabilities


def _multihead_attention(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The forward of torch's module by a call of fused attention, which hooks see; no maps are returned."""
    padded = any(isinstance(given, Tensor) for given in more.values())
    if padded or module.bias_k is not None or module.add_zero_attn or module.in_proj_weight is None:
        raise UserError(
            "this nn.MultiheadAttention has padding, extra keys or separate widths, and cannot be hooked; vision "
            "models use none of these"
        )
    inputs = [query, key, value] if module.batch_first else [each.transpose(0, 1) for each in (query, key, value)]
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    projected = [F.linear(x, w, b) for x, w, b in zip(inputs, module.in_proj_weight.chunk(3), biases, strict=True)]
    q, k, v = (each.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for each in projected)
    dropout = module.dropout if module.training else 0.0
    # A boolean mask of this module marks what is hidden, one of fused attention what is seen.
    mask = ~attn_mask if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout).transpose(1, 2).flatten(2)
    output = F.linear(mixed, module.out_proj.weight, module.out_proj.bias)
    return (output if module.batch_first else output.transpose(0, 1)), None


@contextmanager
def _attribute(module: nn.Module, name: str, value: int) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _notify_before(fired: Callable[[], object], act: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """`act`, preceded by a call of `fired`."""

    def notified(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        fired()
        return act(*args, **kwargs)

    return notified


def _as_multiplier(number: float | Tensor, scores: Tensor) -> Tensor:
    """A factor in the shape and type that multiplies scores or queries, (batch, heads, ..., ...)."""
    if not isinstance(number, Tensor):
        # As a tensor, so that gradient checkpointing detects (and refuses) a second run without the factor.
        return torch.tensor(number, dtype=torch.promote_types(scores.dtype, torch.float32))
    return number.to(scores).view(-1, 1, 1) if number.dim() else number  # half precision must not be promoted


def _is_plain(number: float | Tensor) -> bool:
    """Whether it is one positive number without gradient that can be read without waiting for a GPU.

    Some kernels take the largest score before they scale, which is wrong for negative numbers.
    """
    if isinstance(number, Tensor) and (number.dim() or number.requires_grad or number.device.type != "cpu"):
        return False
    return float(number) > 0


@contextmanager
def scaled_scores(backbone: nn.Module, factors: Tensor) -> Iterator[None]:
    """Multiply the pre-softmax scores inside the block, one factor per softmax attention."""
    parts = attentions_of(backbone)
    silent = dict(enumerate(part.name for part in parts))
    with ExitStack() as undo:
        for place, part in enumerate(parts):
            hook = AttentionHook(part, partial(factors.select, 0, place))
            undo.callback(hook.attach(partial(silent.pop, place, None)))
        yield
    if silent:
        raise not_reached(backbone, silent.values())


def fix_attention_scale(backbone: nn.Module, scale: object) -> None:
    """Multiply the pre-softmax scores of every softmax attention by a number, for good.

    A model that trains with large factors has saturated attention (Jain & Dutta, CVPR 2024, figure 2).
    """
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise UserError(f"attention_scale must be a positive number, got {scale!r}.")
    parts = attentions_of(backbone)
    if not parts:
        raise UserError(f"{type(backbone).__name__} has no softmax attention; drop attention_scale={scale}.")
    for part in parts if scale != 1 else ():
        AttentionHook(part, _Fixed(float(scale))).attach(_ignore)


@dataclass(frozen=True)
class _Fixed:
    """A factor that never changes; no function inside a function, so that models can be copied and pickled."""

    number: float

    def __call__(self) -> float:
        return self.number


def _ignore() -> None:
    pass


def not_reached(model: nn.Module, names: Iterable[str]) -> UserError:
    """The error about modules, given by name, whose hooks never fired."""
    return UserError(
        f"{type(model).__name__} ran, but nothing was seen at {', '.join(map(repr, names))}: these modules were "
        "skipped, or run compiled. Inside the block, call the plain model, without torch.compile, so that its own "
        "modules run."
    )
