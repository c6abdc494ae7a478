"""Attacks of other libraries: what they propose is theirs, what counts is judged here."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import command_line
import vitadel
from toys import TinyNet
from vitadel.attacks.foreign import Foreign
from vitadel.attacks.parse import make, needs_known_family, read_attack_name, split_attack_list
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes, judge
from vitadel.runtime.trusted_code import code_in_recipe

EPS = 0.1


def data(count: int = 8) -> tuple[nn.Module, Tensor, Tensor]:
    model, x = TinyNet().eval(), torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return model, x, model(x).argmax(1)


@pytest.mark.parametrize(
    "name",
    [
        "torchattacks:PGD(steps=5,alpha=1/30)",
        "foolbox:LinfPGD(steps=5,random_start=false)",
        "foolbox:LInfFMNAttack(steps=20)",
        "art:ProjectedGradientDescent(max_iter=5,eps_step=0.03)",
    ],
)
def test_it_proposes_within_the_budget_and_fools(name: str) -> None:
    pytest.importorskip({"torchattacks": "torchattacks", "foolbox": "foolbox", "art": "art"}[name.partition(":")[0]])
    model, x, y = data()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    attack = make(name, eps=EPS, norm="linf")
    assert isinstance(attack, Foreign)
    z = attack(model, x, y)
    verdict = judge(model, attack.threat, x, z, y)
    assert not verdict.void.any()
    assert (~verdict.held).any()
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_it_is_the_librarys_own_attack_with_our_budget() -> None:
    library = pytest.importorskip("torchattacks")
    model, x, y = data()
    with torch.random.fork_rng():
        own = library.PGD(model, eps=EPS, alpha=0.02, steps=4, random_start=False)(x, y)
    ours = make("torchattacks:PGD(alpha=0.02,steps=4,random_start=false)", eps=EPS)(model, x, y)
    assert torch.equal(ours, own)


def test_random_numbers_belong_to_the_samples_and_leave_no_trace() -> None:
    pytest.importorskip("torchattacks")
    model, x, y = data()
    attack = make("torchattacks:PGD(steps=2)", eps=EPS)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = attack(model, x, y)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    torch.manual_seed(5)
    assert torch.equal(attack(model, x, y), first)
    assert not torch.equal(attack(model, x.flip(0), y.flip(0)).flip(0), first)  # another batch, other numbers


def test_prefixes_go_around_it_and_its_passes_are_counted() -> None:
    pytest.importorskip("torchattacks")
    model, x, y = data(4)
    attack = make("targeted:next+torchattacks:PGD(steps=3)", eps=EPS)
    with count_passes(model) as cost:
        attack(model, x, y)
    assert cost.gradients == 3 * 4
    assert make("torchattacks:PGD(steps=7)", eps=EPS).passes() == (7, 1)
    assert not needs_known_family("torchattacks:PGD")


def test_names_keep_their_case_and_lists_their_brackets() -> None:
    name = read_attack_name("EOT:2+torchattacks:PGDRS(steps=3,noise_type=Guassian)")
    assert (name.base, name.prefixes[0][0]) == ("torchattacks:PGDRS", "eot")
    assert name.settings == {"steps": 3, "noise_type": "Guassian"}
    assert split_attack_list("fgsm,foolbox:LinfPGD(steps=2,rel_stepsize=0.1)")[1].endswith("0.1)")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torchattacks:PDG", r"torchattacks has no attack 'PDG'; did you mean .*PGD"),
        ("torchattacks:PGD(step=3)", r"torchattacks:PGD has no setting 'step'; did you mean steps.* It takes: .*alpha"),
        ("torchattacks:PGD(3)", "cannot read '3'; write each setting once"),
        ("foolbox:LinfPGD(steps=2,steps=3)", "cannot read 'steps=3'; write each setting once"),
        ("python:no_such_module_here:Attack", "there is no Python module 'no_such_module_here'"),
    ],
)
def test_wrong_names_and_settings_are_refused(name: str, message: str) -> None:
    for library in ("torchattacks", "foolbox"):
        pytest.importorskip(library)
    with pytest.raises(UserError, match=message):
        make(name, eps=EPS)


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchattacks", None)
    with pytest.raises(UserError, match="needs the package torchattacks: pip install torchattacks"):
        make("torchattacks:PGD", eps=EPS)


OWN = """
import torch

