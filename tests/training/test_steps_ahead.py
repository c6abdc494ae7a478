"""On a device, the images of the next step are read and sent while the device computes this one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from device_double import DeviceDouble
from small_recipes import recipe
from vitadel.errors import UserError
from vitadel.runtime.distributed import Processes
from vitadel.training import data_stream, loop
from vitadel.training.data_stream import MicroBatch, StepsAhead
from vitadel.training.run import run_harden

CPU = torch.device("cpu")
PIXELS, BATCH = 3 * 16 * 16, 8
SMALL: dict[str, Any] = {
    "data": {"limit": 32, "held_out": 10, "test": None},
    "train": {"epochs": 1, "batch_size": BATCH, "amp_dtype": "fp32"},
    "optimizer": {"fused": False},
    "validation": {"limit": 10},
}


def numbered(count: int, broken: int = -1):
    for number in range(count):
        if number == broken:
            raise UserError(f"step {number} cannot be read")
        yield [MicroBatch(torch.tensor([number]), torch.full((1, 3, 2, 2), number, dtype=torch.uint8), torch.zeros(1))]


def test_steps_are_the_same_fetched_or_not():
    with DeviceDouble() as double:
        for device, fetches in ((CPU, True), (double.device, True), (double.device, False)):
            steps, seen = StepsAhead(numbered(4), device), []
            for (part,) in steps:
                seen.append(int(part.names[0]))
                there = part.to(device)
                assert there.x.device == device
                assert torch.equal((there.x * 255).round().cpu(), torch.full((1, 3, 2, 2), float(seen[-1])))
                for _ in range(2 * fetches):
                    steps.fetch()
            assert seen == [0, 1, 2, 3]


def test_a_fetched_step_is_on_its_device_as_bytes_and_is_copied_once():
    with DeviceDouble() as double:
        steps = StepsAhead(numbered(2), double.device)
        steps.fetch()
        assert double.copies == [12, 4]
        ((part,), *_) = steps
        assert (part.x.device, part.x.dtype) == (double.device, torch.uint8)
        part.to(double.device)
        assert double.copies == [12, 4]
        assert double.waits.total() == 0


def test_a_fault_is_raised_when_its_step_is_asked_for():
    with DeviceDouble() as double:
        steps = StepsAhead(numbered(2, broken=1), double.device)
        asked = iter(steps)
        ((part,), _) = next(asked), steps.fetch()
        assert int(part.names[0]) == 0
        with pytest.raises(UserError, match="step 1 cannot be read"):
            next(asked)


@pytest.mark.slow
@pytest.mark.parametrize("on_device", [False, True])
def test_a_training_sends_the_next_batch_before_it_waits_for_the_present_one(tmp_path, monkeypatch, on_device):
    """And ends with the weights of the CPU, where nothing is read ahead."""
    sent, before_wait, copied, checked = [], [], data_stream.copied_to, loop._Trainer._checked

    def counted(device: torch.device, *tensors: torch.Tensor) -> list[torch.Tensor]:
        sent.append(tensors[0].nbytes)
        return copied(device, *tensors)

    def noted(trainer: Any, numbers: Any) -> dict[str, float]:
        before_wait.append(len(sent))
        return checked(trainer, numbers)

    monkeypatch.setattr(data_stream, "copied_to", counted)
    monkeypatch.setattr(loop._Trainer, "_checked", noted)
    built = recipe(**SMALL, augmentation={"on_device": on_device})
    runs = []
    with sdpa_kernel(SDPBackend.MATH), DeviceDouble() as double:  # the double has no fused attention
        for device, ahead in ((CPU, [0] * 4), (double.device, [2, 3, 4, 4])):
            before_wait.clear()
            run_harden(built, "small", Processes(0, 1, device), out=tmp_path / device.type)
            assert before_wait == ahead
            assert sent == [BATCH * PIXELS] * max(ahead)
            runs.append(load_file(tmp_path / device.type / "weights" / "last.safetensors"))
    assert runs[0].keys() == runs[1].keys()
    assert all(torch.equal(value, runs[1][key]) for key, value in runs[0].items())
