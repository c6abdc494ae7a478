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
from vitadel.training import run as training_run
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
