"""Audits that stop when the answer is known: the same verdicts as a plain audit, on fewer images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

import vitadel
from vitadel.errors import Interrupted, UserError
from vitadel.sequential import make_plan


class Threshold(nn.Module):
    """Class 1 if the mean pixel is above `at`, by as much as it is: the largest change of eps decides exactly."""

    def __init__(self, at: float = 0.5) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.tensor(at))

    def forward(self, x: Tensor) -> Tensor:
        gap = x.mean((1, 2, 3)) - self.at
        return torch.stack([-gap, gap], 1)


def data(n: int = 600, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images of one brightness each, from 0.3 to 0.7."""
    bright = 0.3 + 0.4 * torch.rand(n, generator=torch.Generator().manual_seed(seed))
    return bright[:, None, None, None].expand(n, 3, 4, 4).contiguous(), (bright > 0.5).long()


def audit(model: nn.Module, **settings: Any) -> dict[str, Any]:
    given = {"attacks": "fgsm", "eps": 0.06, "batch_size": 50, **settings}
    return vitadel.audit(model, data(), **given)


def samples(run: Path, attack: str = "fgsm") -> dict[int, bool]:
    table = pq.read_table(run / "samples.parquet")
    return dict(zip(table.column("index").to_pylist(), table.column(f"held:{attack}").to_pylist(), strict=True))


@pytest.mark.slow
def test_it_stops_when_the_interval_is_narrow_with_the_verdicts_of_a_plain_audit(tmp_path: Path) -> None:
    found = audit(Threshold(), within=8, out=tmp_path / "looks")
    looks, n = found["sequential"]["looks"], found["worst_case"]["n"]
    assert 100 < n < 600
    assert [look["n"] for look in looks] == sorted({look["n"] for look in looks})
    low, high = found["worst_case"]["ci95"]
    assert (high - low) / 2 <= 0.08
    assert low <= 0.7 <= high  # the share of images farther than eps from the threshold
    assert found["attacks"][-1]["ci95"] == found["worst_case"]["ci95"]
    assert found["worst_case"]["ci95"] == list(make_plan(8, 600).interval(found["worst_case"]["held"], n))
    plain = audit(Threshold(), limit=n, out=tmp_path / "plain")
    assert plain["worst_case"]["held"] == found["worst_case"]["held"]
    assert samples(tmp_path / "plain") == samples(tmp_path / "looks")


def test_earlier_looks_are_not_computed_again(tmp_path: Path) -> None:
    class Counting(Threshold):
        seen = 0

        def forward(self, x: Tensor) -> Tensor:
            Counting.seen += len(x)
            return super().forward(x)

    model = Counting()
    looked = audit(model, within=8)
    passes = Counting.seen
    Counting.seen = 0
    audit(model, limit=looked["worst_case"]["n"])
    assert len(looked["sequential"]["looks"]) > 1
    assert passes < 1.3 * Counting.seen  # what is asked of the whole sample, such as random outputs, repeats


@pytest.mark.slow
def test_a_killed_audit_goes_on_with_its_looks(tmp_path: Path) -> None:
    whole = audit(Threshold(), within=8, out=tmp_path / "whole")

    class Dying(Threshold):
        left = 220

        def forward(self, x: Tensor) -> Tensor:
            Dying.left -= len(x)
            if Dying.left < 0 and len(x) > 20:
                raise KeyboardInterrupt
            return super().forward(x)

    with pytest.raises(Interrupted):
        vitadel.audit(Dying(), data(), attacks="fgsm", eps=0.06, batch_size=50, within=8, out=tmp_path / "killed")
    again = vitadel.audit(
        Threshold(),
        data(),
        attacks="fgsm",
        eps=0.06,
        batch_size=50,
        within=8,
        out=tmp_path / "killed",
        resume=True,
    )
    assert again["sequential"] == whole["sequential"]


def test_all_images_are_used_where_they_are_too_few() -> None:
    found = audit(Threshold(), within=3.2)
    assert (found["worst_case"]["n"], found["sequential"]["reached"]) == (600, False)
    assert "all 600 images are used" in found["sequential"]["sentence"]


