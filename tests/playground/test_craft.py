"""One image, one attack: on a linear model everything is known in closed form."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn

from vitadel.attacks.parse import make
from vitadel.errors import UserError
from vitadel.evaluation.engine.target import open_target
from vitadel.playground.craft import (
    AttackForm,
    ReportProgress,
    craft,
    perturbation_image,
    predict,
    prepare_attack,
    transfer,
)
from vitadel.playground.models import OpenedModel
from vits import make_vit

CPU = torch.device("cpu")
SIDE, CELLS = 4, 48


class Line(nn.Module):
    """Logits (0, s) with s = sum(w x) + b, w of +-1: an Linf step of eps changes s by 48 eps."""

    def __init__(self, score_at_gray: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -1.0]).repeat(CELLS // 2).view(1, 3, SIDE, SIDE))
        self.score = score_at_gray

    def forward(self, x: Tensor) -> Tensor:
        s = (self.w * (x - 0.5)).sum((1, 2, 3)) + self.score
        return torch.stack([torch.zeros_like(s), s], 1)


def gray(side: int = SIDE) -> Tensor:
    return torch.full((1, 3, side, side), 0.5)


def crafted_on(model: nn.Module, form: AttackForm, x: Tensor | None = None):  # type: ignore[no-untyped-def]
    return craft(model, gray() if x is None else x, make(form.attack, eps=form.eps, norm=form.norm), form)


def logistic(s: float) -> float:
    return 1 / (1 + math.exp(-s))


@pytest.mark.parametrize(("score", "fooled"), [(1.0, True), (2.0, False)])
def test_closed_form(score: float, fooled: bool) -> None:
    eps = 8 / 255  # takes 48 * 8 / 255 = 1.506 from the score
    crafted = crafted_on(Line(score), AttackForm("fgsm", eps))
    assert (crafted.before.answer, crafted.after.answer) == (1, 0 if fooled else 1)
    assert (crafted.fooled, crafted.void) == (fooled, False)
    assert float(crafted.before.probabilities[1]) == pytest.approx(logistic(score), abs=1e-6)
    assert float(crafted.after.probabilities[1]) == pytest.approx(logistic(score - CELLS * eps), abs=1e-5)
    assert crafted.size("linf") == pytest.approx(eps, abs=1e-6)
    assert crafted.size("l2") == pytest.approx(eps * math.sqrt(CELLS), abs=1e-5)
    assert crafted.size("l1") == pytest.approx(eps * CELLS, abs=1e-4)
    assert (crafted.gradients, crafted.forwards) == (1, 0)
    kept = load(crafted.safetensors())
    assert torch.equal(kept["clean"], gray())
    assert torch.equal(kept["adversarial"], crafted.z)


def test_l2_goes_straight_to_the_boundary() -> None:
    crafted = crafted_on(Line(1.0), AttackForm("fgsm", 0.2, "l2"))
    assert crafted.size("l2") == pytest.approx(0.2, abs=1e-5)
    assert float(crafted.after.probabilities[1]) == pytest.approx(logistic(1 - 0.2 * math.sqrt(CELLS)), abs=1e-5)


def test_without_budget_nothing_changes() -> None:
    crafted = crafted_on(Line(1.0), AttackForm("pgd-3", 0.0))
    assert torch.equal(crafted.x, crafted.z)
    assert not crafted.fooled
    change, factor = perturbation_image(crafted)
    assert torch.equal(change, torch.full((3, SIDE, SIDE), 0.5))
    assert factor == 1


def test_perturbation_is_scaled_to_fill_the_range() -> None:
    model = Line(1.0)
    change, factor = perturbation_image(crafted_on(model, AttackForm("fgsm", 4 / 255)))
    assert factor == pytest.approx(255 / 8, rel=1e-4)
    # The attack lowers s: black where w is +1, white where it is -1.
    assert torch.allclose(change, (0.5 - 0.5 * model.w.detach()[0]), atol=1e-4)


def test_what_leaves_the_budget_counts_for_nothing() -> None:
    class Cheat:
        def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: object = None) -> Tensor:
            return (x - 0.4 * model.get_parameter("w").detach()).clamp(0, 1)

        def passes(self) -> tuple[int, int]:
            return 0, 0

    crafted = craft(Line(1.0), gray(), Cheat(), AttackForm())
    assert (crafted.after.answer, crafted.fooled, crafted.void) == (0, False, True)


def test_rounding_to_8_bits_can_undo_an_attack() -> None:
    levels = torch.full((1, 3, SIDE, SIDE), 128 / 255)  # sum(w x) does not change: w adds up to zero
    tiny = crafted_on(Line(0.01), AttackForm("fgsm", 0.4 / 255), levels)
    assert (tiny.fooled, tiny.picture_fools) == (True, False)
    assert bool((tiny.picture == 128).all())
    whole = crafted_on(Line(0.01), AttackForm("fgsm", 1 / 255), levels)
    assert (whole.fooled, whole.picture_fools) == (True, True)
    assert sorted(whole.picture.unique().tolist()) == [127, 129]


def test_every_pass_is_reported_and_no_hook_stays() -> None:
    model, reported = Line(100.0), []
    form = AttackForm("pgd-5(random_start=false)", 1 / 255)
    craft(model, gray(), make(form.attack, eps=form.eps), form, lambda done, most: reported.append((done, most)))
    assert reported == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    assert not model._forward_hooks


def test_transfer_to_itself_and_to_its_opposite() -> None:
    made = crafted_on(Line(1.0), AttackForm("fgsm", 8 / 255))
    same = transfer(made, Line(1.0), (SIDE, SIDE), CPU)
    assert (same.fooled, same.resized) == (True, False)
    assert torch.equal(same.after.probabilities, made.after.probabilities)
    opposite = Line(1.0)
    opposite.w.data.neg_()  # what lowers one score raises the other
    moved = transfer(made, opposite, (SIDE, SIDE), CPU)
    assert not moved.fooled
    assert float(moved.after.probabilities[1]) == pytest.approx(logistic(1 + CELLS * 8 / 255), abs=1e-5)


def test_transfer_to_another_size_averages_the_checkerboard_away() -> None:
    made = crafted_on(Line(1.0), AttackForm("fgsm", 8 / 255))

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[2:] == (2, 2)
            return torch.stack([x.mean((1, 2, 3)), 1 - x.mean((1, 2, 3))], 1)

    moved = transfer(made, Mean(), (2, 2), CPU)
    assert moved.resized
    assert torch.allclose(moved.before.probabilities, moved.after.probabilities, atol=1e-6)


def test_models_without_a_map_say_why() -> None:
    swin = predict(make_vit("swin", img_size=64), torch.full((1, 3, 64, 64), 0.5))
    assert swin.attention is None
    assert "windows" in swin.no_attention
    line = predict(Line(1.0), gray())
    assert line.attention is None
    assert "no anatomy known" in line.no_attention


def opened(**changes: object) -> OpenedModel:
    target = open_target("zoo:shapes-standard", "shapes")
    names = tuple(target.source.classes)
    return replace(OpenedModel(target, names, True, CPU), **changes)  # type: ignore[arg-type]


def test_attacks_that_study_the_model_are_made_ready_on_its_own_data() -> None:
    reported: list[tuple[int, int | None]] = []
    attack = prepare_attack(
        opened(), AttackForm("aas(images=8,steps=1,select=false)+fgsm"), 0, lambda *got: reported.append(got)
    )
    assert len(attack.factors) == 6  # type: ignore[attr-defined]
    assert reported
    assert all(most is None for _, most in reported)
    with pytest.raises(UserError, match=r"calibrates on images of the model's own data.*--data SPEC"):
        prepare_attack(opened(knows_data=False), AttackForm("aas+fgsm"))


@pytest.mark.parametrize("report", [None, lambda *_: None])
def test_a_study_is_bounded_too(monkeypatch: pytest.MonkeyPatch, report: ReportProgress | None) -> None:
    # 8 images, once for saturated attention, once as they are and three times on the way
    form = AttackForm("aas(images=8,steps=3,search=ascent,select=false)+fgsm")
    monkeypatch.setattr("vitadel.playground.craft.MOST_PASSES", 40)
    prepare_attack(opened(), form, 0, report)
    monkeypatch.setattr("vitadel.playground.craft.MOST_PASSES", 39)
    beyond = opened()
    with pytest.raises(UserError, match=r"calibrates with more than 39 passes.*Use fewer images or steps"):
        prepare_attack(beyond, form, 0, report)
    assert not beyond.target.model._forward_hooks


def test_hours_are_refused_beforehand() -> None:
    with pytest.raises(UserError, match="may take 1,000,000 passes"):
        prepare_attack(opened(), AttackForm("pgd-1000000"))
