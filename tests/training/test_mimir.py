"""MIMIR's pre-training: masks, its error, its penalty, and what fine-tuning starts from."""

from __future__ import annotations

import pytest
import torch

from small_recipes import BASE, recipe
from toys import images
from vitadel.adapters.masked_autoencoder import MaskedAutoencoder
from vitadel.attacks.parse import make
from vitadel.backbones.load import load_model
from vitadel.errors import UserError
from vitadel.runtime.distributed import Processes
from vitadel.training.loop import run_inner_attack
from vitadel.training.objectives.masked_images import Mimir, normalized_hsic
from vitadel.training.run import run_harden
from vitadel.training.trainables.autoencoder import Autoencoder

CPU = Processes(0, 1, torch.device("cpu"))
SHAPE = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
PRETRAINING = {
    "model": {"kwargs": {"patch_size": 4, "embed_dim": 32, "global_pool": "avg"}},
    "data": {"test": None, "limit": 320},
    "objective": {"use": "mimir", "attack": "pgd-1(step=10/255)"},
    "adapter": {"use": "masked_autoencoder", "width": 32, "heads": 2, "depth": 1},
    "optimizer": {"lr": 3e-3},
    "train": {"epochs": 6},
}


@pytest.fixture
def autoencoder() -> MaskedAutoencoder:
    torch.manual_seed(0)
    classifier = load_model("vit_tiny_patch16_224", weights="random", num_classes=5, kwargs=SHAPE)
    return Autoencoder(width=16, heads=2).attach(classifier).eval()


def objective(name: str = "pgd-1(step=10/255)", **settings) -> Mimir:
    return Mimir(make(name, eps=8 / 255), **settings)


def test_hidden_patches_change_nothing_and_visible_ones_do(autoencoder):
    x = images(3, side=32)
    visible = autoencoder.order(x, "mask")[:, : autoencoder.shown_patches(16)]
    assert visible.shape == (3, 4)
    hidden = torch.ones(3, 16, dtype=torch.bool).scatter(1, visible, False).view(3, 1, 4, 4)
    where = hidden.repeat_interleave(8, 2).repeat_interleave(8, 3)
    clean = autoencoder(x)
    assert torch.allclose(autoencoder(torch.where(where, 1 - x, x), x), clean, atol=1e-6)
    assert (autoencoder(torch.where(where, x, 1 - x), x) - clean).abs().min() > 1e-4


def test_error_counts_hidden_patches_of_the_clean_image_only(autoencoder):
    x = images(3, side=32)
    order = autoencoder.order(x, "mask")
    with torch.no_grad():
        answer = autoencoder.decoder(autoencoder.encode(x, order[:, :4]), order)
    for row, patch_order, found in zip(range(3), order, autoencoder(x), strict=True):
        errors = []
        for patch in patch_order[4:].tolist():
            top, left = patch // 4 * 8, patch % 4 * 8
            pixels = x[row, :, top : top + 8, left : left + 8].flatten()
            target = (pixels - pixels.mean()) / (pixels.var() + 1e-6).sqrt()
            errors.append((answer[row, patch] - target).square().mean())
        assert torch.allclose(torch.stack(errors).mean(), found, rtol=1e-5)


def test_masks_depend_on_image_step_and_stream_but_not_on_the_batch(autoencoder):
    x = images(4, side=32)
    first = autoencoder.order(x, "mask")
    assert torch.equal(autoencoder.order(x[2:3], "mask")[0], first[2])
    assert not torch.equal(autoencoder.order(x, "other"), first)
    autoencoder.step.fill_(1)
    assert not torch.equal(autoencoder.order(x, "mask"), first)


def test_attack_raises_the_error_of_the_clean_image_within_its_budget(autoencoder):
    x, y = images(6, side=32), torch.zeros(6, dtype=torch.int64)
    z = run_inner_attack(objective("pgd-5").attack, autoencoder, x, y)
    assert 0 < float((z - x).abs().max()) <= 8 / 255 + 1e-6
    seen = "mask of the attack"
    assert bool((autoencoder(z, x, seen) > autoencoder(x, x, seen)).all())


def test_hsic_of_a_description_with_itself_is_known_from_its_spectrum():
    rows = torch.randn(9, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernel = torch.exp(-torch.cdist(rows, rows).square() / (2 * 2.0**2 * 5))
    center = torch.eye(9, dtype=torch.float64) - 1 / 9
    values = torch.linalg.eigvalsh(center @ kernel @ center)
    expected = (values / (values + 9e-5)).square().sum()
    assert torch.allclose(normalized_hsic(rows, rows, 2.0), expected, rtol=1e-9)
    assert normalized_hsic(rows, torch.ones(9, 3), 2.0).abs() < 1e-9
    assert normalized_hsic(rows, torch.randn(9, 2), 2.0) < expected


def test_penalty_is_added_and_reaches_the_encoder(autoencoder):
    x, y = images(6, side=32), torch.zeros(6, dtype=torch.int64)
    losses = objective(penalty=0.5)(autoencoder, x, x, y)
    assert torch.allclose(losses["loss"].detach(), losses["error"] + 0.5 * losses["hsic"].float())
    losses["loss"].backward()
    silent = {name for name, each in autoencoder.named_parameters() if each.requires_grad and each.grad is None}
    assert silent == set()


def test_refuses_other_attacks_other_models_and_impossible_decoders(autoencoder):
    with pytest.raises(UserError, match="attacks the reconstruction by PGD"):
        objective("apgd-ce(steps=2)")
    swin = load_model("swin_tiny_patch4_window7_224", weights="random", num_classes=5)
    with pytest.raises(UserError, match="needs a plain ViT"):
        Autoencoder().attach(swin)
    with pytest.raises(UserError, match="multiple of heads"):
        Autoencoder(width=30, heads=4)
    with pytest.raises(UserError, match="no masked autoencoder to train"):
        objective()(autoencoder.classifier, images(2, side=32), images(2, side=32), torch.zeros(2))


@pytest.mark.slow
def test_pretraining_learns_and_fine_tuning_starts_from_its_encoder(tmp_path):
    shape = {**BASE["model"]["kwargs"], **PRETRAINING["model"]["kwargs"]}
    pretraining = recipe(**{**PRETRAINING, "model": {"kwargs": shape}})
    results = run_harden(pretraining, "small", CPU, out=tmp_path / "mae").results
    assert results["training"]["held_out"]["measure"] == "explained"
    assert results["training"]["held_out"]["clean"] > 0.05  # a constant explains nothing
    encoder = load_model(str(tmp_path / "mae"))
    finetuning = recipe(
        model={"name": str(tmp_path / "mae"), "kwargs": None, "mean": None, "std": None},
        optimizer={"lr": 1e-12, "layer_decay": 0.65},
        train={"epochs": 1},
    )
    run_harden(finetuning, "small", CPU, out=tmp_path / "fine")
    tuned, x = load_model(str(tmp_path / "fine")), images(2, side=16)
    assert torch.allclose(tuned.backbone.forward_features(x), encoder.backbone.forward_features(x), atol=1e-5)
