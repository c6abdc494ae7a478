"""AFAT: its loss by two separate passes, whom its gradients reach, how many patches, and what its opponent learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from training_toys import FakeTraining

import vitadel
from small_recipes import document
from vitadel.attacks.patches.corruption_model import CorruptionModel, load_corruption_model
from vitadel.attacks.patches.patch_threat import changed_patches
from vitadel.backbones.classifier import wrap
from vitadel.errors import UserError
from vitadel.instrument.hooks import block_features
from vitadel.runtime.distributed import join_processes
from vitadel.training.objectives.afat import Afat
from vitadel.training.paired_features import pair_of
from vitadel.training.recipes.build import build_recipe
from vitadel.training.run import run_harden
from vits import make_vit, pixels

CPU = join_processes("cpu")
LABELS = torch.tensor([0, 3, 1, 4])


def model_and_images(name="vit", **settings):
    """In float64, with the normalization of a real model: 16 patches of 8 px."""
    model = wrap(make_vit(name, **settings), mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3)).double()
    return model, pixels(name, 4, dtype=torch.float64)


def seen_by(model, call):
    """The images that a call sends through the model, pass by pass."""
    seen = []
    with_hook = model.register_forward_pre_hook(lambda _module, args: seen.append(args[0].detach()))
    try:
        call()
    finally:
        with_hook.remove()
    return seen


def corrupted_half(objective, model, x):
    *_, both = seen_by(model, lambda: objective(model, x, x, LABELS))  # at first, one image for the grid
    first, second = both.chunk(2)
    assert torch.equal(second, x)
    return first


def two_passes(objective, model, x):
    """(CE of the clean images, mean over blocks of the mean squared gap), each image kind in a pass of its own."""
    altered = corrupted_half(objective, model, x)
    with block_features(model) as features:
        logits = model(x)
        clean = list(features)
        model(altered)
        gaps = [((a - b) ** 2).sum() / a.numel() for a, b in zip(features, clean, strict=True)]
    return F.cross_entropy(logits, LABELS), sum(gaps) / len(gaps)


@pytest.mark.parametrize("settings", [{}, {"selector": "random"}, {"fill": "zero"}, {"selector": "cross-entropy"}])
def test_loss_is_that_of_two_separate_passes(settings):
    model, x = model_and_images()
    objective = Afat(weight=0.3, **settings)
    losses = objective(model, x, x, LABELS)
    natural, apart = two_passes(objective, model, x)
    assert apart > 1e-3
    assert losses["loss"].item() == pytest.approx((natural + 0.3 * apart).item(), rel=1e-9)
    assert losses["alignment"].item() == pytest.approx(apart.item(), rel=1e-9)
    assert losses["natural"].item() == pytest.approx(natural.item(), rel=1e-9)


def test_one_pass_over_twice_the_images():
    model, x = model_and_images()
    for settings in ({}, {"selector": "cross-entropy"}, {"selector": "random"}, {"share": 0.5}):
        objective = Afat(**settings)
        objective(model, x, x, LABELS)  # which looks for the grid, once
        passes = seen_by(model, lambda objective=objective: objective(model, x, x, LABELS))
        assert [len(images) for images in passes] == [8]


@pytest.mark.parametrize(("share", "rounding", "count"), [
    (0, "nearest", 0), (0, "quantile", 0), (0.01, "nearest", 1), (0.1, "nearest", 2), (0.1, "quantile", 2),
    (0.2, "nearest", 3), (0.2, "quantile", 4), (0.5, "nearest", 8), (0.5, "quantile", 8), (1, "nearest", 16),
])  # fmt: skip
@pytest.mark.parametrize("selector", ["alignment", "random"])
def test_so_many_patches_are_corrupted(share, rounding, count, selector):
    model, x = model_and_images()
    altered = corrupted_half(Afat(share=share, rounding=rounding, selector=selector), model, x)
    assert changed_patches(altered, x, 8).sum(1).tolist() == [count] * 4


def test_equal_scores_corrupt_no_more():
    model, x = model_and_images()
    altered = corrupted_half(Afat(share=0.25), model, torch.full_like(x, 0.2))
    assert changed_patches(altered, torch.full_like(x, 0.2), 8).sum(1).tolist() == [4] * 4


@pytest.mark.parametrize(("settings", "low", "high"), [
    ({"noise": "normalised"}, (0.4, 0.5, 0.6), (0.6, 0.75, 0.9)),
    ({"noise": "pixel"}, (0, 0, 0), (1, 1, 1)),
    ({"fill": "zero"}, (0.4, 0.5, 0.6), (0.4, 0.5, 0.6)),
])  # fmt: skip
def test_what_patches_are_filled_with(settings, low, high):
    model, x = model_and_images()
    altered = corrupted_half(Afat(share=1, **settings), model, x)
    for channel in range(3):
        values = altered[:, channel]
        assert values.min().item() == pytest.approx(low[channel], abs=0.01)
        assert values.max().item() == pytest.approx(high[channel], abs=0.01)


def test_the_selector_wants_the_opposite_and_learns_through_the_corrupted_images_only():
    """d loss / d C by hand: through the chain rule from x' to the mask to the scores."""
    model, x = model_and_images()
    objective = Afat(weight=0.3, share=0.25)
    objective(model, x, x, LABELS)["loss"].backward()
    selector = objective.patch_selector._model
    altered = corrupted_half(objective, model, x)
    with block_features(model) as features:
        with torch.no_grad():
            model(x)
            clean = list(features)
        free = altered.clone().requires_grad_()
        model(free)
        apart = torch.stack([F.mse_loss(a, b) for a, b in zip(features, clean, strict=True)]).mean()
        (slope,) = torch.autograd.grad(0.3 * apart, free)
    rng = objective.patch_selector.rng(x).stream("noise").uniform(*x.shape[1:])
    mean, std = model.mean.double(), model.std.double()
    noise = mean + std * rng
    at_pixels = (slope * (x - noise)).sum(1)  # d x' / d mask, of all pixels of a patch
    at_patches = at_pixels.unflatten(1, (4, 8)).unflatten(3, (4, 8)).sum((2, 4)).flatten(1)
    normalized = ((x - mean) / std).float()
    scores = F.gelu(F.conv2d(normalized, selector.look, stride=8)).flatten(1) @ selector.mix.T
    expected = torch.autograd.grad((scores * at_patches.float()).sum(), [selector.look, selector.mix])
    for weight, wanted in zip((selector.look, selector.mix), expected, strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(weight.grad, wanted, rtol=1e-4, atol=1e-7)
    before = {name: weight.detach().clone() for name, weight in selector.named_parameters()}
    run = training(model, x)
    fresh = step(Afat(weight=0.3, share=0.25, lr=0.1, momentum=0, weight_decay=0, grad_norm=2.0), run, model, x)
    start = CorruptionModel(4, 4, 8, 3, torch.Generator().manual_seed(seed_of_selector(run)))
    moved = torch.cat(
        [(now - then).flatten() for now, then in zip(fresh.parameters(), start.parameters(), strict=True)]
    )
    assert moved.norm().item() == pytest.approx(0.1 * 2.0, rel=1e-4)  # uphill by rate times length
    assert all(torch.equal(weight, before[name]) for name, weight in selector.named_parameters())


def seed_of_selector(run):
    from vitadel.training.data_stream import derive_seed

    return derive_seed(run.seed, "opponent")


def training(model, x):
    return FakeTraining(model, batches=[(x.float(), LABELS)])


def step(objective, run, model, x):
    """One step of the opponent; its corruption model afterwards."""
    with objective.patch_selector.around_step(run, lambda: ()):
        objective(model, x, x, LABELS)["loss"].backward()
    return objective.patch_selector._model


def flat(parameters):
    return torch.cat([each.detach().flatten() for each in parameters])


@pytest.mark.parametrize("selector", ["alignment", "cross-entropy"])
def test_uphill_is_against_the_gradient_that_the_model_follows(selector):
    model, x = model_and_images()
    settings = {"weight": 0.3, "selector": selector, "momentum": 0, "weight_decay": 0, "lr": 1e-3}
    run = training(model, x)
    start = flat(CorruptionModel(4, 4, 8, 3, torch.Generator().manual_seed(seed_of_selector(run))).parameters())
    slopes = []
    objective = Afat(**settings)
    objective.patch_selector._ascend = lambda run: slopes.append(
        flat(w.grad for w in objective.patch_selector._model.parameters())
    )
    step(objective, run, model, x)
    after = flat(step(Afat(**settings), run, model, x).parameters())
    torch.testing.assert_close(after - start, 1e-3 * 5 * slopes[0] / slopes[0].norm(), rtol=1e-3, atol=1e-8)
    clipped = flat(step(Afat(**settings, gradient="clipped"), run, model, x).parameters())
    torch.testing.assert_close(clipped - start, 1e-3 * slopes[0], rtol=1e-2, atol=2e-8)
    assert slopes[0].norm() < 5


def test_the_answers_to_corrupted_images_teach_the_model_nothing():
    model, x = model_and_images()
    grads = {}
    for selector in ("alignment", "cross-entropy"):
        model.zero_grad()
        Afat(weight=0.3, selector=selector)(model, x, x, LABELS)["loss"].backward()
        grads[selector] = [parameter.grad.clone() for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(*grads.values(), strict=True))
    model.zero_grad()
    objective = Afat(weight=0.0)
    objective(model, x, x, LABELS)["loss"].backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    F.cross_entropy(model(x), LABELS).backward()
    for a, b in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad, rtol=1e-9, atol=1e-12)


