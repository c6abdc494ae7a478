"""Pooled features: what enters the classifier, and for a CLIP image tower its projection."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.attacks.features import AwayFromFeatures, FeatureAttack, features, final_features
from vitadel.attacks.parse import make
from vitadel.attacks.settings import settings_of
from vitadel.attacks.threats import Linf
from vitadel.backbones import load
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.load import load_model
from vitadel.backbones.record import ModelRecord
from vitadel.errors import UserError
from vitadel.instrument import extra_tokens
from vitadel.training.objectives.token_features import RobustnessTokens
from vits import VITS, make_vit, pixels

EPS = 8 / 255
SIZES: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 3}
NAME = "vit_base_patch16_clip_224"


def clip(tag: str = "laion2b", width: int = 16) -> nn.Module:
    """A CLIP image tower in small: `pre_norm`, and a head that projects into `width` dimensions."""
    torch.manual_seed(0)
    overlay = {"num_classes": width}
    model: nn.Module = timm.create_model(f"{NAME}.{tag}", num_classes=width, pretrained_cfg_overlay=overlay, **SIZES)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def classifier_of(net: nn.Module, classes: int = 16) -> Classifier:
    return Classifier(net, ModelRecord(NAME, num_classes=classes, input_size=(32, 32)))


def cosines(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(1) / (one.norm(dim=1) * other.norm(dim=1))


@pytest.mark.parametrize("name", VITS)
def test_without_a_projection_they_are_what_the_classifier_gets(name: str) -> None:
    model: Any = make_vit(name)
    x = pixels(name)
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(x), pre_logits=True)
    if name == "deit_distilled":  # its two heads get two tokens
        expected = model.forward_features(x)[:, :2].mean(1)
    torch.testing.assert_close(final_features(model, x, "pooled"), expected, rtol=0, atol=1e-5)


def test_of_clip_they_are_the_projection_with_and_without_tokens() -> None:
    net, x, tokens = clip(), pixels("clip"), fresh_tokens(24, 3, scale=1.0)
    classifier = classifier_of(net)
    assert isinstance(net.norm_pre, nn.LayerNorm)
    torch.testing.assert_close(final_features(classifier, x, "pooled"), classifier(x), rtol=0, atol=1e-6)
    with torch.no_grad(), extra_tokens(classifier, tokens):
        expected = classifier(x)
    model = TokenClassifier(classifier, tokens)
    seen = final_features(model, x, "pooled")
    assert seen.shape == (2, 16)
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-6)
    assert (seen - classifier(x)).abs().max() > 1e-3
    seen.sum().backward()
    assert model.tokens.grad is not None
    assert model.tokens.grad.abs().max() > 0


def test_a_fine_tuned_clip_has_a_classifier_and_no_projection() -> None:
    net: Any = clip("laion2b_ft_in1k")
    x = pixels("clip")
    expected = net.forward_head(net.forward_features(x), pre_logits=True)
    torch.testing.assert_close(final_features(net, x, "pooled"), expected, rtol=0, atol=1e-6)


def test_the_projection_outlives_a_new_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training on classes puts a classifier in its place, as timm keeps the projection there."""
    net, x = clip(), pixels("clip")
    before = net(x)
    monkeypatch.setattr(load, "create_backbone", lambda *_args, **_more: net)
    model = load_model(f"{NAME}.laion2b", weights="random", num_classes=7, new_head=True, mean=(0,) * 3, std=(1,) * 3)
    assert model(x).shape == (2, 7)
    torch.testing.assert_close(final_features(model, x, "pooled"), before, rtol=0, atol=1e-6)
    assert not any("projection" in key for key in model.state_dict())
    assert final_features(model.double(), x.double(), "pooled").dtype == torch.float64


def test_the_attack_lowers_their_cosine() -> None:
    net, x = clip(), pixels("clip")
    y = net(x).argmax(1)
    with torch.no_grad():
        clean = net(x)
        few, many = (
            cosines(net(features(Linf(EPS), k, features="pooled", stop_when_fooled=False)(net, x, y)), clean)
            for k in (1, 8)
        )
    assert (many < few).all()
    assert (few < 1).all()
    goal = AwayFromFeatures(kind="pooled", weight=0.0)
    z = (x + 0.05).clamp(0, 1)
    torch.testing.assert_close(goal(net, x, y).evaluate(z, 0.5)[0], -cosines(net(z), clean), rtol=0, atol=1e-6)


def test_paper_takes_the_cosine_over_the_embedding() -> None:
    attack: Any = make("features-30(paper=true,features=pooled)")
    assert (attack.goal.kind, attack.goal.axis, attack.length) == ("pooled", "token", 0.01)
    assert attack.effective_eps == "8/255 in normalised units = 1.83, 1.79, 1.80 /255 in pixels"
    net, x = clip(), (pixels("clip") * 255).round() / 255
    z = attack(net, x, net(x).argmax(1))
    assert ((z - x) * 255).abs().max() <= 2.001


def test_the_objective_compares_projections() -> None:
    classifier, x, tokens = classifier_of(clip()), pixels("clip"), fresh_tokens(24, 3)
    z = (x + 0.05).clamp(0, 1)
    objective = RobustnessTokens(make("features-3(features=pooled)"), features="pooled")
    losses = objective(TokenClassifier(classifier, tokens), x, z, torch.zeros(2, dtype=torch.long))
    with torch.no_grad():
        target = classifier(x)
        with extra_tokens(classifier, tokens):
            kept, regained = (cosines(classifier(each), target).mean() for each in (x, z))
    torch.testing.assert_close(losses["loss"].detach(), 2 - kept - regained, rtol=0, atol=1e-5)


def test_the_effective_budget_is_among_the_settings() -> None:
    settings = settings_of(FeatureAttack(Linf(4 / 255), paper=True))["effective_eps"]
    assert settings == "4/255 in normalised units = 0.92, 0.90, 0.90 /255 in pixels"
    assert settings_of(FeatureAttack(Linf(4 / 255)))["effective_eps"] is None


def test_user_errors_are_refused() -> None:
    for wrong in (
        lambda: features(Linf(EPS), axis="channel", features="pooled"),
        lambda: RobustnessTokens(make("features-3"), axis="channel", features="pooled"),
    ):
        with pytest.raises(UserError, match=r"pooled features are one vector per image\. Use axis=token"):
            wrong()
    with pytest.raises(UserError, match="unknown features 'poled'; did you mean pooled"):
        make("features-3(features=poled)")
    with pytest.raises(UserError, match="leave blocks out"):
        make("features-3(features=pooled,blocks=2)")
    with pytest.raises(UserError, match="built without pooling"):
        final_features(make_vit("vit", global_pool=""), pixels("vit"), "pooled")
