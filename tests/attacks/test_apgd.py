"""APGD against a second, plain implementation, against closed forms, and against another library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from toys import TinyNet, images
from vitadel.attacks.apgd import (
    APGD,
    OverTargets,
    TowardsClass,
    TowardsRank,
    apgd_ce,
    apgd_dlr,
    apgd_t,
    checkpoints,
)
from vitadel.attacks.goals import OnLogits, clearly_fooled
from vitadel.attacks.losses import cross_entropy, dlr, margin
from vitadel.attacks.pgd import PGD
from vitadel.attacks.steppers import Steepest
from vitadel.attacks.threats import L1, L2, NORMS, Linf, make_threat
from vitadel.attacks.wrappers import Restarts
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes
from vitadel.evaluation.selftest import LinearToy
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Aim

BUDGETS = {"linf": 0.06, "l2": 0.8, "l1": 4.0}


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Everything the model is shown."""
    seen: list[torch.Tensor] = []
    handle = model.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].detach().clone()))
    try:
        yield seen
    finally:
        handle.remove()


def tiny(count: int, classes: int = 3) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model, x = TinyNet(classes).eval().double(), images(count).double()
    return model, x, model(x).argmax(1)


# --- a second implementation: one sample, plain loops, no torch beyond value and gradient ---------------------------


def project(z, x, eps, norm):
    if norm == "linf":
        return np.clip(np.clip(z, x - eps, x + eps), 0, 1)
    if norm == "l2":
        length = np.sqrt(((z - x) ** 2).sum())
        return np.clip(x + (z - x) * min(1.0, eps / max(length, 1e-12)), 0, 1)
    room = np.where(z > x, 1 - x, x)

    def shrunk(shift):
        return np.minimum(np.maximum(np.abs(z - x) - shift, 0), room)

    low, high = 0.0, float(np.abs(z - x).max())
    if shrunk(0.0).sum() <= eps:
        high = 0.0
    for _ in range(80):  # bisection
        middle = (low + high) / 2
        low, high = (middle, high) if shrunk(middle).sum() > eps else (low, middle)
    return x + np.sign(z - x) * shrunk(high)


def halving_by_hand(f, x, start, eps, steps, norm, events):
    """The paper's algorithm 1 for one sample; yields every iterate, up to a comparison that only rounding decides."""
    reviews = {int(c) for c in checkpoints(steps)}
    z, before, length = start, start, 2 * eps
    value, grad = f(z)
    best, best_value, best_grad = z, value, grad
    values, best_at_review, halved_at_review, last_review = [value], value, True, 0
    yield z
    for k in range(steps):
        direction = np.sign(grad) if norm == "linf" else grad / max(np.sqrt((grad**2).sum()), 1e-12)
        ahead = project(z + length * direction, x, eps, norm)
        share = 1.0 if k == 0 else 0.75
        z, before = project(z + share * (ahead - z) + (1 - share) * (z - before), x, eps, norm), z
        yield z
        value, grad = f(z)
        if not np.array_equal(z, before) and min(abs(value - values[-1]), abs(value - best_value)) < 1e-12:
            events.append("tie")
            return
        values.append(value)
        if value > best_value:
            best, best_value, best_grad = z, value, grad
        if k + 1 in reviews:
            rises = sum(values[i + 1] > values[i] for i in range(last_review, k + 1))
            few = rises <= 0.75 * (k + 1 - last_review)
            stalled = not halved_at_review and best_value <= best_at_review
            events.append("few" if few else "stalled" if stalled else "kept")
            if few or stalled:
                length, z, grad = length / 2, best, best_grad
            halved_at_review, best_at_review, last_review = few or stalled, best_value, k + 1


