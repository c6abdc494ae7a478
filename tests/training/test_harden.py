"""From a recipe to a run: what is held out, what is decayed, what is tracked, what comes out."""

from __future__ import annotations

import json
import ssl
from dataclasses import replace

import pytest
import requests
import torch
import yaml
from accelerate import tracking
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.layers import DropPath

import vitadel
from small_recipes import document, recipe
from vitadel.backbones.checkpoints import read_record, save_classifier
from vitadel.backbones.load import load_model
from vitadel.data.sources.shapes import CLASSES, Shapes
from vitadel.errors import UserError
from vitadel.runtime.distributed import join_processes
from vitadel.training import run as harden_module
from vitadel.training import training_state
from vitadel.training.loop import make_optimizer
from vitadel.training.metrics import HeldOut, Score
from vitadel.training.recipes.build import build_recipe
from vitadel.training.recipes.compose import compose
from vitadel.training.recipes.training_sections import ModelSection, OptimizerSection, Schedule
from vitadel.training.run import open_training, run_harden
from vitadel.training.starting_model import check_answer, starting_model
from vitadel.training.training_cost import plan_training

CPU = join_processes("cpu")


def test_held_out_images_are_balanced_and_never_trained_on():
    setup = open_training(recipe(data={"held_out": 40, "limit": 100}, validation={"limit": None}), CPU)
    aside = setup.held_out.rows
    assert len(aside) == 40
    assert setup.held_out.source.labels()[aside].bincount().tolist() == [4] * 10
    assert not set(aside.tolist()) & set(setup.stream.rows.tolist())
    assert len(setup.stream.rows) == 100
    fewer = open_training(recipe(data={"held_out": 40, "limit": 50}, validation={"limit": None}), CPU)
    assert torch.equal(
        fewer.held_out.rows, aside
    )  # so that trainings of different size are selected on the same images


def test_a_validation_set_of_its_own_leaves_all_training_images():
    data = {"held_out": 0, "limit": None, "validation": "shapes(size=16)@val"}
    setup = open_training(recipe(data=data), CPU)
    assert setup.held_out.source.split == "val"
    assert len(setup.stream.rows) == 50_000


def test_no_test_image_is_read_before_the_audit(tmp_path, monkeypatch):
    read = []
    real = Shapes.read
    monkeypatch.setattr(Shapes, "read", lambda self, rows: (read.append(self.split), real(self, rows))[1])
    monkeypatch.setattr(harden_module, "_audit", lambda *_: {"read before": sorted(set(read))})
    results, _, _ = run_harden(recipe(train={"epochs": 1}), "small", CPU, out=tmp_path / "run")
    assert results["read before"] == ["train"]


def test_without_a_test_set_nothing_is_audited(tmp_path):
    results, folder, _ = run_harden(
        recipe(data={"test": None}, train={"epochs": 1}), "small", CPU, out=tmp_path / "run"
    )
    assert results["complete"]
    assert "clean" not in results
    assert not (folder.path / "audit").exists()


