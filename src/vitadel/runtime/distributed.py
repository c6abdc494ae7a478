"""The processes of a run: one, or several under `accelerate launch` / `torchrun`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, reduce

from vitadel.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    rank: int
    count: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Wait until all processes have reached this point."""
        if self.count > 1:
            PartialState().wait_for_everyone()

    def from_main(self, value: T) -> T:
        """The main process's value, in every process."""
        if self.count == 1:
            return value
        box = [value]
        broadcast_object_list(box, from_process=0)
        return box[0]

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean over all processes, in every process; all must call it, with tensors of one shape."""
        if self.count == 1:
            return tensor
        # On the device: backends between GPUs take no CPU tensors.
        return cast(torch.Tensor, reduce(tensor.to(self.device), reduction="mean")).to(tensor.device)

    def any(self, condition: bool) -> bool:
        """Whether the condition holds in any process; all must call it."""
        return float(self.mean(torch.tensor(float(condition)))) > 0

    def on_main(self, work: Callable[[], T]) -> T:
        """Do the work in the main process, and return its result, or raise its `UserError`, in all processes."""
        answer: T | UserError | None = None
        if self.is_main:
            try:
                answer = work()
            except UserError as error:
                if self.count == 1:
                    raise
                answer = error
        answer = self.from_main(answer)
        if isinstance(answer, UserError):
            raise answer
        return cast(T, answer)


def join_processes(device: str = "auto") -> Processes:
    """The device, and the other processes if a launcher started several; all of them must have joined."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {device}: no CUDA device is available here; use --device cpu or auto")
    if device == "auto":
        # Without an accelerator, accelerate joins processes only if it is asked for the CPU.
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        state = PartialState(cpu=found is None or not _has_float64(found), **_after_restart())
        joined = Processes(state.process_index, state.num_processes, state.device)
    else:
        try:
            wanted = torch.device(device)
            torch.zeros(1, device=wanted).item()
        except (RuntimeError, TypeError, AssertionError):
            raise UserError(f"device {device!r} cannot be used here; use auto, cpu, cuda or cuda:1") from None
        if not _has_float64(wanted):
            raise UserError(
                f"device {device!r} has no float64, in which perturbations are measured against their budget; use "
                "--device cpu"
            )
        state = PartialState(cpu=wanted.type == "cpu", **_after_restart())
        place = wanted if state.num_processes == 1 else state.device
        joined = Processes(state.process_index, state.num_processes, place)
    check_all_joined(joined.count, device)
    return joined


def _after_restart() -> dict[str, Any]:
    """How to join after an elastic restart: the launcher's store still has the addresses of the processes before it.

    A process that reads one of those before its owner has written the new one would wait for a dead process.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or not torch.distributed.is_available() or torch.distributed.is_initialized():
        return {}
    store, rank, count = next(torch.distributed.rendezvous("env://"))
    return {"store": torch.distributed.PrefixStore(f"attempt {attempt}", store), "rank": rank, "world_size": count}


def _has_float64(device: torch.device) -> bool:
    """Whether the device can measure distances; Apple's MPS cannot."""
    try:
        return torch.zeros(1, dtype=torch.float64, device=device).item() == 0
    except (RuntimeError, TypeError):
        return False


def check_all_joined(count: int, device: str) -> None:
    """Processes that did not join would each do all the work, in folders of their own."""
    started = os.environ.get("WORLD_SIZE", "1")
    if started.isdecimal() and int(started) > 1 and int(started) != count:
        raise UserError(
            f"the launcher started {started} processes (WORLD_SIZE), but only {count} joined with --device {device}. "
            "Use a device that all of them have (cpu, or cuda with one GPU each), or start fewer processes."
        )
