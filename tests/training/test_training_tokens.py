"""Robustness tokens trained by the loop: only they change, only their owner can read them."""

from __future__ import annotations

import json
import shutil
import stat
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import save_file

from small_recipes import document
from toys import images
from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.adapters.tokens.token_files import load_tokens, read_tokens
from vitadel.attacks.features import feature_cosine, final_features
from vitadel.attacks.parse import make
from vitadel.backbones.load import has_no_head, load_model
from vitadel.data import open_dataset
from vitadel.data.batches import Preprocess
from vitadel.errors import UserError
from vitadel.instrument import extra_tokens
from vitadel.runtime.distributed import join_processes
from vitadel.training import loop, training_state
from vitadel.training.metrics import HeldOut
from vitadel.training.objectives.token_features import RobustnessTokens
from vitadel.training.recipes.build import build_recipe
from vitadel.training.recipes.check import meta_model
from vitadel.training.recipes.compose import compose, rows
from vitadel.training.run import open_training, run_harden

CPU = join_processes("cpu")
OBJECTIVE = {"use": "robustness_tokens", "attack": "features-3"}
SETTINGS = {"weight_decay": 0.0, "name": "adam", "lr": 1e-2}


def recipe(adapter=None, **changes):
    given = document(objective=OBJECTIVE, optimizer=SETTINGS, **changes)
    given["adapter"] = {"use": "tokens", "count": 3, "seed": 7, **(adapter or {})}
    return build_recipe(given, "tokens")


def small_model():
    torch.manual_seed(0)
    kwargs = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return load_model("vit_tiny_patch16_224", weights="random", num_classes=10, kwargs=kwargs)


@pytest.mark.slow
def test_tokens_of_several_layers_are_trained_and_saved(tmp_path):
    done = run_harden(recipe({"layers": [0, 1], "count": 2}), "tokens", CPU, out=tmp_path / "run")
    assert done.results["complete"]
    file = read_tokens(tmp_path / "run" / "weights" / "best.safetensors")
    assert file.layers == (0, 1)
    assert file.tokens.shape == (4, 16)
    assert (file.tokens - fresh_tokens(16, 4, seed=7)).abs().amax(1).min() > 1e-3  # those of both layers were trained
    with pytest.raises(UserError, match="from 0 to 1 in this model"):
        recipe({"layers": [0, 7]}).adapter.check_model(small_model())


def test_the_cosine_without_tokens_is_logged_if_asked():
    classifier, x = small_model(), images(4, side=16)
    z, y = (x + 0.05).clamp(0, 1), torch.zeros(4, dtype=torch.int64)
    model = TokenClassifier(classifier, fresh_tokens(16, 3, seed=1))
    plain = RobustnessTokens(make("features-3"), axis="channel")(model, x, z, y)
    logged = RobustnessTokens(make("features-3"), axis="channel", log_regular=True)(model, x, z, y)
    assert "regular" not in plain
    expected = feature_cosine(final_features(classifier, z), final_features(classifier, x), "channel").mean()
    assert float(logged.pop("regular")) == pytest.approx(float(expected), abs=1e-6)
    assert logged == plain


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run_harden(recipe(), "tokens", CPU, out=tmp_path_factory.mktemp("tokens") / "run")


def test_the_loss_is_two_minus_two_cosines_and_reaches_the_tokens_only():
    classifier, x = small_model(), images(4, side=16)
    tokens = fresh_tokens(16, 3, seed=1)
    model, z = TokenClassifier(classifier, tokens), (x + 0.05).clamp(0, 1)
    losses = RobustnessTokens(make("features-3"))(model, x, z, torch.zeros(4, dtype=torch.int64))
    target = final_features(classifier, x)
    with extra_tokens(classifier, tokens):
        kept, regained = (feature_cosine(final_features(classifier, each), target).mean() for each in (x, z))
    assert float(losses["loss"].detach()) == pytest.approx(float(2 - kept - regained), abs=1e-5)
    assert losses["invariance"] == pytest.approx(float(kept), abs=1e-5)
    losses["loss"].backward()
    assert model.tokens.grad.abs().max() > 0
    assert all(parameter.grad is None for parameter in classifier.parameters())


def test_labels_play_no_part():
    model, x = TokenClassifier(small_model(), fresh_tokens(16, 2)), images(3, side=16)
    objective = RobustnessTokens(make("features-3"), axis="channel")
    one, other = (objective(model, x, x, torch.full((3,), label))["loss"] for label in (0, 5))
    assert torch.equal(one, other)


