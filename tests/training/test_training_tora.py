"""TORA trained by the loop: each loss teaches its own branch, then only the fusion learns, for one lambda."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from small_recipes import document
from toras import classifier_of, tora_of
from toys import images
from vitadel.adapters.adapted_model import open_model
from vitadel.adapters.tora.tora_files import load_tora, save_tora
from vitadel.adapters.tora.tora_vit import BranchClassifier, part_of, trainable_parameters
from vitadel.attacks import make
from vitadel.backbones.load import load_model
from vitadel.errors import UserError
from vitadel.runtime.distributed import join_processes
from vitadel.training.objectives.two_branches import TwoBranches
from vitadel.training.recipes.build import build_recipe
from vitadel.training.run import run_harden
from vitadel.training.trainables.tora_parts import ToraParts

CPU = join_processes("cpu")
OBJECTIVE = {"use": "tora", "attack": "pgd-1(step=2/255)"}


def batch(count=4):
    x = images(count, side=32).double()
    return x, (x + 0.03 * torch.sin(50 * x)).clamp(0, 1), torch.arange(count) % 5


def grads(tora, losses):
    tora.zero_grad()
    losses["loss"].backward()
    return {name: each.grad for name, each in tora.named_parameters() if part_of(name) != "backbone"}


@pytest.mark.parametrize("kind", ["tora", "adapterfusion"])
def test_each_loss_teaches_its_own_branch_and_both_the_fusion(kind):
    tora, (x, z, y) = tora_of(lively=True, precise=True, kind=kind), batch()
    losses = TwoBranches(make("pgd-1"))(tora, x, z, y)
    acc, rob = F.cross_entropy(tora.branches(x)[0], y), F.cross_entropy(tora.branches(z)[1], y)
    penalty = tora.identity_penalty()
    assert float(losses["loss"].detach()) == pytest.approx(float((acc + rob + penalty).detach()), abs=1e-9)
    assert (penalty > 0) == (kind == "adapterfusion")
    found = grads(tora, losses)
    named = dict(tora.named_parameters())
    by_acc, by_rob, by_pull = (
        dict(zip(found, torch.autograd.grad(each, [named[n] for n in found], allow_unused=True), strict=True))
        if each.requires_grad
        else dict.fromkeys(found)
        for each in (acc, rob, penalty)
    )
    leaks = 0
    for name, gradient in found.items():
        part = part_of(name)
        wanted = torch.zeros_like(named[name])
        for whose, each in (("acc", by_acc[name]), ("rob", by_rob[name])):
            if each is not None and part in (whose, "fusion"):
                wanted = wanted + each
            elif each is not None:
                leaks += int(each.abs().max() > 1e-9)
        wanted = wanted if by_pull[name] is None else wanted + by_pull[name]
        torch.testing.assert_close(torch.zeros_like(wanted) if gradient is None else gradient, wanted, msg=name)
    assert leaks > 5  # without masks the other branch would have learned, too
    assert all(parameter.grad is None for parameter in tora.classifier.parameters())


def test_trades_on_the_robust_branch():
    tora, (x, z, y) = tora_of(lively=True, precise=True), batch()
    losses = TwoBranches(make("kl-1"), beta=3.0)(tora, x, z, y)
    (acc, clean), (_, perturbed) = tora.branches(x), tora.branches(z)
    kl = F.kl_div(perturbed.log_softmax(1), clean.log_softmax(1), reduction="batchmean", log_target=True)
    wanted = F.cross_entropy(acc, y) + F.cross_entropy(clean, y) + 3 * kl
    assert float(losses["loss"].detach()) == pytest.approx(float(wanted.detach()), abs=1e-9)
    found = grads(tora, losses)
    rob = F.cross_entropy(clean, y) + 3 * kl
    name = "rob.adapters.0.up.weight" if "rob.adapters.0.up.weight" in found else next(n for n in found if "rob" in n)
    (expected,) = torch.autograd.grad(rob, [dict(tora.named_parameters())[name]])
    torch.testing.assert_close(found[name], expected)


@pytest.mark.parametrize("beta", [None, 3.0])
def test_mixed_labels_are_taken_as_they_are(beta):
    tora, (x, z, y) = tora_of(lively=True, precise=True), batch()
    one, other = (F.one_hot(each, 5).double() for each in (y, (y + 1) % 5))
    objective = TwoBranches(make("pgd-1"), beta=beta)
    losses = [objective(tora, x, z, label) for label in (y, (y + 1) % 5, 0.7 * one + 0.3 * other)]
    first, second, mixed = (float(each["loss"].detach()) for each in losses)
    assert mixed == pytest.approx(0.7 * first + 0.3 * second, abs=1e-9)  # cross-entropies are linear in the label
    assert losses[2]["accuracy"] == losses[0]["accuracy"]


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_lambda_weighs_the_robust_loss(weight):
    tora, (x, z, y) = tora_of(lively=True, precise=True), batch()
    tora.trade_off = weight
    losses = TwoBranches(make("pgd-1"))(tora, x, z, y)
    acc, rob = F.cross_entropy(tora.branches(x)[0], y), F.cross_entropy(tora.branches(z)[1], y)
    assert float(losses["loss"].detach()) == pytest.approx(
        float((weight * rob + (1 - weight) * acc).detach()), abs=1e-9
    )


def test_without_tora_it_is_reported():
    model = load_model("zoo:shapes-standard")
    x, z, y = (part.float() if part.is_floating_point() else part for part in batch())
    with pytest.raises(UserError, match=r"adapter: \{use: tora\}"):
        TwoBranches(make("pgd-1"))(model, x, z, y)


@pytest.mark.parametrize("joint", ["logits", "probabilities"])
def test_both_losses_may_look_at_the_joint_prediction(joint):
    tora, (x, z, y) = tora_of(lively=True, precise=True, joint=joint), batch()
    tora.loss_at = "joint"
    acc, rob = F.cross_entropy(tora(x), y), F.cross_entropy(tora(z), y)
    losses = TwoBranches(make("pgd-1"))(tora, x, z, y)
    assert float(losses["loss"].detach()) == pytest.approx(float((acc + rob).detach()), abs=1e-9)
    found = grads(tora, losses)
    # Each loss reaches both branches through the joint prediction, and still trains only its own.
    for branch, loss in (("acc", acc), ("rob", rob)):
        for name, each in ((name, each) for name, each in tora.named_parameters() if part_of(name) == branch):
            (wanted,) = torch.autograd.grad(loss, [each], retain_graph=True)
            torch.testing.assert_close(found[name], wanted, msg=name)
    tora.trade_off = 0.3
    second = TwoBranches(make("pgd-1"))(tora, x, z, y)["loss"]
    assert float(second.detach()) == pytest.approx(float((0.3 * rob + 0.7 * acc).detach()), abs=1e-9)


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"loss_at": "jiont"}, "unknown loss_at 'jiont' of TORA; did you mean joint"),
        ({"kind": "single", "trade_off": 0.5, "loss_at": "joint"}, "has one head, so loss_at 'joint' has no effect"),
        ({"trade_off": 0.5}, "TORA has two phases"),
        ({"start": "somewhere"}, "TORA has two phases"),
        ({"kind": "single"}, "no fusion and so one phase"),
        ({"kind": "head", "start": "x", "trade_off": 0.5}, "no fusion and so one phase"),
        ({"start": "x", "trade_off": 1.5}, r"must be in \[0, 1\]"),
        ({"softmax": "adaptor"}, "unknown softmax"),
    ],
)
def test_settings_that_do_not_go_together(settings, reported):
    with pytest.raises(UserError, match=reported):
        ToraParts(**settings)


def recipe(weights, epochs=1, plugins=None, **adapter):
    given = document(objective=OBJECTIVE, optimizer={"lr": 1e-2}, train={"epochs": epochs, "batch_size": 16})
    given["model"] = {**given["model"], "weights": str(weights)}
    given["plugins"] = plugins or {}
    given["adapter"] = {"use": "tora", "reduction": 8, **adapter}
    return build_recipe(given, "tora")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A tiny ViT that somebody has trained before."""
    given = document(objective={"use": "standard"}, train={"epochs": 1})
    _, folder, _ = run_harden(
        build_recipe(given, "pretrained"), "pretrained", CPU, out=tmp_path_factory.mktemp("p") / "run"
    )
    return folder.path / "weights" / "best.safetensors"


