"""AutoAttack: which members, in which order, on which samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toys import TinyNet, images
from vitadel.attacks.apgd import APGD, OverTargets
from vitadel.attacks.autoattack.standard import autoattack, autoattack_plus, autoattack_rand
from vitadel.attacks.fab import FAB
from vitadel.attacks.square import Square
from vitadel.attacks.threats import L1, L2, Linf
from vitadel.attacks.wrappers import Averaged, Restarts, WorstOf
from vitadel.errors import UserError
from vitadel.evaluation.audit.audit import audit
from vitadel.runtime.rng import SampleRNG


@pytest.mark.parametrize("ball", [Linf(8 / 255), L2(0.5)])
def test_standard_is_the_reference_protocol(ball):
    ce, t, fab, square = autoattack(ball).attacks
    assert autoattack(ball).names == ("apgd-ce", "apgd-t", "fab-t", "square")
    assert isinstance(ce, APGD)
    assert ce.steps == 100
    assert isinstance(t, OverTargets)
    assert (t.targets, t.attack.steps) == (9, 100)
    assert isinstance(fab, FAB)
    assert (fab.targets, fab.steps, fab.restarts) == (9, 100, 1)
    assert isinstance(square, Square)
    assert square.queries == 5000
    gradients, forwards = autoattack(ball).passes()
    assert gradients == 100 + 900 + 900
    assert 5900 < forwards < 5960  # what the reference takes, without its checks


def test_l1_has_restarts_and_five_targets():
    ce, t, _, _ = autoattack(L1(12.0)).attacks
    assert isinstance(ce, Restarts)
    assert ce.times == 5
    assert isinstance(t, Restarts)
    assert t.attack.targets == 5


def test_plus_and_rand():
    plus = autoattack_plus(Linf(8 / 255))
    assert plus.names == ("apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t")
    assert [getattr(member, "times", getattr(member, "restarts", 1)) for member in plus.attacks] == [5, 5, 5, 1, 1, 1]
    rand = autoattack_rand(Linf(8 / 255))
    assert rand.names == ("apgd-ce", "apgd-dlr")
    assert all(isinstance(member, Averaged) and member.times == 20 for member in rand.attacks)


class Recorder:
    """Breaks the samples it is asked to (by their number, which is their first pixel), and remembers whom it saw."""

    def __init__(self, breaks: set[int]) -> None:
        self.breaks, self.seen = breaks, []

    def __call__(self, model, x, y, rng=None):
        numbers = (x[:, 0, 0, 0] * 100).round().long().tolist()
        self.seen.append(numbers)
        z = x.clone()
        for row, number in enumerate(numbers):
            if number in self.breaks:
                z[row, 0, 0, 1] = 1.0
        return z

    def passes(self):
        return 0, 0


class FallsToAWhitePixel(nn.Module):
    def forward(self, x):
        white = x[:, 0, 0, 1]
        return torch.stack([torch.full_like(white, 0.5), white], dim=1)


def test_each_member_sees_what_the_others_left():
    x = torch.zeros(5, 3, 4, 4)
    x[:, 0, 0, 0] = torch.arange(5) / 100
    members = (Recorder({1, 3}), Recorder({0}), Recorder({2, 3}))
    WorstOf(members)(FallsToAWhitePixel(), x, torch.zeros(5, dtype=torch.int64))
    assert [member.seen for member in members] == [[[0, 1, 2, 3, 4]], [[0, 2, 4]], [[2, 4]]]
    with pytest.raises(UserError, match="3 attacks need as many names, got 1"):
        WorstOf(members, ("alone",))


@pytest.mark.slow
def test_an_audit_runs_members_as_stages_and_agrees_with_the_attack_itself():
    name = "autoattack(steps=8,targets=3,queries=60)"
    results = audit("zoo:shapes-robust", attacks=[name], limit=24, eps="16/255", batch_size=5)
    entry = results["attacks"][0]
    assert [member["name"] for member in entry["members"]] == ["apgd-ce", "apgd-t", "fab-t", "square"]
    attacked = [member["attacked"] for member in entry["members"]]
    broken = [member["broken"] for member in entry["members"]]
    assert attacked[0] == entry["attacked"] == results["clean"]["correct"]
    assert attacked[1:] == [attacked[0] - sum(broken[:k]) for k in (1, 2, 3)]
    assert entry["held"] == attacked[0] - sum(broken)
    assert entry["gradient_calls"] == sum(member["gradient_calls"] for member in entry["members"])
    whole = audit("zoo:shapes-robust", attacks=[name], limit=24, eps="16/255", batch_size=24)
    assert abs(whole["worst_case"]["held"] - entry["held"]) <= 1


def test_called_directly_it_breaks_what_its_strongest_member_breaks():
    model, x = TinyNet(5).eval(), images(30)
    y = model(x).argmax(1)
    rng = SampleRNG.of_samples(0, range(30))
    ball = Linf(0.02)
    whole = model(autoattack(ball, steps=20, queries=100)(model, x, y, rng)).argmax(1) == y
    first = (
        model(autoattack(ball, steps=20, queries=100).attacks[0](model, x, y, rng.stream("member", 0))).argmax(1) == y
    )
    assert 0 < int(whole.sum()) < 30
    assert not (whole & ~first).any()