@pytest.mark.parametrize("name", ["targeted:99+pgd-2", "targeted:0+pgd-2", "patches-random(side=7)"])
def test_an_audit_that_cannot_be_is_reported_before_the_training(tmp_path, name):
    with pytest.raises(UserError):
        run_harden(recipe(audit={"attacks": ["pgd-2", name]}), "small", CPU, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_attacks_of_the_audit_run_each_alone_if_asked(tmp_path):
    asked = recipe(train={"epochs": 1}, audit={"attacks": ["pgd-3", "fgsm"], "independent": True})
    results, _, _ = run_harden(asked, "small", CPU, out=tmp_path / "run")
    for entry in results["attacks"]:
        assert (entry["attacked"], entry["counts"]) == (results["clean"]["correct"], "this attack alone")
    assert all(compose(name, "trades+aas")["audit"]["independent"] for name in ("aas/table4", "aas/table5"))


@pytest.mark.slow
def test_the_best_epoch_by_robust_accuracy_is_kept_and_among_equals_the_last(tmp_path, monkeypatch):
    scores = iter([Score(0.9, 0.1, 20), Score(0.2, 0.3, 20), Score(0.2, 0.3, 20), Score(0.95, 0.2, 20)])
    at_each = []

    def score(self, model, *_):
        at_each.append({name: tensor.clone() for name, tensor in model.backbone.state_dict().items()})
        return next(scores)

    monkeypatch.setattr(HeldOut, "score", score)
    results, folder, _ = run_harden(recipe(train={"epochs": 4}), "small", CPU, out=tmp_path / "run")
    assert results["training"]["best_epoch"] == 2
    kept = load_file(folder.path / "weights" / "best.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in at_each[2].items())


def test_among_epochs_that_withstand_as_much_the_more_accurate_is_kept():
    """A standard model withstands nothing in any epoch; its first one is hardly trained."""
    scores = [Score(0.1, 0.0, 20), Score(0.8, 0.0, 20), Score(0.7, 0.0, 20)]
    assert max(scores, key=lambda score: score.decisive) is scores[1]
    assert Score(0.2, 0.3, 20).decisive > Score(0.9, 0.2, 20).decisive


@pytest.mark.slow
def test_plug_ins_for_which_a_training_is_too_short_are_reported(tmp_path, capsys):
    plugins = {
        "awp": {"from_epoch": 1},
        "weight_average": {"from_epoch": 3},
        "overfitting_guard": {"from_epoch": 2, "images": 10, "steps": 1},
        "attention_scaling": {"gap": 2, "images": 16, "steps": 1},
        "epsilon_warmup": {"epochs": 2},
    }
    late = {"shape": "steps", "milestones": [1, 2, 5]}
    run_harden(recipe(plugins=plugins, schedule=late), "small", CPU, out=tmp_path / "run", show_progress=True)
    reported = " ".join(capsys.readouterr().err.split())
    assert "plugins.awp" not in reported  # it has one of the two epochs
    for name, first in (("weight_average", 3), ("overfitting_guard", 2), ("attention_scaling", 2)):
        assert f"plugins.{name}: starts at epoch {first} (from 0) of 2: it has no effect" in reported
    assert "plugins.epsilon_warmup: takes 2 of 2 epochs: full eps is never reached" in reported
    assert "schedule: there are 2 epochs, so nothing happens at 2, 5" in reported


@pytest.mark.parametrize(("asked", "rate"), [(None, 0.3), (0.0, 0.0), (0.1, 0.1)])
def test_drop_path_of_a_model_that_has_learned(tmp_path, asked, rate):
    kwargs = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "drop_path_rate": 0.3}
    file = tmp_path / "model.safetensors"
    save_classifier(load_model("vit_tiny_patch16_224", weights="random", num_classes=10, kwargs=kwargs), file)
    section = ModelSection(str(file), drop_path=asked)
    model = starting_model(section, 10, "shapes").classifier
    assert max(
        [each.drop_prob for each in model.modules() if isinstance(each, DropPath)], default=0.0
    ) == pytest.approx(rate)


def test_a_model_must_read_its_own_state_back():
    class Flat(torch.nn.Sequential):
        def __init__(self):
            super().__init__(torch.nn.Flatten(), torch.nn.Linear(48, 10), torch.nn.BatchNorm1d(10))

    class Forgetful(Flat):
        def state_dict(self, *args, **kwargs):
            return {key: value for key, value in super().state_dict(*args, **kwargs).items() if "bias" not in key}

    class Talkative(Flat):
        def get_extra_state(self):
            return {"note": "no tensor"}

    def asked(module):
        check_answer(vitadel.wrap(module), (4, 4), "mine", 10, trains_model=True)

    good = Flat().train()
    asked(good)
    assert good.training
    assert not good[2].running_mean.any()
    with pytest.raises(UserError, match="'mine' cannot load its own state_dict"):
        asked(Forgetful())
    with pytest.raises(UserError, match="the state_dict of 'mine' has entries that are no tensors"):
        asked(Talkative())


def test_a_rate_that_never_gets_full_is_reported():
    note = "the warm-up takes 3 of 3 epochs: the full rate is never reached"
    assert [Schedule(warmup_epochs=3).length_warning(epochs) for epochs in (3, 4)] == [note, None]


@pytest.mark.slow
def test_what_is_said_to_people_does_not_decide_whether_a_run_goes_on(tmp_path):
    first = {**document(), "about": "one thing"}
    run_harden(build_recipe(first, "small"), "small", CPU, out=tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()  # killed at the very end: checkpoint and audit are looked at again
    command = json.loads((tmp_path / "run" / "command.json").read_text())
    command["settings"]["about"] = "one thing"  # as earlier versions noted it
    (tmp_path / "run" / "command.json").write_text(json.dumps(command))
    again = build_recipe({**first, "about": "another", "expected": "more"}, "small")
    results, _, _ = run_harden(again, "small", CPU, out=tmp_path / "run", resume=True)
    assert results["complete"]


def test_pairs_to_mix_must_fit_each_process():
    built = recipe(augmentation={"mixup": 0.8}, train={"batch_size": 6})
    open_training(built, CPU)
    with pytest.raises(UserError, match=r"pairs.*in 2 processes gives 3; choose a multiple of 4 for train.batch_size"):
        open_training(built, replace(CPU, count=2))


@pytest.mark.slow
def test_validation_is_at_full_eps_while_training_warms_up(tmp_path, monkeypatch):
    seen = []
    real = HeldOut.score

    def score(self, model, attack, threat, *rest):
        seen.append((attack.threat.eps, threat.eps))
        return real(self, model, attack, threat, *rest)

    monkeypatch.setattr(HeldOut, "score", score)
    run_harden(recipe(plugins={"epsilon_warmup": {"epochs": 2}}), "small", CPU, out=tmp_path / "run")
    assert seen == [(8 / 255, 8 / 255)] * 2


@pytest.mark.slow
def test_averaged_weights_are_validated_and_saved_in_place_of_the_live_ones(tmp_path):
    plain = recipe(train={"epochs": 1})
    averaged = recipe(train={"epochs": 1}, plugins={"weight_average": {"decay": 0.5}})
    files = []
    for name, built in {"plain": plain, "averaged": averaged}.items():
        _, folder, _ = run_harden(built, "small", CPU, out=tmp_path / name)
        files.append(load_file(folder.path / "weights" / "last.safetensors"))
        state = torch.load(folder.path / "checkpoint.pt", weights_only=True)
        live = state["model"]["backbone.head.weight"]
        assert torch.equal(files[-1]["head.weight"], live) == (name == "plain")
    assert not torch.equal(files[0]["head.weight"], files[1]["head.weight"])


def test_biases_norms_and_positions_are_not_decayed():
    model = load_model("vit_tiny_patch16_224", weights="random", kwargs={"depth": 1, "embed_dim": 12})
    optimizer = make_optimizer(OptimizerSection(weight_decay=0.3), model)
    names = {id(parameter): name for name, parameter in model.backbone.named_parameters()}
    decayed = {
        names[id(parameter)]: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]
    }
    assert decayed.keys() == set(names.values())
    spared = {name for name, decay in decayed.items() if decay == 0}
    assert {name for name in names.values() if name.endswith("bias") or "norm" in name} <= spared
    assert {"pos_embed", "cls_token"} <= spared
    assert decayed["blocks.0.attn.qkv.weight"] == decayed["head.weight"] == 0.3


@pytest.mark.slow
def test_an_unknown_optimizer_is_reported():
    with pytest.raises(UserError, match="adamw"):
        make_optimizer(OptimizerSection(name="adamww"), load_model("zoo:shapes-standard"))


@pytest.mark.slow
def test_tensorboard_gets_every_step(tmp_path):
    run_harden(recipe(train={"epochs": 1, "tracker": "tensorboard"}), "small", CPU, out=tmp_path / "run")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tracker"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    assert [event.step for event in events.Scalars("validation_robust")] == [3]


def test_a_tracker_that_does_not_exist_is_reported(tmp_path):
    with pytest.raises(UserError, match="did you mean tensorboard"):
        run_harden(recipe(train={"tracker": "tensorbord"}), "small", CPU, out=tmp_path / "run")


class Notebook(GeneralTracker):
    """What stands for a tracker that keeps runs elsewhere, as wandb does."""

    name = "wandb"
    requires_logging_directory = False

    def __init__(self, project, **_):
        super().__init__()
        self.kept = [project]
        notebooks.append(self)

    @property
    def tracker(self):
        return self.kept

    def store_init_configuration(self, values):
        self.kept.append(values)

    def log(self, values, step=None, **_):
        self.kept.append((step, values))

    def finish(self):
        self.kept.append("finished")


notebooks = []


@pytest.mark.slow
def test_another_tracker_by_name_gets_the_settings_and_every_step(tmp_path, monkeypatch):
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", Notebook)
    monkeypatch.setattr(tracking, "_available_trackers", [*tracking.get_available_trackers(), LoggerType.WANDB])
    notebooks.clear()
    run_harden(recipe(train={"epochs": 1, "tracker": "wandb"}), "small", CPU, out=tmp_path / "run")
    (project, settings, *steps, end) = notebooks[0].kept
    assert (project, end) == ("vitadel", "finished")
    assert settings["objective.attack"] == "pgd-2(step=5/255)"
    assert [step for step, _ in steps] == [1, 2, 3, 3]
    assert "loss" in steps[0][1]
    assert "validation_robust" in steps[3][1]
    assert not (tmp_path / "run" / "tracker").exists()
    run_harden(recipe(train={"epochs": 1, "tracker": "all"}), "small", CPU, out=tmp_path / "all")
    assert len(notebooks) == 2
    assert list((tmp_path / "all" / "tracker").iterdir())


TROUBLES = [
    (OSError(28, "No space left on device"), r"no space left on the disk while writing .*tracker.*--resume"),
    (ConnectionResetError(104, "reset by peer"), r"'wandb' cannot be reached: .*reset by peer.*--resume"),
    (
        requests.ConnectionError("Max retries exceeded"),
        r"'wandb' cannot be reached: Max retries exceeded.*--resume",
    ),
    (ssl.SSLCertVerificationError(1, "verify failed"), r"'wandb' cannot be reached: .*verify failed"),
    (OSError(24, "Too many open files"), r"cannot write .*tracker: .*Too many open files"),
    (ValueError("no project"), r"'wandb' cannot be used: no project\. Correct it"),
]
# Every trouble at one moment, and one of each kind of error at the others.
FAILURES = [("store_init_configuration", *trouble) for trouble in TROUBLES]
FAILURES += [(moment, *trouble) for moment in ("log", "finish") for trouble in (TROUBLES[0], TROUBLES[-1])]


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "trouble", "reported"), FAILURES)
def test_a_tracker_that_fails_is_reported_and_the_training_goes_on_later(
    tmp_path, monkeypatch, trouble, reported, moment
):
    def fails(*_, **__):
        raise trouble

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", Notebook)
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType.WANDB])
    built = recipe(data={"limit": 16, "test": None}, train={"epochs": 1, "tracker": "wandb"})
    with monkeypatch.context() as patched:
        patched.setattr(Notebook, moment, fails)
        with pytest.raises(UserError, match=reported):
            run_harden(built, "small", CPU, out=tmp_path / "run")
    assert run_harden(built, "small", CPU, out=tmp_path / "run", resume=True)[0]["complete"]


