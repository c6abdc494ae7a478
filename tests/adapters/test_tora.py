"""TORA on a frozen classifier: the pretrained model at first, two branches, and gradients only where they belong."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toras import classifier_of, enlivened, tora_of
from vitadel.adapters.tora.tora_settings import ToraSettings
from vitadel.adapters.tora.tora_vit import BranchClassifier, Tora, part_of, trainable_parameters
from vitadel.attacks.parse import make
from vitadel.backbones.anatomy import backbone_of, family_of
from vitadel.backbones.classifier import Classifier, wrap
from vitadel.backbones.record import ModelRecord
from vitadel.data import open_dataset
from vitadel.errors import UserError
from vitadel.evaluation.audit.audit import AuditRequest, run_audit
from vitadel.evaluation.engine.target import open_target
from vitadel.instrument import attention_maps, block_features, extra_tokens, frozen
from vitadel.instrument.tokens import own_tokens, patch_grid
from vitadel.runtime.distributed import join_processes
from vitadel.runtime.rng import SampleRNG
from vits import make_vit, pixels

HOSTS = ["vit", "deit3", "dinov2_registers", "clip", "parallel"]
ALL = [
    {},
    {"slot": "separate"},
    {"softmax": "token"},
    {"softmax": "joint", "heads": 3},
    {"softmax": "adapterfusion", "slot": "separate", "heads": 2},
    {"joint": "probabilities"},
    {"kind": "adapterfusion"},
    {"kind": "adapterfusion", "slot": "separate"},
    {"kind": "single"},
    {"kind": "head"},
]


def named(settings: dict[str, Any]) -> str:
    return "-".join(map(str, settings.values())) or "default"


def before_norm(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The sequences that the final norm is given."""
    seen: list[Tensor] = []
    norm: Any = backbone_of(model).get_submodule("norm")
    handle = norm.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    with torch.no_grad():
        model(x)
    handle.remove()
    return seen


def hooks_on(model: nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    ]


