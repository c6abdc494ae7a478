"""Hooks and modes, set here only and undone when the `with` block ends.

An `Edge` acts on the input or output of a module, an `AttentionHook` (of `backbones.attention_hooks`) inside an
attention module. With gradient checkpointing the forward pass runs again during the backward pass: call backward inside
the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn

from vitadel.backbones.anatomy import backbone_of, blocks_of
from vitadel.backbones.attention_hooks import AttentionHook, not_reached
from vitadel.errors import UserError
from vitadel.runtime.distributed import computes_alone, generators_kept

__all__ = ["AttentionHook", "Edge", "Record", "block_features", "count_macs", "frozen", "hooked", "token_sequence"]


@dataclass(frozen=True)
class Edge:
    """Call `act` on the first input of a module (`before`) or on its output; a tensor that it returns replaces it.

    With `first` it runs before the hooks that the module already has, which then see what it returned.
    """

    name: str
    module: nn.Module
    act: Callable[[Tensor], Tensor | None]
    before: bool = False
    first: bool = False

    def attach(self, fired: Callable[[], object]) -> Callable[[], None]:
        """Set the hook; returns a function that removes it."""

        def enter(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            fired()
            changed = self.act(args[0])
            return None if changed is None else (changed, *args[1:])

        def leave(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
            fired()
            if not isinstance(output, tuple):
                return self.act(output)
            changed = self.act(output[0])  # modules of transformers also return attention maps
            return None if changed is None else (changed, *output[1:])

        if self.before:
            return self.module.register_forward_pre_hook(enter, prepend=self.first).remove
        return self.module.register_forward_hook(leave, prepend=self.first).remove


@contextmanager
def hooked(model: nn.Module, sites: Sequence[Edge | AttentionHook]) -> Iterator[None]:
    """Attach all sites and remove them at the end, also after an error.

    Raises `UserError` if `model` (the module that the user calls) has run inside the block without reaching a site.
    """
    if any(computes_alone(site.module if isinstance(site, Edge) else site.attention.module) for site in sites):
        raise UserError(
            "this looks inside the model, which computes on a device without float64, apart from everything else; use "
            "--device cpu"
        )
    silent = dict(enumerate(site.name for site in sites))
    runs: list[nn.Module] = []
    with ExitStack() as undo:
        undo.callback(model.register_forward_hook(lambda module, _args, _output: runs.append(module)).remove)
        for place, site in enumerate(sites):
            undo.callback(site.attach(partial(silent.pop, place, None)))
        yield
    if runs and silent:
        raise not_reached(model, silent.values())


def _with_contiguous_gradient(module: nn.Module, inputs: object, output: Tensor) -> None:
    """Torch's batch norm in eval mode gives wrong gradients for one image if the gradient behind it is transposed.

    So it is in stems of convolutions before tokens (XCiT, LeViT); seen in torch 2.15 on the CPU.
    """
    if len(output) == 1 and output.requires_grad:
        output.register_hook(Tensor.contiguous)


@contextmanager
def frozen(model: nn.Module) -> Iterator[nn.Module]:
    """Eval mode and no gradients of parameters inside the block; every module and parameter gets its own flag back."""
    training = [(module, module.training) for module in model.modules()]
    learning = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    handles = [module.register_forward_hook(_with_contiguous_gradient) for module in norms]
    try:
        model.eval()
        for parameter, _ in learning:
            parameter.requires_grad_(False)
        yield model
    finally:
        for handle in handles:
            handle.remove()
        # First by the model's own method: some modules (LeViT's attention) drop a cache there.
        model.train(training[0][1])
        for module, flag in training:
            module.training = flag
        for parameter, flag in learning:
            parameter.requires_grad_(flag)


def count_macs(model: nn.Module, shape: Sequence[int]) -> int | None:
    """Multiply-adds of convolutions, linear layers and attention for one image of `shape` pixels, by torch's counter.

    Papers call them FLOPs. A model on the meta device is counted without computing. None if the model does not take
    such an image, or computes outside of torch.
    """
    first = next(model.parameters(), torch.empty(0))
    try:
        # A random model draws numbers here, which later runs in this process must not miss.
        with generators_kept(first.device):
            return output_and_macs(model, torch.zeros(1, 3, *shape, device=first.device))[1]
    except Exception:  # any code may be a model; that it cannot be counted is no reason to fail
        return None


@torch.no_grad()
def output_and_macs(model: nn.Module, x: Tensor) -> tuple[Tensor, int | None]:
    """What the model gives for x, and the multiply-adds of this pass; None if torch's counter sees none."""
    from torch.utils.flop_counter import FlopCounterMode

    # The counter hooks a gradient to whatever requires one, also where gradients are off.
    with frozen(model), FlopCounterMode(display=False) as counter:
        output = model(x)
    return output, counter.get_total_flops() // 2 or None


class Record(Sequence[Tensor]):
    """Tensors read at a list of sites, in their order; a further run of the model replaces them."""

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
            raise UserError(f"no {self.what} yet at '{self.names[place]}': run the model inside the `with` block first")
        return seen


@contextmanager
def block_features(model: nn.Module, indices: Sequence[int] | None = None) -> Iterator[Record]:
    """Outputs of the transformer blocks: after `model(x)`, `features[i]` is what block `indices[i]` returned.

    Blocks are numbered in running order, including class-attention blocks (except FAN's); negative numbers count from
    the end, None means all. Shapes depend on the family: (batch, tokens, dim), in Swin (batch, height, width, dim), in
    CaiT's class-attention blocks only the class token. Extra tokens are included, after class and register tokens.
    Features keep their graph if gradients are on. A further run replaces those of the last one.
    """
    blocks = blocks_of(model)
    wanted = range(len(blocks)) if indices is None else indices
    wrong = [index for index in wanted if not -len(blocks) <= index < len(blocks)]
    if wrong:
        raise UserError(
            f"block_features: no block {', '.join(map(str, wrong))}; the model has {len(blocks)} blocks. "
            f"Give numbers from {-len(blocks)} to {len(blocks) - 1}, or None for all."
        )
    chosen = [blocks[index] for index in wanted]
    features = Record("block features", [block.name for block in chosen])

    sites = [Edge(block.name, block.module, partial(features.put, place)) for place, block in enumerate(chosen)]
    with hooked(model, sites):
        yield features


def token_sequence(model: nn.Module, features: Tensor) -> Tensor:
    """A block's output as (batch, tokens, channels), whatever shape the family gives it."""
    if features.dim() != 4:
        return features
    # LeViT's convolutional variant has channels first, Swin has them last.
    channels_first = getattr(backbone_of(model), "use_conv", False)
    return features.flatten(2).mT if channels_first else features.flatten(1, 2)
