"""What must hold for robustness tokens whatever they are trained with: who learns, what is detached, what improves."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.attacks.parse import make
from vitadel.attacks.settings import training_form
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.record import ModelRecord
from vitadel.instrument import extra_tokens
from vitadel.training.loop import run_inner_attack
from vitadel.training.objectives.token_features import RobustnessTokens
from vitadel.training.recipes.compose import compose, rows
from vits import make_vit

EPS = 8 / 255
Y = torch.zeros(6, dtype=torch.long)


def classifier_of(name: str = "dinov2_registers") -> Classifier:
    return Classifier(make_vit(name), ModelRecord(name, num_classes=5, input_size=(32, 32)))


def photos(count: int = 6) -> Tensor:
    """On the grid of 8-bit images, blacks and whites included."""
    x = torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(4)) * 1.4 - 0.2
    return (x.clamp(0, 1) * 255).round() / 255


def tokens_of(net: torch.nn.Module, x: Tensor) -> Tensor:
    """Class and patch tokens after the norm, by timm alone: the registers of this model stand at 1 to 4."""
    features: Tensor = net.forward_features(x)  # type: ignore[operator]
    return features[:, [0, *range(5, 21)]]


def test_attacked_images_and_targets_carry_no_graph() -> None:
    """The gradient of the loss is the one with the target as a constant, for the tokens and for the image."""
    classifier, x = classifier_of(), photos().requires_grad_()
    tokened = TokenClassifier(classifier, fresh_tokens(24, 3, scale=1.0))
    objective = RobustnessTokens(make("features-2"))
    z = run_inner_attack(training_form(objective.attack), tokened.classifier, x, Y)
    assert not z.requires_grad
    assert z.grad_fn is None
    loss = objective(tokened, x, z, Y)["loss"]
    found = torch.autograd.grad(loss, [tokened.tokens, x])

    net, tokens = classifier.backbone, tokened.tokens.detach().clone().requires_grad_()
    target = tokens_of(net, x).detach()
    with extra_tokens(net, tokens):
        cosines = [F.cosine_similarity(tokens_of(net, each), target, dim=2).mean() for each in (x, z)]
    expected = torch.autograd.grad(2 - cosines[0] - cosines[1], [tokens, x])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
        assert other.abs().max() > 1e-5


def test_the_papers_constraints_hold_together() -> None:
    """At 8/255 in pixels, PSNR of 40 dB and whole gray levels, on every image, box included."""
    classifier, x = classifier_of(), photos()
    attack = training_form(make("features-10(psnr=40,quantize=true,normed=true)", eps=EPS))
    z = attack(classifier, x, Y)
    assert (z - x).abs().max() <= EPS + 1e-6
    assert z.min() >= 0
    assert z.max() <= 1
    error = (z.double() - x.double()).square().mean((1, 2, 3))
    assert (-10 * error.log10() >= 40).all()
    torch.testing.assert_close(z * 255, (z * 255).round(), rtol=0, atol=1e-4)
    assert (z != x).flatten(1).any(1).all()


def test_the_released_preset_moves_no_pixel_by_more_than_two_levels() -> None:
    classifier, x = classifier_of(), photos()
    z = training_form(make("features-30(paper=true)", eps=EPS))(classifier, x, Y)
    assert ((z - x) * 255).abs().max() <= 2 + 1e-3
    torch.testing.assert_close(z * 255, (z * 255).round(), rtol=0, atol=1e-4)


def test_more_steps_lower_the_cosine_on_average() -> None:
    classifier, x = classifier_of(), photos()
    net, falling = classifier.backbone, [1.0]
    with torch.no_grad():
        clean = tokens_of(net, x)
    for steps in (1, 2, 4, 8, 16):
        z = training_form(make(f"features-{steps}(step=1/255,normed=true)", eps=EPS))(classifier, x, Y)
        with torch.no_grad():
            falling.append(float(F.cosine_similarity(tokens_of(net, z), clean, dim=2).mean()))
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] < 0.9


def test_training_lowers_the_loss_of_images_it_has_not_seen() -> None:
    classifier = classifier_of("vit")
    tokened = TokenClassifier(classifier, fresh_tokens(24, 10, scale=1.0, seed=2))
    objective = RobustnessTokens(make("features-3(normed=true)", eps=EPS))
    attack, optimizer = training_form(objective.attack), torch.optim.Adam([tokened.tokens], lr=0.1)
    unseen, seen = photos(12).split(6)
    away, near = (attack(classifier, x, Y) for x in (unseen, seen))
    with torch.no_grad():
        before = objective(tokened, unseen, away, Y)
    for _ in range(15):
        optimizer.zero_grad()
        objective(tokened, seen, near, Y)["loss"].backward()
        optimizer.step()
    with torch.no_grad():
        after = objective(tokened, unseen, away, Y)
    assert after["loss"] < 0.9 * before["loss"]
    assert after["invariance"] > before["invariance"]
    assert after["recovery"] > before["recovery"]


def test_recipes_train_as_long_as_the_released_code() -> None:
    """50 steps of 8 images for DINOv2, 300 for DeiT-III and OpenCLIP, 200 for the numbers of tokens."""
    lengths = {row: compose("tokens/paper", row)["data"]["limit"] // 8 for row in rows("tokens/paper")}
    assert len(lengths) == 14
    assert all(steps == (50 if row.startswith("dinov2") else 300) for row, steps in lengths.items())
    assert compose("tokens/deit-tiny")["data"]["limit"] // 8 == 300
    assert compose("tokens/shapes")["data"]["limit"] // 8 == 50
    assert {compose("tokens/count", row)["data"]["limit"] // 8 for row in rows("tokens/count")} == {200}
    for row in rows("tokens/paper"):
        document = compose("tokens/paper", row)
        assert (document["train"]["batch_size"], document["adapter"]["count"]) == (8, 10)
        assert document["objective"]["log_regular"]
        assert document["objective"].get("features", "tokens") == ("pooled" if row.startswith("openclip") else "tokens")
