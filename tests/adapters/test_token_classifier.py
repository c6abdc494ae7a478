"""Tokens around a frozen classifier: nothing when disabled, nothing leaked, and every instrument still works."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import timm.layers.attention
import timm.models.eva
import torch
from torch import Tensor, nn

from vitadel.adapters.tokens.token_classifier import TokenBank, TokenClassifier, fresh_tokens
from vitadel.attacks.features import feature_cosine, features, final_features
from vitadel.attacks.goals import Surrogate
from vitadel.attacks.parse import make
from vitadel.attacks.threats import Linf
from vitadel.attacks.wrappers import Averaged
from vitadel.backbones.anatomy import backbone_of, family_of
from vitadel.backbones.classifier import Classifier, wrap
from vitadel.backbones.record import ModelRecord
from vitadel.data import open_dataset
from vitadel.errors import UserError
from vitadel.evaluation.audit.audit import AuditRequest, run_audit
from vitadel.evaluation.engine.target import Target, open_target
from vitadel.instrument import attention_maps, block_features, extra_tokens, frozen
from vitadel.instrument.tokens import patch_grid
from vitadel.runtime.distributed import join_processes
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Calibrated
from vits import VITS, make_vit, pixels

ABLE = ["vit", "deit3", "deit_distilled", "dinov2", "dinov2_registers", "clip", "siglip", "eva02", "dinov3"]
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def classifier_of(name: str, **settings: Any) -> Classifier:
    size = settings.get("img_size", 32)
    record = ModelRecord(name, num_classes=5, mean=MEAN, std=STD, input_size=(size, size))
    return Classifier(make_vit(name, **settings), record)


def lively_tokens(count: int = 3, seed: int = 0) -> Tensor:
    return fresh_tokens(24, count, scale=1.0, seed=seed)


def normalized(x: Tensor) -> Tensor:
    return (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def places(name: str, count: int) -> list[int]:
    """Of class and patch tokens among all of a model's own."""
    registers = 4 if VITS[name].prefix == 5 else 0
    classes = VITS[name].prefix - registers
    return [*range(classes), *range(classes + registers, count)]


# --- fresh tokens -----------------------------------------------------------------------------------------------------


def test_fresh_tokens_are_small_normal_numbers() -> None:
    tokens = fresh_tokens(768, 40, seed=3)
    assert tokens.shape == (40, 768)
    assert tokens.dtype == torch.float32
    assert abs(float(tokens.mean())) < 2e-4  # 3.5 standard errors
    assert abs(float(tokens.std()) - 0.01) < 2e-4
    assert float((tokens[0] * tokens[1]).mean().abs()) < 2e-5
    torch.testing.assert_close(fresh_tokens(768, 40, scale=1.0, seed=3), tokens * 100)


def test_a_longer_set_begins_with_a_shorter_one_and_seeds_differ() -> None:
    assert torch.equal(fresh_tokens(24, 10)[:4], fresh_tokens(24, 4))
    assert not (fresh_tokens(24, 4) == fresh_tokens(24, 4, seed=1)).any()
    assert torch.equal(fresh_tokens(24, 4, scale=0.0), torch.zeros(4, 24))


# --- one set of tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ABLE)
def test_disabled_tokens_change_no_bit(name: str) -> None:
    classifier, x = classifier_of(name), pixels(name)
    backbone: Any = classifier.backbone
    with torch.no_grad():
        logits, whole = classifier(x), backbone.forward_features(normalized(x))
        model = TokenClassifier(classifier, lively_tokens(), enabled=False)
        assert torch.equal(model(x), logits)
        assert torch.equal(final_features(model, x), whole[:, places(name, whole.shape[1])])
        model.enabled = True
        assert (model(x) - logits).abs().max() > 1e-3
        assert torch.equal(classifier(x), logits)  # nothing is left behind
        model.enabled = False
        assert torch.equal(model(x), logits)


