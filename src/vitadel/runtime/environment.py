"""Versions, machine and threads, recorded in every run folder."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

import torch

from vitadel.version import __version__

__all__ = ["environment"]

_PACKAGES = ("torch", "torchvision", "timm", "numpy", "accelerate", "safetensors", "pillow", "pyarrow")


def environment(device: torch.device, processes: int) -> dict[str, Any]:
    """The content of environment.json; nothing personal: no host name, no user, no paths."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "vitadel": __version__,
        "python": sys.version.split()[0],
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": versions,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": processes,
    }