def test_max_ce_selector_climbs_the_cross_entropy_of_corrupted_images():
    model, x = model_and_images()
    slopes = {}
    for selector in ("alignment", "cross-entropy"):
        objective = Afat(weight=0.3, selector=selector)
        objective(model, x, x, LABELS)["loss"].backward()
        slopes[selector] = objective.patch_selector._model.mix.grad
    altered = corrupted_half(objective, model, x).requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(altered), LABELS), altered)
    noise = model.mean.double() + model.std.double() * objective.patch_selector.rng(x).stream("noise").uniform(
        3, 32, 32
    )
    at_pixels = (slope * (x - noise)).sum(1)
    at_patches = at_pixels.unflatten(1, (4, 8)).unflatten(3, (4, 8)).sum((2, 4)).flatten(1).float()
    selector = objective.patch_selector._model
    normalized = ((x - model.mean.double()) / model.std.double()).float()
    hidden = F.gelu(F.conv2d(normalized, selector.look, stride=8)).flatten(1)
    torch.testing.assert_close(slopes["cross-entropy"], at_patches.T @ hidden, rtol=1e-4, atol=1e-7)
    assert not torch.allclose(slopes["cross-entropy"], slopes["alignment"], rtol=0.1)


def test_detach_clean_pulls_the_corrupted_features_only():
    model, x = model_and_images()
    weight = model.backbone.blocks[0].mlp.fc2.weight
    grads = {}
    for detach in (False, True):
        objective = Afat(weight=1.0, detach_clean=detach)
        (grads[detach],) = torch.autograd.grad(objective(model, x, x, LABELS)["loss"], weight)
    with block_features(model) as features:
        natural = F.cross_entropy(model(x), LABELS)
        clean = [each.detach() for each in features]
        model(corrupted_half(objective, model, x))
        apart = torch.stack([F.mse_loss(a, b) for a, b in zip(features, clean, strict=True)]).mean()
    (wanted,) = torch.autograd.grad(natural + apart, weight)
    torch.testing.assert_close(grads[True], wanted, rtol=1e-8, atol=1e-10)
    assert not torch.allclose(grads[False], wanted, rtol=1e-3)


