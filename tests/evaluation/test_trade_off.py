"""The trade-off on models whose verdicts can be worked out by hand."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional as F

from imagenet_a import RIGHT, answering, write_imagenet_a
from toras import classifier_of, enlivened
from vitadel.adapters.tora.tora_files import fusion_of, interpolate_fusions
from vitadel.adapters.tora.tora_settings import ToraSettings
from vitadel.adapters.tora.tora_vit import BranchClassifier, Tora
from vitadel.attacks.branch_attacks import BranchAttack
from vitadel.attacks.parse import make
from vitadel.data import open_dataset
from vitadel.data.batches import read_batches
from vitadel.errors import Interrupted, UserError
from vitadel.evaluation.audit.protocols import RVT
from vitadel.evaluation.engine.stages import count_passes
from vitadel.evaluation.engine.target import apply_class_subset, open_target
from vitadel.evaluation.trade_off import run as trade_off
from vitadel.evaluation.trade_off.candidates import Candidate, between, check_alike, open_candidates
from vitadel.evaluation.trade_off.run import TradeOffRequest, run_trade_off
from vitadel.runtime.distributed import join_processes
from vitadel.types import Source

CPU = join_processes("cpu")
BUDGETS = (1 / 255, 4 / 255)
ORDER = TradeOffRequest(eps=BUDGETS, attacks=("pgd-2",), aimed=("pgd-2",), batch_size=16)


@dataclass(frozen=True, eq=False)
class Answered:
    """Shapes whose labels are what the bare classifier answers, so that models near it are mostly right."""

    shapes: Source
    answers: torch.Tensor
    classes: tuple[str, ...] = tuple("abcde")

    def __len__(self):
        return len(self.answers)

    def __repr__(self):
        return "answered shapes"

    def labels(self):
        return self.answers

    def read(self, indices):
        return self.shapes.read(indices)

    def name(self, index):
        return self.shapes.name(index)


def answered(count=24):
    shapes, bare = open_dataset("shapes(size=32)@test"), open_target(classifier_of(), "shapes(size=32)@test")
    (batch,) = read_batches(shapes, [list(range(count))], bare.preprocess)
    with torch.no_grad():
        return Answered(shapes, bare.model(batch.x).argmax(1))


SOURCE = answered()


def tora(seed=0, scale=0.15, kind="tora", trade_off=0.1, made=Tora):
    """Near the bare classifier; noise makes the two heads differ."""
    model = enlivened(made(classifier_of(), ToraSettings(kind=kind, reduction=8)), seed, scale)
    model.trade_off = trade_off
    return model.eval()


def other_fusion(model, trade_off=0.9):
    """Another phase 2 beside the same adapters."""
    other = tora(trade_off=trade_off)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for number, parameter in enumerate(other.fusion.parameters()):
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    return other


def candidate(name, model):
    return Candidate(name, open_target(model, SOURCE, match=False))


@pytest.fixture(scope="module")
def members():
    first = tora()
    baseline = tora(kind="single", trade_off=0.5)
    return [candidate("low", first), candidate("high", other_fusion(first)), candidate("single", baseline)]


@pytest.fixture(scope="module")
def outcome(members, tmp_path_factory):
    return run_trade_off(members, ORDER, CPU, out=tmp_path_factory.mktemp("trade") / "run")


@pytest.fixture(scope="module")
def samples(outcome):
    return pq.read_table(io.BytesIO((outcome.folder.path / "samples.parquet").read_bytes())).to_pydict()


def pixels(target, index):
    (batch,) = read_batches(target.source, [list(index)], target.preprocess)
    return batch.x, batch.y


@pytest.mark.slow
def test_every_head_is_judged_as_by_hand(members, outcome, samples):
    x, y = pixels(members[0].target, samples["index"])
    model = members[0].tora
    assert samples["label"] == y.tolist()
    outputs = {"acc": BranchClassifier(model, "acc"), "rob": BranchClassifier(model, "rob"), "joint": model}
    reported = outcome.results["trade_off"]["contenders"][0]["rvt"]
    right_of = {}
    for head, output in outputs.items():
        z = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(output(z), y, reduction="sum"), z)
        stepped = (x + RVT.budget * slope.sign()).clamp(0, 1)
        with torch.no_grad():
            right, held = (output(each).argmax(1) == y for each in (x, stepped))
        held = held & right
        where = "" if head == "joint" else f" {head}"
        assert samples[f"correct:low{where}"] == right.tolist()
        if head == "joint":
            with torch.no_grad():
                assert samples["prediction:low"] == output(x).argmax(1).tolist()
        assert samples[f"held:low{where}: RVT fgsm at 1/255"] == held.tolist()
        assert reported[head]["clean"]["correct"] == int(right.sum())
        assert reported[head]["attacks"][0]["held"] == int(held.sum())
        assert [entry["target"] for entry in reported[head]["attacks"]] == [head] * 2
        right_of[head] = right.tolist()
    assert set(samples["clean_prediction"]) == {None}  # there are three models, of which none is the one
    assert samples["prediction:low"] != samples["prediction:high"]
    assert right_of["acc"] != right_of["rob"]  # or heads could have been mixed up unseen
    assert int(sum(right_of["joint"])) > 15


@pytest.mark.slow
def test_the_worst_case_is_what_holds_against_everything_within_the_budget(members, outcome, samples):
    for entry in outcome.results["trade_off"]["contenders"]:
        name, held = entry["name"], np.array(samples[f"correct:{entry['name']}"])
        for worst in entry["worst_case"]:
            inside = [f"held:{name}: RVT {rvt} at 1/255" for rvt in ("fgsm", "pgd-5(step=0.5/255)")]
            inside += [f"held:{name}: {each['name']}" for each in entry["attacks"] if each["eps"] <= worst["eps"]]
            found = held & np.all([samples[each] for each in inside], axis=0)
            assert samples[f"worst:{name}: {worst['eps_text']}"] == found.tolist()
            assert worst["held"] == int(found.sum())
            assert all(worst["held"] <= sum(samples[each]) for each in inside)
        assert entry["worst_case"][1]["held"] <= entry["worst_case"][0]["held"] <= entry["clean"]["correct"]
        targets = [each["target"] for each in entry["attacks"]]
        assert targets == (["joint"] if name == "single" else ["joint", "acc", "rob"]) * 2
    assert outcome.results["trade_off"]["contenders"][0]["worst_case"][1]["held"] < 15
    assert [each["lambda"] for each in outcome.results["trade_off"]["contenders"]] == [0.1, 0.9, 0.5]


def test_an_aimed_step_follows_the_gradient_of_its_branch(members):
    model, target = members[0].tora, members[0].target
    x, y = pixels(target, range(12))
    eps = 2 / 255
    for branch in ("acc", "rob"):
        found = BranchAttack(make("fgsm", eps=eps), branch)(model, x, y)
        z = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(BranchClassifier(model, branch)(z), y, reduction="sum"), z)
        expected = (x + eps * slope.sign()).clamp(0, 1)
        with torch.no_grad():
            standing = model(x).argmax(1) == y
        assert standing.sum() > 5
        torch.testing.assert_close(found[standing], expected[standing])
        assert torch.equal(found[~standing], x[~standing])


def of_imagenet(seed):
    """A TORA for 1000 classes that is right on `RIGHT` of four images of ImageNet-A when it chooses between its 200."""
    model = enlivened(Tora(classifier_of(classes=1000), ToraSettings(reduction=8)), seed, 0.1)
    answering(model.acc.head)
    answering(model.rob.head)
    return model.eval()


@pytest.mark.slow
def test_every_output_chooses_between_the_classes_that_count(tmp_path):
    target = open_target(of_imagenet(0), write_imagenet_a(tmp_path / "a"))
    request = TradeOffRequest(eps=BUDGETS[:1], attacks=("pgd-2",), aimed=("pgd-2",), maps=2, batch_size=2)
    members = [Candidate("one", target), Candidate("plain", open_target(classifier_of(classes=1000), target.source))]
    answering(members[1].target.model.backbone.head)
    results = run_trade_off(members, request, CPU, out=tmp_path / "run").results
    assert results["data"]["classes"] == 200
    one, plain = results["trade_off"]["contenders"]
    assert (one["kind"], plain["kind"]) == ("tora", "model")
    assert {head: reported["clean"]["correct"] for head, reported in one["rvt"].items()} == dict.fromkeys(
        ("acc", "rob", "joint"), RIGHT
    )
    assert [each["attacked"] for each in one["attacks"]] == [RIGHT] * 3
    assert plain["clean"]["correct"] == RIGHT
    assert [each["name"] for each in results["trade_off"]["maps"]["contenders"]] == ["one"]


def test_an_aimed_step_between_some_classes(tmp_path):
    target = apply_class_subset(open_target(of_imagenet(1), write_imagenet_a(tmp_path / "a")))
    x, y = pixels(target, range(RIGHT))
    whole, eps = Candidate("one", target).tora, 2 / 255
    for branch in ("acc", "rob"):
        found = BranchAttack(make("fgsm", eps=eps), branch)(target.model, x, y)
        z = x.clone().requires_grad_()
        logits = BranchClassifier(whole, branch)(z)[:, target.model.chosen]
        (slope,) = torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), z)
        torch.testing.assert_close(found, (x + eps * slope.sign()).clamp(0, 1))


def test_an_aimed_attack_costs_what_it_says(members):
    model = members[0].tora
    x, _ = pixels(members[0].target, range(6))
    with torch.no_grad():
        y = model(x).argmax(1)
    attack = BranchAttack(make("pgd-3", eps=1e-6), "acc")
    with count_passes(model) as cost:
        attack(model, x, y)
    assert (cost.gradients, cost.forwards) == tuple(6 * each for each in attack.passes()) == (18, 18)


def test_aiming_needs_two_heads():
    x = torch.rand(1, 3, 32, 32)
    for model in (tora(kind="single"), classifier_of()):
        with pytest.raises(UserError, match="no branch 'acc' to aim at"):
            BranchAttack(make("fgsm"), "acc")(model, x, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(UserError, match="unknown branch 'ac' to aim at; did you mean acc"):
        BranchAttack(make("fgsm"), "ac")


class Masked(Tora):
    """Its joint output has no gradient, its heads have: the case that only aimed attacks see through."""

    def forward(self, x):
        return super().forward(x).detach()


@pytest.mark.slow
def test_a_joint_output_without_gradients_is_seen_through_and_reported(tmp_path):
    found = run_trade_off([candidate("masked", tora(made=Masked))], ORDER, CPU, out=tmp_path / "run").results
    (entry,) = found["trade_off"]["contenders"]
    before, *after = [each["held"] for each in entry["attacks"] if each["eps"] == BUDGETS[1]]
    assert after[-1] < before - 5
    reported = [each for each in found["findings"] if each["check"] == "branch-attacks"]
    assert reported
    assert reported[-1]["verdict"] == "suspicious"


@pytest.mark.slow
def test_interrupted_and_resumed_it_reports_the_same(members, outcome, tmp_path, monkeypatch):
    real, calls = trade_off.attack_stage, 0

    def fragile(*given, **more):
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt
        return real(*given, **more)

    monkeypatch.setattr(trade_off, "attack_stage", fragile)
    with pytest.raises(Interrupted):
        run_trade_off(members, ORDER, CPU, out=tmp_path / "run")
    monkeypatch.undo()
    again = run_trade_off(members, ORDER, CPU, out=tmp_path / "run", resume=True)
    assert _timeless(again.results) == _timeless(outcome.results)
    finished = run_trade_off(members, ORDER, CPU, out=tmp_path / "run", resume=True)
    assert finished.results == json.loads((again.folder.path / "results.json").read_text())


def _timeless(value):
    if isinstance(value, dict):
        return {key: _timeless(each) for key, each in value.items() if key != "seconds"}
    return [_timeless(each) for each in value] if isinstance(value, list) else value


def test_the_knob_gives_fusions_in_between(members):
    found = between(members, 3)
    assert [each.knob["at"] for each in found] == [0.25, 0.5, 0.75]
    assert found[0].knob["lambdas"] == [0.1, 0.9]
    middle = fusion_of(found[1].tora).weights
    expected = interpolate_fusions(fusion_of(members[0].tora), fusion_of(members[1].tora), 0.5).weights
    assert all(torch.equal(middle[name], expected[name]) for name in expected)
    assert found[1].tora.classifier is members[0].tora.classifier  # not a copy for each
    assert not torch.equal(fusion_of(members[0].tora).weights[name := "fusion.0.query.weight"], middle[name])
    assert between(members, 0) == []


@pytest.mark.parametrize("alone", [slice(0, 1), slice(2, 3)])
def test_a_knob_needs_two_fusions_of_one_training(members, alone):
    with pytest.raises(UserError, match="--knob goes from one fusion to another of the same training"):
        between(members[alone], 1)


def test_a_knob_needs_two_lambdas(members):
    again = candidate("again", other_fusion(members[0].tora, trade_off=0.1))
    with pytest.raises(UserError, match="with different lambdas"):
        between([members[0], again], 1)
    assert [each.knob["lambdas"] for each in between([members[0], again, members[1]], 1)] == [[0.1, 0.9]]


def test_models_by_name_share_data():
    found = open_candidates(["zoo:shapes-standard", "zoo:shapes-robust"], "shapes")
    assert [each.name for each in found] == ["zoo:shapes-standard", "zoo:shapes-robust"]
    assert found[0].target.source is found[1].target.source
    assert found[0].describe()["kind"] == "model"
    assert found[0].branches == ()
    with pytest.raises(UserError, match="at least one model"):
        open_candidates([], "shapes")


@pytest.mark.parametrize("eps", [2 / 255, "2/255", [2 / 255], ["2/255"]])
def test_budgets_and_attacks_however_they_are_written(eps):
    request = TradeOffRequest.read(eps, "pgd-2(step=1/255,restarts=2),fgsm", None)
    assert (request.eps, request.attacks, request.aimed) == ((2 / 255,), ("pgd-2(step=1/255,restarts=2)", "fgsm"), ())
    assert TradeOffRequest.read("1/255,2/255", ["fgsm"], "").eps == (1 / 255, 2 / 255)


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"eps": (4 / 255, 1 / 255)}, "the smallest first"),
        ({"eps": ()}, "got none"),
        ({"eps": (1.0,)}, "between 0 and 1"),
        ({"attacks": ()}, "at least one attack"),
        ({"attacks": ("pgd-2", "pgd-2")}, "--attacks lists 'pgd-2' twice"),
        ({"attacks": ("pdg-2",)}, "unknown attack"),
        ({"aimed": ("aas+pgd-2",)}, "needs calibration images"),
        ({"attacks": ("eot:2+aas+pgd-2",)}, "needs calibration images"),
        ({"attacks": ("patches-random",)}, "a budget of its own"),
        ({"attacks": ("eot:2+patches-random",)}, "a budget of its own"),
        ({"maps": -1}, "--maps must be at least 0"),
    ],
)
def test_orders_that_make_no_sense(settings, reported):
    with pytest.raises(UserError, match=reported):
        TradeOffRequest(**settings)


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"classes": 10}, r"differ in classes \(10 and 5\)"),
        ({"img_size": 16}, "differ in image size and preprocessing"),
    ],
)
def test_models_for_other_inputs_or_classes_are_refused(settings, reported):
    first, other = (candidate(name, classifier_of(**given)) for name, given in (("one", {}), ("two", settings)))
    with pytest.raises(UserError, match=f"'two' and 'one' {reported}"):
        check_alike(first, other)
    check_alike(first, first)


def test_a_crop_is_for_all_models_of_a_comparison():
    specs = ["zoo:shapes-tora", "zoo:shapes-standard"]
    options = trade_off.crop_option("7/8")
    assert options == {"crop_pct": RVT.crop_pct}
    for candidate in open_candidates(specs, "shapes@test", model_options=options):
        assert candidate.target.preprocess.crop_pct == 0.875
        assert candidate.target.model.record.crop_pct == 0.875
    assert trade_off.crop_option(None) is None
    with pytest.raises(UserError, match="--crop-pct"):
        trade_off.crop_option("most")
