"""Switches for memory and speed: the same weights, or a refusal."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from device_double import DeviceDouble
from small_recipes import recipe
from vitadel.errors import UserError
from vitadel.runtime.distributed import Processes
from vitadel.training import loop
from vitadel.training import run as training_run
from vitadel.training.memory_switches import compile_in_place
from vitadel.training.recipes.compose import deciding
from vitadel.training.recipes.training_sections import OptimizerSection
from vitadel.training.recipes.yaml_files import translate_settings
from vitadel.training.run import open_training, run_harden

CPU = Processes(0, 1, torch.device("cpu"))
SHORT = {"data": {"limit": 16, "held_out": 10, "test": None}, "validation": {"limit": 10}}


def trained(path, objective=None, **switches):
    chosen = {} if objective is None else {"objective": objective}
    run_harden(recipe(**SHORT, **chosen, train={"epochs": 1, "batch_size": 8, **switches}), "small", CPU, out=path)
    return load_file(path / "weights" / "last.safetensors")


@pytest.mark.slow
def test_the_weights_are_the_same_with_every_switch(tmp_path):
    switches = [{}, {"checkpointing": True}, {"channels_last": True}, {"tf32": True}]
    runs = [trained(tmp_path / str(number), **each) for number, each in enumerate(switches)]
    for one, other in pairwise(runs):
        for name, value in one.items():
            assert torch.allclose(value, other[name], atol=1e-5), name
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.slow
def test_checkpointing_runs_blocks_again_in_the_backward_pass(monkeypatch):
    counts = []
    for checkpointing in (False, True):
        model = training_run._adapted(
            open_training(recipe(**SHORT, train={"checkpointing": checkpointing}), CPU), CPU
        ).train()
        calls = []
        model.backbone.blocks[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        model(torch.rand(2, 3, 16, 16)).sum().backward()
        counts.append(len(calls))
    assert counts == [1, 2]


@pytest.mark.slow
def test_a_compiled_training_has_the_same_weights_and_is_validated_as_it_is(tmp_path, monkeypatch):
    """With the backend that compiles nothing, which needs no C compiler."""
    calls, real = [], torch.compile

    def compiled(call, **settings):
        fast = real(call, backend="eager", **settings)
        return lambda *given: calls.append((given[0].requires_grad, len(given[0]))) or fast(*given)

    plain = trained(tmp_path / "plain")
    monkeypatch.setattr(torch, "compile", compiled)
    fast = trained(tmp_path / "compiled", compile=True)
    for name, value in plain.items():
        assert torch.allclose(value, fast[name], atol=1e-5), name
    trial, steps = calls[:1], calls[1:]
    assert trial == [(True, 2)]
    assert steps == [(True, 8), (True, 8), (False, 8)] * 2  # PGD-2 and the loss, in two steps; no validation


def test_a_compiler_that_fails_is_said_and_the_model_is_left_as_it_was(monkeypatch):
    def fail(call, **settings):
        raise RuntimeError("no compiler here")

    model = training_run._adapted(open_training(recipe(**SHORT, train={"compile": True}), CPU), CPU)
    monkeypatch.setattr(torch, "compile", fail)
    assert "failed here (RuntimeError); training without" in compile_in_place(model, torch.rand(2, 3, 16, 16))
    assert model._compiled_call_impl is None
    assert model(torch.rand(2, 3, 16, 16)).shape == (2, 10)


@pytest.mark.parametrize("other", ["fsdp", "checkpointing"])
def test_compile_is_refused_beside_what_it_does_not_work_with(other):
    setup = open_training(recipe(**SHORT, train={"compile": True, other: True}), CPU)
    with pytest.raises(UserError, match=rf"train.compile and train.{other} do not work together"):
        training_run._adapted(setup, CPU)


def test_hooks_are_refused_with_compile():
    setup = open_training(recipe(**SHORT, plugins={"attention_scaling": {"gap": 1}}, train={"compile": True}), CPU)
    with pytest.raises(UserError, match=r"plugins.attention_scaling.*train.compile=false"):
        training_run._adapted(setup, CPU)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_fused_optimizers_take_the_same_steps(tmp_path, name):
    runs = []
    for fused in (False, True):
        built = recipe(**SHORT, optimizer={"name": name, "fused": fused}, train={"epochs": 1, "batch_size": 8})
        run_harden(built, "small", CPU, out=tmp_path / str(fused))
        runs.append(load_file(tmp_path / str(fused) / "weights" / "last.safetensors"))
        saved = torch.load(tmp_path / str(fused) / "checkpoint.pt", weights_only=True)
        assert {group.get("fused") or False for group in saved["optimiser"]["param_groups"]} == {fused}
    assert all(torch.allclose(value, runs[1][key], atol=1e-5) for key, value in runs[0].items())


def test_fused_is_the_default_on_gpus_only_and_only_where_torch_has_it():
    sections = [OptimizerSection(name=name) for name in ("adamw", "sgd", "momentum", "lamb", "lion")]
    for kind, expected in (("cuda", [True, True, True, False, False]), ("cpu", [False] * 5)):
        assert [loop._fused(section, torch.device(kind)) for section in sections] == expected
    with pytest.raises(UserError, match=r"torch has no fused 'lamb'.*optimizer.fused=false"):
        loop.make_optimizer(OptimizerSection(name="lamb", fused=True), torch.nn.Linear(2, 2))


@pytest.mark.parametrize(("has", "chosen"), [(True, "bf16"), (False, "fp32")])
def test_bf16_is_the_default_on_gpus_that_have_it(monkeypatch, capsys, has, chosen):
    with DeviceDouble() as double:
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has)
        built = open_training(recipe(**SHORT), Processes(0, 1, double.device)).recipe
        stated = open_training(recipe(**SHORT, train={"amp_dtype": "fp32"}), Processes(0, 1, double.device)).recipe
    said = capsys.readouterr().err
    assert built.train.amp_dtype == built.document["train"]["amp_dtype"] == chosen
    assert said.count("train.amp_dtype: bf16, which this GPU has") == has
    assert stated.train.amp_dtype == "fp32"
    assert open_training(recipe(**SHORT), CPU).recipe.train.amp_dtype == "fp32"
    assert capsys.readouterr().err == ""


def test_a_run_that_recorded_no_precision_had_fp32():
    here, there = {"train.amp_dtype": "fp32", "train.epochs": 1}, {"train.epochs": 1}
    assert translate_settings(here) == translate_settings(there) == deciding({"train": {"epochs": 1}})
    assert deciding({"train": {"amp_dtype": "bf16"}}) == {"train.amp_dtype": "bf16"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"objective": {"use": "afat"}}, "objective.use afat"),
        ({"plugins": {"attention_scaling": {"gap": 1}}}, "plugins.attention_scaling"),
        ({"objective": {"use": "tora", "attack": "pgd-1"}, "adapter": {"use": "tora", "reduction": 8}}, "tora"),
    ],
)
def test_what_looks_inside_is_refused_with_checkpointing(changes, named):
    setup = open_training(recipe(**SHORT, **changes, train={"checkpointing": True}), CPU)
    with pytest.raises(UserError, match=rf"{named}.*train.checkpointing=false"):
        training_run._adapted(setup, CPU)


def test_bf16_on_a_gpu_without_it_is_refused(monkeypatch):
    with DeviceDouble() as double:
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
        with pytest.raises(UserError, match="no bf16"):
            open_training(recipe(**SHORT, train={"amp_dtype": "bf16"}), Processes(0, 1, double.device))


def test_tf32_is_for_the_training_only(monkeypatch):
    seen = []
    with training_run._matrix_products(recipe(train={"tf32": True})):
        seen.append(torch.get_float32_matmul_precision())
    assert (seen, torch.get_float32_matmul_precision()) == (["high"], "highest")