@pytest.fixture(scope="module")
def first_phase(pretrained, tmp_path_factory):
    return run_harden(recipe(pretrained), "tora", CPU, out=tmp_path_factory.mktemp("tora") / "run")


@pytest.mark.slow
def test_phase_two_changes_the_fusion_only_and_is_opened_again(pretrained, first_phase, tmp_path):
    results, folder, _ = first_phase
    assert results["complete"]
    assert results["clean"]["n"] == 20
    built = recipe(pretrained, start=str(folder.path), trade_off=0.7)
    second, out, _ = run_harden(built, "tora", CPU, out=tmp_path / "run")
    assert second["training"]["steps"] == 3
    classifier = load_model("vit_tiny_patch16_224", weights=pretrained, **_model_options(built))
    before = dict(load_tora(folder.path / "weights" / "best.safetensors", classifier).named_parameters())
    opened = open_model(str(out.path))
    after = dict(opened.named_parameters())
    taught = trainable_parameters(opened, 2)
    assert opened.trade_off == 0.7
    for name, value in after.items():
        if name in taught and "key.bias" not in name:
            continue
        assert torch.equal(value, before[name]) or name in taught, name
    assert any(not torch.equal(after[name], before[name]) for name in taught)
    size = {each: (each.path / "weights" / "best.safetensors").stat().st_size for each in (folder, out)}
    assert size[out] < size[folder] < pretrained.stat().st_size * 2


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kind": "adapterfusion"}, "adapter.kind is adapterfusion, phase 1 has tora.* set adapter.kind=tora, or"),
        ({"slot": "separate"}, "adapter.slot is separate, phase 1 has shared"),
        ({"softmax": "token"}, "adapter.softmax is token, phase 1 has adapter"),
        ({"heads": 2}, "adapter.heads is 2, phase 1 has 1"),
        ({"reduction": 4}, "adapter.reduction is 4, phase 1 has 8"),
        ({"joint": "probabilities"}, "adapter.joint is probabilities, phase 1 has logits"),
    ],
)
def test_settings_of_phase_two_that_contradict_its_start_are_refused(changed, said, tmp_path):
    torch.manual_seed(0)
    save_tora(tora_of(), tmp_path / "parts.safetensors")
    parts = ToraParts(**{"reduction": 8, "start": str(tmp_path / "parts.safetensors"), "trade_off": 0.5, **changed})
    torch.manual_seed(0)
    with pytest.raises(UserError, match=said):
        parts.attach(classifier_of())