@pytest.mark.parametrize("way", ["clamp", "window"])
def test_other_ways_straight_through(way):
    """The mask's slope is (x - noise) * weight; a huge weight makes it large enough to be clamped."""
    model, x = model_and_images()
    found = {}
    for each in ("identity", way):
        objective = Afat(weight=1e6, straight_through=each)
        slopes = []
        real = objective.patch_selector.scores

        def scores(*given, real=real, slopes=slopes):
            made = real(*given) * 20
            made.register_hook(slopes.append)
            slopes.append(made.detach())
            return made

        objective.patch_selector.scores = scores
        objective(model, x, x, LABELS)["loss"].backward()
        found[each] = slopes
    scores, free = found["identity"]
    assert free.abs().max() > 1
    if way == "clamp":
        wanted = free.clamp(-1, 1)
    else:
        assert (scores.abs() > 1).any()
        assert (scores.abs() <= 1).any()
        wanted = free * (scores.abs() <= 1)
    torch.testing.assert_close(found[way][1], wanted)


def test_nothing_corrupted_nothing_to_align():
    model, x = model_and_images()
    objective = Afat(weight=10.0, share=0)
    losses = objective(model, x, x, LABELS)
    assert losses["alignment"].item() == pytest.approx(0, abs=1e-20)
    assert losses["loss"].item() == pytest.approx(F.cross_entropy(model(x), LABELS).item(), rel=1e-9)


