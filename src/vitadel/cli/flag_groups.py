"""Flags by the bundle: a verb takes a frozen dataclass of flags where it would otherwise repeat each of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

import typer

__all__ = ["bundled", "flags_of", "given_flags", "spelled"]


def bundled(verb: Callable[..., None]) -> Callable[..., None]:
    """`verb` as typer reads it: a parameter that is a dataclass becomes one flag for each of its fields.

    The fields are annotated as parameters of a verb are. A default of the parameter is an instance, and its values are
    the defaults of the flags, so that a verb may differ from another in one of them.
    """
    kinds = get_type_hints(verb, include_extras=True)
    bundles = {name: kind for name, kind in kinds.items() if isinstance(kind, type) and is_dataclass(kind)}
    written = inspect.signature(verb).parameters

    @wraps(verb)
    def spread(**given: Any) -> None:
        packed = {name: kind(**{each: given.pop(each) for each in flags_of(kind)}) for name, kind in bundles.items()}
        verb(**given, **packed)

    def parameters() -> Iterator[inspect.Parameter]:
        for name, parameter in written.items():
            if name not in bundles:
                yield parameter.replace(annotation=kinds[name], kind=inspect.Parameter.KEYWORD_ONLY)
                continue
            hints = get_type_hints(bundles[name], include_extras=True)
            for each in flags_of(bundles[name]):
                default = getattr(parameter.default, each)
                yield inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[each])

    shown = list(parameters())
    spread.__dict__["__signature__"] = inspect.Signature(shown)
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return spread


def flags_of(bundle: type[Any]) -> tuple[str, ...]:
    """The names of a bundle's flags, as parameters."""
    return tuple(each.name for each in fields(bundle))


def given_flags(ctx: typer.Context) -> set[str]:
    """Those that were typed, as parameters."""
    return {name for name in ctx.params if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")}


def spelled(name: str) -> str:
    """A parameter's flag, as it is typed."""
    return f"--{name.removesuffix('_model').replace('_', '-')}"
