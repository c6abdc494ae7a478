"""Build recipes for heads on frozen features; everything that is wrong with them is reported at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from vitadel.attacks.features import FeatureAttack, WithImageTerm
from vitadel.attacks.goals import OnLogits
from vitadel.attacks.losses import cross_entropy
from vitadel.attacks.parse import make
from vitadel.attacks.pgd import PGD
from vitadel.data.sources.masks import MASKED_KINDS
from vitadel.data.spec import DATA_KINDS
from vitadel.errors import UserError
from vitadel.heads.frozen_features import token_features
from vitadel.heads.segmentation import OnPixels
from vitadel.training.recipes.build import (
    check_model_name,
    check_not_test,
    check_outline,
    names_split,
    read_data_spec,
)
from vitadel.training.recipes.check import check_class_counts, class_count, meta_model
from vitadel.training.recipes.compose import PROBE_SECTIONS, is_probe, section_types
from vitadel.training.recipes.instantiate import Faults, as_mapping, instantiate
from vitadel.training.recipes.probe_sections import (
    HEADS,
    HeadTraining,
    LinearHead,
    MaskData,
    PatchHead,
    ProbeAudit,
    ProbeData,
)
from vitadel.training.recipes.training_sections import ModelSection
from vitadel.training.recipes.yaml_files import TEXTS
from vitadel.types import Attack

_NEEDED = ("model", "data", "head", "train")


@dataclass(frozen=True)
class ProbeRecipe:
    """A probe recipe ready to be run; `tokens` is a file of robustness tokens, or None.

    `document` is the composed document it was built from.
    """

    model: ModelSection
    tokens: str | None
    data: ProbeData | MaskData
    head: LinearHead | PatchHead
    train: HeadTraining
    audit: ProbeAudit
    document: dict[str, Any]


def build_probe(document: Mapping[str, Any], where: str) -> ProbeRecipe:
    """Build every section; `where` names the recipe in messages. Raises one `Faulty` with all faults."""
    if not is_probe(document) and "objective" in document:
        raise UserError(f"recipe {where} trains a model, not a head on frozen features: run it with `vitadel harden`")
    faults = check_outline(document, PROBE_SECTIONS, _NEEDED, (*TEXTS, "tokens"))
    head = dict(as_mapping("head", document.get("head"), faults))
    use = head.pop("use", None)
    known = isinstance(use, str) and use in HEADS
    if "head" in document and not known:
        faults.wrong.append(f"head: needs 'use', one of {', '.join(HEADS)}, got {use!r}")
    types = section_types(document) if "head" in document and known else {}
    given = {name: head if name == "head" else as_mapping(name, document.get(name), faults) for name in types}
    parts = {
        name: instantiate(name, types[name], values, faults)
        for name, values in given.items()
        if name in document or name not in _NEEDED
    }
    _check_values(parts, faults)
    faults.raise_if_any(where)
    sections = cast(dict[str, Any], parts)
    return ProbeRecipe(tokens=document.get("tokens"), document=dict(document), **sections)


def check_probe(document: Mapping[str, Any], where: str) -> None:
    """Build the recipe and its model, without memory for weights, and check that it has the tokens the head needs."""
    recipe, faults = build_probe(document, where), Faults()
    counts = {spec: class_count(spec) for spec in (recipe.data.train, recipe.data.test)}
    if isinstance(recipe.data, ProbeData):
        check_class_counts(counts, faults)
    model = faults.attempt("model", meta_model, replace(recipe.model, num_classes=recipe.model.num_classes or 10))
    if model is not None:
        blocks = max(recipe.head.blocks) if isinstance(recipe.head, LinearHead) else 1
        height, width = model.record.input_size or (224, 224)
        pixels = model.mean.new_zeros(1, 3, height, width)
        faults.attempt("head", token_features, model, pixels, blocks)
    faults.raise_if_any(where)


def _attack(name: str, audit: ProbeAudit) -> Attack:
    return make(name, eps=audit.eps, norm=audit.norm)


def pixel_attack(name: str, audit: ProbeAudit) -> PGD | FeatureAttack:
    """The named PGD attack, on the cross-entropy of pixels."""
    attack: object = _attack(name, audit)
    if isinstance(attack, FeatureAttack) and attack.goal == WithImageTerm(OnLogits(cross_entropy)):
        return replace(attack, goal=WithImageTerm(OnPixels()), stop_when_fooled=False)
    if not isinstance(attack, PGD) or attack.goal != OnLogits(cross_entropy):
        raise UserError(
            f"'{name}' does not attack masks; use fgsm, pgd-K such as pgd-30(step=1/255), without restarts, or "
            "pgd-30(paper=true)"
        )
    return replace(attack, goal=OnPixels(), stop_when_fooled=False)


def _check_values(parts: Mapping[str, Any], faults: Faults) -> None:
    """Check that what the sections name exists."""
    model, data, audit = (parts.get(name) for name in ("model", "data", "audit"))
    if model is not None:
        faults.attempt("model.name", check_model_name, model.name)
    if data is not None:
        _check_data(data, faults)
    if audit is not None:
        check = pixel_attack if isinstance(data, MaskData) else _attack
        for name in audit.attacks:
            faults.attempt("audit.attacks", check, name, audit)


def _check_data(data: ProbeData | MaskData, faults: Faults) -> None:
    train = faults.attempt("data.train", read_data_spec, data.train, data.root)
    test = faults.attempt("data.test", read_data_spec, data.test, data.root)
    if isinstance(data, MaskData):
        for name, request in (("train", train), ("test", test)):
            if request is not None and request.kind not in MASKED_KINDS:
                known = ", ".join(DATA_KINDS[kind].form for kind in MASKED_KINDS)
                faults.wrong.append(f"data.{name}: '{request.spec}' has no masks; there is {known}")
        if train is not None and train.kind in MASKED_KINDS[1:] and data.classes is None:
            faults.missing.append("data: needs 'classes', the number of classes of the masks")
    if train is not None and test is not None and names_split(train, faults):
        check_not_test("data.train", train, test, "trained", faults)


def with_tokens(document: Mapping[str, Any], tokens: str | Path | None) -> dict[str, Any]:
    """The document with `tokens` replaced, if given."""
    return dict(document) if tokens is None else {**document, "tokens": str(tokens)}