def thinning_by_hand(f, x, start, eps, steps, events):
    """The L1 paper's algorithm for one sample, in balls of 3, 2 and 1 times eps."""
    part = 3 * steps // 10
    for times, count in ((3, part), (2, part), (1, steps - 2 * part)):
        ball = times * eps
        z = project(start, x, ball, "l1")
        best, best_value = z, -np.inf
        length, changed = ball, int((np.abs(z - x) > 1e-7).sum())
        to_move = max(1, int(changed / 1.5 + 1e-9))
        for k in range(count + 1):
            yield z
            value, grad = f(z)
            if value > best_value:
                best, best_value, best_grad = z, value, grad
            if k > 0 and k % max(1, int(0.04 * steps)) == 0:
                now = int((np.abs(best - x) > 1e-7).sum())
                if now < 0.95 * changed:
                    length, z, grad = ball, best, best_grad
                    events.append("sparser")
                else:
                    length = max(length / 1.5, ball / 10)
                    events.append("shorter")
                changed, to_move = now, max(1, int(now / 1.5 + 1e-9))
            free = ~(((z > 1 - 1e-5) & (grad > 0)) | ((z < 1e-5) & (grad < 0)))
            weakest = sorted(np.abs(grad) * free, reverse=True)[to_move - 1]
            chosen = np.abs(grad) >= weakest
            z = project(
                z + length * np.sign(grad) * chosen / max(1, (chosen & free & (grad != 0)).sum()), x, ball, "l1"
            )
        start = best


def searched_by_hand(model, loss, x, label, start, eps, steps, norm, events):
    def value_and_gradient(point):
        leaf = torch.tensor(point).view(1, 3, 8, 8).requires_grad_()
        value = loss(model(leaf), label[None])
        return value.item(), torch.autograd.grad(value.sum(), leaf)[0].flatten().numpy()

    if norm == "l1":
        return np.stack(list(thinning_by_hand(value_and_gradient, x, start, eps, steps, events)))
    return np.stack(list(halving_by_hand(value_and_gradient, x, start, eps, steps, norm, events)))


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_every_iterate_agrees_with_a_plain_second_implementation(norm):
    model, x, y = tiny(10)
    x = x if norm != "l1" else (x - 0.4).clamp(min=0)  # black pixels keep every trace of rounding, and have no room
    eps, events, compared, searched = BUDGETS[norm], [], 0, 0
    for steps, loss in ((20, cross_entropy), (50, cross_entropy), (20, margin), (30, margin)):
        with recorded(model) as seen:
            APGD(make_threat(norm, eps), OnLogits(loss), steps, stop_when_fooled=False)(model, x, y)
        for row, ours in enumerate(torch.stack(seen, 1).flatten(2).numpy()):
            clean = x[row].flatten().numpy()
            theirs = searched_by_hand(model, loss, clean, y[row], ours[0], eps, steps, norm, events)
            assert np.abs(theirs - ours[: len(theirs)]).max() < 1e-5
            compared, searched = compared + len(theirs), searched + len(ours)
    assert compared > 0.9 * searched
    assert set(events) - {"tie"} == ({"sparser", "shorter"} if norm == "l1" else {"few", "stalled", "kept"})


# --- schedules ---------------------------------------------------------------------------------------------------


def test_checkpoints_are_the_papers():
    assert checkpoints(100) == (22, 41, 57, 70, 80, 87, 93, 99)
    assert checkpoints(20)[:5] == (4, 7, 9, 10, 11)
    assert checkpoints(1) == ()
    assert checkpoints(1000)[:3] == (220, 410, 570)
    for steps in range(1, 300):
        assert all(0 < c < steps for c in checkpoints(steps))


def test_starts_lie_on_the_surface():
    x = 0.5 + 0.1 * (images(6) - 0.5)
    model, y = TinyNet().eval(), torch.zeros(6, dtype=torch.long)
    for norm, eps, reach in (("linf", 0.06, 0.06), ("l2", 0.8, 0.8), ("l1", 4.0, 12.0)):
        with recorded(model) as seen:
            APGD(make_threat(norm, eps), stop_when_fooled=False, steps=10)(model, x, y)
        assert make_threat(norm, eps).size(seen[0], x).tolist() == pytest.approx([reach] * 6, rel=1e-5)
        assert (seen[0][0] - x[0] - (seen[0][1] - x[1])).abs().max() > 1e-3  # each sample has its own
    assert ((seen[0] - x).abs() > 0).flatten(1).sum(1).max() < 100  # of 192 pixels: L1 starts are sparse


