"""Models as only the attacker sees them: gradients come from a changed model, verdicts from the deployed one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor, nn

Change = Callable[[nn.Module], AbstractContextManager[object]]
"""A `with` block around each forward pass of a model."""


class Changed(nn.Module):
    """A model that runs inside `change`, as a model of its own: its own logits decide who is fooled."""

    def __init__(self, model: nn.Module, change: Change) -> None:
        super().__init__()
        self.model = model
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        with self.change(self.model):
            logits: Tensor = self.model(x)
        return logits


class View(nn.Module):
    """A model with other logits: `read(model, x)` computes them from passes of the model."""

    def __init__(self, model: nn.Module, read: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.model, x)


def changed(model: nn.Module, change: Change) -> nn.Module:
    """`model` run inside `change`. Inside a view the viewed model is changed, since a view may run it several times."""
    return View(changed(model.model, change), model.read) if isinstance(model, View) else Changed(model, change)


class Surrogate(nn.Module):
    """Attacks follow the gradients of `shown`, but `goals.fooled` and the judge ask `deployed`.

    An image that fools only the shown model is not an adversarial example.
    """

    def __init__(self, shown: nn.Module, deployed: nn.Module) -> None:
        super().__init__()
        self.shown = shown
        self.deployed = deployed

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.shown(x)
        return logits


def deployed(model: nn.Module) -> nn.Module:
    """The model that decides who is fooled: `model` itself, or the one behind a surrogate."""
    return model.deployed if isinstance(model, Surrogate) else model


def seen_through(model: nn.Module, view: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """`view(model)`; for a surrogate a surrogate of both views, so that the deployed model still gives the verdicts."""
    return Surrogate(view(model.shown), view(model.deployed)) if isinstance(model, Surrogate) else view(model)
