"""Two processes: FSDP takes the steps of DDP with half the weights each, and attacks exchange nothing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from new_processes import program, run_together
from small_recipes import document, recipe
from vitadel.errors import UserError
from vitadel.runtime.distributed import Processes, join_processes
from vitadel.training import loop
from vitadel.training.run import _adapted, open_training, run_harden

CPU = torch.device("cpu")
TWO = Processes(0, 2, CPU)
SHORT = {
    "data": {"limit": 48, "held_out": 20, "test": None},
    "train": {"epochs": 2, "checkpoint_every": 100, "grad_accum": 2},
    "schedule": {"warmup_epochs": 0.0},
    "validation": {"limit": 10},
}


class Exchanges(TorchDispatchMode):
    """Counts what processes exchange inside the block, as far as torch's dispatcher sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def train_and_count(fsdp: bool, folder: str) -> None:
    """Train in this process, one of two; write what its attacks and steps exchange, and how many weights it has."""
    found: dict[str, list[Any]] = {"in attacks": [], "in steps": [], "shares": [], "gradients": []}
    attack, backward, prepare = loop.run_inner_attack, loop._Trainer._backward, loop._Trainer.__post_init__
    buckets = 0

    def reduced(state, bucket):  # by DDP, which the dispatcher does not see
        nonlocal buckets
        buckets += 1
        return (
            torch.distributed.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda done: done.value()[0] / 2)
        )

    def watched(trainer: Any) -> None:
        prepare(trainer)
        if hasattr(trainer.model, "register_comm_hook"):
            trainer.model.register_comm_hook(None, reduced)

    def counted_attack(given: Any, model: Any, *rest: Any) -> Any:
        before = buckets
        with Exchanges() as exchanges:
            z = attack(given, model, *rest)
        found["in attacks"].append(exchanges.count + buckets - before)
        found["gradients"].append(sum(each.grad is not None for each in model.parameters()))
        return z

    def counted_step(trainer: Any, batch: Any) -> Any:
        before = buckets
        with Exchanges() as exchanges:
            numbers = backward(trainer, batch)
        found["in steps"].append(exchanges.count + buckets - before)
        mine = [each.to_local() if isinstance(each, DTensor) else each for each in trainer.state.model.parameters()]
        found["shares"].append(sum(each.numel() for each in mine))
        return numbers

    loop.run_inner_attack, loop._Trainer._backward = counted_attack, counted_step
    loop._Trainer.__post_init__ = watched
    # Not Adam, which divides rounding errors of gradients that are zero, as those of key biases, by their size.
    changes = {**SHORT, "train": {**SHORT["train"], "fsdp": fsdp}, "optimizer": {"name": "sgd", "lr": 0.5}}
    run_harden(recipe(**changes), "small", join_processes("cpu"), out=Path(folder) / "run")
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_fsdp_takes_the_steps_of_ddp_and_attacks_exchange_nothing(tmp_path):
    runs = {}
    for fsdp in (False, True):
        folder = tmp_path / str(fsdp)
        folder.mkdir()
        run_together(train_and_count, fsdp, str(folder))
        counts = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
        runs[fsdp] = load_file(folder / "run" / "weights" / "last.safetensors"), counts
        for each in counts:
            assert len(each["in attacks"]) == 2 * len(each["in steps"]) == 12  # two micro-batches
            assert set(each["in attacks"]) == {0}
            assert set(each["gradients"]) == {0}
            assert min(each["in steps"]) > 0
    (one, whole), (other, shares) = runs[False], runs[True]
    sizes = [each["shares"][0] for each in shares]
    assert sum(sizes) == whole[0]["shares"][0]
    assert max(sizes) < 0.6 * sum(sizes)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.allclose(value, other[name], atol=1e-5), name
    untrained = open_training(recipe(**SHORT), TWO).model.backbone.state_dict()
    assert any(not torch.allclose(value, untrained[name], atol=1e-3) for name, value in one.items())


@pytest.mark.slow
def test_fsdp_resumes_to_the_same_weights(tmp_path):
    """Preempted after a step in the middle of an epoch, in one of the processes."""
    changes = {**SHORT, "train": {**SHORT["train"], "fsdp": True}}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(document(**changes)))
    words = ["harden", str(file), "--device", "cpu", "--out"]
    run_together(program, *words, str(tmp_path / "whole"))
    run_together(stopped_once, *words, str(tmp_path / "cut"), code=130)
    saved = torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)
    assert saved["step"] == 2
    assert not any(isinstance(each, DTensor) for each in saved["model"].values())
    run_together(program, *words, str(tmp_path / "cut"), "--resume")
    one, other = (load_file(tmp_path / run / "weights" / "last.safetensors") for run in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def stopped_once(*words: str) -> None:
    """The program, with Ctrl-C in the second process during its second step."""
    step = loop._Trainer.take_step

    def take_step(trainer: Any, parts: Any) -> None:
        if (trainer.state.step, trainer.state.processes.rank) == (1, 1):
            os.kill(os.getpid(), signal.SIGINT)
        step(trainer, parts)

    loop._Trainer.take_step = take_step
    program(*words)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"objective": {"use": "afat"}}, "objective.use afat"),
        ({"plugins": {"attention_scaling": {"gap": 1}}}, "plugins.attention_scaling"),
        ({"plugins": {"weight_average": {}}}, "plugins.weight_average needs all"),
        ({"plugins": {"awp": {}}}, "plugins.awp needs all"),
        (
            {"objective": {"use": "tora", "attack": "pgd-1"}, "adapter": {"use": "tora", "reduction": 8}},
            "objective.use tora",
        ),
        ({"adapter": {"use": "tora", "reduction": 8}}, "an adapter"),
        ({"objective": {"use": "adversarial", "attack": "patch-fool-1"}}, "objective.attack patch-fool-1"),
    ],
)
def test_what_cannot_be_divided_is_refused(changes, named):
    setup = open_training(recipe(**changes, train={"fsdp": True}), TWO)
    with pytest.raises(UserError, match=rf"train.fsdp divides.*{named}.*train.fsdp=false"):
        _adapted(setup, TWO)


def test_one_process_is_refused():
    setup = open_training(recipe(train={"fsdp": True}), TWO)
    with pytest.raises(UserError, match=r"there is one\. Start several"):
        _adapted(setup, Processes(0, 1, CPU))
