"""Objectives against their papers' formulas, written out in numpy and float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from toys import TinyNet, images
from vitadel.attacks import PGD, Linf, make
from vitadel.attacks.losses import kl_divergence
from vitadel.errors import UserError
from vitadel.runtime.rng import SampleRNG
from vitadel.training.objectives.cross_entropy import (
    Adversarial,
    Standard,
    accuracy,
    cross_entropy,
    forward_both,
    has_batch_norm,
)
from vitadel.training.objectives.mart import Mart
from vitadel.training.objectives.trades import Trades
from vits import make_vit

ATTACK = PGD(Linf(0.03), steps=2)
CLASSES = 4


def toy() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 12), nn.Tanh(), nn.Linear(12, CLASSES)).double()
    for number, weight in enumerate(model.parameters()):
        weight.data = 0.3 * SampleRNG.of_samples(number, range(len(weight))).normal(*weight.shape[1:]).double()
    return model


def batch(count: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    x = images(count).double()
    z = Linf(0.1).random(x, SampleRNG.of_samples(2, range(count)))
    return x, z, torch.arange(count) % CLASSES


def mixed(y: Tensor) -> Tensor:
    one, other = (nn.functional.one_hot(each, CLASSES).double() for each in (y, (y + 1) % CLASSES))
    return 0.6 * one + 0.4 * other


def probabilities(model: nn.Module, x: Tensor) -> np.ndarray:
    with torch.no_grad():
        logits = model(x).numpy()
    raised = np.exp(logits - logits.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


def entropy(p: np.ndarray, y: Tensor, smoothing: float = 0.0) -> np.ndarray:
    """Of every sample, one by one."""
    rows = []
    for row, label in zip(p, y, strict=True):
        target = label.numpy() if label.ndim else np.eye(len(row))[int(label)]
        target = (1 - smoothing) * target + smoothing / len(row)
        rows.append(-sum(t * np.log(q) for t, q in zip(target, row, strict=True)))
    return np.array(rows)


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.array([sum(a * np.log(a / b) for a, b in zip(*rows, strict=True)) for rows in zip(p, q, strict=True)])


def share_right(p: np.ndarray, y: Tensor) -> float:
    label = y.numpy().argmax(1) if y.ndim == 2 else y.numpy()
    return float((p.argmax(1) == label).mean())


@pytest.mark.parametrize("labels", [lambda y: y, mixed])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_standard_and_adversarial_are_cross_entropies(labels, smoothing):
    model, (x, z, y) = toy(), batch()
    y = labels(y)
    clean, perturbed = probabilities(model, x), probabilities(model, z)
    natural, robust = entropy(clean, y, smoothing).mean(), entropy(perturbed, y, smoothing).mean()
    assert natural != pytest.approx(robust)
    standard = Standard(smoothing)(model, x, z, y)
    assert standard["loss"].item() == pytest.approx(natural)
    assert standard["clean_accuracy"].item() == pytest.approx(share_right(clean, y))
    assert Standard().attack is None
    alone = Adversarial(ATTACK, smoothing)(model, x, z, y)
    assert alone["loss"].item() == pytest.approx(robust)
    assert alone["accuracy"].item() == pytest.approx(share_right(perturbed, y))
    assert "clean_accuracy" not in alone
    half = Adversarial(ATTACK, smoothing, clean_share=0.25)(model, x, z, y)
    assert half["loss"].item() == pytest.approx(0.75 * robust + 0.25 * natural)
    assert half["clean_accuracy"].item() == pytest.approx(share_right(clean, y))


def test_without_a_clean_share_nothing_clean_is_run():
    model, (x, z, y) = TinyNet().train(), batch()
    seen = []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    Adversarial(ATTACK)(model, x.float(), z.float(), y % 3)
    assert len(seen) == 1
    assert torch.equal(seen[0], z.float())


@pytest.mark.parametrize("together", [None, True, False])
@pytest.mark.parametrize("labels", [lambda y: y, mixed])
def test_trades_is_the_formula(labels, together):
    model, (x, z, y) = toy(), batch()
    y = labels(y)
    clean, perturbed = probabilities(model, x), probabilities(model, z)
    natural, robust = entropy(clean, y, 0.1).mean(), divergence(clean, perturbed).mean()
    losses = Trades(ATTACK, beta=3.0, label_smoothing=0.1, together=together)(model, x, z, y)
    assert losses["natural"].item() == pytest.approx(natural)
    assert losses["robust"].item() == pytest.approx(robust)
    assert losses["loss"].item() == pytest.approx(natural + 3 * robust)
    assert losses["accuracy"].item() == pytest.approx(share_right(perturbed, y))
    assert losses["clean_accuracy"].item() == pytest.approx(share_right(clean, y))


def test_trades_on_the_clean_images_is_ordinary_training():
    model, (x, _, y) = toy(), batch()
    losses = Trades(ATTACK)(model, x, x, y)
    assert losses["robust"].item() == pytest.approx(0, abs=1e-12)
    assert losses["loss"].item() == pytest.approx(entropy(probabilities(model, x), y).mean())


class Two(nn.Module):
    """Logits that are its parameters: one table for dark images, one for bright ones."""

    def __init__(self, clean: Tensor, perturbed: Tensor) -> None:
        super().__init__()
        self.clean, self.perturbed = nn.Parameter(clean.clone()), nn.Parameter(perturbed.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.perturbed if x.mean() > 0.5 else self.clean


def slopes(objective, clean: Tensor, perturbed: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    model = Two(clean, perturbed)
    dark = torch.zeros(len(y), 3, 2, 2)
    objective(model, dark, dark + 1, y)["loss"].backward()
    return model.clean.grad, model.perturbed.grad


def test_the_gradient_of_trades_flows_through_both_branches():
    source = torch.Generator().manual_seed(0)
    clean, perturbed = (torch.randn(6, CLASSES, generator=source).double() for _ in range(2))
    y = torch.arange(6) % CLASSES
    into_clean, into_perturbed = slopes(Trades(ATTACK, beta=2.0, together=False), clean, perturbed, y)
    p, q = clean.softmax(1), perturbed.softmax(1)
    ratio = (p / q).log()
    by_hand = p * (ratio - (p * ratio).sum(1, keepdim=True))
    assert torch.allclose(into_perturbed, 2 * (q - p) / 6)
    assert torch.allclose(into_clean, (p - nn.functional.one_hot(y, CLASSES) + 2 * by_hand) / 6)


def mart_by_hand(clean: np.ndarray, perturbed: np.ndarray, y: Tensor, beta: float) -> tuple[float, float]:
    boosted, robust = [], []
    for p, q, label, own in zip(clean, perturbed, y, entropy(perturbed, y), strict=True):
        hard = int(label.argmax()) if label.ndim else int(label)
        rival = max(q[k] for k in range(len(q)) if k != hard)
        boosted.append(own - np.log(1.0001 - rival + 1e-12))
        away = sum(p[k] * (np.log(p[k]) - np.log(q[k] + 1e-12)) for k in range(len(q)))
        robust.append(away * (1.0000001 - p[hard]))
    return float(np.mean(boosted)), float(np.mean(robust))


@pytest.mark.parametrize("together", [None, True, False])
@pytest.mark.parametrize("labels", [lambda y: y, mixed])
@pytest.mark.parametrize("count", [1, 9])
def test_mart_is_the_formula(labels, together, count):
    model, (x, z, y) = toy(), batch(count)
    y = labels(y)
    boosted, robust = mart_by_hand(probabilities(model, x), probabilities(model, z), y, 5.0)
    losses = Mart(ATTACK, together=together)(model, x, z, y)
    assert losses["boosted"].item() == pytest.approx(boosted)
    assert losses["robust"].item() == pytest.approx(robust)
    assert losses["loss"].item() == pytest.approx(boosted + 5 * robust)


def test_the_gradient_of_mart_flows_through_its_weight():
    """Into the clean logits it comes by central differences of the formula, weight and divergence both."""
    source = torch.Generator().manual_seed(1)
    clean, perturbed = (torch.randn(3, CLASSES, generator=source).double() for _ in range(2))
    y = torch.tensor([0, 1, 2])
    into_clean, _ = slopes(Mart(ATTACK, beta=4.0, together=False), clean, perturbed, y)
    q, width = perturbed.softmax(1).numpy(), 1e-5
    for row in range(3):
        for column in range(CLASSES):
            ends = []
            for side in (width, -width):
                moved = clean.clone()
                moved[row, column] += side
                boosted, robust = mart_by_hand(moved.softmax(1).numpy(), q, y, 4.0)
                ends.append(boosted + 4 * robust)
            assert float(into_clean[row, column]) == pytest.approx((ends[0] - ends[1]) / (2 * width), abs=1e-8)


def test_divergence_stays_precise_where_probabilities_round():
    clean, perturbed = torch.tensor([[0.0, 300.0]]), torch.tensor([[300.0, 0.0]])
    assert kl_divergence(clean, perturbed).item() == pytest.approx(300.0)
    assert kl_divergence(clean.bfloat16(), perturbed.bfloat16()).dtype == torch.float32
    assert kl_divergence(clean.double(), perturbed.double()).dtype == torch.float64
    assert cross_entropy(clean.bfloat16(), torch.tensor([0])).dtype == torch.float32


def test_accuracy_of_mixed_labels_counts_the_likeliest_class():
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert accuracy(logits, torch.tensor([[0.6, 0.4], [0.3, 0.7], [0.1, 0.9]])).item() == pytest.approx(2 / 3)


def batches_seen(model: nn.Module, together: bool | None) -> list[int]:
    sizes: list[int] = []
    handle = model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    x, z, _ = batch(5)
    clean, perturbed = forward_both(model, x.float(), z.float(), together)
    handle.remove()
    assert len(clean) == len(perturbed) == 5
    return sizes


def test_batch_norm_keeps_clean_and_perturbed_apart():
    normed, plain = TinyNet().train(), toy().float()
    assert has_batch_norm(normed)
    assert not has_batch_norm(plain)
    assert not has_batch_norm(make_vit("vit"))
    assert has_batch_norm(make_vit("xcit"))
    assert batches_seen(normed, None) == [5, 5]
    assert batches_seen(normed, True) == [10]
    assert batches_seen(plain, None) == [10]
    assert batches_seen(plain, False) == [5, 5]


@pytest.mark.parametrize(
    ("build", "reported"),
    [
        (lambda: Standard(1.5), r"label_smoothing.*\[0, 1\], got 1.5"),
        (lambda: Adversarial(ATTACK, clean_share=-0.1), r"clean_share.*\[0, 1\], got -0.1"),
        (lambda: Trades(ATTACK, beta=-1), "beta must be .*at least 0, got -1"),
        (lambda: Mart(ATTACK, beta=float("nan")), "beta.*got nan"),
    ],
)
def test_senseless_settings_are_refused(build, reported):
    with pytest.raises(UserError, match=reported):
        build()


@pytest.mark.parametrize(("kind", "name"), [(Adversarial, "pgd-3"), (Trades, "kl-3"), (Mart, "pgd-3")])
def test_training_lowers_the_loss(kind, name):
    """Four patterns that stay easy to tell apart within the budget."""
    objective, model = kind(attack=make(name, eps=0.02)), toy().float()
    y = torch.arange(40) % CLASSES
    x = (0.5 + 0.2 * SampleRNG.of_samples(3, range(CLASSES)).signs(3, 8, 8))[y]
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    history = []
    for _ in range(60):
        loss = objective(model, x, objective.attack(model, x, y), y)["loss"]
        history.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert history[-1] < 0.5 * history[0]
