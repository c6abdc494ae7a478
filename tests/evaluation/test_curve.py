"""The whole curve in one run, on a model whose distances are known, and beside separate audits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

import vitadel
from toys import BrightnessThreshold, bright_images
from vitadel.errors import Interrupted, UserError
from vitadel.evaluation.audit.curve import LEVELS, _median
from vitadel.reporting.page import write_report

EPS = 0.06


def audit(model: nn.Module | None = None, **settings: Any) -> dict[str, Any]:
    given = {"attacks": "pgd-5", "eps": EPS, "batch_size": 16, "curve": True, **settings}
    x, y = bright_images(60)
    y[0] = 1 - y[0]  # one is misclassified
    return vitadel.audit(BrightnessThreshold(5.0) if model is None else model, (x, y), **given)


def distances(run: Path) -> list[float]:
    return pq.read_table(run / "samples.parquet").column("distance").to_pylist()


@pytest.mark.slow
def test_distances_are_those_of_the_closed_form(tmp_path: Path) -> None:
    found = audit(out=tmp_path / "run")
    x, _ = bright_images(60)
    exact = (x[:, 0, 0, 0] - 0.5).abs().double()
    exact[0] = 0
    measured = torch.tensor(distances(tmp_path / "run"))
    assert (measured >= exact - 1e-6).all()
    assert (measured[1:] <= 1.02 * exact[1:] + 1e-4).all()
    curve = found["curve"]
    assert [row["eps"] for row in curve["budgets"]] == pytest.approx([level * EPS for level in LEVELS])
    for row in curve["budgets"]:
        assert row["held"] == int((measured > row["eps"] + 1e-6).sum())
        assert abs(row["held"] - int((exact > row["eps"]).sum())) <= 1
    assert found["worst_case"]["held"] == curve["budgets"][2]["held"]
    assert curve["median_distance"]["value"] == pytest.approx(float(measured[1:].median()), rel=0.05)
    low, high = curve["median_distance"]["ci95"]
    assert low <= float(exact[1:].median()) <= high
    area = (measured.clamp(max=2 * EPS) / (2 * EPS)).mean()
    assert curve["area"]["value"] == pytest.approx(float(area))


@pytest.mark.slow
def test_the_curve_agrees_with_separate_audits_at_fewer_passes_than_they_take() -> None:
    found = audit(attacks="apgd-ce")
    passes = []
    for row in found["curve"]["budgets"]:
        alone = audit(attacks="apgd-ce", eps=row["eps"], curve=None)
        assert abs(alone["worst_case"]["held"] - row["held"]) <= 0.01 * row["n"] + 1e-9
        passes.append(sum(2 * entry["gradient_calls"] + entry["forward_calls"] for entry in alone["attacks"]))
    assert found["curve"]["passes"] < 0.5 * sum(passes)


def test_if_a_spot_check_is_broken_all_images_are_attacked() -> None:
    """One step of DeepFool with an overshoot of 1 doubles the distances, so most images seem far from a budget."""
    found = audit(BrightnessThreshold(), attacks="deepfool-1(overshoot=1),pgd-5")["curve"]
    x, _ = bright_images(60)
    exact = (x[1:, 0, 0, 0] - 0.5).abs()
    assert found["spot_checks"]["broken"] > 0
    assert all(level["left_out"] == 0 for level in found["levels"] if level["broken_checks"])
    for row, level in zip(found["budgets"], reversed(found["levels"]), strict=True):
        if level["broken_checks"]:
            assert row["held"] == int((exact > row["eps"]).sum())


@pytest.mark.slow
def test_a_killed_curve_goes_on_and_is_the_same(tmp_path: Path) -> None:
    class Dying(BrightnessThreshold):
        left = 2500

        def forward(self, x: Tensor) -> Tensor:
            Dying.left -= len(x)
            if Dying.left < 0:
                raise KeyboardInterrupt
            return super().forward(x)

    whole = audit(BrightnessThreshold(5.0), out=tmp_path / "whole")
    model = Dying(5.0)
    with pytest.raises(Interrupted):
        audit(model, out=tmp_path / "killed")
    Dying.left = 10**9
    resumed = audit(model, out=tmp_path / "killed", resume=True)
    assert resumed["curve"] == whole["curve"]
    assert distances(tmp_path / "killed") == distances(tmp_path / "whole")


@pytest.mark.slow
def test_the_report_has_the_curve(tmp_path: Path) -> None:
    audit(out=tmp_path / "run")
    write_report([tmp_path / "run"], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "Robust accuracy at every eps" in text
    assert "Median distance of the 59 correctly classified images" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"within": 2}, "--curve and --within cannot be combined"),
        ({"second_phase": 5}, "--curve and --second-phase cannot be combined"),
        ({"independent": True}, "--curve and --independent"),
        ({"eps": 0}, "--curve needs an eps above 0"),
        ({"keep": "images"}, "keeps no images"),
        ({"norm": "linf,l2", "eps": "0.1,1"}, "--curve and --second-phase take one threat"),
        ({"norm": "l0", "eps": 4}, "'pgd' works in linf, l2, l1, not in l0"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        audit(**settings)


def test_l0_distances_are_whole_numbers(tmp_path: Path) -> None:
    found = audit(attacks="fmn-30", norm="l0", eps=8, out=tmp_path / "run")
    assert [row["eps"] for row in found["curve"]["budgets"]] == [2, 4, 8, 12, 16]
    assert all(distance == int(distance) for distance in distances(tmp_path / "run"))


def test_the_interval_of_a_median_is_made_of_order_statistics() -> None:
    """Of 20 values the 6th and the 15th: 95.86 %, the narrowest of at least 95 % (e.g. Conover 1999, table A3)."""
    found = _median(torch.arange(1.0, 21.0).double())
    assert found == {"value": 10.5, "ci95": [6.0, 15.0], "n": 20}
    assert _median(torch.tensor([1.0, torch.inf, torch.inf]).double())["value"] is None
