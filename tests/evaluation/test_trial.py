"""The likely cost of attacks: near the truth, between nothing and the bound, and without a trace on the run."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import vitadel
from vitadel.evaluation.audit.audit import AuditRequest
from vitadel.evaluation.engine import cost
from vitadel.evaluation.engine.cost import PassTimes
from vitadel.evaluation.engine.run import Run
from vitadel.evaluation.engine.target import open_target
from vitadel.runtime.distributed import Processes

CPU = Processes(0, 1, torch.device("cpu"))
EPS = 8 / 255
SHORTER = (  # without escalation, which estimates leave out
    "autoattack-fast(entropy_steps=5,margin_steps=6,best_steps=9,sentinel_steps=3,sentinel_queries=50,escalate=false)"
)
ONE = PassTimes(1.0, 0.0)  # seconds are then gradients
DEADLINE = cost._deadline


@pytest.fixture(autouse=True)
def no_deadline(monkeypatch):
    """A trial that a slow machine cuts off has tried fewer images."""
    monkeypatch.setattr(cost, "_deadline", lambda model, until: nullcontext())


class Brightness(nn.Module):
    """Above or below mid-gray; an attack shifts the mean by eps and no more."""

    num_classes = 2

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((1, 2, 3)) + self.dropout * (torch.rand(len(x)) - 0.5)
        return torch.stack([0.5 - mean, mean - 0.5], 1) * 20


@dataclass(frozen=True)
class Gray:
    """Images of one gray level, all of the class 'light'."""

    levels: tuple[float, ...]
    classes: tuple[str, ...] = ("dark", "light")

    def __len__(self) -> int:
        return len(self.levels)

    def labels(self) -> Tensor:
        return torch.ones(len(self), dtype=torch.int64)

    def read(self, indices):
        return [Image.new("RGB", (8, 8), (round(255 * self.levels[index]),) * 3) for index in indices]

    def name(self, index: int) -> str:
        return str(index)


def gray(robust: int, broken: int, wrong: int) -> Gray:
    """So far from mid-gray that an image withstands EPS, or not, or is misclassified before; in a random order."""
    levels = [0.8] * robust + [0.51] * broken + [0.2] * wrong
    order = torch.randperm(len(levels), generator=torch.Generator().manual_seed(1))
    return Gray(tuple(levels[place] for place in order.tolist()))


def estimated(robust: int, broken: int, wrong: int = 0, *, model: nn.Module | None = None, times=ONE, **fields):
    source = gray(robust, broken, wrong)
    request = AuditRequest(eps=EPS, **fields)
    target = open_target(model or Brightness(), source)
    context = Run(None, CPU).context(target, request)
    indices = torch.arange(len(source))
    settings = {"eps": EPS, "norm": "linf", "independent": request.independent}
    return cost.estimate(context, request.make_attacks(), indices, times=times, **settings), target, request


@pytest.mark.slow
@pytest.mark.parametrize(("robust", "broken", "wrong"), [(60, 0, 0), (30, 30, 0), (0, 60, 0), (20, 30, 20)])
@pytest.mark.parametrize("attacks", [("pgd-20",), ("fgsm", "pgd-10", "apgd-ce(steps=20)"), (SHORTER,)])
def test_likely_is_near_the_truth_and_no_more_than_the_bound(robust, broken, wrong, attacks):
    found, target, _ = estimated(robust, broken, wrong, attacks=attacks)
    results = vitadel.audit(target.model, target.source, attacks=attacks, eps=EPS)
    truth = sum(entry["gradient_calls"] for entry in results["attacks"])
    assert found.images > 0
    assert truth / 1.7 <= found.seconds <= truth * 1.7
    assert found.seconds <= found.seconds_at_most


@pytest.mark.slow
def test_later_attacks_are_likely_run_on_what_the_earlier_ones_leave():
    cascade, _, _ = estimated(50, 150, attacks=("pgd-20", "pgd-30"))
    alone, _, _ = estimated(50, 150, attacks=("pgd-20", "pgd-30"), independent=True)
    robust_only = 50 * 30
    assert cascade.likely["01 pgd-30"] == pytest.approx(robust_only, rel=0.5)
    assert alone.likely["01 pgd-30"] > cascade.likely["01 pgd-30"] + 100  # those that fall cost a step or more
    assert cascade.at_most == alone.at_most == {"00 pgd-20": 200 * 20, "01 pgd-30": 200 * 30}


def test_sentinels_are_counted_for_the_images_that_pgd_leaves():
    """Forty of 60 images get the probe (2 gradients, 9 passes and a verdict) and Square; FAB 3 times 3 steps on two."""
    both = PassTimes(1.0, 1000.0)
    found, _, _ = estimated(60, 40, times=both, attacks=(SHORTER,))
    stage = f"00 {SHORTER} sentinels"
    square, fab = 50 + 2 + 1, 9 + 1 + 1
    expected = 40 * 2 + 2 * 9 + 1000 * (40 * (9 + 1) + 40 * square + 2 * fab)
    assert found.likely[stage] == pytest.approx(expected, rel=0.02)  # the share is that of 64 images
    assert found.seconds == pytest.approx(sum(found.likely.values()))
    none, _, _ = estimated(0, 60, times=both, attacks=(SHORTER,))
    assert none.likely[stage] == 0


def test_members_of_an_ensemble_are_stages():
    found, _, _ = estimated(40, 0, attacks=("autoattack(steps=5,targets=1,queries=10)",))
    assert [name.split()[-1] for name in found.likely] == ["apgd-ce", "apgd-t", "fab-t", "square"]


def test_a_short_bound_needs_no_trial():
    found, _, _ = estimated(10, 0, attacks=("fgsm",))
    assert found.images == 0
    assert found.likely == found.at_most


def test_what_takes_too_long_counts_with_the_bound(monkeypatch):
    monkeypatch.setattr(cost, "_deadline", DEADLINE)
    monkeypatch.setattr(cost, "_SECONDS", (-1.0, -1.0))
    found, _, _ = estimated(100, 0, attacks=("pgd-20",))
    assert found.seconds == found.seconds_at_most == 2000


def test_a_trial_leaves_no_trace():
    model = Brightness(dropout=0.01)
    before = torch.get_rng_state()
    _, target, _ = estimated(50, 50, model=model, attacks=("pgd-20",))
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in target.model.modules())
