"""What torch has for GPUs under the same names: NVIDIA's and AMD's, which it calls CUDA, and Intel's, XPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

_KINDS = ("cuda", "xpu")


def is_gpu(device: torch.device) -> bool:
    """Whether the device has memory and queues of its own; Apple's MPS shares those of the CPU."""
    return device.type in _KINDS


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