@pytest.mark.parametrize("name", ABLE)
@pytest.mark.parametrize("placement", ["prefix", "append"])
def test_features_are_class_and_patch_tokens_after_the_norm(name: str, placement: str) -> None:
    if placement == "append" and VITS[name].family == "eva":
        pytest.skip("rotating models refuse it")
    classifier, x, tokens = classifier_of(name), pixels(name), lively_tokens()
    backbone: Any = classifier.backbone
    with torch.no_grad(), extra_tokens(backbone, tokens):
        whole = backbone.forward_features(normalized(x))
    seen = final_features(TokenClassifier(classifier, tokens, placement=placement), x)
    registers = 4 if VITS[name].prefix == 5 else 0
    assert seen.shape == (2, VITS[name].prefix - registers + 16, 24)
    torch.testing.assert_close(seen, whole[:, places(name, whole.shape[1])], rtol=0, atol=1e-5)
    # A block of `extra_tokens` around the bare model means the same.
    with extra_tokens(classifier, tokens, placement=placement):
        torch.testing.assert_close(final_features(classifier, x), seen, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["eva02", "dinov3"])
def test_patches_keep_their_rotation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first block the patches' queries and keys know nothing of other tokens yet: they must not change."""
    rotated: list[tuple[Tensor, Tensor]] = []
    for home in (timm.models.eva, timm.layers.attention):
        rotate = home.apply_rot_embed_cat

        def watch(x: Tensor, *args: Any, rotate: Any = rotate, **kwargs: Any) -> Tensor:
            out: Tensor = rotate(x, *args, **kwargs)
            rotated.append((x, out))
            return out

        monkeypatch.setattr(home, "apply_rot_embed_cat", watch)
    classifier, x = classifier_of(name), pixels(name)
    model = TokenClassifier(classifier, lively_tokens(7))
    with torch.no_grad():
        classifier(x)
        bare = rotated[:2]  # queries and keys of the first block
        rotated.clear()
        model(x)
    assert len(rotated) == 4
    for (before, after), (plain, plain_after) in zip(rotated[:2], bare, strict=True):
        assert before.shape[2] == 16
        torch.testing.assert_close(before, plain, rtol=0, atol=1e-6)
        torch.testing.assert_close(after, plain_after, rtol=0, atol=1e-6)
        assert (after - before).abs().max() > 0.1


@pytest.mark.parametrize("name", ["vit", "dinov2_registers", "eva02"])
def test_only_the_tokens_learn(name: str) -> None:
    classifier, x = classifier_of(name), pixels(name)
    with torch.no_grad():
        target = final_features(classifier, x)
    given = lively_tokens()
    model = TokenClassifier(classifier, given)
    assert [each for each, parameter in model.named_parameters() if parameter.requires_grad] == ["tokens"]
    z = x.clone().requires_grad_()
    (1 - feature_cosine(final_features(model, z), target)).mean().backward()
    assert {each for each, parameter in model.named_parameters() if parameter.grad is not None} == {"tokens"}
    assert model.tokens.grad is not None
    assert (model.tokens.grad.abs().amax(1) > 0).all()
    assert z.grad is not None
    assert z.grad.abs().max() > 0  # attacks go through the tokens
    with torch.no_grad():
        before = feature_cosine(final_features(model, x), target).mean()
        model.tokens -= 0.05 * model.tokens.grad / model.tokens.grad.norm()
        assert feature_cosine(final_features(model, x), target).mean() > before
    assert torch.equal(given, lively_tokens())  # a copy learns, not what was given


def test_the_backbone_stays_in_eval_mode() -> None:
    model = TokenClassifier(classifier_of("vit", drop_rate=0.5, pos_drop_rate=0.5), lively_tokens()).train()
    x = pixels("vit")
    assert model.training
    assert not any(module.training for module in model.classifier.modules())
    assert torch.equal(model(x), model(x))
    with frozen(model):
        assert not model.training
        assert not model.tokens.requires_grad
    assert model.training
    assert model.tokens.requires_grad
    assert not any(parameter.requires_grad for parameter in model.classifier.parameters())


