"""Memory that a training takes on each device: measured on two small batches, and from there by proportion.

What stays is weights, gradients and the optimizer's state. What comes and goes in a step grows with the images of a
micro-batch: activations kept for the backward pass, and temporary tensors.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError
from vitadel.runtime.distributed import gpu_module, is_gpu
from vitadel.training.memory_switches import refuse_looking_inside
from vitadel.training.recipes.build import Recipe

_SIZES = (2, 4)  # images of the two batches
_USABLE = 0.9  # share of a device's memory: the allocator, the driver and libraries need the rest
GPU_SIZES = (16, 24, 40, 80)
"""Sizes of GPUs, in GB, for which the largest micro-batch is given."""

StepParts = Callable[[Tensor, Tensor], Iterable[Callable[[], object]]]
"""For images and labels: the parts of a step, each of which frees what it took before the next one."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one device: those that stay, and at the peak of a step `fixed` and `per_image` of a micro-batch."""

    weights: int
    gradients: int
    optimizer: int
    fixed: float
    per_image: float

    @property
    def stays(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def peak(self, images: int) -> float:
        return self.stays + self.fixed + images * self.per_image

    def largest_batch(self, memory: float) -> int:
        """The most images of a micro-batch that fit into so many bytes; 0 if none does."""
        return max(0, int((_USABLE * memory - self.stays - self.fixed) / self.per_image))

    def summary(self, images: int, memory: float) -> dict[str, Any]:
        return {
            "images": images,
            "peak_bytes": round(self.peak(images)),
            "bytes_per_image": round(self.per_image),
            "largest_batch": self.largest_batch(memory),
            "largest_batch_by_gb": {str(size): self.largest_batch(size * 2**30) for size in GPU_SIZES},
        }


def plan_memory(
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: StepParts,
    given: tuple[Tensor, Tensor],
    processes: int,
) -> dict[str, Any]:
    """The memory of a step on one device, as the recipe says and with activation checkpointing, where that works.

    `parts` are the parts of a step; gradients and the optimizer's state must be there already.
    """
    x, y = given
    device = x.device
    images = -(-recipe.train.batch_size // (recipe.train.grad_accum * processes))
    available = device_memory(device)

    def measured() -> dict[str, Any]:
        return _measured(recipe, model, optimizer, parts, x, y, processes).summary(images, available)

    whole = measured()
    kept = {"weights_bytes": _bytes(model.parameters()), "optimizer_bytes": _bytes(_optimizer_tensors(optimizer))}
    found: dict[str, Any] = {"device_bytes": available, **kept, "as_set": whole, "checkpointing": None}
    if not recipe.train.checkpointing:
        with _checkpointing(recipe, model) as works:
            found["checkpointing"] = measured() if works else None
    return found


def _measured(
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: StepParts,
    x: Tensor,
    y: Tensor,
    processes: int,
) -> StepMemory:
    peaks = []
    for size in _SIZES:
        rows = torch.arange(size, device=x.device) % len(x)
        peaks.append(max(peak_bytes(part, x.device) for part in parts(x[rows], y[rows])))
    per_image = max((peaks[1] - peaks[0]) / (_SIZES[1] - _SIZES[0]), 1.0)
    weights = _bytes(model.parameters()) + _bytes(model.buffers())
    gradients = _bytes(each for each in model.parameters() if each.requires_grad)
    state = _bytes(_optimizer_tensors(optimizer))
    if recipe.train.fsdp:  # all weights are there in attacks, and of the rest a share
        weights, gradients, state = weights + weights // processes, gradients // processes, state // processes
    if any(name == "weight_average" for name, _ in recipe.plugins):
        state += _bytes(model.parameters())
    return StepMemory(weights, gradients, state, max(0.0, peaks[0] - _SIZES[0] * per_image), per_image)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    yield from (each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor))


@contextmanager
def _checkpointing(recipe: Recipe, model: nn.Module) -> Iterator[bool]:
    """Activation checkpointing inside the block; whether this recipe and model can do it."""
    switch = getattr(model.backbone, "set_grad_checkpointing", None) if isinstance(model, Classifier) else None
    try:
        refuse_looking_inside(recipe, model, "checkpointing", "computes blocks twice")
        if switch is None:
            raise NotImplementedError
        switch(True)
    except (UserError, AttributeError, AssertionError, NotImplementedError):
        yield False
        return
    try:
        yield True
    finally:
        switch(False)


def device_memory(device: torch.device) -> int:
    """All bytes of the device, used or not; for the CPU those of the machine."""
    if is_gpu(device):
        return int(gpu_module(device).mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes that the work has at once, above those that were there before.

    By the allocator of a GPU; on other devices by the tensors that torch's operations return, without what a kernel
    takes for itself.
    """
    if is_gpu(device):
        gpu = gpu_module(device)
        before = gpu.memory_allocated(device)
        gpu.reset_peak_memory_stats(device)
        work()
        return int(gpu.max_memory_allocated(device) - before)
    live = _LiveBytes()
    with live:
        work()
    return live.peak


class _LiveBytes(TorchDispatchMode):
    """Bytes of the memory that operations inside the block return and that is still in use; views count once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.seen = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_leaves((args, kwargs)):  # what was there before the block
            if isinstance(given, Tensor):
                self.seen.setdefault(given.untyped_storage(), True)
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and (storage := made.untyped_storage()) not in self.seen:
                self.seen[storage] = True
                self.now += storage.nbytes()
                weakref.finalize(storage, self._leave, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _leave(self, size: int) -> None:
        self.now -= size
