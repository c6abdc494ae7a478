"""`autoattack-fast` in an audit: a masked model gets no certificate, however the work is cut."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

import vitadel
from vitadel.attacks.autoattack.fast import AutoAttackFast
from vitadel.attacks.autoattack.standard import autoattack
from vitadel.attacks.parse import make, without_escalation
from vitadel.attacks.registry import ATTACKS
from vitadel.attacks.wrappers import WorstOf
from vitadel.errors import Interrupted, UserError
from vitadel.evaluation.engine.stages import ordinary_form
from vitadel.types import Threat

EPS = 4 / 255
SMALL = "autoattack-fast(entropy_steps=6,margin_steps=6,targets=2,target_steps=4,best_targets=1,best_steps=6)"


class Brightness(nn.Module):
    """Ten classes by mean brightness, after a triangle wave on the pixels with this amplitude (0: none).

    With it slopes are -0.5 and 2.5 in turn instead of 1, so half of the signs of a gradient are wrong.
    """

    num_classes = 10

    def __init__(self, ripple: float = 0.0, stop_after: int = 10**9) -> None:
        super().__init__()
        self.ripple = ripple
        self.left = stop_after

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        place = (x + 0.0013) / (EPS / 2)
        rippled = x + self.ripple * EPS / 2 * (4 * (place - place.round()).abs() - 1)
        centers = torch.linspace(0.05, 0.95, 10, dtype=torch.float64)
        level = rippled.double().mean((1, 2, 3))  # in float32 its last bit depends on the size of the batch
        return (-100 * (level[:, None] - centers).square()).to(x.dtype)


@pytest.fixture(autouse=True)
def short_ensemble(monkeypatch):
    """AutoAttack with few steps and queries."""

    def short(threat: Threat) -> WorstOf:
        return autoattack(threat, steps=5, targets=2, queries=300)

    entry = ATTACKS["autoattack-fast"]
    monkeypatch.setitem(ATTACKS, "autoattack-fast", replace(entry, build=partial(AutoAttackFast, ensemble=short)))


@lru_cache
def gray_images() -> tuple[Tensor, Tensor]:
    """300 images whose brightness is that of their class, up to almost half of the distance to the next one."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(300) % 10
    level = 0.05 + 0.1 * labels + 0.098 * (torch.rand(300, generator=random) - 0.5)
    noise = 0.02 * (torch.rand(300, 3, 8, 8, generator=random) - 0.5)
    return (level[:, None, None, None] + noise - noise.mean((1, 2, 3), keepdim=True)).clamp(0, 1), labels


def audited(model: nn.Module, **more):
    return vitadel.audit(model, gray_images(), **{"attacks": SMALL, "eps": EPS, **more})


def completeness(results: dict) -> dict:
    (finding,) = (each for each in results["findings"] if each["check"] == "attack-completeness")
    return finding


@pytest.fixture(scope="module")
def honest() -> int:
    """How many samples are robust without the ripple, to attacks that are exact there."""
    results = audited(Brightness(), attacks="pgd-10")
    return results["worst_case"]["held"]


@pytest.mark.slow
def test_an_honest_model_is_not_escalated(honest):
    results = audited(Brightness())
    (entry,) = results["attacks"]
    assert entry["held"] == honest
    assert entry["escalated"] is False
    assert entry["escalation"]["reasons"] == []
    assert entry["members"][0]["name"] == "search"
    assert not {"apgd-ce", "square"} & {member["name"] for member in entry["members"]}
    # Its clean accuracy is that of chance, beside which no finding is "ok".
    assert "attack-completeness" not in {each["check"] for each in results["findings"] if each["verdict"] != "ok"}


@pytest.mark.slow
def test_a_masked_model_gets_no_certificate(honest):
    results, alone = audited(Brightness(0.375)), audited(Brightness(0.375), attacks="pgd-20")
    (entry,) = results["attacks"]
    assert alone["worst_case"]["held"] > honest + 3  # what masking hides from PGD
    assert entry["escalated"] is True
    assert entry["held"] <= honest
    assert any("promised" in reason for reason in entry["escalation"]["reasons"])
    assert [member["name"] for member in entry["members"]][-4:] == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert entry["held"] == entry["attacked"] - sum(member["broken"] for member in entry["members"])
    finding = completeness(results)
    assert finding["verdict"] == "suspicious"
    assert "all of AutoAttack ran" in finding["evidence"]
    assert 0 < entry["escalation"]["gradient_calls"] < entry["gradient_calls"]


@pytest.mark.slow
def test_without_escalation_a_warning_is_left(honest):
    results = audited(Brightness(0.375), escalate=False)
    (entry,) = results["attacks"]
    assert entry["escalated"] is False
    assert entry["escalation"]["reasons"]
    assert entry["held"] > honest
    assert completeness(results)["verdict"] == "suspicious"
    assert "--no-escalate" in completeness(results)["evidence"]


@pytest.mark.slow
def test_batches_and_interruptions_change_nothing(tmp_path):
    def outcome(results: dict, folder, *left_out: str) -> tuple:
        hidden = ("seconds", "members", *left_out)
        entry = {key: value for key, value in results["attacks"][0].items() if key not in hidden}
        members = [
            (member["name"], member["attacked"], member["broken"]) for member in results["attacks"][0]["members"]
        ]
        held = pq.read_table(folder / "samples.parquet").to_pydict()[f"held:{SMALL}"]
        return entry, members, held, results["findings"]

    seen = []
    few = partial(audited, limit=120)
    for size in (120, 17):
        folder = tmp_path / str(size)
        audit = few(Brightness(0.375), batch_size=size, out=folder)
        seen.append(outcome(audit, folder, "gradient_calls", "forward_calls"))  # a batch may end with a bare forward
    assert seen[0] == seen[1]
    folder = tmp_path / "stopped"
    with pytest.raises(Interrupted):
        few(Brightness(0.375, stop_after=350), out=folder, batch_size=64)
    undisturbed = few(Brightness(0.375), out=tmp_path / "whole", batch_size=64)
    resumed = few(Brightness(0.375), out=folder, batch_size=64, resume=True)
    assert outcome(resumed, folder) == outcome(undisturbed, tmp_path / "whole")


def test_a_prefix_goes_around_every_stage():
    results = audited(Brightness(0.375), attacks=f"eot:2+{SMALL}", limit=60)
    (entry,) = results["attacks"]
    assert entry["escalated"] is True
    assert entry["members"][0]["name"] == "search"


def test_names_without_escalation():
    assert without_escalation(["fgsm", "autoattack-fast"]) == ["fgsm", "autoattack-fast(escalate=false)"]
    assert without_escalation(["eot:2+autoattack-fast(targets=3)"]) == [
        "eot:2+autoattack-fast(targets=3,escalate=false)"
    ]
    assert without_escalation(["autoattack-fast(escalate=true)"]) == ["autoattack-fast(escalate=true)"]
    with pytest.raises(UserError, match="has an effect on autoattack-fast only"):
        without_escalation(["pgd-20"])


def test_an_escalation_is_part_of_the_most_that_a_sample_can_cost():
    fast, calm = make("autoattack-fast"), make("autoattack-fast(escalate=false)")
    more = fast.ensemble(fast.threat).passes()
    assert fast.passes()[0] - calm.passes()[0] == more[0]
    assert ordinary_form(make("eot:2+autoattack-fast")).passes()[0] == 2 * fast.search.passes()[0]