def test_the_ball_of_l1_narrows_to_the_real_one():
    model, x, y = tiny(8)
    with recorded(model) as seen:
        z = APGD(L1(1.0), steps=20, stop_when_fooled=False)(model, x, y)
    sizes = torch.stack([L1(1.0).size(points, x) for points in seen])  # 7 + 7 + 9 looks
    for looks, most in ((slice(0, 7), 3), (slice(7, 14), 2), (slice(14, 23), 1)):
        assert sizes[looks].max() == pytest.approx(most, rel=1e-5)
    assert len(sizes) == 23
    assert L1(1.0).size(z, x).max() <= 1
    with recorded(model) as seen:  # too few steps to divide
        APGD(L1(1.0), steps=3, stop_when_fooled=False)(model, x, y)
    assert max(float(L1(1.0).size(points, x).max()) for points in seen) <= 1 + 1e-9


# --- closed forms ------------------------------------------------------------------------------------------------


class Hill(nn.Module):
    """Two classes whose margin at label 0 is -|x - top|^2: concave, and never positive."""

    def __init__(self, top: torch.Tensor) -> None:
        super().__init__()
        self.top = top

    def forward(self, x):
        value = -(x - self.top).square().flatten(1).sum(1)
        return torch.stack([torch.zeros_like(value), value], dim=1)


@pytest.mark.parametrize(("ball", "reach"), [(Linf(0.1), 0.09), (L2(0.5), 0.4)], ids=["linf", "l2"])
def test_halving_finds_the_top_of_a_hill(ball, reach):
    rng, x = SampleRNG.of_samples(1, range(10)), torch.full((10, 3, 4, 4), 0.5)
    away = rng.normal(3, 4, 4)
    top = x + reach * away / ball.size(x + away, x).view(-1, 1, 1, 1).float()
    hill, y = Hill(top), torch.zeros(10, dtype=torch.long)
    z = APGD(ball, OnLogits(margin))(hill, x, y)
    assert ball.size(z, top).max() < 2 * 2 * ball.eps / 2**7  # of eight reviews all but one or two halve
    fixed = PGD(ball, OnLogits(margin), Steepest(2 * ball.eps), steps=100)(hill, x, y)
    assert ball.size(fixed, top).min() > 0.25 * ball.eps


@pytest.mark.parametrize("build", [apgd_ce, apgd_dlr, apgd_t])
@pytest.mark.parametrize(("norm", "budgets"), [("linf", (0.001, 0.004)), ("l2", (0.01, 0.04)), ("l1", (0.04, 0.09))])
def test_flips_exactly_above_the_distance(norm, budgets, build):
    weight = SampleRNG.of_samples(0, [0]).normal(3 * 64)[0]
    if norm == "l1":
        weight[11] = 8.0  # the closed form lies along this pixel
    x = 0.5 + 0.1 * (images(20) - 0.5)
    toy = LinearToy(weight, -0.5 * float(weight.sum()))
    y, distance = toy(x).argmax(1), toy.distance(x, norm)
    for eps in budgets:
        fooled = toy(build(make_threat(norm, eps), steps=60)(toy, x, y)).argmax(1) != y
        clear = (distance / eps - 1).abs() > 0.01
        assert torch.equal(fooled[clear], (distance < eps)[clear])
        assert 0 < int(fooled.sum()) < 20


