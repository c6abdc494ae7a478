"""`vitadel harden` as it is typed: one clear message for a mistake, exit code 2, nothing lost."""

from __future__ import annotations

import json
import sys

import pytest
import yaml
from PIL import Image

from command_line import call
from small_recipes import document


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(document(train={"epochs": 1})))
    return file


@pytest.mark.slow
def test_a_training_ends_with_accuracies_intervals_and_its_folder(mine, tmp_path):
    code, out, err = call("harden", mine, "train.seed=1", "--out", tmp_path / "run", "--device", "cpu")
    assert code == 0, err
    assert out.splitlines()[-1] == str(tmp_path / "run")
    assert "clean" in out
    assert "95 % interval" in out
    assert "epoch 1/1" in err
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Curves of a training of 3 steps" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shapes/tradess"], "did you mean shapes/trades"),
        (["aas/table5"], "trades+aas"),
        (["aas/table5", "--row", "trades+ass"], "trades+aas"),
        (["shapes/trades", "train.epoch=3"], "did you mean"),
        (["shapes/trades", "train.epochs"], "key=value"),
        (["shapes/trades", "train.epochs=many"], "many"),
        (["shapes/trades", "train.batch_size=100000"], "only"),
        (["shapes/trades", "data.held_out=60000"], "hold out fewer"),
        (["shapes/trades", "data.held_out=0"], "nothing to select models on"),
        (["shapes/trades", "objective.attack=pgdd-3"], "did you mean pgd"),
        (["missing.yaml"], "missing.yaml"),
    ],
)
def test_user_errors_end_with_one_message(tmp_path, words, message):
    code, out, err = call("harden", *words, "--out", tmp_path / "run", "--device", "cpu")
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_model_of_the_users_is_asked_first_and_what_it_prints_is_no_result(mine, tmp_path, monkeypatch):
    (tmp_path / "chatty.py").write_text(
        "import torch\n\n\nclass Chatty(torch.nn.Linear):\n"
        "    def forward(self, x):\n        print('hello')\n        return super().forward(x.flatten(1))\n\n\n"
        "def make():\n    return Chatty(3 * 32 * 32, 12)\n"
    )
    monkeypatch.chdir(tmp_path)
    own = ["model.name=python:chatty:make", "model.kwargs=null"]
    code, _, err = call("harden", mine, *own, "--out", tmp_path / "run")
    assert (code, "'python:chatty:make' failed on two gray images of 16 x 16 pixels" in err) == (2, True)
    code, _, err = call("harden", mine, *own, "data.train=shapes@train", "data.test=null", "--out", tmp_path / "run")
    assert (code, "a tensor of shape (2, 12), but data.train has 10 classes" in err) == (2, True)
    (tmp_path / "chatty.py").write_text(
        (tmp_path / "chatty.py").read_text().replace("12)", "10)\n")
    )  # of another size: not the bytecode of before
    del sys.modules["chatty"]
    words = ["harden", mine, *own, "data.train=shapes@train", "data.test=shapes@test", "audit.attacks=fgsm"]
    code, out, err = call(*words, "--out", tmp_path / "run", "--device", "cpu", "--json")
    assert code == 0, err
    assert json.loads(out)["complete"]
    assert "hello" in err
    trained = tmp_path / "run" / "weights" / "best.safetensors"
    words = ["audit", "python:chatty:make", "--weights", trained, "--attacks", "fgsm", "--json", "--device", "cpu"]
    code, out_of_plan, _ = call("plan", mine, *own, "data.train=shapes@train", "data.test=null", "--json")
    assert (code, json.loads(out_of_plan)["epochs"]) == (0, 1)
    code, again, err = call(*words, "--limit", json.loads(out)["data"]["n"], "--seed", json.loads(out)["seed"])
    assert code == 0, err
    assert json.loads(again)["clean"] == json.loads(out)["clean"]


