"""Square: its schedule and its strokes by the paper, its results where the answer is known."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from toys import Constant, TinyNet, images, trained_toy
from vitadel.attacks.losses import margin
from vitadel.attacks.pgd import PGD
from vitadel.attacks.square import Square, _Bumps, _FlatSquares, _hill, share_of_pixels, square
from vitadel.attacks.threats import L1, L2, Linf
from vitadel.attacks.wrappers import Restarts
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes, judge
from vitadel.evaluation.selftest import LinearToy
from vitadel.runtime.rng import SampleRNG

BUDGETS = {Linf: 8 / 255, L2: 0.5, L1: 3.0}
BALLS = pytest.mark.parametrize("ball", BUDGETS, ids=lambda ball: ball.__name__)


class Witness(nn.Module):
    """Keeps every batch it sees and never changes its mind: nothing is ever accepted after the start."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x):
        self.seen.append(x.clone())
        return torch.tensor([[1.0, 0.0, 0.0]]).repeat(len(x), 1)


def witnessed(ball, queries: int, shape: tuple[int, ...], pixels: torch.Tensor | None = None, **settings):
    """(clean images, start, proposals (queries - 1, samples, ...)) of a search that accepts nothing."""
    x = torch.full(shape, 0.5) if pixels is None else pixels
    model = Witness()
    rng = SampleRNG.of_samples(4, range(len(x)))
    Square(ball, queries=queries, **settings)(model, x, torch.zeros(len(x), dtype=torch.int64), rng)
    assert len(model.seen) == queries + 1
    assert torch.equal(model.seen[0], x)
    return x, model.seen[1], torch.stack(model.seen[2:])