def test_dropped_tokens_are_gone_and_the_others_compared():
    """Against a model that is reported which tokens to keep by timm's own function of that purpose."""
    model, x = model_and_images()
    objective = Afat(weight=0.5, share=0.25, fill="drop", selector="random")
    counts = []
    hook = model.backbone.blocks[1].register_forward_hook(lambda _m, _a, output: counts.append(output.shape[1]))
    losses = objective(model, x, x, LABELS)
    hook.remove()
    assert sorted(counts) == [13, 17]
    keep = objective._kept(model, x).bool()
    assert keep.sum(1).tolist() == [12] * 4
    vit = model.backbone
    tokens = vit.norm_pre(vit._pos_embed(vit.patch_embed((x - model.mean.double()) / model.std.double())))
    gaps = []
    fewer = torch.stack([torch.cat([row[:1], row[1:][kept]]) for row, kept in zip(tokens, keep, strict=True)])
    for block in vit.blocks:
        tokens, fewer = block(tokens), block(fewer)
        same = torch.stack([torch.cat([row[:1], row[1:][kept]]) for row, kept in zip(tokens, keep, strict=True)])
        gaps.append(F.mse_loss(fewer, same))
    assert losses["alignment"].item() == pytest.approx((sum(gaps) / len(gaps)).item(), rel=1e-9)
    assert losses["natural"].item() == pytest.approx(F.cross_entropy(model(x), LABELS).item(), rel=1e-9)
    learns = Afat(weight=0.5, share=0.25, fill="drop")
    learns(model, x, x, LABELS)["loss"].backward()
    assert learns.patch_selector._model.mix.grad.abs().max() > 0


def test_tokens_cannot_be_dropped_from_a_grid():
    model, x = model_and_images("swin")
    with pytest.raises(UserError, match="set fill: zero"):
        Afat(fill="drop", patch_size=8)(model, x, x, LABELS)


@pytest.mark.parametrize(("side", "made"), [(4, 64), (16, 4)])
@pytest.mark.parametrize("selector", ["alignment", "random"])
def test_tokens_can_be_dropped_by_the_models_own_patches_only(side, made, selector):
    model, x = model_and_images()
    with pytest.raises(UserError, match=f"it has 16, and patches of the given size are {made}; set patch_size: 0"):
        Afat(fill="drop", patch_size=side, selector=selector)(model, x, x, LABELS)
    Afat(fill="drop", patch_size=8, selector=selector)(model, x, x, LABELS)


def test_the_harm_of_a_selector_is_not_lost_in_half_precision():
    """Slopes below what fp16 can hold, against those in full precision."""
    model, x = make_vit("vit"), pixels("vit", 4)
    with torch.no_grad():
        model.head.weight *= 1e-6
        model.head.bias.zero_()
    slopes = {}
    for precise in (True, False):
        objective = Afat(weight=0.0, selector="cross-entropy")
        with torch.autocast("cpu", torch.float16, enabled=not precise):
            loss = objective(model, x, x, LABELS)["loss"]
        loss.backward()
        slopes[precise] = flat(each.grad for each in objective.patch_selector._model.parameters())
    assert slopes[True].norm() > 0
    assert F.cosine_similarity(slopes[True], slopes[False], dim=0) > 0.99
    assert slopes[False].norm().item() == pytest.approx(slopes[True].norm().item(), rel=0.05)


