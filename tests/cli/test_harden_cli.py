"""`vitadel harden` as it is typed: one clear message for a mistake, exit code 2, nothing lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from vitadel.cli.main import main

sys.path.insert(0, str(Path(__file__).parents[1] / "defenses"))
from small_recipes import document


@pytest.fixture
def vitadel(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["vitadel", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(document(train={"epochs": 1})))
    return file


def test_a_training_ends_with_accuracies_intervals_and_its_folder(vitadel, mine, tmp_path):
    code, out, err = vitadel("harden", mine, "train.seed=1", "--out", tmp_path / "run", "--device", "cpu")
    assert code == 0, err
    assert out.splitlines()[-1] == str(tmp_path / "run")
    assert "clean" in out
    assert "95 % interval" in out
    assert "epoch 1/1" in err
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Curves of a training of 3 steps" in page


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["shapes/tradess"], "did you mean shapes/trades"),
        (["aas/table5"], "trades+aas"),
        (["aas/table5", "--row", "trades+ass"], "trades+aas"),
        (["shapes/trades", "train.epoch=3"], "did you mean"),
        (["shapes/trades", "train.epochs"], "key=value"),
        (["shapes/trades", "train.epochs=many"], "many"),
        (["shapes/trades", "train.batch_size=100000"], "only"),
        (["shapes/trades", "data.held_out=60000"], "keep fewer"),
        (["shapes/trades", "data.held_out=0"], "nothing to select models on"),
        (["shapes/trades", "objective.attack=pgdd-3"], "did you mean pgd"),
        (["missing.yaml"], "missing.yaml"),
    ],
)
def test_mistakes_end_with_one_message(vitadel, tmp_path, words, told):
    code, out, err = vitadel("harden", *words, "--out", tmp_path / "run", "--device", "cpu")
    assert code == 2
    assert told in err
    assert "Traceback" not in err
    assert out == ""
    assert not (tmp_path / "run").exists()


def test_a_model_of_the_users_is_asked_first_and_what_it_prints_is_no_result(vitadel, mine, tmp_path, monkeypatch):
    (tmp_path / "chatty.py").write_text(
        "import torch\n\n\nclass Chatty(torch.nn.Linear):\n"
        "    def forward(self, x):\n        print('hello')\n        return super().forward(x.flatten(1))\n\n\n"
        "def make():\n    return Chatty(3 * 32 * 32, 12)\n"
    )
    monkeypatch.chdir(tmp_path)
    own = ["model.name=python:chatty:make", "model.kwargs=null"]
    code, _, err = vitadel("harden", mine, *own, "--out", tmp_path / "run")
    assert (code, "'python:chatty:make' cannot take images of 16 x 16 pixels" in err) == (2, True)
    code, _, err = vitadel("harden", mine, *own, "data.train=shapes@train", "data.test=null", "--out", tmp_path / "run")
    assert (code, "a tensor of shape (1, 12), but data.train has 10 classes" in err) == (2, True)
    (tmp_path / "chatty.py").write_text((tmp_path / "chatty.py").read_text().replace("12)", "10)"))
    del sys.modules["chatty"]
    words = ["harden", mine, *own, "data.train=shapes@train", "data.test=shapes@test", "audit.attacks=fgsm"]
    code, out, err = vitadel(*words, "--out", tmp_path / "run", "--device", "cpu", "--json")
    assert code == 0, err
    assert json.loads(out)["complete"]
    assert "hello" in err
    trained = tmp_path / "run" / "weights" / "best.safetensors"
    words = ["audit", "python:chatty:make", "--weights", trained, "--attacks", "fgsm", "--json", "--device", "cpu"]
    code, again, err = vitadel(*words, "--limit", json.loads(out)["data"]["n"], "--seed", json.loads(out)["seed"])
    assert code == 0, err
    assert json.loads(again)["clean"] == json.loads(out)["clean"]


def test_a_test_image_that_cannot_be_read_is_told_without_a_flag_that_there_is_not(vitadel, mine, tmp_path):
    for number in range(20):
        name = str(number % 10)
        (tmp_path / "test" / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (number * 9, 0, 0)).save(tmp_path / "test" / name / f"{number}.png")
    (tmp_path / "test" / "0" / "0.png").write_bytes(b"torn")
    words = ["harden", mine, f"data.test=folder:{tmp_path / 'test'}", "--out", tmp_path / "run", "--device", "cpu"]
    code, _, err = vitadel(*words)
    assert code == 2
    assert "cannot be read" in err
    assert "--skip-bad" not in err


def test_a_folder_of_another_run_is_left_as_it_is(vitadel, mine, tmp_path):
    assert vitadel("harden", mine, "--out", tmp_path / "run", "--device", "cpu")[0] == 0
    before = sorted((file, file.stat().st_mtime_ns) for file in (tmp_path / "run").rglob("*"))
    code, _, err = vitadel("harden", mine, "--out", tmp_path / "run", "--device", "cpu")
    assert (code, "already holds a finished run" in err) == (2, True)
    code, _, err = vitadel("harden", mine, "train.seed=5", "--out", tmp_path / "run", "--resume", "--device", "cpu")
    assert (code, "begun with other settings" in err) == (2, True)
    assert sorted((file, file.stat().st_mtime_ns) for file in (tmp_path / "run").rglob("*")) == before


def test_a_plan_for_a_recipe_and_a_mistake_about_it(vitadel, mine):
    code, out, err = vitadel("plan", mine, "train.epochs=2", "--device", "cpu")
    assert code == 0, err
    assert "2 epochs, 6 steps of 16 images" in " ".join(out.split())
    code, _, err = vitadel("plan", mine, "--eps", "4/255", "--limit", "7", "--device", "cpu")
    assert code == 2
    assert "--limit, --eps: a recipe says these itself" in " ".join(err.split())
    code, _, err = vitadel("plan", "zoo:shapes-robust", "train.epochs=2")
    assert (code, "belong to a recipe" in err) == (2, True)


TOKENS = [
    "tokens/shapes",
    "data.limit=8",
    "data.held_out=4",
    "train.batch_size=4",
    "data.test=null",
    "train.tracker=none",
]


def test_a_budget_in_normalised_units_is_told_in_pixels_from_the_start(vitadel, tmp_path):
    words = [*TOKENS, "objective.attack=features-2(paper=true)", "threat.eps=8/255", "--out", tmp_path / "run"]
    code, out, err = vitadel("harden", *words, "--device", "cpu")
    assert code == 0, err
    first, *rest = err.splitlines()
    assert first == "attack in training: eps 8/255 in normalised units = 1.83, 1.79, 1.80 /255 in pixels"
    assert "eps 8/255 in normalised units, at most 1.83/255 in pixels" in rest[0]
    told = " ".join(out.split())
    held_out = json.loads((tmp_path / "run" / "results.json").read_text())["training"]["held_out"]
    assert f"clean {held_out['clean']:.3f}, robust {held_out['robust']:.3f}" in told
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["validation_cosine_robust"] == held_out["robust"]


def test_a_budget_in_pixels_needs_no_more_words(vitadel, tmp_path):
    words = [*TOKENS, "objective.attack=features-1", "--out", tmp_path / "run"]
    code, _, err = vitadel("harden", *words, "--device", "cpu")
    assert code == 0, err
    assert "eps 2/255 (best)" in err
    assert "attack in training" not in err
    assert "adapter.seed" not in err
    words = [*TOKENS, "objective.attack=features-1", "adapter.seed=1", "--out", tmp_path / "seeded"]
    code, _, err = vitadel("harden", *words, "--device", "cpu")
    assert code == 0, err
    assert "who reads it can train the same tokens" in " ".join(err.split())


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("adapter.count=0", "count of at least 1, got 0"),
        ("adapter.placement=middle", "known: prefix, append"),
        ("model={name: resnet18, weights: random}", "no anatomy known"),
    ],
)
def test_mistakes_about_tokens_leave_no_folder(vitadel, tmp_path, word, told):
    code, _, err = vitadel("harden", *TOKENS, word, "--out", tmp_path / "run", "--device", "cpu")
    assert code == 2
    assert told in " ".join(err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "recipe", [TOKENS, ["tora/shapes", "data.limit=8", "train.batch_size=4", "--row", "tora"]], ids=["tokens", "tora"]
)
def test_a_plan_for_a_recipe_with_an_adapter(vitadel, recipe):
    attack = "objective.attack=features-1" if recipe is TOKENS else "objective.attack=pgd-1"
    code, out, err = vitadel("plan", *recipe, attack, "train.epochs=1", "--device", "cpu")
    assert code == 0, err
    assert "1 epochs" in " ".join(out.split())
