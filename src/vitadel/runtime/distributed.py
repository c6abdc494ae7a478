"""The processes of a run, one or several under `accelerate launch` / `torchrun`, and the devices they compute on."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, reduce
from torch import nn

from vitadel.errors import UserError

T = TypeVar("T")
Model = TypeVar("Model", bound=nn.Module)

_ALONE = "_vitadel_computes_alone"


@dataclass(frozen=True)
class Processes:
    """This process and how many there are; `device` is where it computes.

    A model whose device has no float64 (Apple's MPS) computes alone there, on `model_device`. Attacks and verdicts,
    which measure distances in float64, are then on the CPU.
    """

    rank: int
    count: int
    device: torch.device
    model_device: torch.device | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def place(self, model: Model) -> Model:
        """The model on its device; on one without float64 it takes inputs from the CPU and returns outputs there."""
        if self.model_device is None:
            return model.to(self.device)
        model.to(self.model_device)
        if not computes_alone(model):
            model.register_forward_pre_hook(_bring, prepend=True)
            model.register_forward_hook(_take_back)
            for module in model.modules():
                setattr(module, _ALONE, True)
        return model

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


def computes_alone(module: nn.Module) -> bool:
    """Whether the module is, or is inside, a model that computes on another device than what uses it."""
    return bool(getattr(module, _ALONE, False))


def _bring(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    here = next((each.device for each in module.parameters()), torch.device("cpu"))
    return tuple(each.to(here) if isinstance(each, torch.Tensor) else each for each in inputs)


def _take_back(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    return output.cpu() if isinstance(output, torch.Tensor) else output


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
        alone = None if _has_float64(wanted) else wanted
        state = PartialState(cpu=wanted.type == "cpu" or alone is not None, **_after_restart())
        place = wanted if state.num_processes == 1 and alone is None else state.device
        joined = Processes(state.process_index, state.num_processes, place, alone)
    check_all_joined(joined.count, device)
    return joined


def _after_restart() -> dict[str, Any]:
    """How to join after an elastic restart: the launcher's store still has the addresses of the processes before it.

    A process that reads one of those before its owner has written the new one would wait for a dead process.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or not torch.distributed.is_available() or torch.distributed.is_initialized():
        return {}
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, count = next(rendezvous("env://"))
    return {"store": PrefixStore(f"attempt {attempt}", store), "rank": rank, "world_size": count}


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


# What torch has for GPUs under the same names: NVIDIA's and AMD's, which it calls CUDA, and Intel's, XPU

_GPUS = ("cuda", "xpu")


def is_gpu(device: torch.device) -> bool:
    """Whether the device has memory and queues of its own; Apple's MPS shares those of the CPU."""
    return device.type in _GPUS


def gpu_module(device: torch.device) -> Any:
    """torch.cuda or torch.xpu."""
    assert is_gpu(device)
    return torch.get_device_module(device)


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if is_gpu(device):
        gpu_module(device).synchronize(device)


def generators_kept(device: torch.device) -> AbstractContextManager[None]:
    """A block after which torch's generators of the CPU and of this device are as before."""
    if not is_gpu(device):
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)
