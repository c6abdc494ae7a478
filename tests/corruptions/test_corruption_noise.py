"""Random fields and noise: that they follow the distributions they are named after."""

from __future__ import annotations

import pytest
import torch

from vitadel.corruptions import corrupt, noise
from vitadel.corruptions.randomness import between, normal_field, uniform_field, words
from vitadel.runtime.rng import SampleRNG

stats = pytest.importorskip("scipy.stats")


def test_fields_follow_their_distributions():
    rng = SampleRNG.of_samples(0, range(4))
    assert stats.kstest(normal_field(rng, 20_001).flatten().numpy(), "norm").pvalue > 1e-3
    assert stats.kstest(uniform_field(rng, 20_001).flatten().numpy(), "uniform").pvalue > 1e-3
    angles = between(SampleRNG.of_samples(0, range(5000)), -45, 45)
    assert stats.kstest(angles.numpy(), "uniform", (-45, 90)).pvalue > 1e-3


def test_the_two_halves_of_a_pair_are_independent():
    field = normal_field(SampleRNG.of_samples(7, [0]), 200_000)[0]
    first, second = field[:100_000], field[100_000:]
    for one, other in ((first, second), (first.square(), second.square()), (first[1:], first[:-1])):
        assert abs(torch.corrcoef(torch.stack((one, other)))[0, 1]) < 0.015


def test_a_field_belongs_to_its_sample():
    both = normal_field(SampleRNG.of_samples(0, [3, 9]), 3, 33, 31)
    assert torch.equal(both[1:], normal_field(SampleRNG.of_samples(0, [9]), 3, 33, 31))
    assert not torch.equal(both[0], both[1])
    assert words(SampleRNG.of_samples(0, [1]), 5).shape == (1, 5)


def test_words_are_the_bits_of_the_streams():
    rng = SampleRNG.of_samples(3, [0, 5, 2**40])
    assert torch.equal(words(rng, 3, 334), rng.bits(501).view(torch.int32).view(3, 3, 334))
    assert torch.equal(words(rng, 7), rng.bits(4).view(torch.int32)[:, :7])


@pytest.mark.parametrize("photons", [3, 60, 500])
@pytest.mark.parametrize("level", [0, 1, 130, 255])
def test_shot_noise_counts_photons(photons, level):
    count = 60_000
    pixels = torch.full((1, 3, 100, 200), level, dtype=torch.uint8)
    found = noise.shot_noise(pixels, SampleRNG.of_samples(level, [0]), photons).flatten()
    rate = level / 255 * photons
    values = torch.arange(int(rate + 10 * rate**0.5 + 20))
    levels = (values / photons).clamp(max=1).double().mul(255).add(1e-9).floor()
    chances = torch.zeros(256, dtype=torch.float64)
    chances.index_add_(0, levels.long(), torch.from_numpy(stats.poisson.pmf(values.numpy(), rate)))
    counts = torch.bincount(found.long(), minlength=256)
    assert counts[chances < 1e-12].sum() == 0
    common = chances * count > 10
    if common.sum() > 1:
        expected = chances[common] * (counts[common].sum() / chances[common].sum())
        assert stats.chisquare(counts[common].double().numpy(), expected.numpy()).pvalue > 1e-4
    else:
        assert counts[common] == count


def test_impulses_hit_every_channel_on_its_own_and_go_both_ways():
    pixels = torch.full((1, 3, 200, 200), 100, dtype=torch.uint8)
    found = noise.impulse_noise(pixels, SampleRNG.of_samples(0, [0]), 0.2)
    for end in (0, 255):
        assert abs((found == end).float().mean() - 0.1) < 4 * (0.1 * 0.9 / 120_000) ** 0.5
    assert ((found == 0) | (found == 255) | (found == 100)).all()
    hit = (found != 100)[0]
    assert abs((hit[0] & hit[1]).float().mean() - 0.04) < 4 * (0.04 / 40_000) ** 0.5


@pytest.mark.parametrize(("name", "spread"), [("gaussian_noise", 0.04 * 255), ("speckle_noise", 0.06 * 128)])
def test_the_spread_of_additive_noise(name, spread):
    x = torch.full((2, 3, 32, 32), 128 / 255)
    change = (corrupt(x, name, 1, SampleRNG.of_samples(0, range(2))) - x).mul(255).double()
    count = change.numel()
    assert abs(change.mean() + 0.5) < 4 * spread / count**0.5  # cutting to 8 bits costs half a level
    assert abs(change.std() / (spread**2 + 1 / 12) ** 0.5 - 1) < 4 / (2 * count) ** 0.5


def test_every_severity_has_its_own_stream():
    x = torch.full((1, 3, 32, 32), 0.5)
    first, second = (corrupt(x, "gaussian_noise", severity, SampleRNG.of_samples(0, [0])) - x for severity in (1, 2))
    assert abs(torch.corrcoef(torch.stack((first.flatten(), second.flatten())))[0, 1]) < 0.08
