"""Wrappers ask each attack only for what is still standing."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from toys import images
from vitadel.attacks import Restarts, WorstOf
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes

EASY, MIDDLING, HARD = 0.2, 0.5, 0.8


class Bright(nn.Module):
    """Says 1 for an image brighter than one half."""

    def forward(self, x: Tensor) -> Tensor:
        score = x.mean((1, 2, 3)) - 0.5
        return torch.stack([-score, score], 1)


@dataclass(frozen=True)
class Paint:
    """Makes images white if their first pixel is below `power`; writes down whom it was asked about."""

    power: float
    asked: list[list[float]] = field(default_factory=list)

    def __call__(self, model, x, y, rng=None):
        marks = x[:, 0, 0, 0]
        self.asked.append([round(mark, 1) for mark in marks.tolist()])
        return torch.where((marks < self.power).view(-1, 1, 1, 1), torch.ones_like(x), x)

    def passes(self):
        return 3, 2


def batch() -> tuple[Tensor, Tensor]:
    x = torch.full((3, 3, 4, 4), 0.1)
    x[:, 0, 0, 0] = torch.tensor([EASY, MIDDLING, HARD])
    return x, torch.zeros(3, dtype=torch.int64)


def test_each_attack_sees_only_survivors():
    x, y = batch()
    weak, strong, last = Paint(0.3), Paint(0.6), Paint(0.0)
    model = Bright()
    with count_passes(model) as cost:
        z = WorstOf((weak, strong, last))(model, x, y)
    assert (weak.asked, strong.asked, last.asked) == ([[EASY, MIDDLING, HARD]], [[MIDDLING, HARD]], [[HARD]])
    assert torch.equal(z[:2], torch.ones_like(z[:2]))
    assert torch.equal(z[2], x[2])
    assert cost.forwards == 3 + 2  # looked at after the first and the second attack, not after the last
    assert WorstOf((weak, strong, last)).passes() == (9, 6 + 2)


def test_nothing_left_ends_it():
    x, y = batch()
    later = Paint(1.0)
    WorstOf((Paint(1.0), later, later))(Bright(), x, y)
    assert later.asked == []


def test_restarts_ask_again_for_survivors_with_other_draws():
    @dataclass(frozen=True)
    class Keys:
        seen: list[Tensor] = field(default_factory=list)

        def __call__(self, model, x, y, rng=None):
            self.seen.append(rng.keys)
            return x

        def passes(self):
            return 1, 0

    x, y = images(4) * 0.1, torch.zeros(4, dtype=torch.int64)
    attack = Keys()
    Restarts(attack, 3)(Bright(), x, y)
    assert len(attack.seen) == 3
    assert len(torch.stack(attack.seen).unique()) == 12
    assert Restarts(attack, 3).passes() == (3, 2)


@dataclass(frozen=True)
class PaintWithInfo(Paint):
    """Paints, and reports its power and each image's mark; `name` is what it calls the latter."""

    name: str = "mark"

    def run_with_info(self, model, x, y, rng=None):
        marks = x[:, 0, 0, 0]
        return self(model, x, y, rng), {self.name: marks, "strong": marks < self.power, "at": marks.mul(10).long()}


def test_notes_are_those_of_the_last_attack_that_a_sample_met():
    x, y = batch()
    weak, strong = PaintWithInfo(0.3), PaintWithInfo(0.9, name="other")
    z, notes = WorstOf((weak, strong)).run_with_info(Bright(), x, y)
    assert torch.equal(z, WorstOf((weak, strong))(Bright(), x, y))
    assert notes["mark"].tolist() == pytest.approx([EASY, MIDDLING, HARD])
    assert notes["other"][1:].tolist() == pytest.approx([MIDDLING, HARD])
    assert notes["other"][0].isnan()  # it never met the second one
    assert notes["strong"].tolist() == [True, True, True]
    assert notes["at"].tolist() == [2, 5, 8]
    assert WorstOf((Paint(0.3), strong)).run_with_info(Bright(), x, y)[1]["at"].tolist() == [-1, 5, 8]
    _, again = Restarts(weak, 2).run_with_info(Bright(), x, y)
    assert again["strong"].tolist() == [True, False, False]
    assert Restarts(Paint(0.3), 2).run_with_info(Bright(), x, y)[1] == {}


def test_an_empty_ensemble_is_refused():
    with pytest.raises(UserError, match="at least one"):
        WorstOf(())
