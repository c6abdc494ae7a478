"""PGD and APGD let the CPU wait for the device at most once in a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from device_double import DeviceDouble
from vitadel.attacks.parse import make
from vitadel.runtime.rng import SampleRNG

COUNT = 6


def model_and_images() -> tuple[nn.Module, Tensor, Tensor]:
    """Samples that are fooled in different steps, and some that are never fooled."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 5)).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    x = torch.rand(COUNT, 3, 4, 4, generator=generator)
    return model, x, model(x).argmax(1)


def waits(name: str, norm: str, eps: float) -> tuple[int, Tensor]:
    model, x, y = model_and_images()
    attack = make(name, eps=eps, norm=norm)
    with DeviceDouble() as double:
        model, x, y = model.to(double.device), x.to(double.device), y.to(double.device)
        rng = SampleRNG.of_samples(0, range(COUNT), double.device)
        copied = len(double.copies)
        z = attack(model, x, y, rng)
        waited = double.waits.total()
        assert len(double.copies) == copied, "an attack needs nothing from the CPU"
        return waited, (model(z).argmax(1) != y).cpu()


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.04), ("l2", 0.3)])
@pytest.mark.parametrize("name", ["pgd-{}", "cw-{}", "apgd-ce(steps={})", "apgd-dlr(steps={})"])
def test_a_step_waits_at_most_once(name: str, norm: str, eps: float):
    short, long = 10, 30
    (few, _), (many, fooled) = (waits(name.format(steps), norm, eps) for steps in (short, long))
    assert 0 < fooled.sum() < COUNT, "samples must leave the batch, or nothing is counted"
    assert many - few <= long - short
    assert few <= short + 4  # the checks before the first step