@pytest.mark.parametrize("name", ["deit_distilled", "cait", "xcit", "swin", "levit", "pit", "rvt", "fan"])
@pytest.mark.parametrize("features", ["blocks", "attention"])
def test_families_with_blocks_can_be_trained(name, features):
    model, x = make_vit(name).train(), pixels(name, 4)
    objective = Afat(weight=0.1, features=features, patch_size=8 if name == "pit" else 0)  # whose patches overlap
    objective(model, x, x, LABELS)["loss"].backward()
    assert all(
        each.grad.isfinite().all() and each.grad.abs().max() > 0
        for each in objective.patch_selector._model.parameters()
    )


def test_attention_features_are_what_attention_gives():
    model, x = model_and_images()
    altered = (x + 0.1).clamp(0, 1)
    pair = pair_of(model, altered, x, "attention", same_paths=False)
    seen = []
    hooks = [b.attn.register_forward_hook(lambda _m, _a, output: seen.append(output)) for b in model.backbone.blocks]
    model(altered), model(x)
    for hook in hooks:
        hook.remove()
    for number, (one, other) in enumerate(pair.features):
        torch.testing.assert_close(one, seen[number])
        torch.testing.assert_close(other, seen[number + 2])


@pytest.mark.parametrize("shared", [True, False])
def test_drop_path_the_same_for_both_versions(shared):
    model, x = model_and_images(drop_path_rate=0.5)
    pair = pair_of(model.train(), x, x, "blocks", same_paths=shared)
    assert all(torch.equal(one, other) for one, other in pair.features) == shared
    if shared:  # and not the same for all images, nor nothing dropped at all
        kept = [F.mse_loss(a, b) for a, b in zip(pair.clean, model.eval()(x), strict=True)]
        assert max(kept) > 1e-6


def test_masks_are_new_at_every_step_and_blind_to_the_batch():
    model, x = model_and_images()
    objective, run = Afat(selector="random"), training(model, x)
    halves = []
    for run.step in (0, 0, 1):
        with objective.patch_selector.around_step(run, lambda: ()):
            halves.append(corrupted_half(objective, model, x))
    assert torch.equal(halves[0], halves[1])
    assert not any(torch.equal(a, b) for a, b in zip(halves[1], halves[2], strict=True))
    (alone,) = seen_by(model, lambda: objective(model, x[2:3], x[2:3], LABELS[2:3]))
    assert torch.equal(alone[0], halves[2][2])


@pytest.mark.parametrize(("settings", "reported"), [
    ({"share": 1.5}, r"share must be in"), ({"weight": -1}, "weight must be a finite number of at least 0"),
    ({"noise": "pixels"}, "did you mean"),
    ({"lr": 0}, "lr must be"), ({"fill": "drop", "share": 1}, "no token would be left"),
    ({"fill": "drop", "same_paths": True}, "leave out same_paths"),
])  # fmt: skip
def test_settings_without_sense(settings, reported):
    with pytest.raises(UserError, match=reported):
        Afat(**settings)


# In the loop

OBJECTIVE = {"use": "afat", "weight": 0.5, "share": 0.3, "lr": 0.05}


def trained(out, resume=False, model=None, **changes):
    given = document(
        **{"objective": OBJECTIVE, "augmentation": {"mixup": 0.5}, "train": {"checkpoint_every": 2}, **changes}
    )
    given["model"] = model or given["model"]
    return run_harden(build_recipe(given, "afat"), "afat", CPU, out=out, resume=resume)[1].path


def weights_of(folder):
    from safetensors.torch import load_file

    return {
        f"{name} {key}": value
        for name in ("last", "corruption-model")
        for key, value in load_file(folder / "weights" / f"{name}.safetensors").items()
    }


# Batch norms, whose statistics come from clean and corrupted images, and drop-path.
RVT = {
    "name": "rvt_micro_32",
    "mean": [0.5],
    "std": [0.5],
    "drop_path": 0.3,
    "kwargs": {"img_size": 16, "patch_size": 8, "depths": (2,), "widths": (16,), "heads": (2,)},
}