def test_a_longer_sequence_never_reaches_the_pool() -> None:
    """Mean pooling over extra tokens would change with tokens that no patch can see."""
    classifier, x = classifier_of("vit", global_pool="avg", class_token=False), pixels("vit")
    backbone: Any = classifier.backbone
    tokens = lively_tokens()
    stream = backbone.norm_pre(backbone._pos_embed(backbone.patch_embed(normalized(x))))
    stream = backbone.blocks(torch.cat([stream, tokens.expand(2, -1, -1)], 1))[:, :16]
    torch.testing.assert_close(
        TokenClassifier(classifier, tokens)(x), backbone.forward_head(backbone.norm(stream)), rtol=0, atol=1e-5
    )


def test_neither_repr_nor_state_dict_contains_tokens() -> None:
    tokens = lively_tokens()
    model = TokenClassifier(classifier_of("vit"), tokens, salt=b"s" * 16)
    shown = f"{model!r} {model} {model.record} {list(model.state_dict())}"
    assert "tokens=3" in shown
    assert model.fingerprint in shown
    assert not any(f"{abs(float(value)):.3f}" in shown for value in tokens.flatten())
    assert set(model.state_dict()) == {f"classifier.{key}" for key in model.classifier.state_dict()}
    assert next(iter(nn.Sequential(model).state_dict())).startswith("0.classifier.")
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "tokens"'):
        copy.deepcopy(model).load_state_dict(model.state_dict())
    twin = copy.deepcopy(model)
    assert torch.equal(twin(pixels("vit")), model(pixels("vit")))
    assert "tokens" not in twin.state_dict()


def test_fingerprints_name_tokens_and_salt() -> None:
    classifier = classifier_of("vit")
    one = TokenClassifier(classifier, lively_tokens(), salt=b"1" * 16)
    assert one.fingerprint == TokenClassifier(classifier, lively_tokens(), salt=b"1" * 16).fingerprint
    assert one.fingerprint != TokenClassifier(classifier, lively_tokens(), salt=b"2" * 16).fingerprint
    assert one.fingerprint != TokenClassifier(classifier, lively_tokens(seed=1), salt=b"1" * 16).fingerprint
    assert (
        TokenClassifier(classifier, lively_tokens()).fingerprint
        != TokenClassifier(classifier, lively_tokens()).fingerprint
    )
    before = one.fingerprint
    with torch.no_grad():
        one.tokens[0, 0] += 1
    assert one.fingerprint != before


def test_the_record_is_the_classifiers_with_a_note() -> None:
    classifier = classifier_of("vit")
    model = TokenClassifier(classifier, lively_tokens())
    note = f"3 robustness tokens (prefix), fingerprint {model.fingerprint}"
    assert model.record == replace(classifier.record, notes={"tokens": note})
    model.enabled = False
    assert model.record == classifier.record


