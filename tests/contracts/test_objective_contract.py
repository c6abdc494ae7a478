"""One contract over every objective that recipes can name.

Each is met on a small model of our own; and on each family of transformers and torchvision one of them is, so that
every objective meets such a model.
"""

from __future__ import annotations

import dataclasses
from itertools import cycle

import pytest
import torch
from torch import Tensor, nn

import vitadel
from other_vits import OTHERS, make_other, one_of_each_family
from toys import TinyNet, images
from vitadel.attacks import PGD, Linf
from vitadel.backbones.anatomy import blocks_of
from vitadel.runtime.rng import SampleRNG
from vitadel.training.interfaces import Objective
from vitadel.training.recipes.instantiate import component_names, find_component
from vits import VITS, make_vit

CLASSES = 5
LOOKS_INSIDE = {"Afat"}  # needs a model with blocks
ADAPTED = {"mimir", "robustness_tokens", "tora"}  # on adapted models only: tests/training/test_{mimir,training_*}.py


OBJECTIVES = {name: find_component("objective", name) for name in component_names("objective") if name not in ADAPTED}


LIBRARIES = list(zip(cycle(OBJECTIVES), one_of_each_family(0), strict=False))


@pytest.fixture(params=[*((name, "own") for name in OBJECTIVES), *LIBRARIES], ids=" ".join)
def case(request) -> tuple[str, str]:
    """Objective, and where the model is from."""
    return request.param


@pytest.fixture
def library(case) -> str:
    return case[1]


@pytest.fixture
def objective(case) -> Objective:
    kind = OBJECTIVES[case[0]]
    needs_attack = any(field.name == "attack" for field in dataclasses.fields(kind))
    return kind(attack=PGD(Linf(0.02), steps=2)) if needs_attack else kind()


def make_model(library: str, classes: int = CLASSES) -> nn.Module:
    if library == "own":
        return make_vit("vit", classes=classes)
    return vitadel.wrap(make_other(library, classes).float())


def batch(count: int, classes: int = CLASSES, side: int = VITS["vit"].size) -> tuple[Tensor, Tensor, Tensor]:
    x = images(count, side=side)
    return x, Linf(0.1).random(x, SampleRNG.of_samples(1, range(count))), torch.arange(count) % classes


def soft(y: Tensor, classes: int = CLASSES) -> Tensor:
    """Mixed with the class behind it, as MixUp does."""
    one, other = (nn.functional.one_hot(each, classes).float() for each in (y, (y + 1) % classes))
    return 0.7 * one + 0.3 * other


def used_parameters(model: nn.Module, x: Tensor) -> dict[str, nn.Parameter]:
    """Those that logits depend on: models of transformers have others besides, such as tokens for masked patches."""
    found = torch.autograd.grad(model(x).sum(), list(model.parameters()), allow_unused=True)
    named = zip(model.named_parameters(), found, strict=True)
    return {name: parameter for (name, parameter), slope in named if slope is not None}


def test_all_objectives_are_met():
    assert set(OBJECTIVES) >= {"standard", "adversarial", "trades", "mart"}
    assert {name for name, _ in LIBRARIES} == set(OBJECTIVES)
    assert {OTHERS[library].family for _, library in LIBRARIES} == {other.family for other in OTHERS.values()}


def test_has_the_shape_of_an_objective(objective):
    assert dataclasses.is_dataclass(objective)
    assert type(objective).__dataclass_params__.frozen
    assert objective.attack is None or callable(objective.attack)
    assert type(objective).__doc__


@pytest.mark.parametrize("mixed", [False, True])
def test_finite_and_reaches_every_parameter(objective, library, mixed):
    model = make_model(library).train()
    x, z, y = batch(6)
    losses = objective(model, x, z, soft(y) if mixed else y)
    assert losses["loss"].shape == ()
    assert losses["loss"].isfinite()
    losses["loss"].backward()
    used = used_parameters(model, x)
    assert used
    for name, parameter in used.items():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_further_numbers_have_no_graph(objective, library):
    x, z, y = batch(4)
    losses = objective(make_model(library), x, z, y)
    assert len(losses) > 1
    for name, value in losses.items():
        assert value.shape == ()
        assert value.requires_grad == (name == "loss")
        if name.endswith("accuracy"):
            assert 0 <= value <= 1


@pytest.mark.parametrize("mixed", [False, True])
def test_loss_is_the_mean_over_samples(objective, library, mixed):
    model = make_model(library).double()
    x, z, y = batch(5)
    x, z, y = x.double(), z.double(), soft(y).double() if mixed else y
    whole = objective(model, x, z, y)
    twice = objective(model, *(torch.cat([part, part]) for part in (x, z, y)))
    each = [objective(model, x[i : i + 1], z[i : i + 1], y[i : i + 1]) for i in range(5)]
    assert set(twice) == set(whole) == set(each[0])
    for name, value in whole.items():
        assert twice[name].item() == pytest.approx(value.item(), rel=1e-6), name
        assert sum(one[name].item() for one in each) / 5 == pytest.approx(value.item(), rel=1e-6), name


def test_one_sided_soft_labels_are_hard_labels(objective, library):
    model = make_model(library).double()
    x, z, y = batch(5)
    one_hot = nn.functional.one_hot(y, CLASSES).double()
    hard, same = objective(model, x.double(), z.double(), y), objective(model, x.double(), z.double(), one_hot)
    assert {name: value.item() for name, value in same.items()} == pytest.approx(
        {name: value.item() for name, value in hard.items()}
    )


@pytest.mark.parametrize("mixed", [False, True])
def test_two_classes_and_one_sample_work(objective, library, mixed):
    model = make_model(library, 2).train()
    x, z, y = batch(1, 2)
    loss = objective(model, x, z, soft(y, 2) if mixed else y)["loss"]
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("mixed", [False, True])
def test_half_precision_loses_little(objective, library, mixed):
    model = make_model(library).train()
    x, z, y = batch(6)
    y = soft(y) if mixed else y
    exact = objective(model, x, z, y)["loss"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
        assert torch.equal(logits.float(), logits.bfloat16().float())
        losses = objective(model, x, z, y)
    assert all(value.dtype == torch.float32 for value in losses.values())
    assert losses["loss"].item() == pytest.approx(exact.item(), rel=0.05)
    losses["loss"].backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


class Loud(nn.Module):
    """So sure of itself that its probabilities round to 0 and 1, in places wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = TinyNet(CLASSES).eval()
        self.volume = nn.Parameter(torch.tensor(1e4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) * self.volume


def test_certainty_gives_no_nan(objective):
    if type(objective).__name__ in LOOKS_INSIDE:
        pytest.skip("looks at blocks, and there are none")
    model, (x, z, y) = Loud(), batch(20, side=8)
    with torch.no_grad():
        probabilities = model(x).softmax(1)
    assert (probabilities == 0).any()
    loss = objective(model, x, z, y)["loss"]
    loss.backward()
    assert loss.isfinite()
    assert model.volume.grad.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_inputs_and_modes_stay_as_they_are(objective, library):
    model = make_model(library).train()
    x, z, y = batch(3)
    before = [part.clone() for part in (x, z, y)]
    blocks_of(model)[0].module.eval()
    modes = [module.training for module in model.modules()]
    objective(model, x, z, y)["loss"].backward()
    assert all(torch.equal(a, b) for a, b in zip(before, (x, z, y), strict=True))
    assert [module.training for module in model.modules()] == modes