@pytest.mark.parametrize(
    ("query", "divisor"),
    [
        *[(0, 1), (10, 1), (11, 2), (50, 2), (51, 4), (200, 4), (201, 8), (500, 8), (501, 16), (1000, 16), (1001, 32)],
        *[(2000, 32), (2001, 64), (4000, 64), (4001, 128), (4999, 128), (6000, 128), (6001, 256), (8000, 256)],
        *[(8001, 512), (10_000, 512), (50_000, 512)],
    ],
)
def test_share_follows_the_papers_table(query, divisor):
    assert share_of_pixels(query) == 0.8 / divisor
    assert share_of_pixels(query, 0.1) == 0.1 / divisor
    if query <= 10_000 and query % 10 == 0:
        assert share_of_pixels(query // 10, rescale_from=1000) == 0.8 / divisor


def test_windows_end_as_large_as_the_literature_says():
    assert _FlatSquares(Linf(0.1)).side(share_of_pixels(4999), 32, 32) == 3
    assert _FlatSquares(Linf(0.1)).side(share_of_pixels(4999), 224, 224) == 18
    assert _FlatSquares(Linf(0.1)).side(share_of_pixels(0), 32, 32) == 29
    assert _FlatSquares(Linf(0.1)).side(share_of_pixels(0), 8, 200) == 8  # no larger than the image
    assert _Bumps(L2(1.0)).side(share_of_pixels(4999), 224, 224) == 19  # the next odd number
    assert _Bumps(L2(1.0)).side(share_of_pixels(4999), 32, 32) == 3


def sides(image: torch.Tensor, other: torch.Tensor) -> set[int]:
    rows, columns = torch.where((image != other).flatten(0, 1).any(0))
    return {int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1}


def test_linf_starts_with_vertical_stripes():
    x, start, _ = witnessed(Linf(0.1), 2, (6, 3, 9, 7))
    change = start - x
    assert torch.allclose(change.abs(), torch.full_like(x, 0.1))
    assert torch.equal(change, change[:, :, :1].expand_as(change))
    assert (change > 0).any()
    assert (change < 0).any()
    assert not torch.equal(change[0], change[1])


def test_linf_proposals_are_squares_of_one_sign_per_channel_everywhere():
    x, start, proposals = witnessed(Linf(0.1), 300, (4, 3, 16, 16))
    assert torch.allclose((proposals - x).abs(), torch.full_like(proposals, 0.1))
    corners: list[list[tuple[int, int]]] = [[], [], [], []]
    for query, batch in enumerate(proposals):
        side = round((share_of_pixels(query) * 256) ** 0.5)
        for sample, image in enumerate(batch):
            changed = image != start[sample]  # where the square's sign is not the stripe's
            if not changed.any():
                continue
            rows, columns = (changed.any(0).any(axis).nonzero().squeeze(1) for axis in (1, 0))
            assert torch.equal(rows, torch.arange(rows[0], rows[0] + side))  # stripes are vertical: no row escapes
            assert columns[-1] - columns[0] < side
            for channel in range(3):
                assert torch.equal(changed[channel, rows], changed[channel, rows[:1]].expand(side, 16))
                assert len(torch.unique(image[channel][changed[channel]])) <= 1
            corners[sample].append((int(rows[0]), int(rows[-1])))
    assert {first for spots in corners for first, _ in spots} >= {0, 1, 2, 3}
    assert {last for spots in corners for _, last in spots} >= {12, 13, 14, 15}  # the last place is used too
    assert corners[0] != corners[1]  # each sample has its own places


def test_rescaling_shrinks_the_windows_within_few_queries():
    _, start, slow = witnessed(Linf(0.1), 100, (1, 1, 32, 32))
    _, _, fast = witnessed(Linf(0.1), 100, (1, 1, 32, 32), rescale_schedule=True)
    assert max(sides(slow[-1], start)) > 8
    assert max(sides(fast[-1], start)) <= 2


@pytest.mark.parametrize("ball", [L2, L1], ids=["L2", "L1"])
@pytest.mark.parametrize("shape", [(3, 3, 12, 12), (2, 1, 7, 18), (2, 3, 18, 7), (2, 2, 3, 4)])
def test_bumps_keep_to_budget_and_box_and_spend_all_they_can(ball, shape):
    eps = 0.4 if ball is L2 else 1.5  # no pixel gets to the box
    x, start, proposals = witnessed(ball(eps), 40, shape)
    for z in (start, *proposals):
        assert not judge(Witness(), ball(eps), x, z, torch.ones(len(x))).void.any()
        assert ball(eps).size(z, x).min() >= eps * 0.999
    dark = images(2) * 0.2
    _, start, proposals = witnessed(ball(30.0), 40, (2, 3, 8, 8), dark)
    for z in (start, *proposals):
        assert not judge(Witness(), ball(30.0), dark, z, torch.ones(2)).void.any()


@pytest.mark.parametrize("ball", [L2, L1], ids=["L2", "L1"])
def test_bump_proposals_move_budget_into_a_window_from_another(ball):
    """Elsewhere an L2 proposal is the start times one factor; an L1 proposal grows in the first window only."""
    x, start, proposals = witnessed(ball(0.8), 260, (3, 3, 32, 32))
    emptied = 0
    for query in range(210, 259, 8):
        side = round((share_of_pixels(query) * 32 * 32) ** 0.5) | 1
        for before, after in zip(start - x, proposals[query] - x, strict=True):
            kept = before.abs() > 1e-3
            factor = (after[kept] / before[kept]).median() if ball is L2 else 1.0
            difference = (after - factor * before).abs() > 1e-4 if ball is L2 else after.abs() > before.abs() + 1e-4
            rows, columns = (difference.any(0).any(axis).nonzero().squeeze(1) for axis in (1, 0))
            windows = 2 if ball is L2 else 1
            assert 1 <= difference.any(0).sum() <= windows * side * side
            emptied += int(((after.abs() < 1e-7) & (before.abs() > 1e-3)).any())
            if ball is L1:
                assert rows[-1] - rows[0] < side
                assert columns[-1] - columns[0] < side
    assert emptied >= 18  # of 21: the second window may lie under the first


def test_hills_are_piled_rectangles():
    for height, width, steepness in [(1, 3, 2), (2, 3, 2), (4, 9, 2), (5, 9, 4), (1, 1, 2), (3, 6, 4)]:
        pile = torch.zeros(height, width, dtype=torch.float64)
        for layer in range(max(height, width) // 2 + 1):
            top, left = height // 2 - layer, width // 2 - layer
            pile[max(top, 0) : top + 2 * layer + 1, max(left, 0) : left + 2 * layer + 1] += (layer + 1.0) ** -steepness
        assert torch.allclose(_hill(height, width, steepness), pile)


@pytest.mark.parametrize("ball", [L2, L1], ids=["L2", "L1"])
@pytest.mark.parametrize("side", [1, 3, 6, 9])
def test_the_brush_has_length_one_and_two_opposite_halves(ball, side):
    brush = _Bumps(ball(1.0))._brush(side, torch.zeros(1))
    order = 2 if ball is L2 else 1
    assert torch.allclose(brush.abs().pow(order).sum((1, 2)), torch.ones(2))
    assert torch.equal(brush[1], brush[0].T)
    assert (brush[0][: side // 2] > 0).all()
    assert (brush[0][side // 2 :] < 0).all()
    lower = _hill(side - side // 2, side, 2 if ball is L2 else 4)
    assert torch.allclose(brush[0][side // 2 :] / brush[0].min(), (lower / lower.max()).float())


def linear_toy(spike: float = 0.0) -> tuple[LinearToy, torch.Tensor, torch.Tensor]:
    weight = SampleRNG.of_samples(0, [0]).normal(3 * 64)[0]
    weight[77] += spike
    x = 0.5 + 0.2 * (images(20) - 0.5)
    toy = LinearToy(weight, -0.5 * float(weight.sum()))
    return toy, x, toy(x).argmax(1)


@pytest.mark.parametrize(("ball", "generous"), [(Linf, 3.0), (L2, 6.0), (L1, 12.0)], ids=["Linf", "L2", "L1"])
def test_flips_with_a_generous_budget_and_never_below_the_distance(ball, generous):
    toy, x, y = linear_toy()
    distance = toy.distance(x, {Linf: "linf", L2: "l2", L1: "l1"}[ball])
    eps = float(distance.median())
    fooled = ~judge(toy, ball(eps), x, Square(ball(eps), queries=400)(toy, x, y), y).held
    assert not fooled[distance > eps].any()
    assert fooled[distance < eps / generous].all()
    assert (distance < eps / generous).any()
    most = float(distance.max()) * generous
    assert not judge(toy, ball(most), x, Square(ball(most), queries=400)(toy, x, y), y).held.any()


@BALLS
def test_more_queries_only_help(ball):
    model, x = TinyNet().eval(), images(20)
    y = model(x).argmax(1)
    rng = SampleRNG.of_samples(0, range(20))
    values = [margin(model(Square(ball(BUDGETS[ball]), q)(model, x, y, rng)), y).detach() for q in (1, 20, 150)]
    for fewer, more in itertools.pairwise(values):
        assert ((more >= fewer - 1e-5) | (more > 0)).all()
    assert values[2].mean() > values[1].mean() > values[0].mean()


@BALLS
def test_costs_one_forward_per_query_and_standing_sample(ball):
    model, x = TinyNet().eval(), images(12)
    y = model(x).argmax(1)
    attack = Square(ball(1e-5), queries=30)
    with count_passes(model) as cost:
        attack(model, x, y)
    assert (cost.gradients, cost.forwards) == tuple(12 * count for count in attack.passes()) == (0, 12 * 31)
    y[:5] = (y[:5] + 1) % 3
    with count_passes(model) as cost:
        z = attack(model, x, y)
    assert torch.equal(z[:5], x[:5])
    assert cost.forwards == 7 * 31 + 5
    with count_passes(model) as cost:
        z = Square(ball(10 * BUDGETS[ball]), queries=200)(model, x, y)
    assert (model(z).argmax(1) != y).all()
    assert cost.forwards < 12 * 100


def test_needs_no_gradient():
    """Rounded pixels: gradients are zero nearly everywhere, so PGD stands still, and random search does not care."""

    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TinyNet()

        def forward(self, z):
            return self.inner((z * 64).round() / 64)

    model, x = Rounded().eval(), images(20)
    y = model(x).argmax(1)
    stuck = PGD(Linf(0.1), steps=20, random_start=False)(model, x, y)
    assert torch.equal(stuck, x)
    z = Square(Linf(0.1), queries=400)(model, x, y)
    assert (model(z).argmax(1) != y).float().mean() > 0.5


@BALLS
@pytest.mark.parametrize("shape", [(3, 5, 9), (1, 11, 4), (3, 1, 6), (2, 2, 2)])
def test_any_image_shape_works(ball, shape):
    x = images(4, side=11).flatten(1)[:, : shape[0] * shape[1] * shape[2]].reshape(4, *shape)
    model = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 4))
    y = model(x).argmax(1)
    z = Square(ball(BUDGETS[ball]), queries=80)(model, x, y)
    assert z.shape == x.shape
    assert not judge(model, ball(BUDGETS[ball]), x, z, y).void.any()
    assert (z != x).flatten(1).any(1).all()


@pytest.mark.slow
@BALLS
def test_does_not_depend_on_the_rest_of_the_batch(ball):
    model, x = TinyNet(4).double().eval(), images(9).double()
    y = model(x).argmax(1)
    rng = SampleRNG.of_samples(3, range(9))
    attack = Square(ball(BUDGETS[ball]), queries=150)
    whole = attack(model, x, y, rng)
    for sample in range(9):
        here = torch.tensor([sample])
        assert torch.allclose(attack(model, x[here], y[here], rng[here]), whole[here], atol=1e-9)
    assert not torch.equal(attack(model, x, y, SampleRNG.of_samples(4, range(9))), whole)


@pytest.mark.slow
@BALLS
@pytest.mark.parametrize("classes", [2, 3, 4])
def test_hard_cases(ball, classes):
    model, x = TinyNet(classes).eval(), images(5)
    y = model(x).argmax(1)
    attack = Square(ball(BUDGETS[ball]), queries=70)
    constant = attack(Constant(), x, torch.tensor([0, 1, 2, 0, 1]))
    assert constant.isfinite().all()
    assert torch.equal(Square(ball(0.0))(model, x, y), x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = attack(model, x, y)
    assert z.dtype == torch.float32
    assert not z.requires_grad
    assert ball(1.0).size(z, x).max() <= BUDGETS[ball] + 1e-6


def test_builder_repeats():
    assert square(Linf(0.1), queries=7) == Square(Linf(0.1), queries=7)
    assert square(L1(1.0), restarts=3) == Restarts(Square(L1(1.0)), 3)


def test_user_errors_are_refused():
    with pytest.raises(UserError, match="at least 1 query"):
        Square(Linf(0.1), queries=0)
    with pytest.raises(UserError, match="share of the pixels"):
        Square(Linf(0.1), p_init=1.5)
    with pytest.raises(UserError, match="Linf, L2 or L1"):
        Square(object())
    with pytest.raises(UserError, match="batch, channels, height, width"):
        Square(Linf(0.1))(nn.Linear(4, 2), torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))


@pytest.mark.slow
@pytest.mark.parametrize(("ball", "eps"), [(Linf, 0.07), (L2, 0.9)], ids=["Linf", "L2"])
def test_agrees_with_torchattacks_but_for_the_last_place(ball, eps, monkeypatch):
    """Which never puts a window at the last row or column: on small images that leaves many pixels out of reach."""
    torchattacks = pytest.importorskip("torchattacks")  # which has no L1 version
    model, x, y = trained_toy()
    with torch.random.fork_rng():
        theirs = torchattacks.Square(
            model, norm=ball.__name__, eps=eps, n_queries=300, p_init=0.8, resc_schedule=False, seed=1
        )(x, y)
    reference = judge(model, ball(eps * (1 + 1e-5)), x, theirs, y).held.float().mean()
    assert 0.2 < reference < 0.8
    attack, rng = Square(ball(eps), queries=300), SampleRNG.of_samples(0, range(len(x)))
    assert judge(model, ball(eps), x, attack(model, x, y, rng), y).held.float().mean() < reference - 0.05

    def without_last(corner, length, like):
        places = (max(extent - length, 1) for extent in like.shape[-2:])
        first = [(corner[:, axis] * count).long().clamp(max=count - 1) for axis, count in enumerate(places)]
        return tuple(torch.arange(n) - spot[:, None] for n, spot in zip(like.shape[-2:], first, strict=True))

    monkeypatch.setattr("vitadel.attacks.square._positions", without_last)
    held = judge(model, ball(eps), x, attack(model, x, y, rng), y).held.float().mean()
    assert (held - reference).abs() < 0.08  # L2: it weighs windows over all channels, the paper by channel