@pytest.mark.slow
def test_a_step_costs_thirty_attack_passes_and_three_of_training(tmp_path):
    """Counted in images that enter the model; the attack needs the clean features once, beside its steps."""
    batch, steps, passes = 8, 2, []
    given = recipe(
        data={"limit": steps * batch, "test": None},
        train={"epochs": 1, "batch_size": batch},
        validation={"limit": 5},
    ).document
    built = build_recipe({**given, "objective": {**OBJECTIVE, "attack": "features-30"}}, "tokens")
    model = small_model()
    model.backbone.register_forward_pre_hook(lambda _, given: passes.append((len(given[0]), torch.is_grad_enabled())))
    run_harden(built, "tokens", CPU, out=tmp_path / "run", model=model)
    of_steps = [each for each in passes if each[0] % 5]  # held-out images come in fives and tens
    crafting, target, learning = [(batch, True)] * 30, (batch, False), (2 * batch, True)
    assert of_steps == [(batch, False), *crafting, target, learning] * steps
    assert sum(images for images, _ in of_steps) <= 1.1 * 33 * batch * steps


@pytest.mark.slow
def test_training_brings_features_back(trained):
    _, folder, _ = trained
    rows = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert not any("validation_robust" in row for row in rows)  # a cosine is no accuracy
    assert 0 < rows[-1]["validation_cosine_robust"] <= rows[-1]["validation_cosine_clean"] <= 1
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0]


def test_only_tokens_are_saved_and_only_their_owner_reads_them(trained):
    results, folder, _ = trained
    for name in ("weights/best.safetensors", "weights/last.safetensors", "checkpoint.pt"):
        assert stat.S_IMODE((folder.path / name).stat().st_mode) == 0o600, name
    file = read_tokens(folder.path / "weights" / "best.safetensors")
    assert file.tokens.shape == (3, 16)
    assert file.fingerprint in results["model"]["notes"]["tokens"]
    values = [f"{value:.4f}" for value in file.tokens.flatten().tolist()]
    for path in folder.path.rglob("*.json*"):
        assert not any(value in path.read_text() for value in values if len(value.strip("-0.")) > 3), path


def test_a_checkpoint_that_others_can_read_is_not_gone_on_from(tmp_path, trained):
    training_state.write_checkpoint(tmp_path, {"step": 1}, secret=True)
    assert training_state.read_checkpoint(tmp_path, secret=True) == {"step": 1}
    (tmp_path / "checkpoint.pt").chmod(0o644)
    with pytest.raises(UserError, match=r"mode 0644: users other than its owner .* `chmod 600 .*checkpoint.pt`\.$"):
        training_state.read_checkpoint(tmp_path, secret=True)
    assert training_state.read_checkpoint(tmp_path) == {"step": 1}  # of what is no secret
    unfinished = shutil.copytree(trained[1].path, tmp_path / "run")
    (unfinished / "results.json").unlink()
    (unfinished / "checkpoint.pt").chmod(0o640)
    with pytest.raises(UserError, match="mode 0640"):
        run_harden(recipe(), "tokens", CPU, out=unfinished, resume=True)


def test_the_backbone_stays_as_it_was(trained):
    _, folder, _ = trained
    state = torch.load(folder.path / "checkpoint.pt", weights_only=True)
    assert set(state["model"]) == {"tokens", "salt"}


@pytest.mark.slow
def test_a_resumed_training_ends_with_the_same_tokens(trained, tmp_path, monkeypatch):
    real = loop._Trainer.take_step

    def fragile(self, parts):
        real(self, parts)
        if self.state.step == 3 and not tmp_path.joinpath("cut").exists():
            tmp_path.joinpath("cut").touch()
            raise RuntimeError("power cut")

    monkeypatch.setattr(loop._Trainer, "take_step", fragile)
    with pytest.raises(RuntimeError, match="power cut"):
        run_harden(recipe(), "tokens", CPU, out=tmp_path / "run")
    run_harden(recipe(), "tokens", CPU, out=tmp_path / "run", resume=True)
    ours, theirs = (read_tokens(path / "weights" / "last.safetensors") for path in (tmp_path / "run", trained[1].path))
    assert torch.equal(ours.tokens, theirs.tokens)


