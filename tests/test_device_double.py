"""The device double finds planted faults, allows what CUDA allows, and computes what the CPU computes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from device_double import DeviceDouble
from toys import TinyNet, images
from vitadel.attacks.parse import make
from vitadel.runtime.rng import SampleRNG

COUNT = 6


def batch(double: DeviceDouble) -> torch.Tensor:
    return double.put(torch.rand(COUNT, 3, 4, 4))


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (lambda x: [float(each.sum()) for each in x], {"item": COUNT}),
        (lambda x: bool((x > 0).all()), {"item": 1}),
        (lambda x: x[x.flatten(1).sum(1) > 0], {"mask": 1}),
        (lambda x: x.clone().index_put_((x.flatten(1).sum(1) > 0,), torch.tensor(0.0)), {"mask": 1}),
        (lambda x: (x > 0).nonzero(), {"nonzero": 1}),
        (lambda x: x.cpu(), {"cpu": 1}),
        (lambda x: x[0, 0].tolist(), {"cpu": 1}),
        (lambda x: torch.empty(COUNT, 3, 4, 4).copy_(x), {"cpu": 1}),
        (lambda x: torch.equal(x, x), {"equal": 1}),
        (lambda x: x[torch.arange(2, device=x.device)] + x.amax(), {}),
        (lambda x: x.to(x.device, torch.float64).to(x), {}),
    ],
)
def test_planted_waits_are_counted(fault, found):
    with DeviceDouble() as double:
        fault(batch(double))
    assert +double.waits == found


@pytest.mark.parametrize(
    "fault",
    [
        lambda x: x + torch.rand(COUNT, 3, 4, 4),
        lambda x: x * torch.rand(1),
        lambda x: x.flatten(1) @ torch.rand(48, 2),
        lambda x: torch.cat([x, torch.rand(1, 3, 4, 4)]),
        lambda x: torch.stack([x.sum(), torch.tensor(0.0)]),
        lambda x: torch.rand(COUNT).add_(x.flatten(1).sum(1)),
        lambda x: torch.tensor(1.0).add_(x.sum()),
        lambda x: torch.where(x > 0, x, torch.zeros(COUNT, 3, 4, 4)),
        lambda x: x.index_put_((torch.arange(2),), torch.rand(2, 3, 4, 4)),
        lambda x: torch.arange(COUNT)[x.flatten(1).sum(1).argsort()],
        lambda x: nn.functional.cross_entropy(x.flatten(1), torch.arange(COUNT)),
        lambda x: nn.Linear(48, 2)(x.flatten(1)),
        lambda x: x.flatten(1).gather(1, torch.zeros(COUNT, 1, dtype=torch.int64)),
    ],
)
def test_planted_mixing_is_refused(fault):
    with DeviceDouble() as double, pytest.raises(RuntimeError, match="same device"):
        fault(batch(double))


def test_arrays_cannot_be_taken_from_a_device():
    with DeviceDouble() as double:
        for taken in (lambda x: x.numpy(), np.asarray):
            with pytest.raises(RuntimeError, match="numpy"):
                taken(batch(double))


def test_what_cuda_allows_is_allowed():
    scalar = torch.tensor(2.0)
    with DeviceDouble() as double:
        x = batch(double)
        assert double.copies == []
        for result in (
            x * scalar,
            torch.where(x > 1, scalar, x),
            x.masked_fill(x > 1, scalar),
            x.clone().fill_(scalar),
        ):
            assert result.device == double.device
        assert x[torch.arange(2)].device == double.device
        assert double.copies == [16]  # the two indices
        assert torch.tensor([1.0, 2.0], device=double.device).device == double.device
        assert double.copies == [16, 8]
        x.copy_(torch.zeros(COUNT, 3, 4, 4))
        assert double.copies == [16, 8, COUNT * 3 * 4 * 4 * 4]
        assert (x == 0).all()


def step(device: torch.device | None) -> list[torch.Tensor]:
    """One step of training with a deep copy of the model, and what came of it."""
    torch.manual_seed(0)
    model = copy.deepcopy(TinyNet(3).to(device or "cpu")).train()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.1)
    x, y = images(COUNT).to(device or "cpu"), torch.zeros(COUNT, dtype=torch.int64, device=device)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    return [each.detach().cpu() for each in (*model.parameters(), *model.buffers())]


def test_a_step_of_training_equals_the_cpu_s():
    expected = step(None)
    with DeviceDouble() as double:
        found = step(double.device)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_an_attack_with_a_planted_fault_is_found():
    """A loss that reads every sample's value, and one that keeps its weights on the CPU."""
    weights = torch.ones(3)

    class Reading(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 1.0 if all(float(each.sum()) > -1 for each in x.detach()) else x

    class LeftBehind(Reading):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * weights

    def run(model: nn.Module, double: DeviceDouble) -> int:
        x, y = double.put(images(COUNT)), double.put(torch.zeros(COUNT, dtype=torch.int64))
        before = double.waits.total()
        make("pgd-3", eps=1e-6)(model, x, y, SampleRNG.of_samples(0, range(COUNT), double.device))
        return double.waits.total() - before

    with DeviceDouble() as double:
        model = TinyNet(3).eval().to(double.device)
        few = run(model, double)
        assert run(Reading(model), double) >= few + 3  # at least one for each step and sample that is not fooled yet
        with pytest.raises(RuntimeError, match="same device"):
            run(LeftBehind(model), double)


def test_a_device_without_float64_refuses_it():
    with DeviceDouble("mps", floats=32) as double:
        x = batch(double)
        assert x.device == torch.device("mps:0")
        for fault in (lambda: x.double(), lambda: torch.zeros(3, dtype=torch.float64, device=double.device)):
            with pytest.raises(TypeError, match="float64"):
                fault()
        assert (x + 1).sum().item() > 0