@pytest.mark.slow
def test_broken_off_and_resumed_it_ends_with_the_same_bits(pretrained, first_phase, tmp_path, monkeypatch):
    from vitadel.training import loop

    real, taken = loop._Trainer.take_step, 0

    def fragile(self, parts):
        nonlocal taken
        taken += 1
        if taken == 3:
            raise RuntimeError("power cut")
        real(self, parts)

    monkeypatch.setattr(loop._Trainer, "take_step", fragile)
    with pytest.raises(RuntimeError, match="power cut"):
        run_harden(recipe(pretrained), "tora", CPU, out=tmp_path / "run")
    monkeypatch.undo()
    _, again, _ = run_harden(recipe(pretrained), "tora", CPU, out=tmp_path / "run", resume=True)
    _, folder, _ = first_phase
    one, other = (open_model(str(each.path)).state_dict() for each in (folder, again))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_attacks_in_training_see_the_robust_branch():
    tora, x = tora_of(lively=True), images(2, side=32)
    shown = ToraParts().shown(tora)
    assert isinstance(shown, BranchClassifier)
    torch.testing.assert_close(shown(x), tora.branches(x)[1])
    torch.testing.assert_close(ToraParts(loss_at="joint").shown(tora)(x), tora(x))


def _model_options(built):
    section = built.model
    return {"mean": section.mean, "std": section.std, "kwargs": section.kwargs}


SCALING = {"attention_scaling": {"gap": 1, "images": 16, "steps": 2}}


@pytest.mark.slow
def test_attention_scaling_and_awp_go_with_phase_one(pretrained, tmp_path):
    built = recipe(pretrained, epochs=2, plugins={**SCALING, "awp": {"gamma": 0.005}})
    _, folder, _ = run_harden(built, "tora", CPU, out=tmp_path / "one")
    state = torch.load(folder.path / "checkpoint.pt", weights_only=True)
    factors = open_model(str(folder.path)).classifier.attention_factors
    last = load_tora(
        folder.path / "weights" / "last.safetensors",
        load_model("vit_tiny_patch16_224", weights=pretrained, **_model_options(built)),
    ).classifier.attention_factors
    assert last.min() < 1  # found before the second epoch
    assert factors is not None
    assert torch.equal(state["model"]["classifier.attention_factors"], last)
    second, out, _ = run_harden(
        recipe(pretrained, start=str(folder.path), trade_off=0.5), "tora", CPU, out=tmp_path / "two"
    )
    assert second["complete"]
    assert torch.equal(open_model(str(out.path)).classifier.attention_factors, factors)  # those that it stands on
    with pytest.raises(UserError, match="belongs to phase 1"):
        run_harden(
            recipe(pretrained, start=str(folder.path), trade_off=0.5, plugins=SCALING), "tora", CPU, out=tmp_path / "no"
        )


@pytest.mark.slow
def test_a_training_with_attention_scaling_goes_on_with_its_factors(pretrained, tmp_path, monkeypatch):
    from vitadel.training import loop

    built = recipe(pretrained, epochs=3, plugins=SCALING)
    _, whole, _ = run_harden(built, "tora", CPU, out=tmp_path / "whole")
    real, taken = loop._Trainer.take_step, 0

    def fragile(self, parts):
        nonlocal taken
        taken += 1
        if taken == 5:  # in the second epoch, which has factors of its own
            raise RuntimeError("power cut")
        real(self, parts)

    monkeypatch.setattr(loop._Trainer, "take_step", fragile)
    with pytest.raises(RuntimeError, match="power cut"):
        run_harden(built, "tora", CPU, out=tmp_path / "cut")
    monkeypatch.undo()
    _, again, _ = run_harden(built, "tora", CPU, out=tmp_path / "cut", resume=True)
    one, other = ((each.path / "weights" / "last.safetensors").read_bytes() for each in (whole, again))
    assert one == other