@pytest.mark.slow
def test_without_a_seed_no_one_else_can_train_the_same_tokens(tmp_path):
    found = []
    for name in ("one", "two"):
        _, folder, _ = run_harden(recipe({"seed": None}, train={"epochs": 1}), "tokens", CPU, out=tmp_path / name)
        found.append(read_tokens(folder.path / "weights" / "last.safetensors").tokens)
    assert not torch.allclose(found[0], found[1], atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("through", [False, True])
def test_attacks_see_the_tokens_only_if_asked_to(tmp_path, monkeypatch, through):
    seen = []
    real = loop.run_inner_attack
    monkeypatch.setattr(
        loop, "run_inner_attack", lambda attack, model, *rest: (seen.append(type(model)), real(attack, model, *rest))[1]
    )
    run_harden(recipe({"through": through}, train={"epochs": 1}), "tokens", CPU, out=tmp_path / "run")
    assert all(issubclass(kind, TokenClassifier) == through for kind in seen)
    assert seen


def test_tokens_go_back_on_the_model_they_were_made_for(trained):
    _, folder, _ = trained
    with pytest.raises(UserError, match="trained on other weights"):
        load_tokens(folder.path / "weights" / "best.safetensors", small_model())


def test_user_errors_are_reported(tmp_path):
    with pytest.raises(UserError, match="did you mean tokens"):
        recipe({"use": "token"})
    given = document(objective=OBJECTIVE)
    with pytest.raises(UserError, match="adapter"):
        run_harden(build_recipe(given, "tokens"), "tokens", CPU, out=tmp_path / "bare")


@pytest.mark.parametrize(
    ("adapter", "reported"),
    [
        ({"count": 0}, "count of at least 1, got 0"),
        ({"count": -2}, "count of at least 1, got -2"),
        ({"scale": float("nan")}, "scale of fresh tokens must be finite"),
        ({"placement": "prefx"}, "unknown placement of tokens 'prefx'.*did you mean prefix.*Known: prefix, append"),
    ],
)
def test_settings_of_tokens_are_checked_with_the_recipe(adapter, reported):
    with pytest.raises(UserError, match=f"adapter: .*{reported}"):
        recipe(adapter)


@pytest.mark.parametrize(
    ("model", "adapter", "reported"),
    [
        ({"name": "resnet18", "kwargs": {}}, {}, "no anatomy known"),
        ({"name": "swin_tiny_patch4_window7_224", "kwargs": {"img_size": 64, "window_size": 4}}, {}, "no meaning"),
        ({"name": "eva02_tiny_patch14_224", "kwargs": {"img_size": 28}}, {"placement": "append"}, "RoPE"),
    ],
    ids=["no transformer", "no seam", "rotates by place"],
)
def test_a_model_that_takes_no_such_tokens_leaves_no_folder(tmp_path, model, adapter, reported):
    given = recipe(adapter).document
    given["model"] = model
    with pytest.raises(UserError, match=reported):
        run_harden(build_recipe(given, "tokens"), "tokens", CPU, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Heads that have learned nothing


TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
DINO = "vit_small_patch14_dinov2.lvd142m"


def weight_file(folder, name, classes):
    """As released: without a head if there are no classes."""
    torch.manual_seed(1)
    made = load_model(name, weights="random", num_classes=classes or 2, kwargs=TINY).backbone.state_dict()
    kept = {key: value for key, value in made.items() if classes or not key.startswith("head.")}
    save_file(kept, folder / "weights.safetensors")
    return str(folder / "weights.safetensors")


def of_file(name, file, test, adapter=None, objective=None, **more):
    given = recipe(data={"test": test}).document
    given["model"] = {"name": name, "weights": file, "kwargs": TINY, **more}
    given["adapter"] = adapter or given["adapter"]
    given["objective"] = objective or given["objective"]
    return build_recipe(given, "tokens")


@pytest.mark.slow
def test_a_backbone_without_a_head_gets_tokens(tmp_path):
    file = weight_file(tmp_path, DINO, 0)
    results, folder, _ = run_harden(of_file(DINO, file, None), "tokens", CPU, out=tmp_path / "run")
    assert results["training"]["steps"] == 6
    assert "clean" not in results
    path = folder.path / "weights" / "best.safetensors"
    # With any head: tokens are tied to the released weights, which were not touched.
    tokened = load_tokens(path, load_model(DINO, weights=file, num_classes=3, new_head=True, kwargs=TINY))
    start = fresh_tokens(16, 3, seed=7)
    assert (tokened.tokens - start).abs().max() > 1e-3


def test_a_file_with_a_head_for_a_backbone_released_without_keeps_it(tmp_path):
    file = weight_file(tmp_path, DINO, 10)
    setup = open_training(of_file(DINO, file, "shapes(size=16)@test", num_classes=10), CPU)
    head = load_model(DINO, weights=file, num_classes=10, kwargs=TINY).backbone.head.weight
    assert torch.equal(setup.model.backbone.head.weight, head)


@pytest.mark.parametrize(("name", "classes"), [(DINO, 0), ("vit_tiny_patch16_224", 1000)], ids=["none", "other"])
def test_a_frozen_head_that_has_learned_nothing_is_not_audited(tmp_path, name, classes):
    file, test = weight_file(tmp_path, name, classes), "shapes(size=16)@test"
    with pytest.raises(UserError, match=r"random head. Set data.test=null .*vitadel probe"):
        run_harden(of_file(name, file, test), "tokens", CPU, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert open_training(of_file(name, file, None), CPU).test is None
    whole = of_file(
        name, file, test, adapter={"use": "whole_model"}, objective={"use": "adversarial", "attack": "pgd-1"}
    )  # whose head learns
    assert open_training(whole, CPU).model.record.num_classes == 10


def test_a_head_of_which_classes_are_kept_is_audited(tmp_path):
    file = weight_file(tmp_path, "vit_tiny_patch16_224", 12)
    built = of_file("vit_tiny_patch16_224", file, "shapes(size=16)@test", head_classes=list(range(1, 11)))
    assert open_training(built, CPU).test is not None


# The recipes


DINOV2 = [f"dinov2-{size}{more}" for more in ("", "-reg") for size in "sbgl"]
OTHERS = [f"{family}-{size}" for family in ("deit3", "openclip") for size in "blh"]


@pytest.mark.parametrize("row", [*DINOV2, *OTHERS])
def test_the_papers_rows_have_the_released_settings(row):
    """Fifty steps for DINOv2 and 300 for the others; OpenCLIP by its embedding, the others channel by channel."""
    built = build_recipe(compose("tokens/paper", row), row)
    adapter, optimizer, clip = built.adapter, built.optimizer, "openclip" in row
    assert (adapter.count, adapter.scale, adapter.placement, adapter.through) == (10, 0.01, "append", False)
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay) == ("adam", 1e-3, 0)
    assert (built.train.batch_size, built.train.epochs, built.train.amp_dtype) == (8, 1, "fp32")
    assert built.data.limit / built.train.batch_size == (50 if row in DINOV2 else 300)
    assert (built.objective.features, built.objective.axis) == (("pooled", "token") if clip else ("tokens", "channel"))
    attack = built.objective.attack
    assert (attack.steps, attack.length, attack.paper, attack.goal.weight) == (30, 0.01, True, 1.0)
    assert (attack.goal.kind, attack.goal.axis) == (built.objective.features, built.objective.axis)
    assert attack.effective_eps == "8/255 in normalised units = 1.83, 1.79, 1.80 /255 in pixels"
    assert set(rows("tokens/paper")) == {*DINOV2, *OTHERS}


@pytest.mark.parametrize("name", ["tokens/paper", "tokens/count"])
def test_rows_without_a_classifier_are_not_audited(name):
    built = [build_recipe(compose(name, row), name) for row in rows(name)]
    assert all(
        (each.data.test is None) == (has_no_head(each.model.name) or "clip" in each.model.name) for each in built
    )


@pytest.mark.parametrize(
    ("name", "row"),
    [("tokens/paper", "dinov2-s"), ("tokens/paper", "deit3-b"), ("tokens/paper", "openclip-l"), ("tokens/count", "r1")],
)
def test_images_are_seen_as_by_the_released_code(name, row):
    section = build_recipe(compose(name, row), name).model
    record = meta_model(replace(section, num_classes=7, kwargs={**section.kwargs, "depth": 1})).record
    assert (record.mean, record.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    seen = Preprocess(record.input_size, record.crop_pct, record.interpolation, record.crop_mode)
    assert seen == Preprocess((224, 224), 1.0, "bilinear", "squash")


# What held-out images tell


def test_what_is_reported_as_robust_is_of_attacked_images_and_both_decide():
    source, rows = open_dataset("shapes(size=16)@train"), torch.arange(5)

    def measure(model, x, z):
        return torch.full((len(x),), 0.75), (z - x).mean((1, 2, 3))

    held_out = HeldOut(source, rows, Preprocess(16))
    model = small_model()
    score = held_out.measure(model, model, lambda model, x, y, rng: x + 0.25, measure, "cosine", CPU, 0)
    assert (score.clean, score.n, score.measure) == (0.75, 5, "cosine")
    assert score.robust == pytest.approx(0.25)
    assert score.decisive == pytest.approx((0.5, 0.25))


def test_the_cosines_are_clean_and_attacked():
    classifier, x = small_model(), images(4, side=16)
    tokens = fresh_tokens(16, 3, scale=1.0, seed=1)
    z = (x + 0.2).clamp(0, 1)
    target = final_features(classifier, x)
    with extra_tokens(classifier, tokens), torch.no_grad():
        expected = [feature_cosine(final_features(classifier, each), target) for each in (x, z)]
    with torch.no_grad():
        measured = RobustnessTokens(make("features-3")).measure(TokenClassifier(classifier, tokens), x, z)
    for one, other in zip(measured, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert (expected[0] - expected[1]).abs().min() > 1e-4


def test_a_resumed_training_compares_epochs_by_the_same_number(trained):
    results, folder, _ = trained
    state = torch.load(folder.path / "checkpoint.pt", weights_only=True)
    again = training_state.Score(*state["best"])
    assert asdict(again) == results["training"]["held_out"]
    assert again.decisive == pytest.approx(((again.clean + again.robust) / 2, again.robust))
