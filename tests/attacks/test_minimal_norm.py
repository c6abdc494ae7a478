"""Minimal-norm attacks where the distance to the boundary is known, and beside those of foolbox."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from device_double import DeviceDouble
from toys import images, trained_toy
from vitadel.attacks import make
from vitadel.attacks.minimal_norm.bisection import Bisection
from vitadel.attacks.minimal_norm.ddn import DDN
from vitadel.attacks.minimal_norm.deepfool import DeepFool
from vitadel.attacks.minimal_norm.fmn import FMN
from vitadel.attacks.minimal_norm.fmn_l0 import SparseFMN
from vitadel.attacks.minimal_norm.nearest import project_to_radius
from vitadel.attacks.threats import L0, L1, L2, Linf, make_threat
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes, judge
from vitadel.evaluation.selftest import LinearToy

DUALS = {Linf: 1.0, L2: 2.0, L1: math.inf}
WHOLE_BOX = {Linf: 1.0, L2: 20.0, L1: 200.0, L0: 192.0}  # budgets that reach everywhere in 3 x 8 x 8 pixels
PLACES = 3 * 8 * 8


def linear(count: int = 8) -> tuple[LinearToy, Tensor, Tensor]:
    """Images around mid-gray, so far from the walls that the closed form holds, and a boundary near them."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(PLACES, generator=generator)
    weight[5] = 12.0  # one strongest value, along which the nearest point in L1 lies
    x = 0.5 + 0.05 * torch.randn(count, 3, 8, 8, generator=generator).clamp(-2, 2)
    toy = LinearToy(weight, bias=0.4 - 0.5 * float(weight.sum()))
    return toy, x, toy(x).argmax(1)


ATTACKS = {
    "ddn": (lambda ball: DDN(ball, 200, stop_when_fooled=False), (L2,), 1.03),
    "fmn": (lambda ball: FMN(ball, 200, stop_when_fooled=False), (Linf, L2, L1), 1.03),
    "bisect": (lambda ball: Bisection(ball, 200, stop_when_fooled=False), (Linf, L2, L1), 1.01),
    "deepfool": (lambda ball: DeepFool(ball, stop_when_fooled=False), (Linf, L2, L1), 1.021),
    "superdeepfool": (lambda ball: DeepFool(ball, returns=True, line_steps=12, stop_when_fooled=False), (L2,), 1.005),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ball"), [(name, ball) for name, (_, balls, _) in ATTACKS.items() for ball in balls])
def test_finds_the_distance_to_a_plane(name: str, ball: type):
    build, _, tolerance = ATTACKS[name]
    toy, x, y = linear()
    distance = toy(x)[:, 1].detach().abs() / torch.linalg.vector_norm(toy.weight.detach(), ord=DUALS[ball])
    threat = ball(WHOLE_BOX[ball])
    z = build(threat)(toy, x, y)
    assert not judge(toy, threat, x, z, y).held.any()
    ratio = threat.size(z, x) / distance
    assert ratio.min() >= 1 - 1e-4
    assert ratio.max() <= tolerance


def test_l0_changes_as_few_values_as_a_plane_needs():
    """Of a linear model the largest products of weight and room, in order, until the boundary is crossed."""
    toy, x, _ = linear()
    toy.weight.data[5] = 1.0
    y = toy(x).argmax(1)
    score, weight = toy(x)[:, 1].detach(), toy.weight.detach()
    toward = -torch.sign(score)[:, None] * weight.sign()
    room = torch.where(toward > 0, 1 - x.flatten(1), x.flatten(1))
    gains = (weight.abs() * room).sort(dim=1, descending=True).values.cumsum(1)
    needed = (gains < score.abs()[:, None]).sum(1) + 1
    z = SparseFMN(L0(WHOLE_BOX[L0]), 5, stop_when_fooled=False)(toy, x, y)
    assert (toy(z).argmax(1) != y).all()
    assert (z != x).flatten(1).sum(1).equal(needed)
    for row in range(len(x)):
        alone, budget = slice(row, row + 1), float(needed[row])
        for room, reached in ((budget, True), (budget - 1, False)):
            z = SparseFMN(L0(room), 5)(toy, x[alone], y[alone])
            assert bool(toy(z).argmax(1) != y[alone]) is reached
            assert (z != x[alone]).sum() <= room


def test_l0_starts_with_as_many_values_as_the_linearized_boundary_needs():
    toy, x, _ = linear()
    with count_passes(toy) as cost:
        SparseFMN(L0(WHOLE_BOX[L0]), 100)(toy, x, toy(x).argmax(1))
    assert cost.gradients == 2 * len(x)  # of the clean images, then of the points, all of which are adversarial


@pytest.mark.parametrize("order", [math.inf, 2.0, 1.0])
def test_projections_with_a_radius_for_each_sample_are_those_of_the_threats(order: float):
    kind = {math.inf: Linf, 2.0: L2, 1.0: L1}[order]
    radii = {math.inf: (0.02, 0.3), 2.0: (0.4, 2.0), 1.0: (2.0, 20.0)}[order]
    x = images(2).double()
    z = x + 0.4 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).double()
    ours = project_to_radius(z, x, torch.tensor(radii, dtype=torch.float64), order)
    for row, radius in enumerate(radii):
        alone = slice(row, row + 1)
        assert torch.allclose(ours[alone], kind(radius).project(z[alone], x[alone]), atol=1e-5)


