"""The memory of a training: per image as measured at a larger batch, and less with checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from small_recipes import recipe
from vitadel.runtime.distributed import Processes
from vitadel.training.run import open_training
from vitadel.training.training_cost import plan_training
from vitadel.training.training_memory import GPU_SIZES, StepMemory, peak_bytes

CPU = Processes(0, 1, torch.device("cpu"))
WIDE = {"kwargs": {"embed_dim": 64, "depth": 6, "num_heads": 2, "patch_size": 4}}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for module in ("vitadel.training.training_cost", "vitadel.evaluation.engine.cost"):
        monkeypatch.setattr(f"{module}.seconds_of", lambda work, device: work() is None or 1.0)


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """What autograd keeps between the passes, by its own account; weights and inputs not counted."""
    known = {each.untyped_storage().data_ptr() for each in (x, *model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(x)
    assert logits.requires_grad
    return sum(each.untyped_storage().nbytes() for place, each in kept.items() if place not in known)


def planned(**changes: Any) -> tuple[Any, dict[str, Any]]:
    setup = open_training(recipe(**changes), CPU)
    return setup, plan_training(setup, CPU)


def test_a_chain_of_known_tensors_is_counted():
    """A million floats, twice as many, and the first freed before the last."""

    def work() -> None:
        first = torch.ones(1_000_000)
        second = torch.cat([first, first])
        second.view(-1, 2).mul_(3)  # a view, in place: nothing new
        del first
        torch.zeros(500_000)

    assert peak_bytes(work, CPU.device) == 4 * 3_000_000


@pytest.mark.slow
def test_the_estimate_is_what_autograd_keeps_and_a_little_more():
    setup, plan = planned(model=WIDE, train={"batch_size": 32, "grad_accum": 2}, optimizer={"name": "adamw"})
    model, memory = setup.model.train(), plan["memory"]
    x = torch.rand(32, 3, 16, 16)
    per_image = (saved_bytes(model, x) - saved_bytes(model, x[:8])) / 24
    assert 1.0 <= memory["as_set"]["bytes_per_image"] / per_image < 1.25
    weights = 4 * sum(each.numel() for each in model.parameters())
    assert memory["weights_bytes"] == weights
    assert memory["optimizer_bytes"] == pytest.approx(2 * weights, rel=1e-2)  # two moments
    assert memory["as_set"]["images"] == 16
    stays = 4 * weights
    assert memory["as_set"]["peak_bytes"] == pytest.approx(stays + 16 * per_image, rel=0.25)


@pytest.mark.slow
def test_the_peak_at_a_larger_batch_is_that_of_a_step():
    """The estimate comes from 2 and 4 images; a step on 24 is measured beside it."""
    setup, plan = planned(model=WIDE, train={"batch_size": 24}, objective={"use": "standard"})
    model = setup.model.train()
    y = torch.arange(24) % 10

    def step() -> None:
        setup.recipe.objective(model, x, x, y)["loss"].backward()

    x = torch.rand(24, 3, 16, 16)
    step()  # gradients are there from now on, as in the estimate
    stays = 4 * plan["memory"]["weights_bytes"]
    assert plan["memory"]["as_set"]["peak_bytes"] - stays == pytest.approx(peak_bytes(step, CPU.device), rel=0.1)


@pytest.mark.slow
def test_checkpointing_takes_less_and_is_left_out_where_it_does_not_work():
    _, plan = planned(model=WIDE)
    memory = plan["memory"]
    assert memory["checkpointing"]["bytes_per_image"] < 0.5 * memory["as_set"]["bytes_per_image"]
    assert memory["checkpointing"]["largest_batch"] > memory["as_set"]["largest_batch"]
    setup, plan = planned(objective={"use": "afat"})
    assert plan["memory"]["checkpointing"] is None
    assert not setup.model.backbone.grad_checkpointing


def test_the_largest_batch_fits_and_one_more_does_not():
    memory = StepMemory(weights=10**9, gradients=10**9, optimizer=2 * 10**9, fixed=10**8, per_image=3 * 10**7)
    for size in GPU_SIZES:
        images = memory.largest_batch(size * 2**30)
        assert memory.peak(images) <= 0.9 * size * 2**30 < memory.peak(images + 1)
    assert memory.largest_batch(4 * 10**9) == 0