def test_a_difference_is_decided_as_soon_as_the_images_tell(tmp_path: Path) -> None:
    audit(Threshold(), out=tmp_path / "first")
    worse = audit(Threshold(0.35), compare_with=str(tmp_path / "first"))
    assert worse["sequential"]["decided"] == "less robust"
    assert worse["worst_case"]["n"] < 600
    last = worse["sequential"]["looks"][-1]
    assert last["evidence"] >= 20
    assert last["only_there"] > last["only_here"]
    same = audit(Threshold(), compare_with=str(tmp_path / "first"))
    assert (same["sequential"]["decided"], same["worst_case"]["n"]) == (None, 600)
    assert same["sequential"]["other"]["held"] == same["worst_case"]["held"]


def test_only_images_of_both_runs_are_compared(tmp_path: Path) -> None:
    audit(Threshold(), limit=120, seed=3, out=tmp_path / "first")
    found = audit(Threshold(0.51), compare_with=str(tmp_path / "first"))
    assert found["worst_case"]["n"] <= 120


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"within": 0}, "--within takes percentage points"),
        ({"within": 0.1}, "600 images cannot give an interval of 0.1 points"),
        ({"within": 5, "compare_with": "x"}, "give one of them"),
        ({"within": 5, "skip_bad": True}, "--within and --skip-bad cannot be combined"),
        ({"within": 5, "independent": True}, "leave out --independent"),
        ({"within": 5, "keep": "images"}, "--within keeps no images"),
        ({"within": 5, "norm": "linf,l2", "eps": "0.06,1"}, "take one threat; name one norm"),
        ({"compare_with": "no-such-folder"}, "holds no finished audit"),
        ({"within": 5.0, "attacks": "autoattack-fast(least_chance=0.01)"}, "least_chance .* cannot be combined"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        audit(Threshold(), **settings)


def test_a_run_under_another_threat_is_refused(tmp_path: Path) -> None:
    audit(Threshold(), limit=20, eps=0.01, out=tmp_path / "first")
    with pytest.raises(UserError, match=r"cannot be compared: eps: .* there, .* here"):
        audit(Threshold(), compare_with=str(tmp_path / "first"))


def test_a_run_by_other_attacks_is_refused(tmp_path: Path) -> None:
    """A weaker attack there would make the model here look less robust."""
    audit(Threshold(), limit=20, attacks="noise", out=tmp_path / "first")
    with pytest.raises(UserError, match=r"cannot be compared: attacks: \['noise'\] there, \['fgsm'\] here"):
        audit(Threshold(), compare_with=str(tmp_path / "first"))


def test_the_share_is_covered_over_many_orders() -> None:
    """Orders of recorded verdicts, class-balanced as an audit takes them."""
    rng, plan, covered = np.random.default_rng(0), make_plan(8, 600), 0
    x, y = data()
    robust = ((x[:, 0, 0, 0] - 0.5).abs() > 0.06).numpy()
    share = robust.mean()
    classes = [np.flatnonzero(y.numpy() == label) for label in (0, 1)]
    for _ in range(300):
        pairs = [rng.permutation(rows)[: min(map(len, classes))] for rows in classes]
        hits = robust[np.stack(pairs, 1).ravel()].cumsum()
        n = plan.looks[0]
        while (further := plan.next_look(int(hits[n - 1]), n)) is not None and further <= len(hits):
            n = further
        low, high = plan.interval(int(hits[n - 1]), n)
        covered += low <= share <= high
    assert covered >= 0.95 * 300


@pytest.mark.slow
def test_a_growing_sample_by_the_default_attack_has_the_verdicts_of_a_plain_audit(tmp_path: Path) -> None:
    """Its sentinels, and the queries that they share, depend on the size of the sample."""
    settings = {"eps": 0.06, "batch_size": 50}
    found = vitadel.audit(Threshold(), data(), within=9, out=tmp_path / "looks", **settings)
    n = found["worst_case"]["n"]
    assert len(found["sequential"]["looks"]) > 1
    plain = vitadel.audit(Threshold(), data(), limit=n, out=tmp_path / "plain", **settings)
    assert plain["worst_case"]["held"] == found["worst_case"]["held"]
    assert samples(tmp_path / "plain", "autoattack-fast") == samples(tmp_path / "looks", "autoattack-fast")
