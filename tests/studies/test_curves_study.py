"""Curves: what is one run and what is several, when a sample fell, and rises told."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from toys import images
from vitadel.attacks.parse import make, read_attack_name
from vitadel.attacks.threats import Linf
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import judge
from vitadel.runtime.rng import SampleRNG
from vitadel.studies.curves import CurvesRequest, Timed, beginnings, rises, variant


class Bright(nn.Module):
    """Class 1 from a mean brightness on: each step of PGD takes an image as far as its length says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.full((len(x),), 0.5), x.flatten(1).mean(1)], 1)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("pgd", "pgd-7"),
        ("pgd-100", "pgd-7"),
        ("aas(images=64)+PGD-3(step=1/255,random_start=false)", None),
        ("gama(guide=init)", "gama-7(guide=init)"),
    ],
)
def test_another_number_of_steps_is_the_only_difference(text: str, named: str | None) -> None:
    before, after = read_attack_name(text), read_attack_name(variant(text, 7))
    assert after.settings == {**before.settings, "steps": 7}
    assert (after.base, after.prefixes) == (before.base, before.prefixes)
    assert named is None or variant(text, 7) == named


def test_only_runs_with_one_length_of_step_are_beginnings_of_each_other() -> None:
    def groups(text: str, eps: float = 8 / 255) -> list[list[int]]:
        return beginnings({steps: make(variant(text, steps), eps=eps) for steps in (1, 2, 5, 10, 20, 50)})

    # The usual length is 2.5 eps / K, but at least 2/255, which at 8/255 it is from ten steps on.
    assert groups("pgd") == [[1], [2], [5], [10, 20, 50]]
    assert groups("pgd(step=1/255)") == [[1, 2, 5, 10, 20, 50]]
    assert groups("cw", eps=64 / 255) == [[1], [2], [5], [10], [20], [50]]
    for schedule in ("gama", "mifpe", "mi-fgsm", "apgd-ce", "scale:0.1+pgd(step=1/255)", "pgd(step=1/255,restarts=2)"):
        assert all(len(group) == 1 for group in groups(schedule))
    assert groups("mi-fgsm(step=1/255)") == [[1, 2, 5, 10, 20, 50]]


def test_a_sample_is_noted_at_the_step_at_which_it_falls() -> None:
    # Steps of 0.01 in brightness, from 0.5 - d: class 1 needs more than d, so 1 + floor(d / 0.01) steps.
    distance = torch.tensor([0.005, 0.015, 0.035, 0.075])
    x = (0.5 - distance)[:, None, None, None].expand(4, 3, 4, 4).contiguous()
    y = torch.zeros(4, dtype=torch.int64)
    search = make("pgd-6(step=0.01,random_start=false)", eps=0.2)
    _, notes = Timed(search).run_with_info(Bright(), x, y)
    assert notes["turn"].tolist() == [1, 2, 4, 6]


@pytest.mark.parametrize("text", ["pgd-8(step=1/255)", "kl-8(step=1/255)", "mi-fgsm-8(step=1/255)"])
def test_a_long_run_judged_on_its_way_is_the_short_run(text: str) -> None:
    torch_model = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, 3))
    for number, weight in enumerate(torch_model.parameters()):
        weight.data = 0.4 * SampleRNG.of_samples(number, range(len(weight))).normal(*weight.shape[1:])
    x = images(24)
    with torch.no_grad():
        y = torch_model(x).argmax(1)
    rng, threat = SampleRNG.of_samples(0, range(24)), Linf(8 / 255)
    z, notes = Timed(make(text, eps=threat.eps)).run_with_info(torch_model, x, y, rng)
    held = judge(torch_model, threat, x, z, y).held
    fallen = []
    for steps in range(1, 9):
        short = make(variant(text, steps), eps=threat.eps)(torch_model, x, y, rng)
        expected = judge(torch_model, threat, x, short, y).held
        assert (held | (notes["turn"] > steps)).tolist() == expected.tolist()
        fallen.append(int((~expected).sum()))
    assert fallen[0] < fallen[-1]  # or there would be nothing to tell apart


def test_rises_are_reported_and_falls_are_not() -> None:
    several = [range(9), range(7), [*range(6), 20, 21], range(8), range(3), range(8)]
    one, other = rises(list("abcdef"), [torch.tensor(list(held)) for held in several])
    assert (one["from"], one["to"], one["images"], one["clear"]) == ("b", "c", 1, False)
    assert one["p"] == pytest.approx(4 / 8)  # two of three images on which they differ, or all three
    assert (other["from"], other["to"], other["images"], other["clear"]) == ("e", "f", 5, True)
    assert other["p"] == pytest.approx(1 / 32)


def test_points_by_default_and_user_errors() -> None:
    assert CurvesRequest().points == pytest.approx([0, 1 / 255, 2 / 255, 4 / 255, 8 / 255, 16 / 255])
    assert CurvesRequest(eps=0.6).points[-1] == 0.6  # twice that is beyond any pixel
    assert CurvesRequest(eps=0.6, norm="l2").points[-1] == 1.2
    assert CurvesRequest(attack="fgsm").counts == ()
    assert CurvesRequest(attack="pgd-50").usual_steps == 50
    for wrong, said in [
        ({"budgets": (0.1, 0.1)}, "--budgets must rise"),
        ({"steps": (0, 2)}, "--steps must rise, from 1"),
        ({"attack": "fgsm", "steps": (2,)}, "takes no number of steps"),
        ({"attack": "patch-fool"}, "its own threat model"),
        ({"attack": "pdg"}, "did you mean pgd"),
        ({"eps": 0.0}, "above 0"),
        ({"budgets": (), "steps": (), "restarts": ()}, "no curve to compute"),
    ]:
        with pytest.raises(UserError, match=said):
            dataclasses.replace(CurvesRequest(), **wrong)