class Shift:
    def __init__(self, eps, by=1.0, fault=""):
        self.eps, self.by, self.fault = eps, by, fault

    def __call__(self, model, x, y):
        if self.fault == "box":
            return x + 1
        if self.fault == "shape":
            return x[:1]
        if self.fault == "type":
            return None
        if self.fault == "raise":
            raise RuntimeError("out\\n  of ideas.")
        if self.fault == "silent":
            raise ValueError
        if self.fault == "model":
            with torch.no_grad():
                next(model.parameters()).add_(1)
        if self.fault == "forward":
            model.forward = lambda z: torch.zeros(len(z), 10)
        if self.fault == "module":
            setattr(model, next(iter(dict(model.named_children()))), torch.nn.Identity())
        if self.fault == "mode":
            model.train()
            weight = next(model.parameters())
            weight.grad = torch.ones_like(weight)
        return (x + self.by * self.eps).clamp(0, 1)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_shift_attack.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("my_shift_attack", None)
    return "python:my_shift_attack:Shift"


def test_the_users_own_class_gets_the_budget(own: str) -> None:
    model, x, y = data()
    z = make(f"{own}(by=0.5)", eps=EPS)(model, x, y)
    assert torch.allclose(z, (x + 0.05).clamp(0, 1))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("box", r"returned pixels from .* they must stay in \[0, 1\]"),
        ("shape", r"returned images of shape \(1, 3, 8, 8\) for images of shape \(8, 3, 8, 8\)"),
        ("type", "returned NoneType; an attack must return a tensor"),
        ("raise", r"Shift failed: RuntimeError: out of ideas\. What was judged before is kept\.$"),
        ("silent", r"Shift failed: ValueError\. What was judged before is kept\.$"),
        ("model", r"changed the model \("),
        ("forward", r"changed the model \(its modules or hooks\)"),
        ("module", r"changed the model \("),
    ],
)
def test_faults_of_the_users_class_are_named(own: str, fault: str, message: str) -> None:
    model, x, y = data()
    with pytest.raises(UserError, match=message):
        make(f"{own}(fault={fault})", eps=EPS)(model, x, y)


def test_modes_and_gradients_are_set_back(own: str) -> None:
    model, x, y = data()
    model.eval()
    make(f"{own}(fault=mode)", eps=EPS)(model, x, y)
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_beyond_the_budget_counts_as_void_and_not_as_success(own: str) -> None:
    model, x, y = data()
    attack = make(f"{own}(by=3)", eps=EPS)
    verdict = judge(model, attack.threat, x, attack(model, x, y), y)
    assert verdict.void.any()
    assert verdict.held[verdict.void].all()


@pytest.mark.slow
def test_an_audit_by_another_library(own: str, tmp_path: Path) -> None:
    words = ("audit", "zoo:shapes-standard", "--limit", "8", "--no-precheck", "--attacks", f"fgsm,{own}(by=0.5)")
    command_line.vitadel(*words, "--out", str(tmp_path / "run"))
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [entry["name"] for entry in results["attacks"]] == ["fgsm", f"{own}(by=0.5)"]
    assert results["attacks"][1]["settings"]["library"] == "python"


def test_a_recipe_that_names_code_as_an_attack_is_noticed() -> None:
    assert code_in_recipe({"audit": {"attacks": ["pgd-20", "eot:2+python:evil:Attack"]}}) == [
        "eot:2+python:evil:Attack"
    ]
    assert code_in_recipe({"audit": {"attacks": ["pgd-20"]}}) == []
    for spelling in ("Python:evil:Attack", "BPDA(Backward=Python:evil:run)+pgd-2"):
        assert code_in_recipe({"audit": {"attacks": spelling}}) == [spelling]


def test_ours_can_be_called_as_those_of_torchattacks() -> None:
    model, x, y = data()
    bound = vitadel.attacks.make("pgd-3", eps=EPS, model=model)
    assert torch.equal(bound(x, y), make("pgd-3", eps=EPS)(model, x, y))
    with pytest.raises(UserError, match=r"must be an nn\.Module on pixels in \[0, 1\], got str"):
        vitadel.attacks.make("pgd-3", model="zoo:shapes-robust")  # type: ignore[call-overload]


def test_attacks_of_other_libraries_work_in_l0() -> None:
    pytest.importorskip("foolbox")
    model, x, y = data()
    attack = make("foolbox:L0FMNAttack(steps=30)", eps=100, norm="l0")
    assert not judge(model, attack.threat, x, attack(model, x, y), y).held.all()
