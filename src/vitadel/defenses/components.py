"""Objectives and plug-ins by name: a module's first public class, or a class of the user's by its dotted path."""

from __future__ import annotations

import os
import pkgutil
import sys
from importlib import import_module
from types import ModuleType

from vitadel.errors import Mistake, nearest_names

__all__ = ["component_names", "find_component"]

_WHAT = {"objectives": "objective", "plugins": "plug-in"}


def component_names(package: str) -> list[str]:
    """The 'objectives' or 'plugins' that there are: modules whose first public name is a class."""
    path = import_module(f"vitadel.defenses.{package}").__path__
    modules = [import_module(f"vitadel.defenses.{package}.{found.name}") for found in pkgutil.iter_modules(path)]
    return [module.__name__.rpartition(".")[2] for module in modules if _first_class(module) is not None]


def find_component(package: str, name: str) -> type:
    """The class of a name of ours, with dashes or underscores, or of a dotted path to one of the user's."""
    if "." in name:
        return _users_class(name)
    known = component_names(package)
    module = name.replace("-", "_")
    if module not in known:
        raise Mistake(
            f"there is no {_WHAT[package]} '{name}'; there is {', '.join(known)}{nearest_names(module, known) or '.'} "
            "One of your own is given as package.module.Class"
        )
    found = _first_class(import_module(f"vitadel.defenses.{package}.{module}"))
    assert found is not None
    return found


def _first_class(module: ModuleType) -> type | None:
    first = getattr(module, next(iter(getattr(module, "__all__", ())), ""), None)
    return first if isinstance(first, type) else None


def _users_class(name: str) -> type:
    module_name, _, class_name = name.rpartition(".")
    here = os.getcwd()
    sys.path.insert(0, here)  # a console script, unlike `python -m`, does not look in the working folder
    try:
        module = import_module(module_name)
    except Exception as error:  # the user's code may raise anything
        raise Mistake(f"'{name}': importing '{module_name}' failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(here)
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        near = nearest_names(class_name, classes)
        raise Mistake(f"'{name}': module '{module_name}' has no class '{class_name}'{near}")
    return found