def test_l1_spends_its_budget_where_pixels_still_have_room():
    """On a linear function the best point fills up pixel after pixel, the steepest first."""
    weight, eps = SampleRNG.of_samples(0, [0]).normal(192)[0], 1.5
    x = images(12).flatten(1) * (SampleRNG.of_samples(2, range(12)).uniform(192) < 0.5)  # half of the pixels are black
    toy, y = LinearToy(weight, 0.0), torch.zeros(12, dtype=torch.long)
    z = APGD(L1(eps), OnLogits(margin), stop_when_fooled=False)(toy, x, y)
    steepest = weight.abs().argsort(descending=True)
    room = torch.where(weight > 0, 1 - x, x)[:, steepest].double()
    spent = torch.minimum(room, (eps - (room.cumsum(1) - room)).clamp(min=0))
    most = (spent * weight.abs()[steepest]).sum(1)
    share = ((z - x) * weight).sum(1) / most
    assert share.max() <= 1 + 1e-5
    assert share.min() > 0.97


# --- who leaves, and what comes back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
def test_returns_the_first_adversarial_iterate_or_the_best_one(norm):
    model, x, y = tiny(30)
    attack = APGD(make_threat(norm, 0.6 * BUDGETS[norm]), steps=40)
    with recorded(model) as seen:
        best = replace(attack, stop_when_fooled=False)(model, x, y)
    z, standing = attack.search(model, x, y)
    last_ball = seen[26:] if norm == "l1" else seen
    fooled = torch.stack([clearly_fooled(model(points), y) for points in last_ball])
    values = torch.stack([cross_entropy(model(points), y) for points in last_ball])
    assert 0 < len(standing) < 30
    assert standing.tolist() == torch.where(~fooled.any(0))[0].tolist()
    for row in range(30):
        first = int(fooled[:, row].int().argmax()) if fooled[:, row].any() else int(values[:, row].argmax())
        assert torch.allclose(z[row], last_ball[first][row], atol=1e-9)
        assert torch.allclose(best[row], last_ball[int(values[:, row].argmax())][row], atol=1e-9)


@dataclass(frozen=True)
class Timed:
    """The cross-entropy, but every sample counts as fooled from a turn of its own on; goal and aim in one."""

    leave: torch.Tensor
    steps: int
    aim: Aim | None = None
    forwards: int = 0

    def __call__(self, model, x, y):
        return replace(self, aim=OnLogits()(model, x, y))

    def evaluate(self, z, progress):
        return self.aim.evaluate(z, progress)[0], self.leave < progress * self.steps + 0.5

    def keep(self, chosen):
        return replace(self, aim=self.aim.keep(chosen), leave=self.leave[chosen])


