"""What processes tell each other: two of them, on this machine."""

from __future__ import annotations

import pytest
import torch

from device_double import DeviceDouble
from new_processes import run_together
from vitadel.errors import UserError
from vitadel.runtime.distributed import Processes, check_all_joined, join_processes


def agree():
    """The work of each of two processes."""
    us = join_processes()
    mine = torch.tensor([1.0, 10.0]) * (us.rank + 1)
    assert us.mean(mine).tolist() == [1.5, 15.0]
    assert mine.tolist() == [us.rank + 1, 10 * (us.rank + 1)]
    assert us.on_main(lambda: us.rank) == us.from_main(us.rank) == 0
    assert us.count == 2
    torch.distributed.destroy_process_group()


def test_alone_the_mean_is_the_tensor_itself():
    tensor = torch.tensor([1.0, 2.0])
    assert Processes(0, 1, torch.device("cpu")).mean(tensor) is tensor


@pytest.mark.slow
def test_two_processes_agree():
    run_together(agree)


def test_processes_that_did_not_join_are_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # as a launcher that this process never heard of would set it
    with pytest.raises(UserError, match=r"started 2 processes .* only 1 joined"):
        check_all_joined(1, "cuda")


def test_a_model_computes_alone_on_a_device_without_float64(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with DeviceDouble("mps", floats=32) as double:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: double.device)
        assert join_processes("auto") == Processes(0, 1, torch.device("cpu"))
        joined = join_processes("mps:0")
        assert joined == Processes(0, 1, torch.device("cpu"), double.device)
        model = joined.place(joined.place(torch.nn.Linear(3, 2)))  # twice does no harm
        x = torch.rand(4, 3, requires_grad=True)
        logits = model(x)
        assert (model.weight.device, logits.device) == (double.device, torch.device("cpu"))
        (grad,) = torch.autograd.grad(logits.sum(), x)
        assert torch.allclose(grad, model.weight.cpu().sum(0).expand(4, 3))
        assert double.copies[2:] == [x.nbytes, logits.nbytes]  # inputs, and gradients of outputs; before, two weights
        with pytest.raises(TypeError, match=r"no torch\.float64"):
            model.weight.double()
