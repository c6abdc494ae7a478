"""Inputs are checked before a run begins: recipes, images to train on, images to fit tokens to."""

from __future__ import annotations

import numpy as np
import pytest

from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.backbones.load import load_model
from vitadel.errors import Interrupted, UserError
from vitadel.evaluation.engine.target import open_target
from vitadel.runtime.distributed import join_processes
from vitadel.threat_levels import prepare, run, token_training
from vitadel.threat_levels.levels import AttackerAssets
from vitadel.threat_levels.prepare import open_provided
from vitadel.threat_levels.request import ThreatLevelsRequest
from vitadel.threat_levels.run import run_threat_levels
from vitadel.threat_levels.token_training import read_recipe

CPU = join_processes("cpu")
SHORT = {"eps": (4 / 255,), "steps": 2, "white_box": (), "limit": 10, "batch_size": 5, "extraction": (16, 2)}
THEIRS = "shapes(seed=5)@train"


@pytest.fixture(scope="module")
def target():
    victim = TokenClassifier(load_model("zoo:shapes-standard"), fresh_tokens(96, 4, seed=11)).eval()
    return open_target(victim, "shapes")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return written(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def far_away(tmp_path_factory):
    """A recipe whose images are not here."""
    return written(tmp_path_factory.mktemp("recipe"), train="folder:not/here@train")


def written(folder, **data):
    file = folder / "short.yaml"
    reported = ", ".join(f"{key}: '{value}'" for key, value in data.items())
    file.write_text(
        f"extends: tokens/shapes\ndata: {{limit: 8, held_out: 10, {reported}}}\ntrain: {{batch_size: 4}}\n"
        "objective: {attack: features-1}\nvalidation: {limit: 10}\n"
    )
    return str(file)


def provided_for(target, **changes):
    request = ThreatLevelsRequest(**{**SHORT, **changes})
    indices, _ = target.selection(request.limit, 0, False)
    return open_provided(target, AttackerAssets(target.model), request, indices, CPU)


def test_each_kind_of_sets_has_its_images(target, recipe):
    """Attackers have theirs; what the defender trained, or might have trained instead, is by the recipe's."""
    provided = provided_for(target, levels=("T2", "T3", "T8"), recipe=recipe, attacker_data=THEIRS)
    assert {name: training.data for name, training in provided.trainings.items()} == {
        "surrogates": THEIRS,
        "bank": None,
        "controls": None,
    }
    assert provided.settings()["control_data"] is None
    assert provided.trainings["surrogates"].build("x", 3).data.train == THEIRS
    assert provided.trainings["bank"].build("x", 3).data.train == "shapes@train"


@pytest.mark.slow
def test_controls_are_trained_on_the_attackers_images_if_there_are_no_others(target, far_away, tmp_path, monkeypatch):
    seen = []

    def harden(recipe, title, *more, **named):
        seen.append((title, recipe.data.train, recipe.objective.attack))
        raise Interrupted(tmp_path)

    monkeypatch.setattr(token_training, "run_harden", harden)
    request = ThreatLevelsRequest(**SHORT, levels=("T2",), recipe=far_away, attacker_data=THEIRS)
    with pytest.raises(Interrupted):
        run_threat_levels(target, request, CPU, out=tmp_path / "run")
    ((title, data, attack),) = seen
    assert title == f"{far_away} (tokens trained on noise)"
    assert data == THEIRS
    assert type(attack).__name__ == "Noise"
    provided = provided_for(target, levels=("T2",), recipe=far_away, attacker_data=THEIRS)
    assert provided.settings()["control_data"] == THEIRS  # a resumed run must agree


@pytest.mark.parametrize(
    ("asked", "reported"),
    [
        ({"levels": ("T2",)}, r"cannot train controls.*not/here.*Give images with --attacker-data"),
        ({"levels": ("T3",)}, r"cannot train surrogates.*not/here.*Give images with.*files with --surrogates"),
        (
            {"levels": ("T3",), "attacker_data": "folder:nor/there@train"},
            r"cannot train surrogates.*nor/there.*Give other images with --attacker-data",
        ),
        (
            {"levels": ("T8",), "attacker_data": THEIRS},
            r"cannot train sets for a bank.*not/here.*give token files with --bank",
        ),
    ],
    ids=["controls", "surrogates", "attackers", "bank"],
)
def test_missing_images_are_reported_before_anything_is_spent(target, far_away, tmp_path, asked, reported):
    with pytest.raises(UserError, match=reported):
        run_threat_levels(target, ThreatLevelsRequest(**SHORT, recipe=far_away, **asked), CPU, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("recipe", "reported"),
    [
        ("tokens/shaeps", "unknown recipe 'tokens/shaeps'.*tokens/shapes"),
        ("tokens/paper", r"--recipe tokens/paper: this recipe is a table.*--recipe tokens/paper:dinov2-s. Known rows:"),
        ("tokens/paper:dinov2-x", "has no row 'dinov2-x'; it has: dinov2-s"),
        ("tokens/shapes:r1", "is a single training and has no row 'r1'"),
        ("shapes/trades", "--recipe shapes/trades trains no robustness tokens .its adapter is whole_model"),
    ],
)
def test_a_wrong_recipe_is_reported_before_there_is_a_folder(target, tmp_path, recipe, reported):
    with pytest.raises(UserError, match=reported):
        run_threat_levels(
            target, ThreatLevelsRequest(**SHORT, levels=("T2",), recipe=recipe), CPU, out=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_a_row_is_named_behind_a_colon(tmp_path):
    assert read_recipe("tokens/shapes-count:r20").build().adapter.count == 20
    assert read_recipe("tokens/paper:dinov2-b").features == "tokens"
    assert read_recipe("tokens/paper:openclip-b").features == "pooled"
    file = tmp_path / "table.yaml"
    file.write_text("extends: tokens/shapes\nsweep: [{few: {adapter.count: 2}, many: {adapter.count: 30}}]\n")
    assert read_recipe(f"{file}:many").build().adapter.count == 30


@pytest.mark.parametrize(("count", "enough"), [(16, False), (17, True)])
def test_images_to_fit_tokens_to_are_counted(target, tmp_path, count, enough):
    file = tmp_path / "few.npz"
    np.savez(file, images=np.zeros((count, 32, 32, 3), np.uint8), labels=np.arange(count) % 10)
    if enough:
        assert len(provided_for(target, levels=("T7",), attacker_data=f"npz:{file}").images[1]) == count
        return
    with pytest.raises(UserError, match=r"measures its fit by 16 others, but npz:\S+ has 16\. Give more"):
        provided_for(target, levels=("T7",), attacker_data=f"npz:{file}")


def test_attackers_train_what_the_recipe_says_and_defenders_what_the_victim_has(target, recipe):
    """The victim has 4 tokens; its recipe, which attackers know, says 10."""
    trainings = provided_for(target, levels=("T2", "T3", "T8"), recipe=recipe, attacker_data=THEIRS).trainings
    counts = {name: training.build("x", 3).adapter.count for name, training in trainings.items()}
    assert counts == {"surrogates": 10, "bank": 4, "controls": 4}


@pytest.mark.slow
def test_guessed_numbers_of_tokens_are_trained_and_fitted(target, recipe, tmp_path):
    request = ThreatLevelsRequest(
        **SHORT, levels=("T4", "T7"), recipe=recipe, attacker_data=THEIRS, surrogates=3, guess=(2, 5)
    )
    results = run_threat_levels(target, request, CPU, out=tmp_path / "run").results
    assert [each["tokens"] for each in results["ladder"]["surrogates"]] == [2, 5, 2]
    fits = ["features, 2 tokens", "features, 5 tokens", "scores, 2 tokens", "scores, 5 tokens"]
    assert [fit["from"] for fit in results["ladder"]["extraction"]] == fits
    assert [row["attack"] for row in results["ladder"]["rows"] if row["level"] == "T7"] == [
        f"pgd-2, from {name}" for name in fits
    ]
    assert len(list((tmp_path / "run" / "sets").glob("extracted-from-*.safetensors"))) == 4


@pytest.mark.slow
def test_fitted_tokens_are_kept_and_found_again(target, tmp_path, monkeypatch):
    """A resumed run continues with its tokens and their numbers."""
    request, out = ThreatLevelsRequest(**SHORT, levels=("T7",)), tmp_path / "run"
    with monkeypatch.context() as patch:
        real, calls = run.judge, 0

        def fragile(*arguments):
            nonlocal calls
            calls += 1
            if calls == 2:
                raise RuntimeError("power cut")
            return real(*arguments)

        patch.setattr(run, "judge", fragile)
        with pytest.raises(RuntimeError, match="power cut"):
            run_threat_levels(target, request, CPU, out=out)
    files = sorted((out / "sets").iterdir())
    assert [file.name for file in files] == ["extracted-from-features.safetensors", "extracted-from-scores.safetensors"]
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    started = {file: file.read_bytes() for file in files}
    # Without the tokens, as an earlier version left its folders, verdicts on them cannot be gone on with.
    files[0].unlink()
    with pytest.raises(UserError, match=r"verdicts about tokens fitted to features .T7., but not these tokens"):
        run_threat_levels(target, request, CPU, out=out, resume=True)
    for file, content in started.items():
        file.write_bytes(content)
        file.chmod(0o600)
    monkeypatch.setattr(prepare, "extract_tokens", lambda *arguments, **named: pytest.fail("fitted again"))
    results = run_threat_levels(target, request, CPU, out=out, resume=True).results
    assert {file: file.read_bytes() for file in files} == started
    fits = results["ladder"]["extraction"]
    assert [fit["from"] for fit in fits] == ["features", "scores"]
    assert all(fit["queries"] == 16 and fit["cosine"] != fit["cosine_before"] for fit in fits)


@pytest.mark.slow
def test_the_features_of_the_recipe_are_those_attacked(target, tmp_path):
    """As the released code does for CLIP, whose embeddings it compares."""
    file = tmp_path / "pooled.yaml"
    file.write_text("extends: tokens/shapes\nobjective: {features: pooled, attack: 'features-1(features=pooled)'}\n")
    request = ThreatLevelsRequest(**SHORT, levels=("T6",), recipe=str(file))
    (row, _) = run_threat_levels(target, request, CPU, out=tmp_path / "run").results["ladder"]["rows"]
    assert row["attack"] == "features-2, pooled"
    assert {name for name in row["cosines"] if name.endswith("pooled")} == {
        "to bare, pooled",
        "to own, pooled",
        "no tokens, pooled",
    }
    assert row["cosines"]["to own, pooled"] < 0.999
