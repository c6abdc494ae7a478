"""`vitadel list`: models, attacks, data sets, recipes or protocols by name, with one line each."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from vitadel.errors import UserError, nearest_names

if TYPE_CHECKING:
    from vitadel.backbones.published import Published


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
    if kind is Kind.models:  # the one that is meant is built; a list of all would take minutes
        meant = found[0][0] if len(found) == 1 else search
        found = [(name, _with_size(name, about) if name == meant else about) for name, about in found]
    show_names(found)


def _published_rows(search: str) -> Sequence[tuple[str, str]]:
    """Published models with one line each; a single one as a card with one line for each fact."""
    from vitadel.backbones.published import find_published, published_names

    wanted = search.removeprefix("published:").lower()
    found = [(name, about) for name, about in published_names().items() if wanted in name.lower()]
    if len(found) > 1:
        return found
    return tuple(_card(find_published(found[0][0].removeprefix("published:") if found else wanted)).items())


def _card(published: Published) -> dict[str, str]:
    """All that is known, with the multiply-adds of the model, which is built without memory for its weights."""
    import torch

    from vitadel.backbones.checkpoints import build_classifier
    from vitadel.instrument.hooks import count_macs

    with torch.device("meta"):
        macs = count_macs(build_classifier(published.record()), (published.size, published.size))
    card = published.card()
    return {**card, "architecture": f"{card['architecture']}{'' if macs is None else f', {macs / 1e9:.2f} GMACs'}"}


def _with_size(name: str, about: str) -> str:
    """What a list says of a single model: also its size, if it is one of timm, ours or the zoo."""
    import timm
    import torch

    from vitadel.adapters.adapted_model import open_model
    from vitadel.backbones.checkpoints import build_classifier
    from vitadel.backbones.record import ModelRecord
    from vitadel.instrument.hooks import count_macs

    if name.startswith("zoo:"):
        model = open_model(name)
        height, width = model.record.input_size or (224, 224)
    elif timm.is_model(name):
        with torch.device("meta"):
            model = build_classifier(ModelRecord(name=name))
        known = timm.get_pretrained_cfg(name)
        height, width = known.input_size[1:] if known is not None else (224, 224)
    else:
        return about
    macs = count_macs(model, (height, width))
    counted = "" if macs is None else f", {macs / 1e9:.2f} GMACs at {height} x {width}"
    return f"{about}; {sum(each.numel() for each in model.parameters()) / 1e6:.2f} M parameters{counted}"


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
        foreign = dict.fromkeys(("torchattacks:CLASS", "foolbox:CLASS", "art:CLASS"), "an attack of this library")
        foreign["python:MODULE:CLASS"] = "your own attack, called with (model, x, y)"
        return attacks | foreign | {prefix.title(name): prefix.describe() for name, prefix in PREFIXES.items()}
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
