"""The loop: the same weights whatever the number of parts, processes or lives; nothing lost when something breaks."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

import vitadel
from new_processes import program, signaled_at, start
from small_recipes import TRADES, document, recipe
from vitadel.errors import Interrupted, UserError
from vitadel.runtime.distributed import join_processes
from vitadel.training import loop, training_state
from vitadel.training import run as harden_module
from vitadel.training.metrics import HeldOut, Metrics
from vitadel.training.plugins.awp import AWP
from vitadel.training.plugins.overfitting_guard import OverfittingGuard
from vitadel.training.run import run_harden

CPU = join_processes("cpu")
EVERYTHING = {
    "awp": {"gamma": 0.01},
    "epsilon_warmup": {"epochs": 1},
    "weight_average": {"decay": 0.9},
    "attention_scaling": {"gap": 1, "images": 16, "steps": 1},
    "random_dropping": {"epochs": 1.5},
    "overfitting_guard": {"images": 10, "steps": 1},
}


def weights(folder, name="last"):
    return load_file(Path(folder) / "weights" / f"{name}.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def close(a, b, tolerance):
    return a.keys() == b.keys() and all(torch.allclose(a[key], b[key], atol=tolerance) for key in a)


def lines(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def stopped_at_the_first_save(built, folder, monkeypatch):
    save = loop.save_checkpoint

    def once(*arguments):
        save(*arguments)
        raise Interrupted(folder)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "save_checkpoint", once)
        with pytest.raises(Interrupted):
            run_harden(built, "small", CPU, out=folder)


@pytest.mark.slow
def test_the_plain_copy_of_a_repeated_batch_is_not_mixed(tmp_path, monkeypatch):
    """MixUp is an augmentation, too: of three copies the first keeps its class numbers."""
    seen = []
    monkeypatch.setattr(loop, "run_inner_attack", lambda attack, model, x, y, *rest: seen.append((x, y)) or x)
    repeated = {"mixup": 0.8, "repeated_aug": 3, "repeated_aug_by": "batches"}
    run_harden(recipe(augmentation=repeated, train={"epochs": 1}), "small", CPU, out=tmp_path / "run")
    once = len(seen) // 3
    assert len(seen) == 3 * once > 0
    assert [y.ndim for _, y in seen] == [1, 2, 2] * once
    for (plain, labels), (mixed, shares) in zip(seen[::3], seen[1::3], strict=True):
        assert plain.shape == mixed.shape
        assert bool((shares.gather(1, labels[:, None]) > 0).all())  # the same images in the same order
    assert [row["step"] for row in lines(tmp_path / "run") if "epoch" not in row][-1] == len(seen)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A training with every kind of plug-in that keeps state, run in one go."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    torch.manual_seed(5)
    results, _, _ = run_harden(recipe(plugins=EVERYTHING), "small", CPU, out=folder)
    assert torch.initial_seed() == 5  # the caller's generator is left alone
    return folder, results


@pytest.mark.slow
def test_a_run_leaves_what_it_should(finished):
    folder, results = finished
    assert results["complete"]
    assert results["training"]["steps"] == 6
    assert 0 <= results["worst_case"]["robust_accuracy"] <= results["clean"]["accuracy"] <= 1
    assert json.loads((folder / "results.json").read_text()) == results
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["train"]["epochs"] == 2
    assert {file.name for file in folder.iterdir()} >= {"environment.json", "metrics.jsonl", "samples.parquet"}
    model = vitadel.load_model(str(folder))
    assert model.record.num_classes == 10


@pytest.mark.slow
def test_metrics_report_of_every_step_and_epoch(finished):
    folder, _ = finished
    rows = lines(folder)
    steps = [row for row in rows if "epoch" not in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert [row["eps"] for row in steps] == pytest.approx([0, 0, 0, *[8 / 255] * 3])
    epochs = [row for row in rows if "epoch" in row]
    assert [row["epoch"] for row in epochs] == [0, 1]
    assert all({"validation_clean", "validation_robust"} <= row.keys() for row in epochs)


def broken_off(folder, monkeypatch, cut, **changes):
    """A training that ended for good in the middle of a step, after so many of them, and was resumed."""
    taken = 0
    real = loop._Trainer.take_step

    def fragile(self, parts):
        nonlocal taken
        if taken == cut:
            real(self, parts)  # work that no checkpoint knows of
            raise RuntimeError("power cut")
        taken += 1
        real(self, parts)

    with monkeypatch.context() as patched:
        patched.setattr(loop._Trainer, "take_step", fragile)
        with pytest.raises(RuntimeError, match="power cut"):
            run_harden(recipe(**changes), "small", CPU, out=folder)
    run_harden(recipe(**changes), "small", CPU, out=folder, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_a_training_that_broke_off_ends_with_the_same_bits(finished, tmp_path, monkeypatch, cut):
    """With a checkpoint every second step and at the end of an epoch."""
    broken_off(tmp_path / "run", monkeypatch, cut, plugins=EVERYTHING)
    folder, _ = finished
    assert same(weights(tmp_path / "run"), weights(folder))
    assert same(weights(tmp_path / "run", "best"), weights(folder, "best"))
    assert lines(tmp_path / "run") == lines(folder)


@pytest.mark.slow
def test_in_half_precision_it_ends_with_the_same_bits_too(finished, tmp_path, monkeypatch):
    changes = {"plugins": EVERYTHING, "train": {"amp_dtype": "bf16"}}
    run_harden(recipe(**changes), "small", CPU, out=tmp_path / "whole")
    broken_off(tmp_path / "cut", monkeypatch, 5, **changes)
    assert same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    assert not same(weights(tmp_path / "whole"), weights(finished[0]))  # so that it was another precision


@pytest.mark.slow
def test_killed_for_good_and_resumed_it_ends_with_the_same_bits(finished, tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(document(plugins=EVERYTHING)))
    command = ["harden", str(file), "--out", str(tmp_path / "run"), "--resume", "--device", "cpu"]
    threads = torch.get_num_threads()  # sums in the same order
    for place, call, saved in (
        ("training.loop._Trainer._backward", 3, 2),  # in the middle of a step
        ("training.loop.save_checkpoint", 1, 2),  # an epoch's end
        ("runtime.run_folder.FolderCache.save", 2, 6),  # the audit
    ):
        killed = start(signaled_at, signal.SIGKILL, f"vitadel.{place}", call, program, *command, threads=threads)
        killed.finish(-signal.SIGKILL)
        assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] == saved
    start(program, *command, threads=threads).finish()
    folder, _ = finished
    assert same(weights(tmp_path / "run"), weights(folder))
    hours = json.loads((tmp_path / "run" / "time.json").read_text())["device_hours"]
    assert 0 < hours == torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["hours"]
    again, whole = (json.loads((each / "time.json").read_text())["image_passes"] for each in (tmp_path / "run", folder))
    assert again == whole > 0  # what was done twice counts once


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective", [{"use": "adversarial", "attack": "pgd-2(step=5/255)"}, TRADES], ids=["at", "trades"]
)
def test_parts_of_a_batch_add_up_to_the_batch(tmp_path, objective):
    for parts in (1, 4):
        built = recipe(objective=objective, train={"grad_accum": parts, "epochs": 1}, plugins={"awp": {}})
        run_harden(built, "small", CPU, out=tmp_path / str(parts))
    assert close(weights(tmp_path / "1"), weights(tmp_path / "4"), 2e-4)
    untrained = recipe(train={"epochs": 1}, optimizer={"lr": 1e-12})
    run_harden(untrained, "small", CPU, out=tmp_path / "0")
    assert not close(weights(tmp_path / "1"), weights(tmp_path / "0"), 2e-3)  # so that the comparison means something


@pytest.mark.slow
def test_another_seed_gives_other_weights(finished, tmp_path):
    run_harden(recipe(plugins=EVERYTHING, train={"seed": 1}), "small", CPU, out=tmp_path / "run")
    assert not same(weights(tmp_path / "run"), weights(finished[0]))


def test_a_finished_run_is_only_read(finished):
    folder, results = finished
    before = (folder / "weights" / "best.safetensors").stat().st_mtime_ns
    again, _, _ = run_harden(recipe(plugins=EVERYTHING), "small", CPU, out=folder, resume=True)
    assert again == results
    assert (folder / "weights" / "best.safetensors").stat().st_mtime_ns == before


@pytest.mark.slow
def test_what_decides_nothing_may_change_while_a_run_goes_on(finished, tmp_path, monkeypatch, capsys):
    built = recipe(plugins=EVERYTHING)
    stopped_at_the_first_save(built, tmp_path / "run", monkeypatch)
    other = recipe(plugins=EVERYTHING, data={"workers": 1}, train={"tracker": "tensorboard", "checkpoint_every": 1})
    assert other.document != built.document
    capsys.readouterr()
    run_harden(other, "small", CPU, out=tmp_path / "run", resume=True, show_progress=True)
    losses = [row["loss"] for row in lines(tmp_path / "run") if "loss" in row and row["step"] <= 3]
    assert f"epoch 1/2: loss {sum(losses) / 3:.3f}" in capsys.readouterr().err  # also of steps before the resume
    assert same(weights(tmp_path / "run"), weights(finished[0]))


def test_other_images_cannot_go_on_with_a_run(tmp_path, monkeypatch):
    """Held-out images are chosen by their places: were one taken away, others might be learned from after all."""
    photos = tmp_path / "photos"
    for number in range(60):
        (photos / str(number % 2)).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (4 * number, 0, 0)).save(photos / str(number % 2) / f"{number:02d}.png")
    built = recipe(data={"train": f"folder:{photos}", "test": None, "limit": None, "held_out": 10})
    stopped_at_the_first_save(built, tmp_path / "run", monkeypatch)
    taken = photos / "1" / "31.png"
    content = taken.read_bytes()
    taken.rename(photos / "1" / "renamed.png")
    for _ in range(2):  # under another name, and then not at all
        with pytest.raises(UserError, match=r"not those that .*run started with.*Restore the images"):
            run_harden(built, "small", CPU, out=tmp_path / "run", resume=True)
        (photos / "1" / "renamed.png").unlink(missing_ok=True)
    taken.write_bytes(content)
    assert run_harden(built, "small", CPU, out=tmp_path / "run", resume=True)[0]["complete"]


def test_another_recipe_cannot_go_on_with_a_run(finished):
    with pytest.raises(UserError, match="different settings"):
        run_harden(recipe(plugins={}), "small", CPU, out=finished[0], resume=True)


@pytest.mark.slow
def test_the_checkpoint_of_another_recipe_is_refused_and_nothing_is_lost(finished, tmp_path):
    """Brought into the folder of a training that has not saved anything yet."""
    folder = run_harden(recipe(train={"epochs": 1}), "small", CPU, out=tmp_path / "run").folder.path
    (folder / "results.json").unlink()
    foreign = (finished[0] / "checkpoint.pt").read_bytes()
    (folder / "checkpoint.pt").write_bytes(foreign)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    with pytest.raises(
        UserError, match=r"(?s)checkpoint of another recipe.*plugins\.awp\.gamma: 0\.01 there, None here"
    ) as e:
        run_harden(recipe(train={"epochs": 1}), "small", CPU, out=folder, resume=True)
    assert "train.epochs: 2 there, 1 here" in str(e.value)
    changed = {file for file, content in before.items() if file.read_bytes() != content}
    assert {file.name for file in changed} <= {"environment.json"}
    torch.save({"weights": torch.zeros(2)}, folder / "checkpoint.pt")
    with pytest.raises(UserError, match="is not a checkpoint of `vitadel harden`"):
        run_harden(recipe(train={"epochs": 1}), "small", CPU, out=folder, resume=True)


@pytest.mark.slow
def test_what_a_kill_left_half_written_is_taken_away(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    names = [".checkpoint.pt.k3j4h5", ".metrics.jsonl.aaaaaa", "weights/.best.safetensors.xyz123"]
    with monkeypatch.context() as patched:
        patched.setattr(loop, "_write_weights", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_harden(recipe(), "small", CPU, out=folder)
    (folder / "weights").mkdir()
    for name in names:
        (folder / name).write_bytes(b"half")
    run_harden(recipe(), "small", CPU, out=folder, resume=True)
    assert not [name for name in names if (folder / name).exists()]
    assert (folder / "weights" / "best.safetensors").exists()


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_the_training_and_keeps_the_checkpoint(tmp_path, monkeypatch):
    real = loop._Trainer._backward

    def poisoned(self, batch):
        numbers = real(self, batch)
        return {**numbers, "robust": torch.tensor(float("nan"))} if self.state.step == 4 else numbers

    monkeypatch.setattr(loop._Trainer, "_backward", poisoned)
    with pytest.raises(UserError, match=r"diverged at step 5 \(epoch 2\): robust = nan; .* of step 4 is kept"):
        run_harden(recipe(), "small", CPU, out=tmp_path / "run")
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] == 4
    monkeypatch.undo()
    run_harden(recipe(), "small", CPU, out=tmp_path / "run", resume=True)


@pytest.mark.slow
def test_weights_that_give_no_answer_are_neither_judged_nor_saved(tmp_path, monkeypatch):
    """They may be numbers, and the loss of the step that made them, too."""
    real = loop._Trainer.take_step

    def thrown(self, parts):
        real(self, parts)
        if self.state.step == 4:
            next(self.state.model.parameters()).data.fill_(1e38)

    monkeypatch.setattr(loop._Trainer, "take_step", thrown)
    with pytest.raises(UserError, match=r"diverged at step 4 .*NaN or infinite logits; .* of step 3 is kept"):
        run_harden(recipe(), "small", CPU, out=tmp_path / "run")
    monkeypatch.undo()
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] == 3
    run_harden(recipe(), "small", CPU, out=tmp_path / "run", resume=True)


def test_a_real_overflow_is_reported(tmp_path):
    with pytest.raises(UserError, match="training diverged at step"):
        run_harden(
            recipe(optimizer={"lr": 1e30, "clip_grad_norm": None, "name": "sgd"}), "small", CPU, out=tmp_path / "run"
        )


@pytest.mark.slow
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    real = training_state.write_checkpoint
    states = []

    def full(folder, state, secret):
        states.append(state["step"])
        if len(states) == 2:
            monkeypatch.setattr(os, "fsync", no_room)
        real(folder, state, secret)

    def no_room(_file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training_state, "write_checkpoint", full)
    with pytest.raises(UserError, match="no space left"):
        run_harden(recipe(), "small", CPU, out=tmp_path / "run")
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] == 2
    monkeypatch.undo()
    results, _, _ = run_harden(recipe(), "small", CPU, out=tmp_path / "run", resume=True)
    assert results["complete"]


def test_a_gradient_that_is_no_number_never_reaches_the_checkpoint(tmp_path, monkeypatch):
    """With a finite loss and no clipping, too."""
    real = loop._Trainer._backward

    def poisoned(self, batch):
        numbers = real(self, batch)
        if self.state.step == 3:
            next(self.state.model.parameters()).grad.view(-1)[0] = float("nan")
        return numbers

    monkeypatch.setattr(loop._Trainer, "_backward", poisoned)
    with pytest.raises(UserError, match=r"diverged at step 4 .*gradient_norm = nan"):
        run_harden(recipe(optimizer={"clip_grad_norm": None}), "small", CPU, out=tmp_path / "run")
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


@pytest.mark.slow
def test_a_kill_between_metrics_and_checkpoint_leaves_no_hole(finished, tmp_path, monkeypatch):
    real = training_state.write_checkpoint
    written = 0

    def torn(folder, state, secret):
        nonlocal written
        written += 1
        if written == 2:
            raise RuntimeError("power cut")
        real(folder, state, secret)

    monkeypatch.setattr(training_state, "write_checkpoint", torn)
    with pytest.raises(RuntimeError, match="power cut"):
        run_harden(recipe(plugins=EVERYTHING), "small", CPU, out=tmp_path / "run")
    assert lines(tmp_path / "run")[-1]["step"] == 3  # ahead of the checkpoint
    monkeypatch.undo()
    run_harden(recipe(plugins=EVERYTHING), "small", CPU, out=tmp_path / "run", resume=True)
    assert lines(tmp_path / "run") == lines(finished[0])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_reported_for_metrics_and_weights_too(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    metrics = Metrics(tmp_path / "full")
    metrics.add(1, {"loss": 1.0})
    with pytest.raises(UserError, match="no space left"):
        metrics.save(1)


@pytest.mark.slow
def test_a_plug_in_that_stops_lets_the_epoch_end(tmp_path):
    built = recipe(plugins={"stopping.Stops": {"at_step": 1}})
    results, folder, _ = run_harden(built, "small", CPU, out=tmp_path / "run")
    assert results["training"]["steps"] == 3
    assert results["training"]["stopped"] == "enough"
    assert (folder.path / "weights" / "best.safetensors").exists()


def test_ctrl_c_finishes_the_step_and_saves(tmp_path, monkeypatch):
    real = loop._Trainer.take_step

    def interrupted(self, parts):
        if self.state.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        real(self, parts)

    monkeypatch.setattr(loop._Trainer, "take_step", interrupted)
    with pytest.raises(Interrupted):
        run_harden(recipe(), "small", CPU, out=tmp_path / "run")
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] == 3


@pytest.mark.slow
def test_ctrl_c_while_the_last_epoch_is_judged_is_heeded(tmp_path, monkeypatch):
    real = loop._score

    def interrupted(run):
        if run.epoch == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return real(run)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "_score", interrupted)
        with pytest.raises(Interrupted):
            run_harden(recipe(), "small", CPU, out=tmp_path / "run")
    assert not (tmp_path / "run" / "audit").exists()
    results, _, _ = run_harden(recipe(), "small", CPU, out=tmp_path / "run", resume=True)
    assert (results["complete"], results["training"]["steps"]) == (True, 6)


@pytest.mark.slow
def test_attacks_in_train_mode_meet_it_from_the_first_step_of_every_life(tmp_path, monkeypatch):
    settings = {"model": {"drop_path": 0.4}, "train": {"attack_mode": "train", "checkpoint_every": 1}}
    modes, real = [], loop.run_inner_attack

    def watched(attack, model, *rest):
        modes.append(model.training)
        return real(attack, model, *rest)

    monkeypatch.setattr(loop, "run_inner_attack", watched)
    run_harden(recipe(**settings), "small", CPU, out=tmp_path / "whole")
    broken_off(tmp_path / "cut", monkeypatch, 2, **settings)
    assert all(modes)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


@pytest.mark.slow
def test_attacks_leave_no_trace_on_a_training(tmp_path, monkeypatch):
    """No gradient reaches a parameter while an attack runs, and every module has its own mode before and after."""
    real = loop.run_inner_attack
    seen = []

    def watched(attack, model, x, y, rng, mode):
        model.backbone.blocks[0].eval()  # frozen by someone
        before = [module.training for module in model.modules()]
        z = real(attack, model, x, y, rng, mode)
        seen.append([module.training for module in model.modules()] == before)
        seen.append(all(p.grad is None and p.requires_grad for p in model.parameters()))
        model.train()
        return z

    monkeypatch.setattr(loop, "run_inner_attack", watched)
    for mode in ("eval", "train"):
        run_harden(recipe(train={"epochs": 1, "attack_mode": mode}), "small", CPU, out=tmp_path / mode)
    assert len(seen) == 12
    assert all(seen)


def test_half_precision_trains_and_is_validated_in_full(tmp_path, monkeypatch):
    seen = []
    real = HeldOut.score

    def watched(self, model, *rest):
        hook = model.backbone.blocks[0].register_forward_hook(lambda _module, _args, out: seen.append(out.dtype))
        with hook:
            return real(self, model, *rest)

    monkeypatch.setattr(HeldOut, "score", watched)
    results, _, _ = run_harden(recipe(train={"amp_dtype": "bf16", "epochs": 1}), "small", CPU, out=tmp_path / "run")
    assert results["complete"]
    assert all(tensor.dtype == torch.float32 for tensor in weights(tmp_path / "run").values())
    assert set(seen) == {torch.float32}
    with pytest.raises(UserError, match="fp16 needs a GPU"):
        run_harden(recipe(train={"amp_dtype": "fp16"}), "small", CPU, out=tmp_path / "no")
    assert not (tmp_path / "no").exists()


OBJECTIVES = {
    "standard": {"use": "standard"},
    "at": {"use": "adversarial", "attack": "pgd-1"},
    "trades": TRADES,
    "mart": {"use": "mart", "attack": "pgd-1"},
    "apgd": {"use": "adversarial", "attack": "apgd-ce(steps=2)"},
}


@pytest.mark.slow
def test_mixed_labels_reach_every_objective(tmp_path):
    for name, objective in OBJECTIVES.items():
        built = recipe(objective=objective, augmentation={"mixup": 0.8, "cutmix": 1.0}, train={"epochs": 1})
        assert run_harden(built, "small", CPU, out=tmp_path / name)[0]["complete"]


@pytest.mark.slow
def test_attention_scaling_goes_with_every_objective(tmp_path):
    """New factors before the second epoch are in the file, and in the model that is opened from it."""
    for name, objective in OBJECTIVES.items():
        plugins = {"attention_scaling": {"gap": 1, "images": 16, "steps": 1}}
        built = recipe(objective=objective, plugins=plugins, data={"limit": 16, "test": None})
        _, folder, _ = run_harden(built, "small", CPU, out=tmp_path / name)
        factors = vitadel.load_model(str(folder.path / "weights" / "last.safetensors")).record.attention_factors
        assert len(factors) == 2, name
        assert all(0.0099 < factor <= 1 for factor in factors), name
        assert factors != (1.0, 1.0), name


@pytest.mark.slow
def test_an_overfitted_epoch_is_rolled_back_and_the_good_one_deployed(tmp_path, monkeypatch):
    left = iter([0.5, 0.5, 0.4, 0.5, 0.9, 0.1])  # by FGSM and PGD: two good epochs, then one that overfits
    at_each = []

    def left_by(self, attack, run):
        at_each.append({name: tensor.clone() for name, tensor in run.model.backbone.state_dict().items()})
        return next(left)

    monkeypatch.setattr(OverfittingGuard, "_accuracy", left_by)
    built = recipe(train={"epochs": 4}, plugins={"overfitting_guard": {"action": "rollback"}})
    results, folder, _ = run_harden(built, "small", CPU, out=tmp_path / "run")
    assert "the weights of the last epoch without alarm are restored" in results["training"]["stopped"]
    assert results["training"]["steps"] == 9
    first, good, overfitted = at_each[::2]
    kept = weights(folder.path)
    assert same(kept, good)
    assert not same(kept, overfitted)
    assert same(weights(folder.path, "best"), (first, good)[results["training"]["best_epoch"]])
    last = [row for row in lines(folder.path) if "epoch" in row][-1]
    assert (last["epoch"], last["back_to_epoch"], last["pgd_accuracy"]) == (2, 1, 0.1)
    assert "validation_clean" not in last  # of weights that are gone


@pytest.mark.slow
def test_an_epoch_that_was_gone_back_to_is_judged_if_it_was_not_yet(tmp_path, monkeypatch):
    left = iter([0.5, 0.5, 0.9, 0.1])
    monkeypatch.setattr(OverfittingGuard, "_accuracy", lambda *_: next(left))
    plugins = {"overfitting_guard": {"action": "rollback"}}
    built = recipe(train={"epochs": 4}, validation={"every": 3}, plugins=plugins)
    results, folder, _ = run_harden(built, "small", CPU, out=tmp_path / "run")
    (row,) = [row for row in lines(folder.path) if "back_to_epoch" in row]
    assert (row["epoch"], row["back_to_epoch"], results["training"]["best_epoch"]) == (1, 0, 0)
    assert row["validation_clean"] == results["training"]["held_out"]["clean"]


@pytest.mark.slow
def test_weights_are_moved_by_the_scaled_loss_where_the_step_is_taken_by_it(tmp_path, monkeypatch):
    """fp16 multiplies the loss lest gradients round to zero."""
    seen = []
    build, around = harden_module._accelerator, AWP.around_step

    def scaled(*arguments):
        accelerator = build(*arguments)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        return accelerator

    def noting(self, run, losses):
        seen.append([float(loss.detach()) for loss in losses()])
        return around(self, run, losses)

    monkeypatch.setattr(AWP, "around_step", noting)
    built = recipe(plugins={"awp": {"gamma": 0.01}}, train={"epochs": 1})
    run_harden(built, "small", CPU, out=tmp_path / "plain")
    monkeypatch.setattr(harden_module, "_accelerator", scaled)
    run_harden(built, "small", CPU, out=tmp_path / "scaled")
    plain, multiplied = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    for losses, times in zip(plain, multiplied, strict=True):
        assert times == pytest.approx([1024 * loss for loss in losses], rel=1e-4)


@pytest.mark.slow
def test_a_batch_norm_backbone_trains_and_says_whose_statistics_it_uses(tmp_path, capsys):
    xcit = {
        "name": "xcit_nano_12_p16_224",
        "small_images": 4,
        "input_size": 16,
        "kwargs": {"embed_dim": 16, "depth": 1, "num_heads": 2},
    }
    base = document(objective=TRADES, train={"epochs": 1}, data={"train": "shapes(size=16)@train"})
    base["model"] = xcit
    from vitadel.training.recipes.build import build_recipe

    results, folder, _ = run_harden(build_recipe(base, "small"), "small", CPU, out=tmp_path / "run", show_progress=True)
    assert results["complete"]
    assert "BatchNorm layers collect the statistics of the images of the loss" in capsys.readouterr().err
    moved = weights(folder.path)
    assert any(key.endswith("num_batches_tracked") and int(value) == 6 for key, value in moved.items())