def test_user_errors_are_reported() -> None:
    classifier = classifier_of("vit")
    for count in (0, -1):
        with pytest.raises(UserError, match=rf"a count of at least 1, got {count}; the paper uses 10"):
            fresh_tokens(24, count)
    with pytest.raises(UserError, match="a count of at least 1, got 0"):
        TokenClassifier(classifier, torch.zeros(0, 24))
    with pytest.raises(UserError, match="width of at least 1, got 0"):
        fresh_tokens(0, 1)
    with pytest.raises(UserError, match="scale of fresh tokens"):
        fresh_tokens(24, 1, scale=float("nan"))
    with pytest.raises(UserError, match=r"of shape \(3, 25\) do not fit 'vit', whose tokens are 24 wide"):
        TokenClassifier(classifier, torch.zeros(3, 25))
    with pytest.raises(UserError, match="finite floating-point numbers"):
        TokenClassifier(classifier, torch.full((3, 24), torch.inf))
    with pytest.raises(UserError, match="no meaning for family 'swin': its stages resize"):
        TokenClassifier(wrap(make_vit("swin")), torch.zeros(3, 24))
    with pytest.raises(UserError, match="no anatomy known for"):
        TokenClassifier(wrap(nn.Flatten()), torch.zeros(3, 24))
    with pytest.raises(UserError, match="need a Classifier, got VisionTransformer"):
        TokenClassifier(make_vit("vit"), torch.zeros(3, 24))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="unknown placement"):
        TokenClassifier(classifier, lively_tokens(), placement="middle")
    with pytest.raises(UserError, match="cannot be appended to Eva"):
        TokenClassifier(classifier_of("eva02"), lively_tokens(), placement="append")
    with pytest.raises(UserError, match="at least 2 sets of tokens, got 1"):
        TokenBank(classifier, [lively_tokens()])
    with pytest.raises(UserError, match="same number of tokens, got 2, 3"):
        TokenBank(classifier, [lively_tokens(3), lively_tokens(2)])
    with pytest.raises(UserError, match=r"of shape \(2, 3, 24\) do not fit"):
        TokenBank(classifier, [torch.zeros(2, 3, 24)] * 2)


# --- cosines ----------------------------------------------------------------------------------------------------------


def test_cosines_by_hand() -> None:
    here = torch.tensor([[[3.0, 4.0], [1.0, 0.0]], [[1.0, 2.0], [3.0, 4.0]]])
    there = torch.tensor([[[4.0, 3.0], [0.0, 2.0]], [[1.0, 2.0], [3.0, 4.0]]])
    # Image 1: tokens 24/25 and 0; channels (3,1).(4,0) and (4,0).(3,2); flat 24 / sqrt(26 * 29).
    expected = {
        "token": 0.48,
        "channel": (12 / (10**0.5 * 4) + 12 / (4 * 13**0.5)) / 2,
        "flat": 24 / (26 * 29) ** 0.5,
    }
    for axis, value in expected.items():
        torch.testing.assert_close(feature_cosine(here, there, axis), torch.tensor([value, 1.0]))
    for axis in ("token", "flat"):  # pooled features
        torch.testing.assert_close(feature_cosine(here[:, 0], there[:, 0], axis), torch.tensor([0.96, 1.0]))
    with pytest.raises(UserError, match="class token alone"):
        feature_cosine(here[:, 0], there[:, 0], "channel")
    with pytest.raises(UserError, match="unknown axis 'tokn'; did you mean token"):
        feature_cosine(here, there, "tokn")
    with pytest.raises(UserError, match=r"shapes \(2, 2, 2\) and \(1, 2, 2\) cannot be compared"):
        feature_cosine(here, there[:1])


# --- attacks and instruments on it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vit", "dinov2_registers", "dinov3"])
def test_instruments_see_the_model_inside(name: str) -> None:
    classifier, x = classifier_of(name), pixels(name)
    model = TokenClassifier(classifier, lively_tokens(4))
    assert backbone_of(model) is classifier.backbone
    assert family_of(model) == VITS[name].family
    assert patch_grid(model, x) == (4, 4)
    with torch.no_grad(), block_features(model) as seen, attention_maps(model) as maps:
        model(x)
    tokens = VITS[name].prefix + 16 + 4
    assert [each.shape for each in seen] == [(2, tokens, 24)] * 2
    assert [each.shape for each in maps] == [(2, 3, tokens, tokens)] * 2
    with extra_tokens(model, lively_tokens(2, seed=5)), torch.no_grad():
        more = model(x)
    both = torch.cat([lively_tokens(2, seed=5), lively_tokens(4)])
    with torch.no_grad():
        torch.testing.assert_close(more, TokenClassifier(classifier, both)(x), rtol=0, atol=1e-4)


