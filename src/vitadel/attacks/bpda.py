"""BPDA: attack through modules whose backward pass is replaced (Athalye et al. 2018, arXiv:1802.00420).

The forward pass stays that of the deployed model, so verdicts are the model's own. The backward pass of the chosen
modules is that of a differentiable stand-in, by default the identity: rounding, compression, purifiers and sparse
activations then pass gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import Changed, Surrogate, View, changed, seen_through
from vitadel.attacks.per_sample import SampleInfo, images_and_info_of, images_of, run_attack, takes_arrays
from vitadel.attacks.wrappers import Averaged, mean_logits
from vitadel.backbones.classifier import check_pixels
from vitadel.backbones.third_party import import_function
from vitadel.errors import UserError, nearest_names
from vitadel.instrument.hooks import Edge, frozen, hooked
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack

Backward = Callable[[Tensor], Tensor]
"""A differentiable stand-in of a module: its input -> a tensor of its output's shape, used for gradients only."""

_IDENTITY = "identity"
_RANDOM = 1e-4  # relative difference between two passes over the same images that is more than rounding
_IMAGES = 8  # that the search for modules looks at, half of them noisy
_MOVE = 2 / 255  # of every pixel: a usual step of an attack
_NOISE = 8 / 255
_DIRECTIONS = 2
_ERROR = 0.8  # of the predicted change of a module's output, relative; a median filter comes to 0.6


@dataclass(frozen=True)
class BPDA:
    """An attack that follows gradients through the stand-in `backward` of the named `modules`.

    `modules` are names as in `model.named_modules()`, or their last parts, or patterns with `*`. `backward` is
    `identity`, `python:module:function`, or a function from a module's input to a tensor of its output's shape.
    """

    attack: Attack
    modules: tuple[str, ...]
    backward: str | Backward = _IDENTITY

    def __post_init__(self) -> None:
        if not self.modules or not all(self.modules):
            raise UserError("bpda needs the names of modules, e.g. bpda(modules=input_transform)+pgd-20; got none")
        _stand_in(self.backward)  # reports a wrong one before anything runs

    __call__ = images_of
    run_with_info = images_and_info_of

    def run(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, with_info: bool) -> tuple[Tensor, SampleInfo]:
        check_pixels(x)
        _check_one_answer(model, self.attack, x)
        view = seen_through(model, lambda inner: changed(inner, self._change))
        return run_attack(self.attack, view, x, y, rng, with_info)

    @contextmanager
    def _change(self, model: nn.Module) -> Iterator[None]:
        stand_in = _stand_in(self.backward)
        sites = [
            edge
            for name, module in named_modules(model, self.modules).items()
            for edge in _replaced_backward(name, module, stand_in)
        ]
        with hooked(model, sites):
            yield

    def passes(self) -> tuple[int, int]:
        gradients, forwards = self.attack.passes()
        return gradients, forwards + 2  # whether the model answers the same twice


@dataclass(frozen=True)
class SearchedBPDA:
    """BPDA through the modules whose backward pass is missing, zero, or does not match what their outputs do."""

    attack: Attack
    backward: str | Backward = _IDENTITY

    def __post_init__(self) -> None:
        _stand_in(self.backward)

    @property
    def calibration_images(self) -> int:
        return _IMAGES // 2

    @takes_arrays
    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        raise UserError(
            "bpda must find its modules on calibration images first, which are not the attacked ones: call "
            "attack.prepared(model, [(images, labels), ...]) and use what it returns, or name them: "
            "bpda(modules=NAME)+. `vitadel audit` does so by itself"
        )

    def prepared(self, model: nn.Module, calibration: Iterable[tuple[Tensor, Tensor]], seed: int = 0) -> BPDA:
        x = next(iter(calibration))[0]
        found = find_masking_modules(model, x, seed)
        if not found and _answers_at_random(model, x):
            raise UserError(
                "bpda found no module whose backward pass is missing, zero or wrong; but the model gives two answers "
                "to the same images. Average over its randomness: eot:20+pgd-20; or name modules: "
                "eot:20+bpda(modules=NAME)+pgd-20"
            )
        if not found:
            raise UserError(
                "bpda found no module whose backward pass is missing, zero or wrong. If the model changes images or "
                "activations in a function, put that into an nn.Module; or name modules: bpda(modules=NAME)+"
            )
        return BPDA(self.attack, tuple(found), self.backward)

    def passes(self) -> tuple[int, int]:
        return BPDA(self.attack, ("*",), self.backward).passes()


