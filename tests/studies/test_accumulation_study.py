"""Climbs on a linear model, whose gradient is the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from two_patterns import GRAY, Faint, Patterned, pattern, patterned

from vitadel.errors import UserError
from vitadel.evaluation.engine.target import open_target
from vitadel.runtime.distributed import join_processes
from vitadel.studies import reference_models
from vitadel.studies.accumulation import AccumulationRequest, Ascent, Canvases, ascend, study_accumulation
from vitadel.studies.run import SHOWN

CPU = join_processes("cpu")


@pytest.mark.parametrize("objective", ["logit", "probability"])
def test_a_climb_goes_straight_and_stops_at_the_box(objective):
    model, y = Patterned(0.01), torch.tensor([0, 1])
    start = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    z, course = ascend(model, start, y, 30, Ascent(objective, 0.02))
    signs = torch.stack([pattern(), -pattern()])
    torch.testing.assert_close(z, (start + 30 * 0.02 * signs).clamp(0, 1), atol=1e-5, rtol=0)
    assert course.shape == (2, 31)
    for step in (0, 7, 30):
        there = (start + step * 0.02 * signs).clamp(0, 1)
        wanted = model(there).softmax(1)[[0, 1], [0, 1]]
        torch.testing.assert_close(course[:, step], wanted.detach(), atol=1e-5, rtol=0)
    assert bool((course.diff(dim=1) > 0).all())


def test_the_preset_of_the_thesis_takes_sign_steps_in_a_ball_that_bounds_nothing():
    """1.5 * 15 / 100 in every pixel, whatever the gradient's length: from anywhere, five steps cross the whole box."""
    ascent = AccumulationRequest(preset="paper").ascent
    assert ascent == Ascent("probability", 0.225, signs=True)
    start = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    uneven = pattern() * torch.linspace(0.1, 3, 8)  # signs of a gradient, not its sizes
    moved = ascent.move(start, torch.stack([uneven, -uneven]))
    signs = torch.stack([pattern(), -pattern()])
    torch.testing.assert_close(moved, (start + 0.225 * signs).clamp(0, 1))
    z, _ = ascend(Patterned(0.01), start, torch.tensor([0, 1]), 5, ascent)
    torch.testing.assert_close(z, (signs + 1) / 2)
    assert AccumulationRequest().ascent == Ascent("logit", 0.01)


def test_a_model_without_gradients_leaves_the_picture_alone():
    start = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    z, course = ascend(Patterned(0.0), start, torch.tensor([1]), 3, Ascent(step=0.1))
    assert torch.equal(z, start)
    assert course.tolist() == [[0.5] * 4]


def test_canvases_are_every_class_and_then_again():
    canvases = Canvases(("a", "b", "c"), (2, 0), 3, (4, 6))
    assert canvases.labels().tolist() == [2, 0, 2, 0, 2, 0]
    assert canvases.read([0])[0].size == (6, 4)
    assert canvases.name(3) == "start 1 of a"


def test_everyone_sees_the_class_and_all_begin_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(reference_models, "open_model", lambda spec: patterned(2.0))
    request = AccumulationRequest(starts=3, steps=20, step=0.05, start="grey", others=("twin",), batch_size=4)
    results = study_accumulation(open_target(patterned(), Faint()), request, CPU, out=tmp_path / "run").results
    reported = results["study"]
    assert (reported["n"], [each["name"] for each in reported["classes"]]) == (6, ["pattern", "opposite"])
    for maker in reported["models"]:
        assert maker["confidence"]["median"][-1] == pytest.approx(1)
        assert len(maker["confidence"]["median"]) == 21
        for seen in maker["seen_by"]:
            assert (seen["pictures"]["top1"]["right"], seen["pictures"]["top1"]["n"]) == (6, 6)
            assert seen["dealt"]["top1"]["accuracy"] == 0.5
    first, second = (maker["seen_by"][0]["start"] for maker in reported["models"])
    assert first == second
    with np.load(tmp_path / "run" / "study.npz", allow_pickle=False) as arrays:
        pictures = arrays["pictures 0"]
    assert len(pictures) == 2 <= SHOWN
    assert np.abs(pictures[0] - 255.0 * (pattern().numpy() > 0)).max() <= 1
    assert GRAY == 128


def test_wrong_requests_are_refused(tmp_path):
    for settings, words in (
        ({"start": "nois"}, "did you mean noise"),
        ({"objective": "loss"}, "Known: logit, probability"),
        ({"preset": "papers"}, "did you mean paper"),
        ({"preset": "paper", "step": 0.1}, "'paper' decides start, objective and step"),
        ({"steps": 0}, "at least 1"),
        ({"classes": (1, 1)}, "different numbers"),
    ):
        with pytest.raises(UserError, match=words):
            AccumulationRequest(**settings)
    request = AccumulationRequest(classes=(5,))
    with pytest.raises(UserError, match="no class 5"):
        study_accumulation(open_target(patterned(), Faint()), request, CPU, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
