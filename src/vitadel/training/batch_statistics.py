"""Batch statistics in a training of several processes: each learns its own, and once an epoch they are averaged."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitadel.runtime.distributed import Processes

__all__ = ["average_statistics", "restore_statistics", "statistics_of_all", "whose_statistics"]


def _batch_norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]


def average_statistics(model: nn.Module, processes: Processes) -> None:
    """As the light recipe does (dist_bn = reduce): cheap, and every process deploys the same model."""
    if processes.count == 1:
        return
    for norm in _batch_norms(model):
        for running in (norm.running_mean, norm.running_var):
            if running is not None:
                running.copy_(processes.mean(running))


def statistics_of_all(model: nn.Module, processes: Processes) -> list[list[Tensor]]:
    """Every process's own, for a checkpoint in the middle of an epoch."""
    own = [buffer.detach().cpu().clone() for norm in _batch_norms(model) for buffer in norm.buffers()]
    everyone: list[list[Tensor]] = gather_object([own]) if processes.count > 1 else [own]
    return everyone


def restore_statistics(model: nn.Module, processes: Processes, everyone: Sequence[Sequence[Tensor]]) -> None:
    """Each process takes its own again; with another number of processes those of the first."""
    own = everyone[processes.rank if len(everyone) == processes.count else 0]
    for buffer, value in zip((b for norm in _batch_norms(model) for b in norm.buffers()), own, strict=True):
        buffer.copy_(value)


def whose_statistics(model: nn.Module, processes: Processes, attack_mode: str) -> str:
    """One sentence for the person who trains a backbone with BatchNorm; empty for one without."""
    norms = len(_batch_norms(model))
    if not norms:
        return ""
    of = "the images of the loss" if attack_mode == "eval" else "the images of the loss and of every attack step"
    shared = (
        f", in each of {processes.count} processes its own, averaged after every epoch" if processes.count > 1 else ""
    )
    return f"{norms} BatchNorm layers gather the statistics of {of}{shared}"
