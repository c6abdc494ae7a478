"""FAB where the nearest adversarial point is known, and its projections against slow independent solvers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from toys import Constant, TinyNet, images, trained_toy
from vitadel.attacks.fab import FAB, fab, fab_t, to_hyperplane
from vitadel.attacks.threats import L1, L2, Linf
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes, judge
from vitadel.evaluation.selftest import LinearToy
from vitadel.runtime.rng import SampleRNG

ORDERS = {Linf: math.inf, L2: 2.0, L1: 1.0}
WHOLE_BOX = {Linf: 1.0, L2: 20.0, L1: 200.0}  # budgets that reach everywhere in 3 x 8 x 8 pixels
BALLS = pytest.mark.parametrize("ball", ORDERS, ids=lambda ball: ball.__name__)
ROUTES = pytest.mark.parametrize("targets", [None, 9], ids=["all classes", "targeted"])


def slow_move(x: torch.Tensor, w: torch.Tensor, gap: torch.Tensor, order: float) -> torch.Tensor:
    """Bisection in float64 on the multiplier (L2) or the radius (Linf) of gap + w . d = 0 with x + d in the box."""
    x, gap = x.double(), gap.double()[:, None]
    w = w.double() * gap.sign()  # now the value is positive and has to fall

    def moved(size):
        step = size * w.sign() if order == math.inf else size * w
        return (x - step).clamp(0, 1) - x

    low, high = torch.zeros_like(gap), torch.full_like(gap, 1e15)
    for _ in range(200):
        middle = (low + high) / 2
        short = gap.abs() + (w * moved(middle)).sum(1, keepdim=True) > 0
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    return moved(high)


def brute_force_l1(x: torch.Tensor, w: torch.Tensor, gap: float) -> float:
    """The least L1 length: at a corner of the linear program all pixels but one move by nothing or by all they can."""
    count, best = len(x), math.inf
    rooms = [[0.0, float(1 - value), float(-value)] for value in x]
    for free in range(count):
        others = [rooms[i] if i != free else [0.0] for i in range(count)]
        for moves in itertools.product(*others):
            rest = gap + sum(float(w[i]) * move for i, move in enumerate(moves))
            last = -rest / float(w[free])
            if -1e-12 <= x[free] + last <= 1 + 1e-12:
                best = min(best, sum(map(abs, moves)) + abs(last))
    return best


def planes(seed: int, samples: int, size: int, reach: float):
    """Points with pixels at 0 and 1, gradients with zeros, and planes at `reach` of what the box allows."""
    rng = SampleRNG.of_samples(seed, range(samples))
    x = (rng.stream("x").uniform(size) * 1.6 - 0.3).clamp(0, 1).double()
    w = rng.stream("w").normal(size).double()
    w[:, 1::7] = 0
    sign = rng.stream("sign").signs().double()
    toward = -w.sign() * sign[:, None]
    room = torch.where(toward > 0, 1 - x, torch.where(toward < 0, x, 0.0))
    gap = sign * reach * (w.abs() * room).sum(1)
    return x, w, gap, room * toward


@pytest.mark.parametrize("reach", [1e-4, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("order", [math.inf, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_projection_agrees_with_bisection(order, reach, dtype):
    x, w, gap, _ = planes(1, 40, 150, reach)
    move = to_hyperplane(x.to(dtype)[None], w.to(dtype), gap.to(dtype)[None], order)[0]
    assert move.dtype == dtype
    assert (x + move).min() >= -1e-6
    assert (x + move).max() <= 1 + 1e-6
    slack = 1e-9 if dtype == torch.float64 else 2e-4
    assert ((w * move).sum(1) + gap).abs().max() <= slack * gap.abs().max()
    right = torch.linalg.vector_norm(slow_move(x, w, gap, order), ord=order, dim=1)
    assert torch.allclose(torch.linalg.vector_norm(move.double(), ord=order, dim=1), right, rtol=slack)
    if order == 2.0 and dtype == torch.float64:  # only there is the nearest point unique
        assert torch.allclose(move, slow_move(x, w, gap, order), atol=1e-7)


@pytest.mark.parametrize("reach", [1e-4, 0.1, 0.5, 0.9, 0.999])
def test_l1_projection_agrees_with_brute_force(reach):
    x, w, gap, _ = planes(2, 12, 5, reach)
    w[:, 1] = 0.3
    move = to_hyperplane(x[None], w, gap[None], 1.0)[0]
    assert ((x + move).clamp(0, 1) - x - move).abs().max() < 1e-12
    assert ((w * move).sum(1) + gap).abs().max() < 1e-12
    best = [brute_force_l1(*row) for row in zip(x, w, gap.tolist(), strict=True)]
    assert torch.allclose(move.abs().sum(1), torch.tensor(best, dtype=torch.float64), rtol=1e-9)


@pytest.mark.parametrize("order", [math.inf, 2.0, 1.0])
def test_no_other_point_of_the_plane_is_nearer(order):
    x, w, gap, _ = planes(3, 20, 60, 0.3)
    move = to_hyperplane(x[None], w, gap[None], order)[0]
    length = torch.linalg.vector_norm(move, ord=order, dim=1)
    for trial in range(50):
        other = SampleRNG.of_samples(trial, range(20)).uniform(60).double()
        # Between a random point of the box and our point, on the plane after one more projection.
        there = x + 0.9 * move + 0.1 * (other - x)
        value = gap + (w * (there - x)).sum(1)
        there = there + to_hyperplane(there[None], w, value[None], 2.0)[0]
        reached = (gap + (w * (there - x)).sum(1)).abs() < 1e-9
        assert reached.any()
        assert (torch.linalg.vector_norm(there - x, ord=order, dim=1) >= length - 1e-9)[reached].all()


@pytest.mark.parametrize("order", [math.inf, 2.0, 1.0])
def test_planes_that_miss_the_box_lead_to_its_nearest_corner(order):
    x, w, gap, corner = planes(4, 10, 40, 1.5)
    assert torch.allclose(to_hyperplane(x[None], w, gap[None], order)[0], corner)


@pytest.mark.parametrize("order", [math.inf, 2.0, 1.0])
def test_flat_places_and_points_on_the_plane_do_not_move(order):
    x = images(3).flatten(1)
    flat = to_hyperplane(x[None], torch.zeros_like(x), torch.full((1, 3), 0.4), order)
    there = to_hyperplane(x[None], torch.ones_like(x), torch.zeros(1, 3), order)
    assert not flat.any()
    assert not there.any()


@pytest.mark.parametrize("order", [math.inf, 2.0, 1.0])
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_the_size_of_the_gradient_does_not_matter(order, scale):
    x, w, gap, _ = (tensor.float() for tensor in planes(5, 10, 40, 0.4))
    plain = to_hyperplane(x[None], w, gap[None], order)
    assert torch.allclose(to_hyperplane(x[None], w * scale, gap[None] * scale, order), plain, atol=1e-5)


@pytest.mark.parametrize("order", [math.inf, 2.0])
def test_many_scales_of_room_and_weight_do_not_slow_the_solver_into_error(order):
    spread = 2.0 ** -torch.arange(40, dtype=torch.float64)
    x, w = torch.stack([spread, spread.flip(0)]), torch.stack([spread.flip(0), spread.flip(0)])
    gap = 0.9 * (x * w).sum(1)
    move = to_hyperplane(x[None], w, gap[None], order)[0]
    assert ((w * move).sum(1) + gap).abs().max() < 1e-12
    right = torch.linalg.vector_norm(slow_move(x, w, gap, order), ord=order, dim=1)
    assert torch.allclose(torch.linalg.vector_norm(move, ord=order, dim=1), right, rtol=1e-9)


@pytest.mark.parametrize("order", [math.inf, 2.0, 1.0])
def test_two_sets_of_points_at_once_are_each_projected(order):
    x, w, gap, _ = planes(6, 10, 40, 0.4)
    z = (x * 0.9).clamp(0, 1)
    value = gap + (w * (z - x)).sum(1)
    both = to_hyperplane(torch.stack([z, x]), w, torch.stack([value, gap]), order)
    assert torch.equal(both[0], to_hyperplane(z[None], w, value[None], order)[0])
    assert torch.equal(both[1], to_hyperplane(x[None], w, gap[None], order)[0])


class ManyPlanes(nn.Module):
    """A linear classifier; the nearest adversarial point lies on the nearest of its planes."""

    def __init__(self, classes: int, spread: float = 0.0) -> None:
        super().__init__()
        self.head = nn.Linear(192, classes)
        steepness = 1 + spread * torch.arange(classes)[:, None]  # else the runner-up's plane is always the nearest
        self.head.weight.data = steepness * SampleRNG.of_samples(0, range(classes)).normal(192)
        self.head.bias.data = -0.5 * self.head.weight.data.sum(1)

    def forward(self, x):
        return self.head(x.flatten(1))

    def distance(self, x: torch.Tensor, y: torch.Tensor, order: float) -> torch.Tensor:
        weight, logits = self.head.weight.detach().double(), self(x).detach().double()
        every = []
        for rival in range(len(weight)):
            w = weight[rival] - weight[y]
            gap = logits[:, rival] - logits.gather(1, y[:, None]).squeeze(1)
            if order == 1.0:  # the largest coefficients first, each as far as it can, pixel by pixel
                every.append(torch.stack([_greedy_length(*row) for row in zip(x.flatten(1), w, gap, strict=True)]))
            else:
                every.append(torch.linalg.vector_norm(slow_move(x.flatten(1), w, gap, order), ord=order, dim=1))
            every[-1][y == rival] = torch.inf
        return torch.stack(every).amin(0)


def _greedy_length(x: torch.Tensor, w: torch.Tensor, gap: torch.Tensor) -> torch.Tensor:
    need, length = abs(float(gap)), 0.0
    for i in sorted(range(len(w)), key=lambda i: -abs(float(w[i]))):
        room = float(1 - x[i] if float(w[i]) * float(gap) < 0 else x[i])
        move = min(room, need / max(abs(float(w[i])), 1e-12))
        need, length = need - move * abs(float(w[i])), length + move
        if need <= 1e-12:
            break
    return torch.tensor(length, dtype=torch.float64)


def gray(count: int) -> torch.Tensor:
    """Images so near to mid-gray that no boundary is reached at the box."""
    return 0.5 + 0.2 * (images(count) - 0.5)


@pytest.mark.slow
@BALLS
@ROUTES
@pytest.mark.parametrize("clipped", [False, True], ids=["box far", "box active"])
def test_finds_the_minimal_norm_of_a_linear_model(ball, targets, clipped):
    model = ManyPlanes(4)
    x = images(16) if clipped else gray(16)
    y = model(x).argmax(1)
    best = model.distance(x, y, ORDERS[ball])
    z = FAB(ball(WHOLE_BOX[ball]), steps=40, targets=targets, stop_when_fooled=False)(model, x, y)
    assert (model(z).argmax(1) != y).all()
    ratio = ball(1.0).size(z, x) / best
    assert ratio.min() > 1 - 1e-4
    assert ratio.max() < 1.02


@BALLS
def test_two_classes_agree_with_the_closed_form(ball):
    weight = SampleRNG.of_samples(0, [0]).normal(192)[0]
    weight[11] = 12.0  # one pixel is enough in L1, and does not reach the box
    toy, x = LinearToy(weight, -0.5 * float(weight.sum())), gray(20)
    y = toy(x).argmax(1)
    distance = toy.distance(x, {Linf: "linf", L2: "l2", L1: "l1"}[ball])
    for attack in (FAB(ball(WHOLE_BOX[ball]), 30, stop_when_fooled=False), FAB(ball(WHOLE_BOX[ball]), 30, 9)):
        z = attack(toy, x, y)
        assert (toy(z).argmax(1) != y).all()
        ratio = ball(1.0).size(z, x) / distance
        assert ratio.min() > 1 - 1e-4
        assert attack.stop_when_fooled or ratio.max() < 1.02


@BALLS
@ROUTES
def test_succeeds_exactly_above_the_distance_and_else_returns_the_image(ball, targets):
    model, x = ManyPlanes(4), gray(16)
    y = model(x).argmax(1)
    best = model.distance(x, y, ORDERS[ball])
    eps = float(best.median())
    z = FAB(ball(eps), steps=40, targets=targets)(model, x, y)
    broken = ~judge(model, ball(eps), x, z, y).held
    clear = (best / eps - 1).abs() > 0.02
    assert clear.sum() > 8
    assert torch.equal(broken[clear], (best < eps)[clear])
    assert torch.equal(z[~broken], x[~broken])


def test_finds_smaller_perturbations_than_it_stops_with():
    model, x = TinyNet(4).eval(), images(20)
    y = model(x).argmax(1)
    with count_passes(model) as short:
        first = FAB(L2(2.0), steps=30)(model, x, y)
    with count_passes(model) as long:
        least = FAB(L2(2.0), steps=30, stop_when_fooled=False)(model, x, y)
    fooled = model(first).argmax(1) != y
    assert fooled.sum() > 10
    assert torch.equal(fooled, model(least).argmax(1) != y)
    sizes, smallest = L2(1.0).size(first, x)[fooled], L2(1.0).size(least, x)[fooled]
    assert (smallest <= sizes).all()
    assert smallest.mean() < 0.95 * sizes.mean()
    assert short.gradients < long.gradients / 2


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_costs_what_the_number_of_classes_says(classes):
    model, x = TinyNet(classes).eval(), images(6)
    y = model(x).argmax(1)
    with count_passes(model) as cost:
        assert torch.equal(FAB(Linf(1e-4), steps=7)(model, x, y), x)
    assert (cost.gradients, cost.forwards) == (6 * 7 * (classes - 1), 6 * (7 + 1))
    with count_passes(model) as cost:
        FAB(Linf(1e-4), steps=7, targets=2, restarts=3)(model, x, y)
    rounds = 3 * min(2, classes - 1)
    assert (cost.gradients, cost.forwards) == (6 * 7 * rounds, 6 * (7 * rounds + 1))


def test_announces_the_cost_of_ten_classes():
    model, x = TinyNet(10).eval(), images(3)
    y = model(x).argmax(1)
    for attack in (fab(Linf(1e-4), steps=3), fab_t(Linf(1e-4), steps=3), fab_t(Linf(1e-4), 3, targets=4, restarts=2)):
        with count_passes(model) as cost:
            attack(model, x, y)
        assert (cost.gradients, cost.forwards) == tuple(3 * count for count in attack.passes())


def test_targeted_runs_follow_the_classes_in_clean_order():
    model, x = ManyPlanes(6, spread=2.0), gray(30)
    y = model(x).argmax(1)
    size = [L2(1.0).size(FAB(L2(20.0), 30, count, stop_when_fooled=False)(model, x, y), x) for count in (1, 2, 3, 5)]
    for more, fewer in itertools.pairwise(reversed(size)):
        assert (more <= fewer + 1e-6).all()
    assert torch.allclose(size[-1], model.distance(x, y, 2.0), rtol=0.02)
    runner_up = model(x).topk(2, dim=1).indices[:, 1]
    w = model.head.weight[runner_up] - model.head.weight[y]
    gap = (model(x).gather(1, y[:, None]) - model(x).gather(1, runner_up[:, None])).squeeze(1)
    bound = (gap / w.norm(dim=1)).detach()
    assert (size[0] <= 1.02 * bound).all()
    assert (bound > 1.1 * model.distance(x, y, 2.0)).any()


@BALLS
@ROUTES
def test_wrong_labels_come_back_at_once(ball, targets):
    model, x = TinyNet().eval(), images(5)
    y = (model(x).argmax(1) + 1) % 3
    for stop in (True, False):
        with count_passes(model) as cost:
            z = FAB(ball(1.0), targets=targets, restarts=2, stop_when_fooled=stop)(model, x, y)
        assert torch.equal(z, x)
        assert (cost.gradients, cost.forwards) == (0, 5)


def test_restarts_only_help_and_come_from_the_draws():
    model, x = TinyNet(4, seed=3).eval(), images(30)
    y = model(x).argmax(1)
    rng = [SampleRNG.of_samples(seed, range(30)) for seed in (1, 2)]
    once = FAB(L2(5.0), steps=3, stop_when_fooled=False)
    more = FAB(L2(5.0), steps=3, restarts=4, stop_when_fooled=False)
    assert torch.equal(once(model, x, y, rng[0]), once(model, x, y, rng[1]))
    sizes = [L2(1.0).size(attack(model, x, y, rng[0]), x) for attack in (once, more)]
    assert (sizes[1] <= sizes[0]).all()
    assert (sizes[1] < sizes[0] - 1e-4).any()
    assert not torch.equal(more(model, x, y, rng[0]), more(model, x, y, rng[1]))


@BALLS
@ROUTES
def test_does_not_depend_on_the_rest_of_the_batch(ball, targets):
    model, x = TinyNet(4).double().eval(), images(9).double()
    y = model(x).argmax(1)
    rng = SampleRNG.of_samples(3, range(9))
    attack = FAB(ball(WHOLE_BOX[ball] / 20), steps=8, targets=targets, restarts=2)
    whole = attack(model, x, y, rng)
    for sample in range(9):
        here = torch.tensor([sample])
        assert torch.allclose(attack(model, x[here], y[here], rng[here]), whole[here], atol=1e-9)
    assert (whole != x).any()


@BALLS
@ROUTES
def test_hard_cases(ball, targets):
    x = images(5)
    y = torch.tensor([0, 1, 2, 0, 1])
    assert torch.equal(FAB(ball(0.1), 4, targets, restarts=2)(Constant(), x, y), x)
    model = TinyNet().eval()
    assert torch.equal(FAB(ball(0.0), 4, targets)(model, x, y), x)
    vectors = nn.Linear(12, 3)
    assert FAB(ball(0.5), 4, targets)(vectors, x.flatten(1)[:, :12], y).shape == (5, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = FAB(ball(WHOLE_BOX[ball] / 10), 10, targets)(model, x, model(x).argmax(1))
    assert z.dtype == torch.float32
    assert not z.requires_grad
    assert ball(1.0).size(z, x).max() <= WHOLE_BOX[ball] / 10


def test_user_errors_are_refused():
    for settings in ({"steps": 0}, {"targets": 0}, {"restarts": 0}):
        with pytest.raises(UserError, match="at least 1"):
            FAB(Linf(0.1), **settings)
    with pytest.raises(UserError, match="Linf, L2 or L1"):
        FAB(object())


@pytest.mark.parametrize("ball", [Linf, L2], ids=["Linf", "L2"])
def test_ends_where_the_linearized_boundary_is_as_near_as_the_point(ball):
    """The condition for a nearest point of a curved boundary; stuck on a tie of two logits one is farther away."""
    model, x, y = trained_toy()
    z = FAB(ball(20.0), steps=40, stop_when_fooled=False)(model, x, y)
    right = model(x).argmax(1) == y
    x, y, z = x[right], y[right], z[right].requires_grad_()
    logits = model(z)
    gaps = logits.gather(1, logits.argmax(1)[:, None]) - logits.gather(1, y[:, None])
    (slope,) = torch.autograd.grad(gaps.sum(), z)
    at_x = gaps.detach().squeeze(1) + (slope * (x - z)).flatten(1).sum(1)
    nearest = slow_move(x.flatten(1), slope.flatten(1), at_x, ORDERS[ball])
    ratio = ball(1.0).size(z.detach(), x) / torch.linalg.vector_norm(nearest, ord=ORDERS[ball], dim=1)
    assert ratio.quantile(0.95) < 1.02  # the rest may lie where two boundaries meet


@pytest.mark.slow
@pytest.mark.parametrize("ball", [Linf, L2], ids=["Linf", "L2"])
@ROUTES
def test_agrees_with_torchattacks(ball, targets):
    torchattacks = pytest.importorskip("torchattacks")  # whose L1 version does not run
    model, x, y = trained_toy()

    def theirs(eps):
        with torch.random.fork_rng():
            return torchattacks.FAB(
                model, norm=ball.__name__, eps=eps, steps=20, multi_targeted=targets is not None, n_classes=4
            )(x, y)

    eps = {Linf: 0.04, L2: 0.45}[ball]
    held = judge(model, ball(eps), x, FAB(ball(eps), 20, targets)(model, x, y), y).held
    reference = judge(model, ball(eps * (1 + 1e-5)), x, theirs(eps), y).held
    assert 0.2 < reference.float().mean() < 0.8
    assert (held != reference).sum() <= 2
    ours = ball(1.0).size(FAB(ball(20.0), 20, targets, stop_when_fooled=False)(model, x, y), x)
    assert (ours <= 1.01 * ball(1.0).size(theirs(20.0), x)).all()