ATTACKS = [
    "pgd-3",
    "apgd-ce",
    "aas-bpda+pgd-3",
    "self-ensemble-3",
    "pna-patchout",
    "features-3",
    "scale:0.5+pgd-3",
    "patch-fool(steps=3,patches=2)",
]


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("placement", ["prefix", "append"])
def test_attacks_work_through_the_tokens(attack: str, placement: str) -> None:
    """An attack through the tokens is that on a model whose registers hold them: timm's own road to the same thing."""
    name, x = "dinov2", pixels("dinov2")
    classifier, tokens = classifier_of(name), lively_tokens()
    twin = make_vit(name, reg_tokens=3)
    state = dict(classifier.backbone.state_dict())
    position = state["pos_embed"]
    state["pos_embed"] = torch.cat([position[:, :1], torch.zeros(1, 3, 24), position[:, 1:]], 1)
    twin.load_state_dict({**state, "reg_token": tokens[None]})
    model, reference = (
        TokenClassifier(classifier, tokens, placement=placement).double(),
        Classifier(twin, classifier.record),
    )
    reference.double()
    x = x.double()
    torch.testing.assert_close(model(x), reference(x), rtol=0, atol=1e-11)
    y = reference(x).argmax(1)
    found = []
    for each in (model, reference):
        ready = make(attack, eps=4 / 255)
        if isinstance(ready, Calibrated):
            ready = ready.prepared(each, [(pixels(name, 8, seed=4).double(), torch.arange(8) % 5)])
        found.append(ready(each, x, y, SampleRNG.of_samples(0, range(2))))
    z, expected = found
    assert (z - x).abs().max() > 1e-3
    # Signs of gradients that are rounding errors may differ.
    assert ((z - expected).abs() > 1e-9).double().mean() < 0.01
    assert model.tokens.grad is None


def test_a_feature_attack_through_tokens_lowers_their_cosine() -> None:
    classifier, x = classifier_of("dinov2_registers"), pixels("dinov2_registers")
    model = TokenClassifier(classifier, lively_tokens())
    z = features(Linf(8 / 255), 10, normed=True, stop_when_fooled=False)(model, x, torch.tensor([0, 1]))
    with torch.no_grad():
        assert (feature_cosine(final_features(model, z), final_features(model, x)) < 0.95).all()


def test_surrogate_tokens_share_the_backbone_and_not_the_verdict() -> None:
    """The attacker's own tokens and the victim's go around one classifier; each is run with its own."""
    classifier, x = classifier_of("vit"), pixels("vit")
    victim, theirs = (TokenClassifier(classifier, lively_tokens(seed=seed)) for seed in (0, 1))
    pair = Surrogate(theirs, victim)
    with torch.no_grad():
        assert torch.equal(pair(x), theirs(x))
        torch.testing.assert_close(final_features(pair, x), final_features(theirs, x))
        assert (victim(x) - theirs(x)).abs().max() > 1e-3


def test_half_precision() -> None:
    model, x = TokenClassifier(classifier_of("vit"), lively_tokens()), pixels("vit")
    with torch.no_grad():
        expected = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(model(x).float(), expected, rtol=0, atol=0.2)
        model.bfloat16()
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0.4)


# --- a bank -----------------------------------------------------------------------------------------------------------


def bank_of(classifier: Classifier, sets: int = 4, seed: int = 0) -> TokenBank:
    tokens = [lively_tokens(seed=each) for each in range(sets)]
    return TokenBank(classifier, tokens, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["vit", "eva02"])
def test_a_bank_answers_with_one_of_its_sets_for_each_image(name: str) -> None:
    classifier, x = classifier_of(name), pixels(name)[:1].expand(64, -1, -1, -1)
    with torch.no_grad():
        known = torch.cat([TokenClassifier(classifier, lively_tokens(seed=each))(x[:1]) for each in range(4)])
        logits = bank_of(classifier)(x)
    distance = (logits[:, None] - known).abs().amax(2)
    assert distance.amin(1).max() < 1e-4
    counts = distance.argmin(1).bincount(minlength=4)
    assert counts.min() >= 6  # 16 expected; this or less by chance: about 0.3 % a set