# --- at first -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("settings", ALL, ids=named)
@pytest.mark.parametrize("name", HOSTS)
def test_at_first_it_is_the_pretrained_model(name: str, settings: dict[str, Any]) -> None:
    tora, x = tora_of(name, precise=True, **settings), pixels(name, dtype=torch.float64)
    classifier = tora.classifier
    (plain,) = before_norm(classifier, x)
    sequences = before_norm(tora, x)
    assert len(sequences) == (2 if tora.settings.fuses else 1)
    for sequence in sequences:  # class token, registers and patches of either branch
        torch.testing.assert_close(sequence, plain, rtol=0, atol=1e-10)
    with torch.no_grad():
        logits = classifier(x)
        for branch in tora.branches(x):
            torch.testing.assert_close(branch, logits, rtol=0, atol=1e-10)
        joint = tora(x) if tora.settings.joint == "logits" else tora(x) - tora(x).mean(1, True) + logits.mean(1, True)
        torch.testing.assert_close(joint, logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("settings", [{}, {"slot": "separate"}], ids=named)
def test_at_first_in_single_precision(settings: dict[str, Any]) -> None:
    tora, x = tora_of(**settings), pixels("vit", batch=4)
    with torch.no_grad():
        torch.testing.assert_close(tora(x), tora.classifier(x), rtol=0, atol=1e-5)


def test_other_classes_get_heads_initialized_from_the_seed() -> None:
    hosts = [(classifier_of(), seed) for seed in (3, 3, 4)]
    state = torch.get_rng_state()
    made = [Tora(host, ToraSettings(reduction=8), num_classes=7, seed=seed) for host, seed in hosts]
    assert torch.equal(torch.get_rng_state(), state)
    first, same, other = (dict(each.named_parameters()) for each in made)
    assert all(torch.equal(first[name], same[name]) for name in first)
    for name in ("acc.head.weight", "rob.head.weight", "fusion.1.query.weight", "acc.adapters.0.down.weight"):
        assert not torch.equal(first[name], other[name])
    weights = torch.stack([first["acc.head.weight"], first["rob.head.weight"]]).detach()
    assert weights.shape == (2, 7, 24)
    assert 0.015 < float(weights.std()) < 0.025
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(first["fusion.0.query.weight"], first["fusion.1.query.weight"])
    assert not torch.equal(first["acc.adapters.0.down.weight"], first["rob.adapters.0.down.weight"])
    assert made[0](pixels("vit")).shape == (2, 7)
    assert made[0].record.num_classes == 7


# --- two branches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"slot": "separate"}, {"kind": "adapterfusion"}], ids=named)
def test_both_class_tokens_see_the_image(settings: dict[str, Any]) -> None:
    tora, x = tora_of(lively=True, **settings), pixels("vit")
    with torch.no_grad():
        for token in tora.class_tokens(x):
            assert (token[0] - token[1]).abs().max() > 0.1


def test_the_joint_prediction() -> None:
    tora, x = tora_of(lively=True), pixels("vit")
    with torch.no_grad():
        acc, rob = tora.branches(x)
        torch.testing.assert_close(tora(x), (acc + rob) / 2, rtol=0, atol=0)
        for each, logits in (("acc", acc), ("rob", rob)):
            torch.testing.assert_close(BranchClassifier(tora, each)(x), logits, rtol=0, atol=0)
        tora.settings = replace(tora.settings, joint="probabilities")
        torch.testing.assert_close(tora(x).softmax(1), (acc.softmax(1) + rob.softmax(1)) / 2)
        torch.testing.assert_close(tora(x).exp().sum(1), torch.ones(2))
    assert BranchClassifier(tora, "rob").record.notes["tora"].endswith("no lambda, rob head only")


# --- what learns ------------------------------------------------------------------------------------------------------


def names_of(branch: str, layers: int = 2) -> set[str]:
    own = {f"{branch}.token", f"{branch}.head.weight", f"{branch}.head.bias"}
    parts = [f"{part}.{kind}" for part in ("norm", "down", "up") for kind in ("weight", "bias")]
    return own | {f"{branch}.adapters.{layer}.{part}" for layer in range(layers) for part in parts}


PHI = {
    f"fusion.{layer}.{part}.{kind}"
    for layer in range(2)
    for part in ("query", "key", "value")
    for kind in ("weight", "bias")
}
HEADS = {f"{branch}.head.{kind}" for branch in ("acc", "rob") for kind in ("weight", "bias")}


def test_learners_of_each_phase_by_name() -> None:
    tora = tora_of()
    assert trainable_parameters(tora, 1, "acc").keys() == names_of("acc") | PHI
    assert trainable_parameters(tora, 1, "rob").keys() == names_of("rob") | PHI
    assert trainable_parameters(tora, 2).keys() == PHI
    assert trainable_parameters(tora, 2, heads=True).keys() == PHI | HEADS
    everything = {name for name, each in tora.named_parameters() if each.requires_grad}
    assert everything == names_of("acc") | names_of("rob") | PHI
    assert {part_of(name) for name, each in tora.named_parameters() if not each.requires_grad} == {"backbone"}
    single, head, fusion = (tora_of(kind=kind) for kind in ("single", "head", "adapterfusion"))
    for each in (
        trainable_parameters(single, 1, "acc"),
        trainable_parameters(single, 1, "rob"),
        trainable_parameters(single, 2),
    ):
        assert each.keys() == names_of("single")
    assert trainable_parameters(head, 1, "acc").keys() == {"acc.head.weight", "acc.head.bias"}
    assert trainable_parameters(head, 2).keys() == HEADS
    assert trainable_parameters(fusion, 2).keys() == PHI - {f"fusion.{layer}.value.bias" for layer in range(2)}
    with pytest.raises(UserError, match="phase 1, with the loss of branch 'acc' or 'rob'"):
        trainable_parameters(tora, 1)
    with pytest.raises(UserError, match="got phase 2 and branch 'rob'"):
        trainable_parameters(tora, 2, "rob")
    with pytest.raises(UserError, match="is not a parameter of a Tora"):
        part_of("head.weight")


@pytest.mark.parametrize("settings", [{}, {"slot": "separate"}, {"kind": "adapterfusion"}], ids=named)
def test_masked_gradients_reach_every_learner_and_nothing_else(settings: dict[str, Any]) -> None:
    tora, x, y = tora_of(precise=True, **settings), pixels("vit", dtype=torch.float64), torch.tensor([0, 1])
    enlivened(tora, scale=0.3)  # gates saturate with more
    for place, branch in enumerate(("acc", "rob")):
        group = trainable_parameters(tora, 1, branch)
        loss = F.cross_entropy(tora.branches(x)[place], y)
        for name, slope in zip(group, torch.autograd.grad(loss, list(group.values())), strict=True):
            # What is added to every key adds the same to both adapters' scores: it cannot matter.
            idle = name.endswith("key.bias")
            assert slope.abs().max() < 1e-12 if idle else slope.abs().max() > 1e-6, name
    assert all(each.grad is None for each in tora.parameters())
    F.cross_entropy(tora(x), y).backward()
    assert {name for name, each in tora.named_parameters() if each.grad is not None} == set(
        trainable_parameters(tora, 1, "acc")
    ) | set(trainable_parameters(tora, 1, "rob"))


def test_the_first_step_moves_values_and_adapters_and_not_yet_scores() -> None:
    tora, x, y = tora_of(), pixels("vit"), torch.tensor([0, 1])
    F.cross_entropy(tora(x), y).backward()
    moved = {name for name, each in tora.named_parameters() if each.grad is not None and each.grad.abs().max() > 1e-7}
    for layer in range(2):
        assert f"fusion.{layer}.value.weight" in moved
        assert {f"acc.adapters.{layer}.up.weight", f"rob.adapters.{layer}.up.weight"} <= moved
    assert not any("query" in name or "key" in name or "down" in name for name in moved)
    assert moved >= HEADS | {"acc.token", "rob.token"}


def test_losses_at_the_ends_of_lambda_leave_the_other_branchs_own_parts_alone() -> None:
    tora, x, y = tora_of(lively=True), pixels("vit"), torch.tensor([0, 1])
    acc, rob = (F.cross_entropy(each, y) for each in tora.branches(x))
    group = [tora.acc.head.weight, tora.rob.head.weight]
    for trade_off, still in ((0.0, 1), (1.0, 0)):
        slopes = torch.autograd.grad(trade_off * rob + (1 - trade_off) * acc, group, retain_graph=True)
        assert slopes[still].abs().max() == 0
        assert slopes[1 - still].abs().max() > 1e-4


def test_the_backbone_stays_frozen_and_in_eval_mode() -> None:
    classifier = classifier_of(drop_rate=0.5, pos_drop_rate=0.5, drop_path_rate=0.5)
    tora, x = enlivened(Tora(classifier, ToraSettings(reduction=8))).train(), pixels("vit")
    assert tora.training
    assert not any(module.training for module in tora.classifier.modules())
    assert torch.equal(tora(x), tora(x))
    with frozen(tora):
        assert not tora.training
        assert not any(each.requires_grad for each in tora.parameters())
    assert tora.training
    assert tora.acc.head.weight.requires_grad
    assert not any(each.requires_grad for each in tora.classifier.parameters())


# --- as a model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", ALL, ids=named)
def test_attacks_run_through_it_and_leave_no_trace(settings: dict[str, Any]) -> None:
    tora, x = tora_of(lively=True, **settings), pixels("vit")
    with torch.no_grad():
        clean = tora(x)
    y = clean.argmax(1)
    flags = [module.training for module in tora.modules()]
    z = make("pgd-2", eps=8 / 255)(tora, x, y, SampleRNG.of_samples(0, range(2)))
    with torch.no_grad():
        assert (F.cross_entropy(tora(z), y, reduction="none") > F.cross_entropy(clean, y, reduction="none")).all()
        assert torch.equal(tora(x), clean)
    assert (z - x).abs().max() <= 8 / 255 + 1e-6
    assert hooks_on(tora) == []
    assert [module.training for module in tora.modules()] == flags
    assert all(each.grad is None for each in tora.parameters())


def test_nothing_is_left_behind_by_a_pass_that_fails() -> None:
    tora = tora_of(slot="separate")
    tora.classifier.set_attention_factors([0.5, 0.5])
    with pytest.raises(UserError, match="images of 40 x 40 pixels were given to 'vit', which is built for 32 x 32"):
        tora(torch.rand(1, 3, 40, 40))
    assert hooks_on(tora) == []


def test_the_audit_takes_it() -> None:
    source = open_dataset("shapes")
    classes, side = len(source.classes), source.read([0])[0].height  # type: ignore[union-attr]
    classifier = classifier_of(classes=classes, img_size=side)
    tora = enlivened(Tora(classifier, ToraSettings(reduction=8), trade_off=0.5), scale=0.2).eval()
    subjects = [open_target(each, "shapes") for each in (tora, BranchClassifier(tora, "rob"))]
    assert subjects[0].model is tora  # type: ignore[comparison-overlap]
    assert subjects[0].model_fingerprint() != subjects[1].model_fingerprint()
    request = AuditRequest(attacks=("pgd-2", "features-2"), eps=4 / 255, limit=6, batch_size=6)
    results = run_audit(subjects[0], request, join_processes("cpu")).results
    assert results["model"]["notes"]["tora"] == "tora (shared slot, adapter softmax, 1 head), lambda 0.5"
    assert results["model"]["family"] == "vit"


@pytest.mark.parametrize("slot", ["shared", "separate"])
@pytest.mark.parametrize("name", ["vit", "dinov2_registers"])
def test_instruments_see_the_model_inside(name: str, slot: str) -> None:
    tora, x = tora_of(name, slot=slot), pixels(name)
    assert family_of(tora) == "vit"
    assert patch_grid(tora, x) == (4, 4)
    tokens = (1 if name == "vit" else 5) + 16
    with torch.no_grad():
        with block_features(tora.classifier) as plain:
            tora.classifier(x)
        with block_features(tora) as seen, attention_maps(tora) as maps, own_tokens(tora) as own:
            tora(x)
        assert own.extra == (slot == "separate")
        for here, there in zip(seen, plain, strict=True):  # the second class token is no patch
            torch.testing.assert_close(own(here), there, rtol=0, atol=1e-4)
        assert all(own(own(each, dim=2), dim=3).shape == (2, 3, tokens, tokens) for each in maps)


@pytest.mark.parametrize("settings", [{}, {"slot": "separate"}, {"kind": "single"}], ids=named)
def test_extra_tokens_and_attention_factors_act_as_on_the_classifier(settings: dict[str, Any]) -> None:
    tora, x = tora_of(precise=True, **settings), pixels("vit", dtype=torch.float64)
    tora.classifier.set_attention_factors([0.3, 2.0])
    tokens = torch.randn(3, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for placement in ("prefix", "append"):
        with torch.no_grad(), extra_tokens(tora.classifier, tokens, placement=placement):
            expected = tora.classifier(x)
        with torch.no_grad(), extra_tokens(tora, tokens, placement=placement):
            torch.testing.assert_close(tora(x), expected, rtol=0, atol=1e-10)
    assert hooks_on(tora) == []


@pytest.mark.parametrize("settings", ALL, ids=named)
def test_half_precision(settings: dict[str, Any]) -> None:
    tora, x = tora_of(**settings), pixels("vit")
    enlivened(tora, scale=0.2)
    with torch.no_grad():
        expected = tora(x)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(tora(x).float(), expected, rtol=0, atol=0.25)
        low = copy.deepcopy(tora).bfloat16()(x)
        assert low.dtype == torch.float32
        torch.testing.assert_close(low, expected, rtol=0, atol=0.5)
        assert tora.double()(x.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        F.cross_entropy(tora.float()(x).float(), torch.tensor([0, 1])).backward()
    assert all(bool(each.grad.isfinite().all()) for each in tora.parameters() if each.grad is not None)


def test_the_record_is_the_classifiers_with_a_note() -> None:
    tora = tora_of()
    note = "tora (shared slot, adapter softmax, 1 head), no lambda"
    assert tora.record == replace(tora.classifier.record, notes={"tora": note})
    assert note.split(", no")[0] in repr(tora)


# --- mistakes ---------------------------------------------------------------------------------------------------------


class Reordered(type(make_vit("vit"))):  # type: ignore[misc]
    """A ViT of somebody else's."""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("swin", "plain ViT; 'swin' is of family 'swin': its stages resize the grid"),
        ("pit", "of family 'pit': its stages resize the grid"),
        ("levit", "of family 'levit': its stages resize"),
        ("cait", "of family 'cait': its class token joins"),
        ("beit", "of family 'beit': its position bias"),
        ("eva02", r"of family 'eva': it rotates queries and keys by position \(RoPE\)"),
        ("dinov3", r"of family 'eva': it rotates queries and keys by position \(RoPE\)"),
        ("deit_distilled", "'deit_distilled' is distilled: it has a second class token"),
        ("siglip", r"'siglip' does not classify by a class token \(global_pool 'map'\)"),
    ],
)
def test_models_that_it_cannot_be_put_on(name: str, message: str) -> None:
    classifier = Classifier(make_vit(name), ModelRecord(name, num_classes=5))
    with pytest.raises(UserError, match=message):
        Tora(classifier, ToraSettings(reduction=8))
    assert any(each.requires_grad for each in classifier.parameters())  # refused before anything was frozen


def test_other_user_errors() -> None:
    with pytest.raises(UserError, match=r"classify by a class token \(global_pool 'avg'\)"):
        Tora(classifier_of(global_pool="avg"))
    with pytest.raises(UserError, match="needs a Classifier, got VisionTransformer"):
        Tora(make_vit("vit"))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no anatomy known for"):
        Tora(wrap(nn.Flatten()))
    with pytest.raises(UserError, match=r"skip the modules around it in 'wrapped' \(Sequential\)"):
        Tora(wrap(nn.Sequential(nn.Identity(), make_vit("vit"))))
    with pytest.raises(UserError, match="is a Reordered, which may run differently"):
        Tora(wrap(Reordered(img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=3, num_classes=5)))
    with pytest.raises(
        UserError, match=r"reduction 16 of TORA does not divide the backbone's width, 24\. Divisors: 1, 2, 3"
    ):
        Tora(classifier_of())
    with pytest.raises(UserError, match="heads 5 of TORA does not divide"):
        tora_of(heads=5)
    with pytest.raises(UserError, match="number of classes, at least 2, got 1"):
        Tora(classifier_of(), ToraSettings(reduction=8), num_classes=1)
    with pytest.raises(UserError, match=r"must be in \[0, 1\], got 1.5"):
        Tora(classifier_of(), ToraSettings(reduction=8), trade_off=1.5)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"kind": "tore"}, "unknown kind 'tore' of TORA; did you mean tora"),
        ({"slot": "both"}, "unknown slot 'both' of TORA. Known: shared, separate"),
        ({"softmax": "adaptr"}, "did you mean adapter"),
        ({"joint": "votes"}, "unknown joint 'votes'"),
        ({"heads": 0}, "heads of TORA must be at least 1, got 0"),
        ({"reduction": 0}, "reduction of TORA must be above 0, got 0"),
        ({"kind": "single", "softmax": "token"}, "kind 'single' has no gated fusion"),
        ({"kind": "adapterfusion", "heads": 2}, "kind 'adapterfusion' has no gated fusion"),
        ({"kind": "head", "slot": "separate"}, "kind 'head' has one class token"),
    )
    for settings, message in wrong:
        with pytest.raises(UserError, match=message):
            ToraSettings(**settings)
    with pytest.raises(UserError, match="kind 'single' has no fusion and no gates"):
        tora_of(kind="single").gates(pixels("vit"))
    with pytest.raises(UserError, match="unknown branch 'robust' of TORA; did you mean rob"):
        BranchClassifier(tora_of(), "robust")