SPOILT = {
    "quiet": (
        "x.flatten(1) @ self.weight.detach()",
        "no gradient of the logits of 'python:spoilt:quiet' reaches its parameters",
    ),
    "blind": ("x.detach().flatten(1) @ self.weight", "reaches its pixels: is there a detach"),
    "broken": ("x.flatten(1) @ self.weight * float('nan')", "NaN or infinite logits"),
    "half": ("(x.half().flatten(1) @ self.weight.half()).float()", "parameters of torch.float16"),
    "frozen": ("x.flatten(1) @ self.weight", "no parameters that require gradients"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_model_that_cannot_learn_is_reported_before_anything_is_written(mine, tmp_path, monkeypatch, name):
    answer, message = SPOILT[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "spoilt", raising=False)
    (tmp_path / "spoilt.py").write_text(
        "import torch\n\n\nclass Spoilt(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        weight = torch.rand(768, 10, dtype=torch.{'float16' if name == 'half' else 'float32'})\n"
        f"        self.weight = torch.nn.Parameter(weight, requires_grad={name != 'frozen'})\n\n"
        f"    def forward(self, x):\n        return {answer}\n\n\ndef {name}():\n    return Spoilt()\n"
    )
    for verb, more in (("harden", ["--out", tmp_path / "run"]), ("plan", [])):
        words = [mine, f"model.name=python:spoilt:{name}", "model.kwargs=null", *more, "--device", "cpu"]
        code, _, err = call(verb, *words)
        assert (code, message in " ".join(err.split())) == (2, True), err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["objective.attack", "validation.attack"])
def test_a_target_that_is_a_label_is_reported_before_the_training(mine, tmp_path, key):
    code, _, err = call("harden", mine, f"{key}=targeted:1+pgd-2", "--out", tmp_path / "run", "--device", "cpu")
    assert (code, f"{key}: targeted:1+pgd-2: class 1 is the label of" in err) == (2, True), err
    assert not (tmp_path / "run").exists()


def test_a_plugin_that_does_not_suit_the_model_is_named(mine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").write_text(
        "import torch\n\n\ndef make():\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 10))\n"
    )
    for plugin, settings in (("random_dropping", "{}"), ("attention_scaling", "{gap: 1}")):
        words = ["model.name=python:plain:make", "model.kwargs=null", f"plugins.{plugin}={settings}"]
        code, _, err = call("harden", mine, *words, "--out", tmp_path / "run", "--device", "cpu")
        assert (code, f"plugins.{plugin}: " in err) == (2, True), err
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_fresh_head_is_reported(mine, tmp_path):
    for number in range(60):
        (tmp_path / "photos" / "train" / str(number % 3)).mkdir(parents=True, exist_ok=True)
        picture = Image.new("RGB", (32, 32), (number * 4, 0, 0))
        picture.save(tmp_path / "photos" / "train" / str(number % 3) / f"{number}.png")
    data = [f"data.train=folder:{tmp_path / 'photos'}@train", "data.test=null", "data.held_out=9", "data.limit=null"]
    model = ["model.name=zoo:shapes-standard", "model.kwargs=null", "model.mean=null", "model.std=null"]
    words = ["harden", mine, *model, *data, "--out", tmp_path / "run", "--device", "cpu"]
    code, _, err = call(*words)
    assert code == 0, err
    assert "the head of zoo:shapes-standard is new, for the 3 classes of data.train" in " ".join(err.split())


def test_a_test_image_that_cannot_be_read_is_reported_without_a_flag_that_there_is_not(mine, tmp_path):
    for number in range(20):
        name = str(number % 10)
        (tmp_path / "test" / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (number * 9, 0, 0)).save(tmp_path / "test" / name / f"{number}.png")
    (tmp_path / "test" / "0" / "0.png").write_bytes(b"torn")
    words = ["harden", mine, f"data.test=folder:{tmp_path / 'test'}", "--out", tmp_path / "run", "--device", "cpu"]
    code, _, err = call(*words)
    assert code == 2
    assert "cannot be read" in err
    assert "--skip-bad" not in err


@pytest.mark.slow
def test_a_folder_of_another_run_is_left_as_it_is(mine, tmp_path):
    assert call("harden", mine, "--out", tmp_path / "run", "--device", "cpu")[0] == 0
    before = sorted((file, file.stat().st_mtime_ns) for file in (tmp_path / "run").rglob("*"))
    code, _, err = call("harden", mine, "--out", tmp_path / "run", "--device", "cpu")
    assert (code, "already holds a finished run" in err) == (2, True)
    code, _, err = call("harden", mine, "train.seed=5", "--out", tmp_path / "run", "--resume", "--device", "cpu")
    assert (code, "started with different settings" in err) == (2, True)
    assert sorted((file, file.stat().st_mtime_ns) for file in (tmp_path / "run").rglob("*")) == before


@pytest.mark.slow
def test_a_plan_for_a_recipe_and_a_user_error_about_it(mine):
    code, out, err = call("plan", mine, "train.epochs=2", "--device", "cpu")
    assert code == 0, err
    assert "2 epochs, 6 steps of 16 images" in " ".join(out.split())
    code, _, err = call("plan", mine, "--eps", "4/255", "--limit", "7", "--device", "cpu")
    assert code == 2
    assert "--eps, --limit: a recipe sets these itself" in " ".join(err.split())
    code, _, err = call("plan", "zoo:shapes-robust", "train.epochs=2")
    assert (code, "belong to a recipe" in err) == (2, True)


TOKENS = [
    "tokens/shapes",
    "data.limit=8",
    "data.held_out=4",
    "train.batch_size=4",
    "data.test=null",
    "train.tracker=none",
]


def test_a_budget_in_normalized_units_is_reported_in_pixels_from_the_start(tmp_path):
    words = [*TOKENS, "objective.attack=features-2(paper=true)", "threat.eps=8/255", "--out", tmp_path / "run"]
    code, out, err = call("harden", *words, "--device", "cpu")
    assert code == 0, err
    first, *rest = err.splitlines()
    assert first == "attack in training: eps 8/255 in normalised units = 1.83, 1.79, 1.80 /255 in pixels"
    assert "eps 8/255 in normalized units, at most 1.83/255 in pixels" in rest[0]
    text = " ".join(out.split())
    held_out = json.loads((tmp_path / "run" / "results.json").read_text())["training"]["held_out"]
    assert f"clean {held_out['clean']:.3f}, robust {held_out['robust']:.3f}" in text
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["validation_cosine_robust"] == held_out["robust"]


@pytest.mark.slow
def test_a_budget_in_pixels_needs_no_more_words(tmp_path):
    words = [*TOKENS, "objective.attack=features-1", "--out", tmp_path / "run"]
    code, _, err = call("harden", *words, "--device", "cpu")
    assert code == 0, err
    assert "eps 2/255 (best)" in err
    assert "attack in training" not in err
    assert "adapter.seed" not in err
    words = [*TOKENS, "objective.attack=features-1", "adapter.seed=1", "--out", tmp_path / "seeded"]
    code, _, err = call("harden", *words, "--device", "cpu")
    assert code == 0, err
    assert "anyone with it can train the same tokens" in " ".join(err.split())


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("adapter.count=0", "count of at least 1, got 0"),
        ("adapter.placement=middle", "Known: prefix, append"),
        ("model={name: resnet18, weights: random}", "no anatomy known"),
    ],
)
def test_user_errors_about_tokens_leave_no_folder(tmp_path, word, message):
    code, _, err = call("harden", *TOKENS, word, "--out", tmp_path / "run", "--device", "cpu")
    assert code == 2
    assert message in " ".join(err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [TOKENS, ["tora/shapes", "data.limit=8", "train.batch_size=4", "--row", "tora"]], ids=["tokens", "tora"]
)
def test_a_plan_for_a_recipe_with_an_adapter(recipe):
    attack = "objective.attack=features-1" if recipe is TOKENS else "objective.attack=pgd-1"
    code, out, err = call("plan", *recipe, attack, "train.epochs=1", "--device", "cpu")
    assert code == 0, err
    assert "1 epochs" in " ".join(out.split())
