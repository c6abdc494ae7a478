"""The saturated codebook of the gallery has no gradient in pixels, but a search without gradients breaks it."""

from __future__ import annotations

import pytest
import torch

from vitadel.attacks.parse import make
from vitadel.data.batches import read_batches
from vitadel.evaluation.engine.target import open_target
from vitadel.runtime.rng import SampleRNG


@pytest.mark.slow
def test_square_breaks_what_gradients_do_not():
    target = open_target("python:vitadel.diagnosis.gallery:saturated_codebook", "shapes")
    indices = target.selection(40, 0, False)[0][:12]
    (batch,) = read_batches(target.source, [indices.tolist()], target.preprocess)
    model, left = target.model, {}
    for name in ("pgd-20", "square"):
        z = make(name)(model, batch.x, batch.y, SampleRNG.of_samples(0, indices))
        with torch.no_grad():
            left[name] = int((model(z).argmax(1) == batch.y).sum())
    assert left["pgd-20"] >= 11
    assert left["square"] == 0