def bpda(attack: Attack, modules: str, backward: str | Backward) -> Attack:
    """BPDA through named modules, separated by semicolons; without names they are searched."""
    names = tuple(name.strip() for name in modules.split(";")) if modules else ()
    return BPDA(attack, names, backward) if names else SearchedBPDA(attack, backward)


def _stand_in(backward: str | Backward) -> Backward:
    if callable(backward):
        return backward
    if backward == _IDENTITY:
        return lambda x: x
    kind, _, spec = backward.partition(":")
    if kind != "python":
        raise UserError(f"unknown backward {backward!r} of bpda; allowed: {_IDENTITY}, python:package.module:function")
    return import_function(spec)


def _inside(model: nn.Module) -> nn.Module:
    """The user's model inside what attacks put around it."""
    if isinstance(model, (Changed, View)):
        return _inside(model.model)
    return _inside(model.deployed) if isinstance(model, Surrogate) else model


def _is_averaged(model: nn.Module) -> bool:
    """Whether logits are already means over several passes."""
    if isinstance(model, Surrogate):
        return _is_averaged(model.shown)
    if isinstance(model, View) and isinstance(model.read, partial) and model.read.func is mean_logits:
        return True
    return isinstance(model, (Changed, View)) and _is_averaged(model.model)


def _check_one_answer(model: nn.Module, attack: Attack, x: Tensor) -> None:
    inner: object = attack
    while inner is not None and not isinstance(inner, Averaged):
        inner = getattr(inner, "attack", None)
    if inner is None and not _is_averaged(model) and len(x) > 0 and _answers_at_random(model, x):
        raise UserError(
            "the model gives two answers to the same images, and bpda follows the gradient of one pass. "
            "Average over its randomness: eot:20+bpda+pgd-20"
        )


def _answers_at_random(model: nn.Module, x: Tensor) -> bool:
    with frozen(model), torch.no_grad():
        first, second = model(x), model(x)
    return float((first - second).abs().max()) > _RANDOM * float(first.abs().max())


def named_modules(model: nn.Module, patterns: tuple[str, ...]) -> dict[str, nn.Module]:
    """The modules that the patterns name, in full or by their last parts, upper or lower case."""
    known = {name: module for name, module in _inside(model).named_modules() if name}
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        low = pattern.lower()
        hits = [name for name in known if fnmatchcase(name.lower(), low)]
        hits = hits or [name for name in known if fnmatchcase(name.lower(), f"*.{low}")]
        if not hits:
            ends = dict.fromkeys(name.rpartition(".")[2] for name in known)
            near = nearest_names(pattern, [*known, *ends]) or "."
            some = ", ".join(list(known)[:5])
            raise UserError(
                f"the model has no module {pattern!r}{near} Its {len(known)} modules are named as in "
                f"model.named_modules(): {some}, ..."
            )
        found |= {name: known[name] for name in hits}
    return found


def _compute(stand_in: Backward, x: Tensor, name: str) -> Tensor:
    try:
        return stand_in(x)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the user's function raises
        raise UserError(
            f"the stand-in of module {name!r} in the backward pass failed with {type(error).__name__}: {error}. It got "
            f"the module's input, of shape {tuple(x.shape)}, and must return a tensor of the module's output shape"
        ) from error


def _replaced_backward(name: str, module: nn.Module, stand_in: Backward) -> list[Edge]:
    entered: list[Tensor] = []

    def enter(x: Tensor) -> Tensor:
        entered.append(x)
        return x.clone()  # a module may change its input in place

    def leave(output: Tensor) -> Tensor:
        replaced = _compute(stand_in, entered.pop(), name)
        shapes = [tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in (output, replaced)]
        if not isinstance(output, Tensor) or shapes[0] != shapes[1]:
            raise UserError(
                f"module {name!r} returns {shapes[0]}, and its stand-in in the backward pass {shapes[1]}. "
                "Name a module that keeps shapes, or give a function with the module's output shape: "
                "bpda(modules=NAME,backward=python:package.module:function)+"
            )
        replaced = replaced.to(output.dtype)
        return output.detach() + (replaced - replaced.detach())

    return [Edge(name, module, enter, before=True, first=True), Edge(name, module, leave)]


# --- the search for modules -------------------------------------------------------------------------------------------


