"""The last attack on a random part of the images: its estimate beside the whole audit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import vitadel
from toys import BrightnessThreshold, bright_images
from vitadel.errors import UserError
from vitadel.evaluation.audit.audit import AuditRequest


def audit(**settings: Any) -> dict[str, Any]:
    given = {"attacks": "noise,pgd-5", "eps": 0.06, "batch_size": 50, "second_phase": 40, **settings}
    return vitadel.audit(BrightnessThreshold(), bright_images(200), **given)


def test_the_estimate_covers_the_audit_of_all_images(tmp_path: Path) -> None:
    whole = audit(second_phase=None)["worst_case"]["held"]
    for seed in range(3):
        found = audit(seed=seed, out=tmp_path / str(seed))
        phase, worst = found["two_phase"], found["worst_case"]
        low, high = phase["held_of_these_images"]
        assert low <= whole <= high
        assert phase["sampled"] == 40
        assert worst["robust_accuracy"] == pytest.approx(phase["left"] / 200 * (1 - phase["broken"] / 40))
        assert worst["ci95"][0] < worst["robust_accuracy"] < worst["ci95"][1]
        assert "two-phase" in worst["estimator"]
        table = pq.read_table(tmp_path / str(seed) / "samples.parquet")
        assert sum(table.column("second_phase").to_pylist()) == 40


@pytest.mark.slow
def test_the_random_part_depends_on_seed_and_sample_only(tmp_path: Path) -> None:
    def chosen(name: str, **settings: Any) -> list[bool]:
        audit(out=tmp_path / name, **settings)
        picked: list[bool] = pq.read_table(tmp_path / name / "samples.parquet").column("second_phase").to_pylist()
        return picked

    first = chosen("first")
    assert first == chosen("batches", batch_size=17)
    assert first != chosen("seed", seed=5)


def test_enough_images_for_all_is_no_estimate() -> None:
    found = audit(second_phase=500)
    whole = audit(second_phase=None)["worst_case"]
    assert found["worst_case"]["held"] == whole["held"]
    assert found["two_phase"]["held_of_these_images"] == [whole["held"], whole["held"]]
    assert found["two_phase"]["sentence"].endswith("no estimate.")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"second_phase": 0}, "at least 1, got 0"),
        ({"attacks": "pgd-5"}, "needs two attacks or more"),
        ({"protocol": "robustbench-cifar10"}, "the protocol robustbench-cifar10 needs every attack on all"),
        ({"independent": True}, "--second-phase and --independent cannot be combined"),
        ({"within": 2}, "--second-phase and --within cannot be combined"),
        ({"norm": "linf,l2", "eps": "0.1,1"}, "take one threat"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        audit(**settings)


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--second-phase", {"second_phase": 5, "attacks": ("pgd-5", "pgd-9")}),
        ("--curve", {"curve": True}),
        ("--within", {"within": 5.0}),
        ("--compare-with", {"compare_with": "runs/other"}),
    ],
)
def test_protocols_refuse_them_before_data_are_looked_for(flag: str, settings: dict[str, Any]) -> None:
    """The request itself: this machine need not have the data of the protocol."""
    with pytest.raises(UserError, match=rf"^{flag} .*protocol"):
        AuditRequest(protocol="robustbench-cifar10", **settings)
