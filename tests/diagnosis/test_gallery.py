"""The gallery: what its changes do in closed form, and that every member answers."""

from __future__ import annotations

import copy
import hashlib
import math
from collections import Counter
from functools import cache

import pytest
import torch

from vitadel.adapters.adapted_model import open_model
from vitadel.backbones.checkpoints import zoo_names
from vitadel.diagnosis.gallery import BROKEN_DEFENSES, HONEST_MODELS, held_out, pixels
from vitadel.diagnosis.gallery.inside import k_winners
from vitadel.diagnosis.run import DiagnosisRequest, examination_of
from vitadel.evaluation.engine.target import open_target
from vitadel.runtime.distributed import join_processes
from vitadel.runtime.rng import SampleRNG

base = cache(open_model)
LEVELS = torch.arange(256).double() / 255


def x(count: int = 2) -> torch.Tensor:
    return SampleRNG.of_samples(0, range(count)).stream("gallery").uniform(3, 32, 32)


def gradient(change, at: torch.Tensor) -> torch.Tensor:
    z = at.clone().requires_grad_()
    value = change(z).sum()
    return torch.autograd.grad(value, z)[0] if value.requires_grad else torch.zeros_like(z)


@pytest.mark.parametrize("members", [BROKEN_DEFENSES, HONEST_MODELS], ids=["broken", "honest"])
def test_half_of_every_family_is_held_out_by_a_rule_that_only_sees_names(members):
    names = [each.name for each in members]
    assert len(set(names)) == len(names)
    out = held_out(members)
    assert out == [each for each in members if each in held_out(members[::-1])]
    families, kept = Counter(each.family for each in members), Counter(each.family for each in out)
    assert kept == {family: (count + 1) // 2 for family, count in families.items()}
    for family in families:
        digests = {each: hashlib.sha256(each.name.encode()).hexdigest() for each in members if each.family == family}
        assert max(digests[each] for each in digests if each in out) < min(
            [digests[each] for each in digests if each not in out], default="~"
        )


def test_it_is_large_and_its_strengths_are_curves():
    assert len(BROKEN_DEFENSES) >= 50
    assert len(HONEST_MODELS) >= 20
    curves = Counter(each.kind for each in BROKEN_DEFENSES if each.strength is not None)
    assert sum(count >= 2 for count in curves.values()) >= 15
    rounded = [each.strength / 255 for each in BROKEN_DEFENSES if each.kind == "rounded pixels"]
    assert min(rounded) == pytest.approx(1e-6)
    assert max(rounded) == pytest.approx(8 / 255)


def test_honest_models_of_the_zoo_are_shipped():
    assert {each.name for each in HONEST_MODELS if each.family == "zoo"} == {
        name for name in zoo_names() if name.startswith("zoo:shapes-")
    }


@pytest.mark.parametrize("defense", BROKEN_DEFENSES, ids=lambda defense: defense.name)
def test_every_broken_defense_answers(defense):
    model = defense.build(copy.deepcopy(base(defense.base)))
    assert any(part.training for part in model.modules()) == ("train-mode" in defense.raises)
    with torch.no_grad():
        logits = model(x())
    assert logits.shape == (2, 10)
    assert logits.isfinite().all() or "non-finite-outputs" in defense.raises


@pytest.mark.parametrize(
    "model",
    [each for each in HONEST_MODELS if each.family not in ("zoo", "convolutions")],
    ids=lambda model: model.name,
)
def test_every_honest_model_answers_with_gradients_and_ignores_its_batch(model):
    built, images = model.make(), x()
    assert not any(part.training for part in built.modules())
    z = images.clone().requires_grad_()
    logits = built(z)
    assert torch.autograd.grad(logits.sum(), z)[0].flatten(1).abs().amax(1).min() > 0
    assert torch.allclose(logits[1:], built(images[1:]), atol=1e-1 if "bfloat16" in model.name else 1e-3)


@pytest.mark.slow
def test_a_convolutional_network_learns_shapes():
    (model,) = [each for each in HONEST_MODELS if each.name == "CNN, ReLU"]
    target = open_target(model.make(), "shapes")
    e = examination_of(target, DiagnosisRequest(limit=48), join_processes("cpu"))[0]
    assert e.share(e.correct) > 0.6


def test_staircases_in_closed_form():
    assert torch.allclose(pixels.stairs(1)(LEVELS), LEVELS)  # 8-bit images do not change
    assert pixels.stairs(4)(LEVELS).unique().numel() == 65
    smooth = pixels.smooth_stairs(2, 20)
    corners = LEVELS[::2]
    assert torch.allclose(smooth(corners), corners)
    # At the middle of a step the slope of the sigmoid is sharpness / 4, and the sigmoid is stretched to the whole step.
    steepest = torch.full((127,), 5 / math.tanh(20 / 4), dtype=torch.float64)
    assert torch.allclose(gradient(smooth, corners[:-1] + 1 / 255), steepest)
    assert gradient(smooth, corners[1:-1] + 1e-9).max() < 0.01
    fine = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    slopes = gradient(pixels.ramps(3, 0.2), fine)
    assert slopes.unique().tolist() == pytest.approx([0, 5])
    assert float((slopes > 0).double().mean()) == pytest.approx(0.2, abs=0.01)
    through = pixels.straight_through(pixels.rounded_to(4))
    assert torch.equal(through(LEVELS), pixels.rounded_to(4)(LEVELS))
    assert torch.equal(gradient(through, LEVELS), torch.ones_like(LEVELS))


def test_a_triangle_wave_points_back_half_of_the_time():
    fine = torch.linspace(0.10003, 0.9, 80_001, dtype=torch.float64)  # on no kink
    wave = pixels.triangle(2, 1.5)
    slopes = gradient(wave, fine)
    assert slopes.unique().tolist() == pytest.approx([-0.5, 2.5])
    assert float((slopes < 0).double().mean()) == pytest.approx(0.5, abs=0.01)
    assert float((wave(fine) - fine).abs().max()) * 255 == pytest.approx(0.75, abs=0.01)


def test_cosine_coefficients_are_orthonormal_and_cut():
    images = x().double()
    assert torch.allclose(pixels.in_blocks(lambda c: c)(images), images)
    norms = []
    pixels.in_blocks(lambda c: norms.append(c.norm()) or c)(images)
    assert norms[0] == pytest.approx(images.norm())
    mean = pixels.in_blocks(pixels.low_frequencies(1))(images)
    assert torch.allclose(mean[..., :8, :8], images[..., :8, :8].mean((2, 3), keepdim=True).expand(-1, -1, 8, 8))


def test_median_filter_and_k_winners():
    images = x().double()
    window = images[0, 0, 4:7, 9:12].flatten()
    assert pixels.median_of(3)(images)[0, 0, 5, 10] == window.sort().values[4]
    hidden = SampleRNG.of_samples(0, range(2)).normal(5, 40)
    kept = k_winners(0.1)(hidden)
    assert ((kept != 0).sum(-1) == 4).all()
    assert torch.equal(kept.amax(-1), hidden.amax(-1))