@dataclass
class _Call:
    """The first call of a module: input and output, and the gradients of some projections of the output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor | None = None
    gradients: tuple[Tensor, ...] = ()


def find_masking_modules(model: nn.Module, x: Tensor, seed: int = 0) -> dict[str, float]:
    """The innermost modules whose gradient does not predict how their output changes when pixels move by a step.

    Returns names with the relative error of the prediction: 1 for a backward pass that is missing or zero.
    """
    few = x[: _IMAGES // 2].detach()
    rng = SampleRNG.of_samples(seed, range(2 * len(few)), x.device).stream("bpda")
    noise = _NOISE * rng[torch.arange(len(few), device=x.device)].stream("noise").signs(*x.shape[1:]).to(x)
    start = torch.cat([few, (few + noise).clamp(0, 1)])
    moved = (start + _MOVE * rng.stream("move").signs(*x.shape[1:]).to(x)).clamp(0, 1)
    with frozen(model), torch.random.fork_rng():
        here, there = _first_calls(model, start, rng, seed), _first_calls(model, moved, None, seed)
    errors = {name: _prediction_error(here[name], there[name], rng) for name in here if name in there}
    # A part that holds others counts only without any gradient: the identity stands in badly for a whole block.
    parts = dict(_inside(model).named_modules())
    whole = {
        name for name in errors if len(list(parts[name].children())) and any(map(Tensor.any, here[name].gradients))
    }
    wrong = {name: error for name, error in errors.items() if error > _ERROR and name not in whole}
    return {name: e for name, e in wrong.items() if not any(other.startswith(f"{name}.") for other in wrong)}


def _first_calls(model: nn.Module, x: Tensor, rng: SampleRNG | None, seed: int) -> dict[str, _Call]:
    """The first call of every module, with gradients if `rng` is given."""
    calls: dict[str, _Call] = {}
    repeated = False  # a module runs again, for its gradient

    def enter(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not repeated and name not in calls and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            calls[name] = _Call((args[0].detach().clone(), *args[1:]), kwargs)

    def leave(name: str, module: nn.Module, _args: object, output: object) -> None:
        nonlocal repeated
        if repeated or name not in calls or calls[name].output is not None or not isinstance(output, Tensor):
            return
        calls[name].output = output.detach().clone()
        if rng is not None and output.is_floating_point() and len(output) == len(rng):
            repeated = True  # here, and not later, because the module may run under autocast
            calls[name].gradients = _gradients(module, calls[name], rng)
            repeated = False

    handles = []
    for name, module in _inside(model).named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(partial(leave, name)))
    try:
        torch.manual_seed(seed)
        with torch.no_grad():
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return {name: call for name, call in calls.items() if call.output is not None}


def _signs(output: Tensor, rng: SampleRNG, turn: int) -> Tensor:
    return rng.stream("signs", turn).signs(*output.shape[1:]).to(output)


def _gradients(module: nn.Module, call: _Call, rng: SampleRNG) -> tuple[Tensor, ...]:
    with torch.random.fork_rng(), torch.enable_grad():
        start = call.args[0].detach().clone().requires_grad_()
        output = module(start.clone(), *call.args[1:], **call.kwargs)
        found = []
        for turn in range(_DIRECTIONS):
            grad = None
            if output.requires_grad:
                value = (output * _signs(output, rng, turn)).sum()
                (grad,) = torch.autograd.grad(value, start, retain_graph=True, allow_unused=True)
            found.append(torch.zeros_like(start) if grad is None else grad.nan_to_num(0.0))
    return tuple(each.detach() for each in found)


def _prediction_error(here: _Call, there: _Call, rng: SampleRNG) -> float:
    """How far the change of the output is from what the gradient predicts, relative to the larger of the two."""
    assert here.output is not None
    assert there.output is not None
    if not here.gradients or there.output.shape != here.output.shape or there.args[0].shape != here.args[0].shape:
        return 0.0
    change, move = (there.output - here.output).double(), (there.args[0] - here.args[0]).double()
    moves = [(change * _signs(here.output, rng, turn)).flatten(1).sum(1) for turn in range(_DIRECTIONS)]
    by_gradient = torch.cat([(move * slope).flatten(1).sum(1) for slope in here.gradients])
    by_moves = torch.cat(moves)
    size = torch.maximum(by_gradient.norm(), by_moves.norm())
    return float((by_gradient - by_moves).norm() / size.clamp(min=1e-12))
