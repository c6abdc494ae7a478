"""Averages in closed form; live weights come back bit by bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from training_toys import FakeTraining

from device_double import DeviceDouble
from vitadel.errors import UserError
from vitadel.training.interfaces import AfterEpoch, AfterStep, ChangesEvaluation, Stateful
from vitadel.training.plugins.weight_average import WeightAverage


class OneNumber(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=dtype))
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def become(self, number: float) -> None:
        with torch.no_grad():
            self.weight.fill_(number)
            self.seen.fill_(10 * number)
            self.count += 1


def steps(plugin: WeightAverage, run: FakeTraining, numbers: list[float]) -> None:
    for number in numbers:
        run.model.become(number)
        plugin.after_step(run)


def deployed(plugin: WeightAverage, run: FakeTraining) -> float:
    with plugin.evaluated(run):
        return run.model.weight.item()


def test_exponential_average_with_warm_up():
    plugin, run = WeightAverage(decay=0.25), FakeTraining(OneNumber())
    assert all(isinstance(plugin, shape) for shape in (AfterStep, AfterEpoch, ChangesEvaluation, Stateful))
    steps(plugin, run, [3.0])
    assert deployed(plugin, run) == 3
    steps(plugin, run, [5.0, -1.0, 8.0])  # t = 1, 2, 3: d = 2/11, then 3/12 = decay, then decay
    first = 2 / 11 * 3 + 9 / 11 * 5
    second = 0.25 * first + 0.75 * -1
    assert deployed(plugin, run) == pytest.approx(0.25 * second + 0.75 * 8, rel=1e-12)


def test_the_warm_up_ends_at_the_decay():
    plugin, run = WeightAverage(decay=0.999), FakeTraining(OneNumber())
    steps(plugin, run, [0.0] * 9000)  # (1 + 9000) / (10 + 9000) = 0.99900...
    steps(plugin, run, [1.0])
    assert deployed(plugin, run) == pytest.approx(0.001, rel=1e-6)


def test_mean_of_epochs():
    plugin, run = WeightAverage(kind="mean", from_epoch=1), FakeTraining(OneNumber())
    for epoch, number in enumerate([100.0, 1.0, 2.0, 6.0]):
        run.epoch = epoch
        steps(plugin, run, [50.0, number])
        plugin.after_epoch(run)
    assert deployed(plugin, run) == pytest.approx(3.0)


def test_exponential_average_waits_for_its_epoch_and_ignores_ends_of_epochs():
    plugin, run = WeightAverage(from_epoch=1), FakeTraining(OneNumber())
    steps(plugin, run, [100.0])
    assert deployed(plugin, run) == 100  # nothing averaged yet: the live weights are deployed
    run.epoch = 1
    steps(plugin, run, [2.0])
    run.model.become(7.0)
    plugin.after_epoch(run)
    assert deployed(plugin, run) == 2


def test_live_weights_come_back_bit_by_bit_and_buffers_stay():
    model = OneNumber(torch.float32)
    plugin, run = WeightAverage(), FakeTraining(model)
    steps(plugin, run, [0.1, 0.3])
    live = model.weight.detach().clone()
    with pytest.raises(KeyError), plugin.evaluated(run):  # noqa: PT012
        assert not torch.equal(model.weight, live)
        assert float(model.seen) == 3
        assert int(model.count) == 2
        raise KeyError
    assert torch.equal(model.weight, live)
    assert float(model.seen) == 3


def test_half_precision_weights_are_averaged_in_full():
    plugin, run = WeightAverage(decay=0.999), FakeTraining(OneNumber(torch.bfloat16))
    steps(plugin, run, [1.0] * 2)
    plugin._count = 10**6
    steps(plugin, run, [2.0] * 3)
    assert float(plugin.state()["average.weight"]) == pytest.approx(2 - 0.999**3)
    with plugin.evaluated(run):
        assert run.model.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["ema", "mean"])
def test_a_resumed_average_goes_on_as_if_nothing_had_happened(kind):
    whole, run = WeightAverage(kind=kind), FakeTraining(OneNumber())
    numbers = [3.0, 1.0, 4.0, 1.0, 5.0]
    half = WeightAverage(kind=kind)
    other = FakeTraining(OneNumber())
    for number in numbers:
        steps(whole, run, [number])
        whole.after_epoch(run)
        state = {name: each.clone() for name, each in half.state().items()}
        half = WeightAverage(kind=kind)
        half.load(state)
        steps(half, other, [number])
        half.after_epoch(other)
    assert deployed(whole, run) == deployed(half, other) != 5


def test_settings():
    with pytest.raises(UserError, match=r"'swa'.*ema, mean"):
        WeightAverage(kind="swa")
    with pytest.raises(UserError, match="decay must be at least 0 and below 1, got 1"):
        WeightAverage(decay=1.0)


def test_the_average_stays_on_the_device():
    """An update copies nothing to or from the CPU and does not wait for the device."""
    with DeviceDouble() as double:
        average, run = WeightAverage(), SimpleNamespace(model=nn.Linear(3, 2).to(double.device), epoch=0)
        average.after_step(run)
        double.copies.clear()
        double.waits.clear()
        average.after_step(run)
        assert (double.copies, sum(double.waits.values())) == ([], 0)
        assert {each.device for name, each in average.state().items() if name != "count"} == {double.device}