@pytest.mark.parametrize("name", ["ddn", "fmn", "bisect", "deepfool", "superdeepfool"])
def test_samples_fooled_inside_the_budget_cost_no_more(name: str):
    toy, x, y = linear()
    far = float((toy(x)[:, 1].detach().abs() / toy.weight.detach().norm()).max()) * 1.5
    with count_passes(toy) as cost:
        make(name, eps=far, norm="l2")(toy, x, y)
    gradients, _ = make(name, eps=far, norm="l2").passes()
    assert cost.gradients < len(x) * gradients / 5


@pytest.mark.parametrize("build", [DDN, FMN, Bisection])
def test_a_step_waits_at_most_once(build: type):
    toy, x, y = linear()

    def waits(steps: int) -> int:
        with DeviceDouble() as double:
            there = copy.deepcopy(toy).to(double.device)
            build(L2(0.01), steps)(there, double.put(x), double.put(y))
        return double.waits.total()

    assert waits(30) - waits(10) <= 20


@pytest.mark.parametrize(
    ("name", "norm", "message"),
    [
        ("ddn", "linf", "'ddn' works in l2, not in linf"),
        ("superdeepfool", "l1", "works in l2"),
        ("pgd-5", "l0", "works in linf, l2, l1, not in l0"),
        ("deepfool(overshoot=2)", "l2", "overshoot"),
        ("fmn-10(step=1)", "l0", "step of fmn has no meaning in l0"),
    ],
)
def test_what_an_attack_is_not_made_for_is_refused(name: str, norm: str, message: str):
    with pytest.raises(UserError, match=message):
        make(name, eps=1, norm=norm) if norm != "linf" else make(name, norm=norm)


def test_a_fraction_of_a_value_is_refused():
    with pytest.raises(UserError, match=r"whole number, got 0\.5"):
        make_threat("l0", 0.5)
    with pytest.raises(UserError, match="DDN needs the threat L2, got Linf"):
        DDN(Linf(0.1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "norm", "peer"),
    [
        ("ddn", "l2", "DDNAttack"),
        ("fmn", "linf", "LInfFMNAttack"),
        ("fmn", "l2", "L2FMNAttack"),
        ("fmn", "l1", "L1FMNAttack"),
        ("fmn", "l0", "L0FMNAttack"),
        ("deepfool", "linf", "LinfDeepFoolAttack"),
        ("deepfool", "l2", "L2DeepFoolAttack"),
    ],
)
def test_is_no_farther_than_foolbox(ours: str, norm: str, peer: str):
    """The median distance on a small trained network, with as many steps."""
    foolbox = pytest.importorskip("foolbox")
    model, x, y = trained()
    whole = {"linf": 1.0, "l2": 20.0, "l1": 200.0, "l0": 192.0}[norm]
    attack = replace(make(f"{ours}-50", eps=whole, norm=norm), stop_when_fooled=False)  # type: ignore[type-var]
    z = attack(model, x, y)
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    theirs, _, _ = getattr(foolbox.attacks, peer)(steps=50)(wrapped, x, y, epsilons=None)
    threat = make_threat(norm, whole)
    sizes = []
    for points in (z, theirs):
        held = model(points).argmax(1) == y
        sizes.append(torch.where(held, torch.inf, threat.size(points, x)).median())
    assert sizes[0] <= 1.02 * sizes[1]


def trained() -> tuple[nn.Module, Tensor, Tensor]:
    model, x, y = trained_toy()
    right = model(x).argmax(1) == y
    return model, x[right][:32], y[right][:32]