@pytest.mark.slow
def test_broken_off_and_resumed_it_ends_with_the_same_bits(tmp_path, monkeypatch):
    from vitadel.training import loop

    whole = trained(tmp_path / "whole", model=RVT)
    real, taken = loop._Trainer.take_step, 0

    def fragile(self, parts):
        nonlocal taken
        taken += 1
        if taken == 5:  # the third step was the first of the second epoch, the fourth is saved
            raise RuntimeError("power cut")
        real(self, parts)

    monkeypatch.setattr(loop._Trainer, "take_step", fragile)
    with pytest.raises(RuntimeError, match="power cut"):
        trained(tmp_path / "cut", model=RVT)
    monkeypatch.undo()
    again = trained(tmp_path / "cut", resume=True, model=RVT)
    one, other = weights_of(whole), weights_of(again)
    assert any("running_mean" in name and value.abs().max() > 0 for name, value in one.items())
    assert all(torch.equal(one[name], other[name]) for name in one)
    rows, rows_again = (
        [json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in (whole, again)
    )
    assert rows == rows_again
    reported = [row for row in rows if "masks_moved" in row]
    assert len(reported) == 2
    assert reported[1]["masks_moved"] > 0
    selector = load_corruption_model(whole / "weights" / "corruption-model.safetensors")
    assert (selector.rows, selector.columns, selector.side) == (2, 2, 8)


def test_random_patches_need_no_selector(tmp_path):
    folder = trained(tmp_path / "run", objective={**OBJECTIVE, "selector": "random"}, train={"epochs": 1})
    assert not (folder / "weights" / "corruption-model.safetensors").exists()
    assert "masks_moved" not in (folder / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_half_precision_and_averages_beside_it(tmp_path):
    plugins = {"weight_average": {"decay": 0.5}, "awp": {"gamma": 0.01}}
    folder = trained(tmp_path / "run", plugins=plugins, train={"amp_dtype": "bf16", "epochs": 1, "grad_accum": 2})
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "opponent_gradient" in row]
    assert len(steps) == 3  # 48 images, 16 at a time
    assert all(row["opponent_gradient"] > 0 for row in steps)


def test_recipes_name_the_data_of_their_audits():
    """Without --data an audit is of shapes, whatever was trained."""
    words = [
        line
        for file in (Path(vitadel.__file__).parent / "recipes" / "afat").glob("*.yaml")
        for line in file.read_text().splitlines()
        if "vitadel audit" in line
    ]
    assert len(words) >= 4
    assert all("--data " in each for each in words)
    assert all(
        "--suite corruptions" in each for each in words if "-c" in each.partition("--data ")[2].partition(":")[0]
    )


@pytest.mark.parametrize("grid", ["[2, 2]", "[2, 2, 0]", "[2, 2, 4]", "[3, 2, 8]", "no grid", "null", '{"side": 8}'])
def test_a_file_whose_grid_is_damaged(tmp_path, grid):
    from safetensors.torch import save_file

    made = CorruptionModel(2, 2, 8)
    path, key = tmp_path / "c.safetensors", "vitadel.corruption_model"
    save_file(dict(made.state_dict()), path, {key: "[2, 2, 8]"})
    assert torch.equal(load_corruption_model(path).mix, made.mix)
    save_file(dict(made.state_dict()), path, {key: grid})
    with pytest.raises(UserError, match="is damaged"):
        load_corruption_model(path)


@pytest.mark.parametrize("part", [
    {"mix": torch.zeros(4, 5)}, {"mix": torch.zeros(4)}, {"look": torch.zeros(3, 8, 8)}, {"look": torch.zeros(())},
    {"mix": torch.full((4, 4), torch.nan)}, {"mix": torch.zeros(4, 4, dtype=torch.int64)},
])  # fmt: skip
def test_a_file_whose_weights_are_damaged(tmp_path, part):
    from safetensors.torch import save_file

    weights = {**CorruptionModel(2, 2, 8).state_dict(), **part}
    save_file(weights, tmp_path / "c.safetensors", {"vitadel.corruption_model": "[2, 2, 8]"})
    with pytest.raises(UserError, match="is damaged"):
        load_corruption_model(tmp_path / "c.safetensors")


def test_a_file_that_holds_none(tmp_path):
    from safetensors.torch import save_file

    save_file({"look": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="holds no corruption model"):
        load_corruption_model(tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("no")
    with pytest.raises(UserError, match="cannot be read"):
        load_corruption_model(tmp_path / "text.safetensors")
