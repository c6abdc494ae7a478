"""Objectives and plug-ins by name: a module's first public class, or a class of the user's by its dotted path."""

from __future__ import annotations

import pkgutil
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import ModuleType

from vitadel.backbones.third_party import user_code
from vitadel.errors import UserError, nearest_names

__all__ = ["component_names", "find_component"]

_WHAT = {"objectives": "objective", "plugins": "plug-in", "trainables": "adapter"}
_ADAPTER = ("attach", "shown", "state", "load_state", "save", "deployed")
_HOOKS = (
    "before_epoch",
    "after_epoch",
    "change_attack",
    "change_batch",
    "around_step",
    "after_step",
    "evaluated",
    "prepare",
)


def component_names(package: str) -> list[str]:
    """Names of all 'objectives', 'plugins' or 'trainables' (adapters): modules whose first public name is a class."""
    path = import_module(f"vitadel.training.{package}").__path__
    modules = [import_module(f"vitadel.training.{package}.{found.name}") for found in pkgutil.iter_modules(path)]
    firsts = {module.__name__.rpartition(".")[2]: _first_class(module) for module in modules}
    # What adapters are made of lies beside them.
    return [name for name, cls in firsts.items() if cls and (package != "trainables" or hasattr(cls, "attach"))]


def find_component(package: str, name: str) -> type:
    """The class of a name of ours, with dashes or underscores, or of a dotted path to one of the user's.

    A dotted path imports the module that it names. The class is looked at and not called: any class of any library
    can be named so, and some do things when they are made.
    """
    if "." in name:
        found = _users_class(name)
        _check_shape(package, name, found)
        return found
    known = component_names(package)
    module = name.replace("-", "_")
    if module not in known:
        raise UserError(
            f"there is no {_WHAT[package]} '{name}'; there is {', '.join(known)}{nearest_names(module, known) or '.'} "
            "One of your own is given as package.module.Class"
        )
    ours = _first_class(import_module(f"vitadel.training.{package}.{module}"))
    assert ours is not None
    return ours


def _first_class(module: ModuleType) -> type | None:
    first = getattr(module, next(iter(getattr(module, "__all__", ())), ""), None)
    return first if isinstance(first, type) else None


def _users_class(name: str) -> type:
    module_name, _, class_name = name.rpartition(".")
    try:
        with user_code():
            module = import_module(module_name)
        found = getattr(module, class_name, None)
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and scripts end themselves
        raise UserError(f"'{name}': importing '{module_name}' failed: {type(error).__name__}: {error}") from error
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        near = nearest_names(class_name, classes)
        raise UserError(f"'{name}': module '{module_name}' has no class '{class_name}'{near}")
    return found


def _check_shape(package: str, name: str, cls: type) -> None:
    if not is_dataclass(cls):
        raise UserError(f"'{name}' is not a dataclass, as every {_WHAT[package]} is: its fields are the settings")
    has = {key for base in cls.__mro__ for key in vars(base)} | {field.name for field in fields(cls)}
    if package == "objectives":
        missing = [key for key in ("__call__", "attack") if key not in has]
        if missing:
            needs = "`__call__(model, x, z, y)` and `attack`, a field or property"
            raise UserError(f"'{name}' is not an objective: it has no {' and no '.join(missing)}; it needs {needs}")
    elif package == "trainables":
        missing = [key for key in _ADAPTER if key not in has]
        if missing:
            raise UserError(f"'{name}' is not an adapter: it has no {' and no '.join(missing)}")
    elif not has.intersection(_HOOKS):
        raise UserError(f"'{name}' is not a plug-in: it has none of {', '.join(_HOOKS)}")
