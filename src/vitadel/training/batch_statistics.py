"""Batch-norm statistics in a training with several processes: each has its own, averaged once per epoch."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitadel.runtime.distributed import Processes

__all__ = ["average_statistics", "describe_statistics", "gather_statistics", "restore_statistics"]


def _batch_norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]


def average_statistics(model: nn.Module, processes: Processes) -> None:
    """As in the light recipe (dist_bn = reduce): cheap, and every process then has the same model."""
    if processes.count == 1:
        return
    for norm in _batch_norms(model):
        for running in (norm.running_mean, norm.running_var):
            if running is not None:
                running.copy_(processes.mean(running))


def gather_statistics(model: nn.Module, processes: Processes) -> list[list[Tensor]]:
    """The statistics of every process, for a checkpoint in the middle of an epoch."""
    own = [buffer.detach().cpu().clone() for norm in _batch_norms(model) for buffer in norm.buffers()]
    all_statistics: list[list[Tensor]] = gather_object([own]) if processes.count > 1 else [own]
    return all_statistics


def restore_statistics(model: nn.Module, processes: Processes, all_statistics: Sequence[Sequence[Tensor]]) -> None:
    """Restore each process's own statistics; with another number of processes those of the first."""
    own = all_statistics[processes.rank if len(all_statistics) == processes.count else 0]
    for buffer, value in zip((b for norm in _batch_norms(model) for b in norm.buffers()), own, strict=True):
        buffer.copy_(value)


def describe_statistics(model: nn.Module, processes: Processes, attack_mode: str) -> str:
    """One sentence about the statistics of a model with BatchNorm; empty for one without."""
    norms = len(_batch_norms(model))
    if not norms:
        return ""
    of = "the images of the loss" if attack_mode == "eval" else "the images of the loss and of every attack step"
    shared = f", separately in {processes.count} processes, averaged after every epoch" if processes.count > 1 else ""
    return f"{norms} BatchNorm layers collect the statistics of {of}{shared}"