@pytest.mark.parametrize("norm", NORMS)
def test_samples_that_stop_do_not_change_the_others(norm):
    model, x, y = tiny(32)
    attack = APGD(make_threat(norm, BUDGETS[norm]), steps=40, stop_when_fooled=False)
    with recorded(model) as seen:
        attack(model, x, y)
    earliest, starts = (26, 2) if norm == "l1" else (9, 0)  # the two larger balls of L1 cost a look each
    leave = earliest + torch.arange(32) * 7 % (40 - earliest)
    z = replace(attack, goal=Timed(leave, 40), stop_when_fooled=True)(model, x, y)
    for row, turn in enumerate(leave.tolist()):
        assert torch.allclose(z[row], seen[turn + starts][row], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("build", [apgd_ce, apgd_t])
def test_the_rest_of_the_batch_does_not_matter(build, norm):
    model, x, y = tiny(16, classes=4)
    rng, attack = SampleRNG.of_samples(5, range(16)), build(make_threat(norm, 0.6 * BUDGETS[norm]), steps=25)
    whole = attack(model, x, y, rng)
    assert 0 < int((model(whole).argmax(1) == y).sum()) < 16
    for part in (torch.tensor([3]), torch.arange(16).flip(0), torch.tensor([8, 1, 15])):
        assert torch.allclose(attack(model, x[part], y[part], rng[part]), whole[part], atol=1e-9)


@pytest.mark.slow
def test_costs_what_it_says_and_nothing_twice():
    model, x, y = tiny(6, classes=4)
    for ball, balls, forwards in ((Linf(1e-6), 1, 1), (L2(1e-6), 1, 1), (L1(1e-6), 3, 4)):
        for attack, expected in (
            (APGD(ball, steps=20), (20, forwards)),
            (OverTargets(APGD(ball, TowardsRank(), steps=20), targets=3), (60, 3 * balls + 1)),
            (APGD(ball, TowardsRank(3), steps=20), (20, forwards + 1)),
        ):
            with count_passes(model) as cost:
                attack(model, x, y)
            assert attack.passes() == expected
            assert (cost.gradients, cost.forwards) == (6 * expected[0], 6 * expected[1])
    assert APGD(L1(1.0), random_start=False).passes() == (100, 3)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("build", [apgd_ce, apgd_dlr, apgd_t])
def test_labels_wrong_from_the_start_cost_one_look(build, norm):
    model, x, y = tiny(6)
    with count_passes(model) as cost:
        z = build(make_threat(norm, 1e-4))(model, x, (y + 1) % 3)
    assert (cost.gradients, cost.forwards) == (0, 6)
    assert (model(z).argmax(1) == y).all()
    if norm == "l1":
        assert torch.equal(z, x)


def test_fooled_samples_cost_nothing_any_more():
    model, x, y = tiny(40)
    attack = APGD(Linf(0.03), steps=50)
    with count_passes(model) as cost:
        _, standing = attack.search(model, x, y)
    assert 0 < len(standing) < 40
    assert 50 * len(standing) <= cost.gradients < 50 * len(standing) + 0.5 * 50 * (40 - len(standing))


class Broken(nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :4] * torch.nan


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("build", [apgd_ce, apgd_dlr, apgd_t])
def test_nothing_to_attack_and_nothing_to_climb_are_survived(build, norm):
    model, x, y = tiny(3, classes=4)
    ball = make_threat(norm, BUDGETS[norm])
    assert build(ball, steps=10)(model, x[:0], y[:0]).shape == (0, 3, 8, 8)
    z = build(ball, steps=10)(Broken(), x, y)
    assert z.isfinite().all()
    assert ball.size(z, x).max() <= ball.eps + 1e-6


# --- targets ---------------------------------------------------------------------------------------------------------


class Offsets(nn.Module):
    """Logits that start at the given heights and rise with the mean pixel, each at its own rate."""

    def __init__(self, heights: list[float], rates: list[float]) -> None:
        super().__init__()
        self.heights, self.rates = torch.tensor(heights), torch.tensor(rates)

    def forward(self, x):
        return self.heights + (x.flatten(1).mean(1, keepdim=True) - 0.5) * 10 * self.rates


GRAY, ZEROS = torch.full((4, 3, 4, 4), 0.5), torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize("classes", [3, 4, 5])
def test_targets_are_tried_in_the_order_of_the_clean_logits(classes):
    heights, rates = [0.0, -1.0, -2.0, -9.0, -10.0][:classes], [0.0, 0.0, 3.0, 0.0, 0.0][:classes]
    model = Offsets(heights, rates)  # only the class of rank 3 can be reached
    one, two = (OverTargets(APGD(Linf(0.1), random_start=False, steps=20), n) for n in (1, 2))
    assert (model(one(model, GRAY, ZEROS)).argmax(1) == 0).all()
    assert (model(two(model, GRAY, ZEROS)).argmax(1) == 2).all()
    assert (APGD(Linf(0.1), TowardsClass(ZEROS + 2), random_start=False)(model, GRAY, ZEROS) > 0.5).all()
    with count_passes(model) as cost:  # no more targets than wrong classes
        OverTargets(APGD(Linf(1e-3), steps=5), targets=99)(model, GRAY, ZEROS)
    assert cost.gradients == 4 * 5 * (classes - 1)


def test_any_wrong_class_counts_and_the_label_is_no_target():
    model = Offsets([0.0, -1.0, -2.0, -9.0], [0.0, 1.0, 3.0, 0.0])  # on the way to class 1, class 2 comes first
    z = OverTargets(APGD(Linf(0.07), random_start=False, steps=20), 1)(model, GRAY, ZEROS)
    assert (model(z).argmax(1) == 2).all()
    model = Offsets([0.0, 0.0, -2.0, -9.0], [0.0, 0.0, 5.0, 0.0])  # a tie: either order, the label is rank 1
    for y in (ZEROS, ZEROS + 1):
        aim = TowardsRank(2)(model, GRAY, y)
        assert torch.allclose(aim.evaluate(GRAY, 0.0)[0], torch.zeros(4))
        assert (APGD(Linf(0.1), TowardsRank(3), random_start=False)(model, GRAY, y) > 0.5).all()


# --- another library -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A small network on smooth patterns of ten classes under noise, and 200 images that it gets right."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        patterns = F.interpolate(torch.randn(10, 3, 4, 4), size=(8, 8), mode="bicubic")
        y = torch.arange(1300) % 10
        x = (0.5 + 0.12 * patterns[y] + 0.1 * torch.randn(1300, 3, 8, 8)).clamp(0, 1)
        head = (nn.Flatten(), nn.Linear(108, 32), nn.GELU(), nn.Linear(32, 10))
        model = nn.Sequential(nn.Conv2d(3, 12, 3, stride=2), nn.GELU(), *head)
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(10):
            for chosen in torch.randperm(1000).split(100):
                optimizer.zero_grad()
                F.cross_entropy(model(x[chosen]), y[chosen]).backward()
                optimizer.step()
    x, y = x[1000:], y[1000:]
    right = model.eval()(x).argmax(1) == y
    return model, x[right][:200], y[right][:200]


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "eps"), [("Linf", 0.05), ("L2", 0.4)])
@pytest.mark.parametrize("kind", ["ce", "dlr", "t"])
def test_as_strong_as_torchattacks(kind, norm, eps, trained):
    """Untargeted runs are restarted: from one random start to the next, each library varies by two or three samples."""
    torchattacks = pytest.importorskip("torchattacks")
    model, x, y = trained
    assert len(x) == 200
    ball, rng = make_threat(norm.lower(), eps), SampleRNG.of_samples(0, range(200))
    common = {"norm": norm, "eps": eps, "steps": 100}
    with torch.random.fork_rng():
        if kind == "t":
            theirs = torchattacks.APGDT(model, **common, n_restarts=1, n_classes=10)(x, y)
            ours = apgd_t(ball)(model, x, y, rng)
        else:
            theirs = torchattacks.APGD(model, **common, n_restarts=4, loss=kind)(x, y)
            ours = {"ce": apgd_ce, "dlr": apgd_dlr}[kind](ball, restarts=4)(model, x, y, rng)
    held_ours, held_theirs = (int((model(z).argmax(1) == y).sum()) for z in (ours, theirs))
    assert 20 < held_theirs < 180  # otherwise there is nothing to compare
    assert held_theirs - 5 <= held_ours <= held_theirs + 1


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: APGD(Linf(0.1), steps=0), "at least 1 step"),
        (lambda: APGD(Linf(0.1), rho=1.5), "rho must lie between 0 and 1, got 1.5"),
        (lambda: APGD(Linf(0.1), momentum=-1), "momentum must lie between 0 and 1"),
        (lambda: OverTargets(APGD(Linf(0.1)), 0), "targets must be at least 1"),
        (lambda: OverTargets(APGD(Linf(0.1), stop_when_fooled=False)), "stop_when_fooled=True"),
        (lambda: APGD(Linf(0.1), TowardsRank(5))(Offsets([0.0] * 4, [1.0] * 4), GRAY, ZEROS), "rank must lie"),
    ],
)
def test_impossible_settings_are_refused(build, message):
    with pytest.raises(UserError, match=message):
        build()


def test_restarts_wrap_the_whole_attack():
    for build in (apgd_ce, apgd_dlr, apgd_t):
        assert build(Linf(0.1), restarts=3) == Restarts(build(Linf(0.1)), 3)
        assert build(Linf(0.1), steps=7).passes()[0] == (63 if build is apgd_t else 7)
    assert apgd_dlr(L1(2.0)) == APGD(L1(2.0), OnLogits(dlr), steps=100)
