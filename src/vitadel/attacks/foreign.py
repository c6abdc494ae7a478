"""Attacks of other libraries under our judge: `torchattacks:PGDRS(steps=10)`, `foolbox:LInfFMNAttack`, `art:...`.

They propose images, and nothing they say about success counts: box, budget and label are checked as for our own
attacks. `python:package.module:Class` names the user's own, whose objects are called with (model, x, y).

A foreign attack draws from global generators. They are seeded by the samples of the batch and restored afterwards, so a
run can be repeated and resumed; another batch size, however, gives other random numbers.
"""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitadel.attacks.per_sample import takes_arrays
from vitadel.backbones.classifier import check_pixels
from vitadel.backbones.third_party import import_function, user_code
from vitadel.errors import UserError, nearest_names
from vitadel.instrument.hooks import frozen
from vitadel.runtime.distributed import generators_kept, gpu_module, is_gpu
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Threat

Settings = Mapping[str, Any]
Propose = Callable[[nn.Module, Tensor, Tensor], Tensor]

_ORDERS = {"Linf": np.inf, "L2": 2, "L1": 1}
_STEPS = ("steps", "max_iter", "iterations", "n_queries", "max_queries")
_RESTARTS = ("restarts", "n_restarts", "num_random_init")
_MODELS = ("model", "estimator", "classifier")
_ASSUMED_STEPS = 100
_BOX = 1e-4  # beyond [0, 1], from where on it is no rounding


@dataclass(frozen=True)
class Foreign:
    """An attack of another library by its class name, with the settings of its constructor.

    Its budget is that of `threat`, unless its settings have one.
    """

    threat: Threat
    library: str
    name: str
    settings: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        self._kind()

    @takes_arrays
    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        check_pixels(x)
        x = x.detach()
        keys = (SampleRNG.of_pixels(x) if rng is None else rng).stream("foreign").keys
        with frozen(model), _unchanged(model, self.title), _seeded(keys), _blamed(self.title):
            z = _LIBRARIES[self.library].propose(self, model, x.clone(), y.clone())
        return self._checked(z, x)

    @property
    def title(self) -> str:
        return f"{self.library}:{self.name}"

    def passes(self) -> tuple[int, int]:
        """An estimate by its number of steps: what it really costs is counted when it runs."""
        chosen = {**_defaults(self._kind()), **dict(self.settings)}
        steps = next((int(chosen[name]) for name in _STEPS if isinstance(chosen.get(name), int)), _ASSUMED_STEPS)
        restarts = next((int(chosen[name]) for name in _RESTARTS if isinstance(chosen.get(name), int)), 1)
        return steps * max(restarts, 1), 1

    def build(self, *given: Any, **usual: Any) -> Any:
        """The library's object; of the `usual` settings those that it knows and that are not set."""
        kind, chosen = self._kind(), dict(self.settings)
        known = _defaults(kind)
        return kind(*given, **{name: value for name, value in usual.items() if name in known} | chosen)

    def _kind(self) -> Callable[..., Any]:
        kind = _LIBRARIES[self.library].find(self.name)
        known = _defaults(kind)
        for name, _ in self.settings:
            if name not in known:
                takes = ", ".join(known) or "no settings"
                raise UserError(
                    f"{self.title} has no setting {name!r}{nearest_names(name, known) or '.'} It takes: {takes}."
                )
        return kind

    def _checked(self, z: object, x: Tensor) -> Tensor:
        if not isinstance(z, Tensor):
            raise UserError(f"{self.title} returned {type(z).__name__}; an attack must return a tensor of images")
        if z.shape != x.shape:
            raise UserError(
                f"{self.title} returned images of shape {tuple(z.shape)} for images of shape {tuple(x.shape)}; an "
                "attack must return one image for each, of the same size"
            )
        z = z.detach().to(x)
        low, high = (float(end) for end in z.nan_to_num(0.5).aminmax()) if z.numel() else (0.0, 1.0)
        if low < -_BOX or high > 1 + _BOX:
            raise UserError(
                f"{self.title} returned pixels from {low:.4g} to {high:.4g}; they must stay in [0, 1]. Set its bounds, "
                "and give it no normalization: the model normalizes by itself."
            )
        # What is NaN or beyond the budget stays as it is: the judge counts it as void.
        return z.clamp(0, 1)


def foreign(threat: Threat, title: str, settings: Settings) -> Foreign:
    """The attack that a name such as 'torchattacks:PGD' means."""
    library, _, name = title.partition(":")
    return Foreign(threat, library, name, tuple(settings.items()))


def _defaults(kind: Callable[..., Any]) -> dict[str, Any]:
    """The settings of a constructor and their defaults; not the model, which libraries take first."""
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(f"{kind!r} cannot be used as an attack: {error}. Name a class or a function.") from error
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in _MODELS]
    return {p.name: None if p.default is p.empty else p.default for p in named}


