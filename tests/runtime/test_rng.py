"""Random numbers belong to (seed, sample, stream) and to nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from vitadel.runtime.rng import SampleRNG


def splitmix64(state: int) -> int:
    """One output of the published generator, in plain Python integers."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_bits_are_those_of_splitmix64():
    keys = torch.tensor([0, 1234567, -5], dtype=torch.int64)
    bits = SampleRNG(keys).bits(3)
    golden = 0x9E3779B97F4A7C15
    for row, key in enumerate(keys.tolist()):
        for place in range(3):
            expected = splitmix64((key + place * golden) % 2**64)
            assert bits[row, place].item() % 2**64 == expected
    assert (
        SampleRNG(torch.tensor([0])).bits(1).item() % 2**64 == 0xE220A8397B1DCDAF
    )  # the generator's known first output


def test_a_sample_draws_the_same_in_every_batch():
    whole = SampleRNG.of_samples(7, range(100))
    for size in (1, 7, 64):
        parts = [SampleRNG.of_samples(7, range(a, min(a + size, 100))).stream("x", 2) for a in range(0, 100, size)]
        assert torch.equal(torch.cat([p.uniform(3, 4) for p in parts]), whole.stream("x", 2).uniform(3, 4))


def test_large_draws_agree_with_small_ones():
    rng = SampleRNG.of_samples(1, range(5))
    assert torch.equal(rng.uniform(700_000)[:, :10], rng.uniform(10))


def test_seed_sample_and_stream_all_matter():
    base = SampleRNG.of_samples(0, [3]).uniform(8)
    others = [
        SampleRNG.of_samples(1, [3]),
        SampleRNG.of_samples(0, [4]),
        SampleRNG.of_samples(0, [3]).stream("a"),
        SampleRNG.of_samples(0, [3]).stream("b"),
        SampleRNG.of_samples(0, [3]).stream("a", 1),
        SampleRNG.of_samples(0, [3]).stream("a", 2),
    ]
    values = [base, *(rng.uniform(8) for rng in others)]
    for i, first in enumerate(values):
        for second in values[i + 1 :]:
            assert not torch.equal(first, second)


def test_uniform_normal_signs_and_integers_have_their_distributions():
    rng = SampleRNG.of_samples(2, range(200))
    n = 200 * 500
    uniform = rng.stream("u").uniform(500)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 5 / math.sqrt(12 * n)
    normal = rng.stream("n").normal(500)
    assert abs(normal.mean()) < 5 / math.sqrt(n)
    assert abs(normal.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((normal.abs() < 1.959964).float().mean() - 0.95) < 5 * math.sqrt(0.95 * 0.05 / n)
    signs = rng.stream("s").signs(500)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(signs.mean()) < 5 / math.sqrt(n)
    integers = rng.stream("i").integers(7, 500)
    counts = torch.bincount(integers.flatten(), minlength=7)
    assert len(counts) == 7
    assert ((counts - n / 7) ** 2 / (n / 7)).sum() < 30  # chi-squared, 6 degrees of freedom


def test_neighbouring_samples_and_streams_are_uncorrelated():
    rng = SampleRNG.of_samples(0, range(1000))
    rows = rng.uniform(50) - 0.5
    limit = 5 / math.sqrt(999 * 50)
    assert abs((rows[1:] * rows[:-1]).mean() * 12) < limit
    other = rng.stream("other").uniform(50) - 0.5
    assert abs((rows * other).mean() * 12) < limit


def test_order_is_a_permutation_per_sample():
    order = SampleRNG.of_samples(0, range(20)).permutation(9)
    assert torch.equal(order.sort(dim=1).values, torch.arange(9).expand(20, 9))
    assert len({tuple(row) for row in order.tolist()}) > 10


def test_pixels_key_their_own_image_only():
    x = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    whole = SampleRNG.of_pixels(x).uniform(4)
    assert torch.equal(torch.cat([SampleRNG.of_pixels(x[:2]).uniform(4), SampleRNG.of_pixels(x[2:]).uniform(4)]), whole)
    changed = x.clone()
    changed[0, 0, 0, 0] += 2**-10
    after = SampleRNG.of_pixels(changed).uniform(4)
    assert not torch.equal(after[0], whole[0])
    assert torch.equal(after[1:], whole[1:])
    shuffled = x.clone()
    shuffled[0] = x[0].flip(-1)
    assert not torch.equal(SampleRNG.of_pixels(shuffled).uniform(4)[0], whole[0])
    assert not torch.equal(SampleRNG.of_pixels(x, seed=1).uniform(4), whole)


def test_the_global_generator_is_not_touched():
    before = torch.get_rng_state()
    SampleRNG.of_samples(0, range(3)).normal(5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 - 1])
def test_any_seed_works(seed):
    assert SampleRNG.of_samples(seed, [0]).uniform(2).isfinite().all()
