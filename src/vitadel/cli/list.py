"""`vitadel list`: models, attacks, data sets, recipes or protocols by name, with one line each."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import Annotated

import typer

from vitadel.errors import UserError, nearest_names


class Kind(enum.StrEnum):
    """What can be listed."""

    models = enum.auto()
    attacks = enum.auto()
    data = enum.auto()
    recipes = enum.auto()
    protocols = enum.auto()


def list_names(
    kind: Annotated[Kind, typer.Argument(help="what to list")],
    search: Annotated[str, typer.Argument(help="only names that contain this; timm models are searched, too")] = "",
    published: Annotated[
        bool, typer.Option("--published", help="published robust models; a single one with all that is known of it")
    ] = False,
) -> None:
    """List models, attacks, data, recipes or protocols."""
    from vitadel.reporting.terminal import show_names

    if published:
        if kind is not Kind.models:
            raise UserError(f"--published lists models, not {kind}: vitadel list models --published")
        show_names(_published_rows(search))
        return
    rows = _rows(kind, search)
    found = [(name, about) for name, about in rows.items() if search.lower() in name.lower()]
    if not found:
        near = _near(kind, search.lower(), rows)
        raise UserError(f"no name among the {kind} contains {search!r}{near} See 'vitadel list {kind}'.")
    show_names(found)


def _published_rows(search: str) -> Sequence[tuple[str, str]]:
    """Published models with one line each; a single one as a card with one line for each fact."""
    from vitadel.backbones.published import find_published, published_names

    wanted = search.removeprefix("published:").lower()
    found = [(name, about) for name, about in published_names().items() if wanted in name.lower()]
    if len(found) > 1:
        return found
    return tuple(find_published(found[0][0].removeprefix("published:") if found else wanted).card().items())


def _near(kind: Kind, search: str, rows: dict[str, str]) -> str:
    """Suggest names as they are typed, without placeholders: 'pgd', not 'pgd[-K]'."""
    if kind is Kind.models:
        from vitadel.backbones.timm_models import suggest_models

        return suggest_models(search, rows)
    return nearest_names(search, [re.split(r"\[|\+|:(?=[A-Z])", name)[0] for name in rows]) or "."


def _rows(kind: Kind, search: str) -> dict[str, str]:
    if kind is Kind.attacks:
        from vitadel.attacks.registry import ATTACKS, PREFIXES

        attacks = {f"{n}[-K]" if "steps" in p.settings else n: p.describe() for n, p in ATTACKS.items()}
        return attacks | {prefix.title(name): prefix.describe() for name, prefix in PREFIXES.items()}
    if kind is Kind.data:
        from vitadel.data import known_specs

        return dict(known_specs())
    if kind is Kind.recipes:
        from vitadel.training.recipes.compose import rows, texts
        from vitadel.training.recipes.yaml_files import shipped_recipes

        counts = {name: len(rows(name)) for name in shipped_recipes()}
        return {name: texts(name)["about"] + (f" [{count} rows]" if count else "") for name, count in counts.items()}
    if kind is Kind.protocols:
        from vitadel.evaluation.audit.protocols import protocols

        return {name: protocol.about for name, protocol in protocols().items()}
    import timm

    from vitadel.backbones.load import model_names

    return (dict.fromkeys(timm.list_models(f"*{search}*"), "timm") if search else {}) | model_names()