@contextmanager
def _blamed(title: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # other people's code may raise anything, or call sys.exit()
        said = " ".join(str(error).split()).rstrip(".")  # one line
        reason = f"{type(error).__name__}: {said}" if said else type(error).__name__
        raise UserError(f"{title} failed: {reason}. What was judged before is kept.") from error


@contextmanager
def _unchanged(model: nn.Module, title: str) -> Iterator[None]:
    """Refuse an attack that changes weights, buffers, modules or hooks of the model.

    Gradients that it leaves are removed, and train and eval modes set back: libraries change both for their own passes.
    """

    def tensors() -> dict[str, Tensor]:
        return dict([*model.named_parameters(), *model.named_buffers()])

    before, versions, built = tensors(), {name: each._version for name, each in tensors().items()}, _structure(model)
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        for module, mode in modes:
            module.training = mode
    after = tensors()
    changed = [name for name, each in before.items() if each._version != versions[name]]  # written into
    changed += [name for name, each in before.items() if name not in after or not _same(each, after[name])]
    if changed or _structure(model) != built:
        what = changed[0] if changed else "its modules or hooks"
        raise UserError(f"{title} changed the model ({what}), so its verdicts would be about another one")


def _structure(model: nn.Module) -> list[tuple[object, ...]]:
    """The modules, forward methods that were put on them, and how many hooks each one has."""
    return [
        (name, id(module), vars(module).get("forward"), len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]


def _same(old: Tensor, new: Tensor) -> bool:
    """Libraries that move a model to its own device replace its tensors by equal ones."""
    return new is old or (new.shape == old.shape and torch.equal(new, old))


@contextmanager
def _seeded(keys: Tensor) -> Iterator[None]:
    """Global generators that depend on the samples, inside the block."""
    # The seeds of numpy have 32 bits.
    seed = int(keys.cpu().numpy().view(np.uint64).astype(object).sum() % 2**32) if len(keys) else 0
    python, numpy = random.getstate(), np.random.get_state()
    with generators_kept(keys.device):
        torch.default_generator.manual_seed(seed)  # and no other device's, which would not be restored
        if is_gpu(keys.device):
            gpu = gpu_module(keys.device)
            with gpu.device(keys.device):
                gpu.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _by_torchattacks(attack: Foreign, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.enable_grad():
        images: Tensor = attack.build(model, eps=attack.threat.eps)(x, y)
    return images


def _by_foolbox(attack: Foreign, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    library = importlib.import_module("foolbox")
    around = library.PyTorchModel(model, bounds=(0, 1), device=x.device)
    with torch.enable_grad():
        _, clipped, _ = attack.build()(around, x, y, epsilons=attack.threat.eps)
    images: Tensor = clipped
    return images


def _by_art(attack: Foreign, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    estimators = importlib.import_module("art.estimators.classification")
    with torch.no_grad():
        classes = model(x[:1]).shape[1]
    kind = "gpu" if x.device.type == "cuda" else "cpu"
    shape = tuple(x.shape[1:])
    around = estimators.PyTorchClassifier(
        model, nn.CrossEntropyLoss(), shape, classes, clip_values=(0, 1), device_type=kind
    )
    usual = {"eps": attack.threat.eps, "norm": _ORDERS.get(type(attack.threat).__name__, np.inf)}
    built = attack.build(around, **usual, batch_size=len(x), verbose=False)
    with torch.enable_grad():
        return torch.from_numpy(np.asarray(built.generate(x.cpu().numpy(), y.cpu().numpy()))).to(x.device)


def _by_user(attack: Foreign, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with user_code(), torch.enable_grad():
        built = attack.build(eps=attack.threat.eps, norm=type(attack.threat).__name__.lower())
        images: Tensor = built(model, x, y)
    return images


@dataclass(frozen=True)
class _Library:
    """Where a library keeps its attacks, and how one of them is called."""

    module: str
    package: str
    call: Callable[[Foreign, nn.Module, Tensor, Tensor], Tensor]

    def find(self, name: str) -> Callable[..., Any]:
        if not self.module:
            return import_function(name)
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            library = self.module.partition(".")[0]
            raise UserError(
                f"'{library}:{name}' needs the package {self.package}: pip install {self.package}"
            ) from error
        kinds = [each for each, kind in vars(module).items() if inspect.isclass(kind)]
        if name not in kinds:
            library = self.module.partition(".")[0]
            raise UserError(f"{library} has no attack {name!r}{nearest_names(name, kinds) or '.'}")
        kind: Callable[..., Any] = getattr(module, name)
        return kind

    def propose(self, attack: Foreign, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self.call(attack, model, x, y)


_LIBRARIES = {
    "torchattacks": _Library("torchattacks", "torchattacks", _by_torchattacks),
    "foolbox": _Library("foolbox.attacks", "foolbox", _by_foolbox),
    "art": _Library("art.attacks.evasion", "adversarial-robustness-toolbox", _by_art),
    "python": _Library("", "", _by_user),
}
