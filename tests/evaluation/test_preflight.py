"""What an attack asks of a model is asked before anything long begins."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vitadel.attacks import make
from vitadel.errors import UserError
from vitadel.evaluation.audit.audit import audit
from vitadel.evaluation.engine.attack_preparation import preflight
from vits import make_vit


class Counting(nn.Module):
    """A linear model that counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * 16 * 16, 4)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.linear(x.flatten(1))


def ensemble(*names: str) -> list[tuple[str, object]]:
    return [(name, make(name, eps=8 / 255)) for name in names]


@pytest.mark.parametrize("name", ["pgd-1000", "autoattack", "square", "targeted:2+pgd-100", "pgd-100(restarts=50)"])
def test_it_takes_few_passes_and_leaves_no_trace(name):
    model = Counting().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    preflight(model, ensemble(name), (16, 16))
    members = 4 if name == "autoattack" else 1
    assert 1 < model.passes <= 1 + 3 * members
    assert model.training
    assert not model._forward_pre_hooks
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "name",
    [
        "targeted:99+pgd-2",
        "patch-fool-2",
        "aas(images=4,steps=1)+pgd-2",
        "eot:2+aas(images=4,steps=1)+pgd-2",
        "pna-patchout",
        "patches-learned",
    ],
)
def test_what_does_not_suit_the_model_is_reported(name):
    with pytest.raises(UserError):
        preflight(Counting(), ensemble("pgd-2", name), (16, 16))


@pytest.mark.parametrize("name", ["patch-fool-2", "aas(images=4,steps=1)+pgd-2", "features-3", "patches-learned"])
def test_what_suits_it_is_not(name):
    model, passes = make_vit("vit"), []
    model.register_forward_hook(lambda module, given, logits: passes.append(len(logits)))
    preflight(model, ensemble(name), (32, 32))
    assert 1 < len(passes) <= 8


def test_an_audit_is_refused_before_it_writes_or_attacks_anything(tmp_path):
    model = Counting()
    with pytest.raises(UserError, match="99"):
        audit(model, "shapes(size=16)", attacks=["pgd-2", "targeted:99+pgd-2"], limit=4, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert model.passes < 10
