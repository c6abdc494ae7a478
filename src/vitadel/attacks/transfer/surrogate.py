"""A model as only the attacker sees it: gradients come from a changed model, verdicts from the deployed one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

__all__ = ["Change", "Changed", "Surrogate", "View", "changed", "deployed", "seen_through"]

Change = Callable[[nn.Module], AbstractContextManager[object]]
"""A `with` block around each forward pass of a model."""


class Changed(nn.Module):
    """A model run inside `change`, and taken for a model of its own: what it calls fooled counts as fooled."""

    def __init__(self, model: nn.Module, change: Change) -> None:
        super().__init__()
        self.model = model
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        with self.change(self.model):
            logits: Tensor = self.model(x)
        return logits


@runtime_checkable
class View(Protocol):
    """A module that shows another one in its own way, and can show a third one in the same way."""

    model: nn.Module

    def around(self, model: nn.Module) -> nn.Module: ...


def changed(model: nn.Module, change: Change) -> nn.Module:
    """`model` run inside `change`; of a view, the view of what is changed, since a view may run its model again."""
    return model.around(changed(model.model, change)) if isinstance(model, View) else Changed(model, change)


class Surrogate(nn.Module):
    """Attacks climb what `shown` returns, but `goals.fooled` and the judge ask `deployed`.

    An image that only fools the model that was shown is no adversarial example.
    """

    def __init__(self, shown: nn.Module, deployed: nn.Module) -> None:
        super().__init__()
        self.shown = shown
        self.deployed = deployed

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.shown(x)
        return logits


def deployed(model: nn.Module) -> nn.Module:
    """The model that judges: itself, or the one behind a surrogate."""
    return model.deployed if isinstance(model, Surrogate) else model


def seen_through(model: nn.Module, view: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """`view(model)`; of a surrogate, a surrogate of the views, so that verdicts still come from the deployed model."""
    return Surrogate(view(model.shown), view(model.deployed)) if isinstance(model, Surrogate) else view(model)