def test_an_optimizer_that_this_machine_lacks_leaves_no_folder(tmp_path):
    with pytest.raises(UserError, match=r"optimizer 'fusedlamb' cannot be built .*CUDA"):
        run_harden(recipe(optimizer={"name": "fusedlamb"}), "small", CPU, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_second_source_is_mixed_in(tmp_path):
    data = {"extra": "shapes(size=16,texture=0)@val", "extra_share": 0.5}
    results, _, _ = run_harden(recipe(data=data, train={"epochs": 1}), "small", CPU, out=tmp_path / "run")
    assert results["training"]["steps"] == 48 // 8


def test_an_easier_source_must_have_the_same_samples():
    with pytest.raises(UserError, match="same order"):
        open_training(recipe(data={"easier": "shapes(size=16)@val", "easier_epochs": 1}), CPU)


def test_fine_tuning_keeps_the_weights_and_gives_other_classes_a_new_head(tmp_path):
    _, folder, _ = run_harden(recipe(train={"epochs": 1}), "small", CPU, out=tmp_path / "run")
    changed = document()
    changed["model"] = {"name": str(folder.path)}
    setup = open_training(build_recipe(changed, "small"), CPU)
    kept = load_file(folder.path / "weights" / "best.safetensors")
    assert torch.equal(setup.model.backbone.head.weight, kept["head.weight"])
    for split in ("train", "test"):
        for kind in ("cat", "dog"):
            (tmp_path / "pets" / split / kind).mkdir(parents=True)
            for number in range(30):
                Image.new("RGB", (16, 16), (number, 0, 0)).save(tmp_path / "pets" / split / kind / f"{number}.png")
    pets = f"folder:{tmp_path / 'pets'}"
    changed["data"] = {"train": f"{pets}@train", "test": f"{pets}@test", "held_out": 10}
    other = open_training(build_recipe(changed, "small"), CPU).model.backbone
    assert other.head.weight.shape[0] == 2
    assert torch.equal(other.blocks[0].attn.qkv.weight, kept["blocks.0.attn.qkv.weight"])


def test_a_weight_file_of_a_named_model_keeps_its_head_if_the_recipe_says_how_many_classes(tmp_path):
    small = {"depth": 1, "embed_dim": 12, "num_heads": 2, "patch_size": 8, "img_size": 32}
    made = load_model("vit_tiny_patch16_224", weights="random", num_classes=10, kwargs=small)
    save_file(made.backbone.state_dict(), tmp_path / "ten.safetensors")
    changed = document()
    changed["model"] = {"name": "vit_tiny_patch16_224", "kwargs": small, "num_classes": 10}
    changed["model"]["weights"] = str(tmp_path / "ten.safetensors")
    setup = open_training(build_recipe(changed, "small"), CPU)
    assert torch.equal(setup.model.backbone.head.weight, made.backbone.head.weight)


@pytest.mark.parametrize("classes", [10, 12])
def test_a_weight_file_keeps_its_head_if_it_is_one_for_the_classes_of_the_data(tmp_path, classes):
    small = {"depth": 1, "embed_dim": 12, "num_heads": 2, "patch_size": 8, "img_size": 32}
    made = load_model("vit_tiny_patch16_224", weights="random", num_classes=classes, kwargs=small).backbone
    save_file(made.state_dict(), tmp_path / "file.safetensors")
    changed = document()
    changed["model"] = {"name": "vit_tiny_patch16_224", "kwargs": small, "weights": str(tmp_path / "file.safetensors")}
    opened = open_training(build_recipe(changed, "small"), CPU).model.backbone
    assert opened.head.weight.shape[0] == 10
    assert (opened.head.weight.tolist() == made.head.weight.tolist()) == (classes == 10)
    assert torch.equal(opened.blocks[0].attn.qkv.weight, made.blocks[0].attn.qkv.weight)
    changed["model"]["kwargs"] = {**small, "embed_dim": 24}
    with pytest.raises(UserError, match="do not fit the model"):
        open_training(build_recipe(changed, "small"), CPU)


def test_of_a_head_for_more_classes_a_recipe_keeps_those_of_its_data(tmp_path):
    small = {"depth": 1, "embed_dim": 12, "num_heads": 2, "patch_size": 8, "img_size": 32}
    made = load_model("vit_tiny_patch16_224", weights="random", num_classes=12, kwargs=small)
    save_file(made.backbone.state_dict(), tmp_path / "twelve.safetensors")
    kept = [11, 3, 4, 5, 6, 7, 8, 9, 1, 0]
    changed = document()
    changed["model"] = {"name": "vit_tiny_patch16_224", "kwargs": small, "head_classes": kept}
    with pytest.raises(UserError, match="this model has random weights"):
        open_training(build_recipe(changed, "small"), CPU)
    changed["model"]["weights"] = str(tmp_path / "twelve.safetensors")
    setup = open_training(build_recipe(changed, "small"), CPU)
    assert torch.equal(setup.model.backbone.head.weight, made.backbone.head.weight[kept])
    changed["model"]["head_classes"] = kept[:9]
    with pytest.raises(UserError, match=r"keeps 9 classes, but .* has 10"):
        open_training(build_recipe(changed, "small"), CPU)


def test_labels_must_mean_the_same_everywhere(tmp_path):
    for split, kinds in {"train": ("a", "b"), "val": ("b", "c")}.items():
        for kind in kinds:
            (tmp_path / "set" / split / kind).mkdir(parents=True)
            for number in range(20):
                Image.new("RGB", (16, 16)).save(tmp_path / "set" / split / kind / f"{number}.png")
    data = {"train": f"folder:{tmp_path / 'set'}@train", "validation": f"folder:{tmp_path / 'set'}@val", "test": None}
    with pytest.raises(UserError, match=r"its class 0 is 'b', that of data.train is 'a'"):
        open_training(recipe(data=data), CPU)


def test_an_average_cannot_be_rolled_back(tmp_path):
    plugins = {"overfitting_guard": {"action": "rollback"}, "weight_average": {}}
    with pytest.raises(UserError, match="use action: stop"):
        run_harden(recipe(plugins=plugins), "small", CPU, out=tmp_path / "run")


def test_a_tracker_that_is_not_installed_is_reported(tmp_path):
    with pytest.raises(UserError, match="not installed"):
        run_harden(recipe(train={"tracker": "wandb"}), "small", CPU, out=tmp_path / "run")


def test_what_a_foreign_weight_file_leaves_open_is_said_and_not_kept(tmp_path, capsys):
    kwargs = {"depth": 1, "embed_dim": 24, "num_heads": 3, "img_size": 32, "patch_size": 8}
    model = load_model("vit_tiny_patch16_224", weights="random", num_classes=10, kwargs=kwargs)
    torch.save(model.backbone.state_dict(), tmp_path / "w.pth")
    changed = document()
    changed["model"] = {"name": "vit_tiny_patch16_224", "weights": str(tmp_path / "w.pth"), "kwargs": kwargs}
    setup = open_training(build_recipe(changed, "small"), CPU)
    assert "vit_tiny_patch16_224, assumed: mean and std 0.5" in capsys.readouterr().err
    assert "assumed" not in setup.model.record.notes  # the trained model was trained so


def test_the_seed_draws_the_first_weights_and_the_callers_generator_is_left_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, two, other = (open_training(recipe(train={"seed": seed}), CPU).model for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.backbone.head.weight, two.backbone.head.weight)
    assert not torch.equal(one.backbone.head.weight, other.backbone.head.weight)


def test_from_python_by_name_with_overrides(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(document()))
    results = vitadel.harden(str(file), {"train.epochs": 1, "threat.eps": "4/255"}, out=tmp_path / "run", device="cpu")
    assert results["training"]["epochs"] == 1
    assert results["threat"]["eps_text"] == "4/255"
    assert json.loads((tmp_path / "run" / "command.json").read_text())["verb"] == "harden"


@pytest.mark.slow
def test_a_plan_counts_every_part():
    cost = plan_training(open_training(recipe(), CPU), CPU)
    assert (cost["epochs"], cost["steps"]) == (2, 6)
    assert [row["images"] for row in cost["rows"]] == [96, 96, 96, 96, 40, 20]
    assert all(row["seconds"] > 0 for row in cost["rows"])
    assert cost["seconds"] == pytest.approx(sum(row["seconds"] for row in cost["rows"]))
    clean = recipe(objective={"use": "standard"})
    assert plan_training(open_training(clean, CPU), CPU)["rows"][1]["seconds"] == 0


def test_a_guard_may_end_a_training(tmp_path, monkeypatch):
    from vitadel.training.plugins import overfitting_guard as guard

    monkeypatch.setattr(guard.OverfittingGuard, "after_epoch", lambda self, run: run.stop("it overfits"))
    built = recipe(plugins={"overfitting_guard": {"action": "stop"}})
    results, folder, _ = run_harden(built, "small", CPU, out=tmp_path / "run")
    assert results["training"]["stopped"] == "it overfits"
    assert results["training"]["steps"] == 3
    assert (folder.path / "weights" / "last.safetensors").exists()
    assert training_state.read_checkpoint(folder.path)["stopped"] == "it overfits"


def test_weights_know_their_classes_and_a_collapse_is_said(tmp_path):
    """Two steps of a tiny model teach it nothing: at chance, which the results say first."""
    changes = {"data": {"test": None}, "train": {"epochs": 1}, "validation": {"limit": 40}}
    results, folder, _ = run_harden(recipe(**changes), "small", CPU, out=tmp_path / "run")
    record = read_record(folder.path / "weights" / "best.safetensors")
    assert record.classes == tuple(CLASSES)
    assert record.classes_from == "data.train of its training (shapes(size=16)@train)"
    assert record.training["n"] == 40
    assert record.training["clean"] == results["training"]["held_out"]["clean"]
    assert results["findings"][0]["check"] == "clean-accuracy"
