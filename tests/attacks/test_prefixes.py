"""What goes around attacks, around each other."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from toys import images
from vitadel.attacks import make
from vitadel.attacks.attention_scaling.aas import Rescaled
from vitadel.attacks.gain_ratio import GAINS
from vitadel.attacks.per_sample import ReportsSampleInfo
from vitadel.attacks.registry import PREFIXES
from vitadel.attacks.settings import settings_of
from vitadel.errors import UserError
from vitadel.evaluation.audit.audit import audit
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Calibrated
from vits import VITS, make_vit

AROUND = {"aas": "aas(images=4,steps=1)", "aas-bpda": "aas-bpda(images=4,steps=1)", "aas-paper": "aas-paper(images=4)"}
TWICE = ("targeted", "targeted")  # refused: a search has one target
CORES = ("pgd-2", "apgd-t(steps=3,targets=2)", "square(queries=4)")
AROUND |= {
    "scale": "scale:0.1",
    "logits": "logits:0.1",
    "eot": "eot:2",
    "targeted": "targeted:least",
    "bpda": "bpda(modules=norm)",
}


def triples() -> list[tuple[str, str, str]]:
    """Every pair of prefixes with one attack, so that each prefix meets each attack as the outer and the inner one."""
    numbered = product(enumerate(PREFIXES), enumerate(PREFIXES))
    return [(outer, inner, CORES[(i + j) % 3]) for (i, outer), (j, inner) in numbered if (outer, inner) != TWICE]


def prepared(attack, model, x):
    from dataclasses import replace

    inner = getattr(attack, "attack", None)
    if inner is not None:
        attack = replace(attack, attack=prepared(inner, model, x))
    return attack.prepared(model, [(x, torch.arange(len(x)) % 2)]) if isinstance(attack, Calibrated) else attack


@pytest.mark.slow
@pytest.mark.parametrize(("outer", "inner", "core"), triples())
def test_every_pair_runs_and_keeps_the_budget(outer, inner, core):
    model, x = make_vit("vit", classes=4), images(4, side=VITS["vit"].size)
    with torch.no_grad():
        y = model(x).argmax(1)
    attack = prepared(make(f"{AROUND[outer]}+{AROUND[inner]}+{core}"), model, x)
    z = attack(model, x, y)
    assert (z - x).abs().max() <= 8 / 255 + 1e-6
    assert z.min() >= 0
    assert z.max() <= 1


@pytest.mark.slow
def test_averaging_reaches_the_softened_restart():
    from vitadel.attacks.autoattack.fast import AutoAttackFast
    from vitadel.attacks.threats import Linf
    from vitadel.attacks.wrappers import Averaged

    model, x = make_vit("vit", classes=4), images(3, side=VITS["vit"].size)
    with torch.no_grad():
        y = model(x).argmax(1)
    fast = AutoAttackFast(Linf(1e-5), 2, 3, 2, 2, 1, 2, reaches=((float("inf"), 3),), sentinel_queries=2)
    _, notes = Averaged(fast, 2).run_with_info(model, x, y)
    assert (notes["restarts"] == 3).all()


def test_notes_pass_through_views():
    model, x = make_vit("vit", classes=4), images(5, side=VITS["vit"].size)
    with torch.no_grad():
        y = model(x).argmax(1)
    for name in ("targeted:least+scale:0.1+pgd-2", "eot:2+scale:0.1+pgd-2"):
        attack = make(name)
        assert isinstance(attack, ReportsSampleInfo)
        assert attack.run_with_info(model, x, y)[1][GAINS].shape[0] == 5


@pytest.mark.slow
def test_the_warnings_of_an_attack_inside_are_passed_on():
    """What autoattack-fast reports about a sample: through scaled attention, or plain where that run came last."""
    model, x = make_vit("vit", classes=4), images(12, side=VITS["vit"].size)
    with torch.no_grad():
        y = model(x).argmax(1)
    fast = make("autoattack-fast(entropy_steps=2,margin_steps=2,target_steps=1,best_steps=1)", eps=1 / 255)
    rng = SampleRNG.of_samples(0, range(12))
    z, notes = Rescaled(fast, 0.5).run_with_info(model, x, y, rng)
    held = model(z).argmax(1) == y
    assert 0 < int(held.sum()) < 12
    assert torch.equal(notes["fell_in"] < 0, held)
    plain, alone = fast.run_with_info(model, x[held], y[held], rng[held])
    assert torch.equal(z[held], plain)
    assert torch.equal(notes["missing"][held], alone["missing"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pgd-10", {"restarts": 1}),
        ("eot:7+pgd-10", {"restarts": 1, "times": 7}),
        ("scale:0.1+pgd-2(restarts=3)", {"restarts": 3, "factors": 0.1}),
        ("targeted:next+eot:3+pgd-2(restarts=4)", {"restarts": 4, "times": 3, "target": "next"}),
        ("eot:2+eot:3+eot:4+pgd-2", {"times": 2, "inner.times": 3, "inner.inner.times": 4, "steps": 2}),
        ("aas(images=8)+patches-learned(images=99)", {"images": 8, "inner.images": 99}),
    ],
)
def test_settings_include_every_layer(name, expected):
    settings = settings_of(make(name))
    assert {key: settings[key] for key in expected} == expected


@pytest.mark.slow
def test_calibrated_layers_are_prepared_from_the_inside_out():
    name = "aas(images=4,steps=1)+aas(images=4,steps=1)+pgd-2"
    assert audit("zoo:shapes-robust", attacks=[name], limit=4)["complete"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("targeted:2.5+pgd-2", "a name or the number of a class"),
        ("targeted:true+pgd-2", "a name or the number of a class"),
        ("eot:0+pgd-2", "must be positive"),
        ("scale+scale+", "unknown attack"),
        ("ass+pgd-2", "did you mean aas"),
        ("scale:0.1(factor=2)+pgd-2", r"scale:FACTOR\+"),
        ("aas:3+pgd-2", r"write aas\+"),
        ("pgd-20(restarts=5", "write it like"),
        ("pgd-20 (restarts=5)", "without spaces"),
    ],
)
def test_wrong_names_are_refused(name, message):
    with pytest.raises(UserError, match=message):
        make(name)


def test_a_target_that_is_a_label_is_refused_before_anything_runs():
    for name in ("targeted:3+pgd-2", "scale:0.1+targeted:3+pgd-2"):
        with pytest.raises(UserError, match="class 3 is the label of 2 of the 20 samples"):
            audit("zoo:shapes-robust", attacks=[name], limit=20)


@pytest.mark.parametrize(("norm", "eps"), [("l2", 56.0), ("l1", 4000.0)])
def test_a_budget_that_reaches_everything_is_refused(norm, eps):
    with pytest.raises(UserError, match="lets every pixel become anything"):
        audit("zoo:shapes-robust", attacks=["pgd-2"], limit=4, norm=norm, eps=eps)
