"""Before anything long: whether each attack suits the model. A layer, grid or target that it lacks is told now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from vitadel.attacks.parse import numbered_targets
from vitadel.attacks.wrappers import WorstOf
from vitadel.evaluation.engine.calibration import studies
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Calibrated

__all__ = ["preflight"]

_FORWARDS = 3
"""After so many forward passes an attack has looked at everything that it asks of a model."""


class _Enough(Exception):
    """Ends an attack that got going."""


def preflight(model: nn.Module, crew: Sequence[tuple[str, Attack]], shape: tuple[int, int]) -> None:
    """The first passes of each attack, on a made-up image: the `UserError` that it would end with later comes now."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    x = torch.linspace(0.2, 0.8, 3 * shape[0] * shape[1], device=device).view(1, 3, *shape)
    with frozen(model):
        with torch.no_grad():
            likely = model(x)[0].argsort(descending=True).tolist()
        for name, attack in crew:
            # As the model sees it, so that it is not fooled at once; but no target's class.
            label = next((each for each in likely if each not in numbered_targets(name)), likely[0])
            for beginning in _beginnings(attack, model, x, torch.tensor([label], device=device)):
                _stopped_early(model, beginning)


def _beginnings(attack: Attack, model: nn.Module, x: Tensor, y: Tensor) -> Iterator[Callable[[], object]]:
    """What an attack does first; of an ensemble each member, of one that studies images that, and what it wraps."""
    if isinstance(attack, WorstOf):
        for _, member in attack.members():
            yield from _beginnings(member, model, x, y)
    elif not studies(attack):
        yield partial(attack, model, x, y, SampleRNG.of_samples(0, [0], x.device))
    else:
        if isinstance(attack, Calibrated):
            yield partial(attack.prepared, model, [(x, y)], 0)
        if (inner := getattr(attack, "attack", None)) is not None:
            yield from _beginnings(inner, model, x, y)


def _stopped_early(model: nn.Module, work: Callable[[], object]) -> None:
    passed = 0

    def count(module: nn.Module, given: object) -> None:
        nonlocal passed
        passed += 1
        if passed > _FORWARDS:
            raise _Enough

    watch = model.register_forward_pre_hook(count)
    try:
        work()
    except _Enough:
        return
    finally:
        watch.remove()
