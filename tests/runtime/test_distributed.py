"""What processes tell each other: two of them, on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch

from device_double import DeviceDouble
from vitadel.errors import UserError
from vitadel.runtime.distributed import Processes, check_all_joined, join_processes

_WORK = """
import torch
from vitadel.runtime.distributed import join_processes
us = join_processes()
mine = torch.tensor([1.0, 10.0]) * (us.rank + 1)
mean = us.mean(mine)
assert mean.tolist() == [1.5, 15.0], mean
assert mine.tolist() == [us.rank + 1, 10 * (us.rank + 1)]
assert us.on_main(lambda: us.rank) == us.from_main(us.rank) == 0
assert us.count == 2
torch.distributed.destroy_process_group()
"""


def test_alone_the_mean_is_the_tensor_itself():
    tensor = torch.tensor([1.0, 2.0])
    assert Processes(0, 1, torch.device("cpu")).mean(tensor) is tensor


@pytest.mark.slow
def test_two_processes_agree():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", _WORK],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in both:
        _, complaint = process.communicate(timeout=600)
        assert process.returncode == 0, complaint


def test_processes_that_did_not_join_are_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # as a launcher that this process never heard of would set it
    with pytest.raises(UserError, match=r"started 2 processes .* only 1 joined"):
        check_all_joined(1, "cuda")


def test_a_device_without_float64_is_not_chosen_and_refused(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with DeviceDouble("mps", floats=32) as double:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: double.device)
        assert join_processes("auto").device == torch.device("cpu")
        with pytest.raises(UserError, match=r"has no float64.*--device cpu"):
            join_processes("mps:0")
