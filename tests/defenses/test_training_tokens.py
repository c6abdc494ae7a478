"""Robustness tokens trained by the loop: only they change, only their owner can read them."""

from __future__ import annotations

import json
import stat

import pytest
import torch
from small_recipes import document

from toys import images
from vitadel.adapters.robustness_tokens import Tokened, fresh_tokens
from vitadel.adapters.token_files import load_tokens, read_tokens
from vitadel.attacks.features import feature_cosine, final_features
from vitadel.attacks.names import make
from vitadel.backbones.load import load_model
from vitadel.defenses import loop
from vitadel.defenses.building import build_recipe
from vitadel.defenses.harden import run_harden
from vitadel.defenses.objectives.robustness_tokens import RobustnessTokens
from vitadel.errors import Mistake
from vitadel.instrument import extra_tokens
from vitadel.runtime.processes import join_processes

CPU = join_processes("cpu")
OBJECTIVE = {"use": "robustness_tokens", "attack": "features-3"}
SETTINGS = {"weight_decay": 0.0, "name": "adam", "rate": 1e-2}


def recipe(adapter=None, **changes):
    given = document(objective=OBJECTIVE, optimiser=SETTINGS, **changes)
    given["adapter"] = {"use": "tokens", "count": 3, "seed": 7, **(adapter or {})}
    return build_recipe(given, "tokens")


def small_model():
    torch.manual_seed(0)
    kwargs = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return load_model("vit_tiny_patch16_224", weights="random", num_classes=10, kwargs=kwargs)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run_harden(recipe(), "tokens", CPU, out=tmp_path_factory.mktemp("tokens") / "run")


def test_the_loss_is_two_minus_two_cosines_and_reaches_the_tokens_only():
    classifier, x = small_model(), images(4, side=16)
    tokens = fresh_tokens(16, 3, seed=1)
    model, z = Tokened(classifier, tokens), (x + 0.05).clamp(0, 1)
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
    model, x = Tokened(small_model(), fresh_tokens(16, 2)), images(3, side=16)
    objective = RobustnessTokens(make("features-3"), axis="channel")
    one, other = (objective(model, x, x, torch.full((3,), label))["loss"] for label in (0, 5))
    assert torch.equal(one, other)


def test_training_brings_features_back(trained):
    _, folder = trained
    rows = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert not any("validation_robust" in row for row in rows)  # a cosine is no accuracy
    assert 0 < rows[-1]["validation_cosine_robust"] <= rows[-1]["validation_cosine_clean"] <= 1
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0]


def test_only_tokens_are_saved_and_only_their_owner_reads_them(trained):
    results, folder = trained
    for name in ("weights/best.safetensors", "weights/last.safetensors", "checkpoint.pt"):
        assert stat.S_IMODE((folder.path / name).stat().st_mode) == 0o600, name
    file = read_tokens(folder.path / "weights" / "best.safetensors")
    assert file.tokens.shape == (3, 16)
    assert file.fingerprint in results["model"]["notes"]["tokens"]
    values = [f"{value:.4f}" for value in file.tokens.flatten().tolist()]
    for path in folder.path.rglob("*.json*"):
        assert not any(value in path.read_text() for value in values if len(value.strip("-0.")) > 3), path


def test_the_backbone_stays_as_it_was(trained):
    _, folder = trained
    state = torch.load(folder.path / "checkpoint.pt", weights_only=True)
    assert set(state["model"]) == {"tokens", "salt"}


def test_a_resumed_training_ends_with_the_same_tokens(trained, tmp_path, monkeypatch):
    real = loop._Learner.take

    def fragile(self, parts):
        real(self, parts)
        if self.run.step == 3 and not tmp_path.joinpath("cut").exists():
            tmp_path.joinpath("cut").touch()
            raise RuntimeError("power cut")

    monkeypatch.setattr(loop._Learner, "take", fragile)
    with pytest.raises(RuntimeError, match="power cut"):
        run_harden(recipe(), "tokens", CPU, out=tmp_path / "run")
    run_harden(recipe(), "tokens", CPU, out=tmp_path / "run", resume=True)
    ours, theirs = (read_tokens(path / "weights" / "last.safetensors") for path in (tmp_path / "run", trained[1].path))
    assert torch.equal(ours.tokens, theirs.tokens)


def test_without_a_seed_nobody_else_can_train_the_same_tokens(tmp_path):
    found = []
    for name in ("one", "two"):
        _, folder = run_harden(recipe({"seed": None}, train={"epochs": 1}), "tokens", CPU, out=tmp_path / name)
        found.append(read_tokens(folder.path / "weights" / "last.safetensors").tokens)
    assert not torch.allclose(found[0], found[1], atol=1e-3)


@pytest.mark.parametrize("through", [False, True])
def test_attacks_see_the_tokens_only_if_told_to(tmp_path, monkeypatch, through):
    seen = []
    real = loop.craft
    monkeypatch.setattr(
        loop, "craft", lambda attack, model, *rest: (seen.append(type(model)), real(attack, model, *rest))[1]
    )
    run_harden(recipe({"through": through}, train={"epochs": 1}), "tokens", CPU, out=tmp_path / "run")
    assert all(issubclass(kind, Tokened) == through for kind in seen)
    assert seen


def test_tokens_go_back_on_the_model_they_were_made_for(trained):
    _, folder = trained
    with pytest.raises(Mistake, match="made for other weights"):
        load_tokens(folder.path / "weights" / "best.safetensors", small_model())


def test_mistakes_are_told(tmp_path):
    with pytest.raises(Mistake, match="did you mean tokens"):
        recipe({"use": "token"})
    with pytest.raises(Mistake, match="count"):
        run_harden(recipe({"count": 0}), "tokens", CPU, out=tmp_path / "none")
    given = document(objective=OBJECTIVE)
    with pytest.raises(Mistake, match="adapter"):
        run_harden(build_recipe(given, "tokens"), "tokens", CPU, out=tmp_path / "bare")