def test_draws_need_the_key_and_repeat_with_it() -> None:
    classifier, x = classifier_of("vit"), pixels("vit", 16)

    def answers(bank: TokenBank) -> list[Tensor]:
        torch.manual_seed(7)
        with torch.no_grad():
            return [bank(x), bank(x)]

    first, second = answers(bank_of(classifier))
    assert not torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip((first, second), answers(bank_of(classifier)), strict=True))
    assert not torch.equal(answers(bank_of(classifier, seed=1))[0], first)
    keyless = [TokenBank(classifier, [lively_tokens(seed=each) for each in range(4)]) for _ in range(2)]
    assert not torch.equal(answers(keyless[0])[0], answers(keyless[1])[0])  # alike by chance: 1 in 4**16


def test_gradients_averaged_over_draws_are_those_of_the_same_draws() -> None:
    """Averaging runs each pass again for its gradient: that must meet the tokens of the first time."""
    classifier, x = classifier_of("vit"), pixels("vit")
    bank = bank_of(classifier)
    slopes = []

    def spy(model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        z = x.clone().requires_grad_()
        slopes.append(torch.autograd.grad(model(z).square().sum(), z)[0])
        return x

    torch.manual_seed(7)
    Averaged(spy, 3)(bank, x, torch.tensor([0, 1]))  # type: ignore[arg-type]
    torch.manual_seed(7)
    z = x.clone().requires_grad_()
    mean = torch.stack([bank(z) for _ in range(3)]).mean(0)
    torch.testing.assert_close(slopes[0], torch.autograd.grad(mean.square().sum(), z)[0], rtol=1e-4, atol=1e-5)


def test_nor_does_a_bank() -> None:
    bank = bank_of(classifier_of("vit"))
    shown = f"{bank!r} {bank.record}"
    assert "sets=4, tokens=3" in shown
    assert f"bank of 4 sets of 3 robustness tokens (prefix), fingerprint {bank.fingerprint}" in shown
    assert bank._key.hex() not in shown
    assert repr(bank._key) not in shown
    assert set(bank.state_dict()) == {f"classifier.{key}" for key in bank.classifier.state_dict()}
    assert not any(parameter.requires_grad for parameter in bank.parameters())
    assert not bank.train().classifier.training


# --- the audit --------------------------------------------------------------------------------------------------------


def audited(model: Any) -> dict[str, Any]:
    target = Target(model, "vit", open_dataset("shapes"), "shapes")
    request = AuditRequest(attacks=("pgd-2", "features-2"), eps=4 / 255, limit=6, batch_size=6)
    return run_audit(target, request, join_processes("cpu")).results


def test_an_audit_takes_a_bank_and_distinguishes_it_from_a_fixed_set() -> None:
    size = open_dataset("shapes").read([0])[0]
    side = size.height  # type: ignore[union-attr]
    classes = len(open_dataset("shapes").classes)
    backbone = make_vit("vit", img_size=side, classes=classes)
    classifier = Classifier(backbone, ModelRecord("vit", num_classes=classes, input_size=(side, side)))
    fixed = TokenClassifier(classifier, lively_tokens())
    results = audited(fixed)
    assert fixed.fingerprint in results["model"]["notes"]["tokens"]
    assert results["model"]["family"] == "vit"
    assert "random-outputs" not in [finding["check"] for finding in results["findings"]]
    findings = audited(bank_of(classifier))["findings"]
    assert "random-outputs" in [finding["check"] for finding in findings]


def test_an_audit_takes_a_token_classifier_and_distinguishes_its_tokens() -> None:
    classifier = classifier_of("dinov2")
    subjects = [open_target(TokenClassifier(classifier, fresh_tokens(24, 3, seed=seed)), "shapes") for seed in (0, 1)]
    assert all(isinstance(target.model, TokenClassifier) for target in subjects)
    assert subjects[0].model_fingerprint() != subjects[1].model_fingerprint()
    assert "3 robustness tokens" in subjects[0].model.record.notes["tokens"]
