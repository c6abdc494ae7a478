"""FSDP2: weights, gradients and optimizer state divided among the processes (Zhao et al. 2023, arXiv:2304.11277).

By torch's `fully_shard`: accelerate calls the same on GPUs and has nothing for CPUs, where this is tested. A process
has all weights of a block while it computes with it in a step. During attacks and validations, whose numbers of passes
differ between processes, it has the weights of all blocks, so that no pass waits for another process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from vitadel.backbones.anatomy import blocks_of
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError
from vitadel.runtime.distributed import Processes
from vitadel.training.memory_switches import refuse_looking_inside
from vitadel.training.recipes.build import Recipe

_NEEDS_NO_WEIGHTS = ("epsilon_warmup", "patch_augmentation")


def check_sharding(recipe: Recipe, model: nn.Module, processes: Processes) -> None:
    """Refuse what needs all weights in every process."""
    refuse_looking_inside(recipe, model, "fsdp", "divides the weights among processes")
    others = [f"plugins.{name}" for name, _ in recipe.plugins if name.replace("-", "_") not in _NEEDS_NO_WEIGHTS]
    if others:
        raise UserError(
            f"train.fsdp divides the weights among processes, and {', '.join(others)} needs all of them. Remove it, or "
            "set train.fsdp=false."
        )
    if recipe.train.amp_dtype == "fp16":
        raise UserError("train.fsdp does not scale gradients, which fp16 needs; use train.amp_dtype=bf16 or fp32")
    if processes.count == 1:
        raise UserError(
            "train.fsdp divides weights among processes, and there is one. Start several, one per GPU "
            "(torchrun --nproc-per-node 8 -m vitadel harden ...), or set train.fsdp=false."
        )


@dataclass
class Sharded:
    """A model whose weights are divided among the processes, and a copy on the CPU to write files from."""

    model: nn.Module
    copy: nn.Module
    is_whole: bool = False

    @classmethod
    def divide(cls, model: nn.Module, processes: Processes) -> Sharded:
        """Divide the weights of a model in place, block by block where its blocks are known."""
        assert isinstance(model, Classifier)
        copy = deepcopy(model).cpu()
        mesh = init_device_mesh(processes.device.type, (processes.count,))
        try:
            blocks = [part.module for part in blocks_of(model)]
        except UserError:  # of another family: divided as one
            blocks = []
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return cls(model, copy)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All weights in every process inside the block; no pass then waits for other processes."""
        if self.is_whole:
            yield
            return
        parts = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.set_reshard_after_backward(False, recurse=False)
            part.unshard()
        self.is_whole = True
        try:
            yield
        finally:
            self.is_whole = False
            for part in parts:
                part.set_reshard_after_forward(part is not self.model, recurse=False)
                part.set_reshard_after_backward(True, recurse=False)
                part.reshard()

    @torch.no_grad()
    def plain_model(self) -> nn.Module:
        """The copy with the present weights; all processes must call this."""
        theirs = dict(self.copy.named_parameters()) | dict(self.copy.named_buffers())
        with self.whole():
            for name, value in (*self.model.named_parameters(), *self.model.named_buffers()):
                theirs[name].copy_(value)
        return self.copy

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The whole state on the CPU, of the main process; all processes must call this."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_optimizer_state_dict(self.model, _bare(optimizer), options=options)

    def load(self, weights: Mapping[str, Any], optimizer: Any, state: Mapping[str, Any]) -> None:
        """Divide a checkpoint, which every process has read, among the processes."""
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.model, dict(weights), options=options)
        set_optimizer_state_dict(self.model, _bare(optimizer), dict(state), options=options)


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found
