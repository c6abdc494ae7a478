"""What a plan counts: the images of the audit at the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_recipes import recipe

from vitadel.data import open_dataset
from vitadel.defenses import planning
from vitadel.defenses.harden import open_workshop
from vitadel.defenses.planning import plan_training
from vitadel.runtime.processes import Processes

CPU = Processes(0, 1, torch.device("cpu"))


@pytest.fixture
def quick(monkeypatch):
    """Every piece of work takes a second: what is counted is the point here."""
    monkeypatch.setattr(planning, "seconds_of", lambda work, device: 1.0)


def audited(limit: int | None, test: str | None = "shapes(size=16)@test") -> float:
    shop = open_workshop(recipe(audit={"limit": limit}, data={"test": test}), CPU)
    (row,) = [row for row in plan_training(shop, CPU)["rows"] if row["name"].startswith("audit")]
    return row["images"]


def test_an_audit_without_a_limit_is_of_all_test_images(quick):
    assert audited(None) == len(open_dataset("shapes@test")) > 1000


def test_an_audit_is_of_no_more_images_than_there_are(quick):
    assert audited(30) == 30
    assert audited(10**6) == len(open_dataset("shapes@test"))
    assert audited(None, None) == audited(30, None) == 0


def test_processes_share_the_audit(quick):
    shop = open_workshop(recipe(audit={"limit": None}), CPU)
    of_two = plan_training(shop, replace(CPU, count=2))["rows"][-1]["images"]
    assert of_two == len(open_dataset("shapes@test")) / 2
