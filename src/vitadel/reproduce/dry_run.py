"""Build every model of a table with random weights and without memory, so that what cannot work is found in a plan.

Models are made on torch's meta device: tensors have shapes, but no numbers. Each gets its head, adapters and
optimizer, plug-ins check it, and one image passes through it. Weights are neither read nor downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from vitadel.adapters.adapted_model import open_model, options_for_features
from vitadel.attacks.parse import needs_known_family
from vitadel.backbones.anatomy import family_of
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.timm_models import is_timm_name
from vitadel.errors import UserError
from vitadel.instrument.hooks import output_and_macs
from vitadel.reproduce.jobs import Job, TableJobs, Training
from vitadel.training.interfaces import ChecksModel, StartsFromRun
from vitadel.training.loop import make_optimizer
from vitadel.training.recipes.build import Recipe, build_recipe
from vitadel.training.recipes.check import CLASSES, without_numbers
from vitadel.training.recipes.compose import compose
from vitadel.training.starting_model import starting_model

_CLASSES = {**CLASSES, "imagenette": 10}
_OTHER_CLASSES = 100  # of other data, until it is opened; only the size of the head depends on it
_SIDE = 32  # pixels, for models that take images of any size


@dataclass(frozen=True)
class Built:
    """A model as it was built: all parameters, those that are trained, and why attacks cannot look inside it, if so.

    `macs` are multiply-adds of one image, None if torch's counter sees none.
    """

    parameters: int
    trained: int
    unknown_family: str | None = None
    macs: int | None = None


@dataclass(frozen=True)
class DryRun:
    """Builds models, each once; one for several tables saves what they share."""

    known: dict[str, Built] = field(default_factory=dict)

    def build_models(self, table: TableJobs) -> dict[str, Built]:
        """The models by the names of their trainings, or their own; a `UserError` names the row that fails."""
        found: dict[str, Built] = {}
        for job in table.jobs:
            if job.have is None:
                with _errors_of(table, job):
                    ends = [each for each in (job.training, job.other_end) if each is not None]
                    for training in (each for end in ends for each in _chain(end)):
                        if training.name not in found:
                            found[training.name] = self._trained(training)
                    if job.training is None:
                        found[job.model_name] = self._given(job)
                    _check_attacks(job, found[job.model_name if job.training is None else job.training.name])
        return found

    def _trained(self, training: Training) -> Built:
        recipe = _recipe(training)
        adapter = recipe.adapter
        if isinstance(adapter, StartsFromRun):
            starts = [_recipe(each).adapter for key, each in training.after if key == "adapter.start"]
            adapter = adapter.without_start(starts)
        section = replace(
            recipe.model, weights="random" if is_timm_name(recipe.model.name) else None, head_classes=None
        )
        classes = count_classes(recipe.data.train)

        def build() -> Built:
            with without_numbers(section.name):
                classifier = starting_model(section, classes, recipe.data.train).classifier
                for _, plugin in recipe.plugins:
                    if isinstance(plugin, ChecksModel):
                        plugin.check_model(classifier)
                model = adapter.attach(classifier)
                make_optimizer(recipe.optimizer, model)
                return self._once((section, adapter, classes), lambda: _tried(model, classifier, classes))

        return self._once((section, adapter, classes, recipe.plugins, recipe.optimizer), build)

    def _given(self, job: Job) -> Built:
        """A model of others, with random weights where timm would download its own."""
        name, options = str(job.row.model), dict(job.row.options)
        if options.get("weights") == "pretrained":
            options["weights"] = "random"

        def build() -> Built:
            with without_numbers(name):
                model = cast(Classifier, open_model(name, options_for_features(name, options)))
                return _tried(model, model, model.record.num_classes)

        return self._once((name, options), build)

    def _once(self, what: object, build: Callable[[], Built]) -> Built:
        key = repr(what)
        if key not in self.known:
            self.known[key] = build()
        return self.known[key]


@contextmanager
def _errors_of(table: TableJobs, job: Job) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{table.name}, row {job.row.id}: {error}") from error
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:  # of timm or torch
        raise UserError(f"{table.name}, row {job.row.id} cannot be built: {type(error).__name__}: {error}") from error


def _chain(training: Training) -> list[Training]:
    """The trainings it starts from, and itself."""
    return [*(each for earlier in training.earlier for each in _chain(earlier)), training]


def _recipe(training: Training) -> Recipe:
    return build_recipe(compose(training.recipe, training.row, training.overrides), training.name)


def count_classes(spec: str) -> int:
    """The classes of a data set by its spec, before it is opened."""
    chosen = re.search(r"classes=(\d+)", spec)
    if chosen or "classes=light-recipe" in spec:  # the thesis' own hundred classes
        return int(chosen[1]) if chosen else 100
    place = re.split(r"[@(]", spec)[0]
    kind, _, path = place.partition(":")
    return _CLASSES.get(kind, _CLASSES.get(path.rpartition("/")[2], _OTHER_CLASSES))


def _tried(model: nn.Module, classifier: Classifier, classes: int | None) -> Built:
    """One image passes through."""
    sizes = [(each.numel(), each.requires_grad) for each in model.parameters()]
    side = classifier.record.input_size or (_SIDE, _SIDE)
    logits, macs = output_and_macs(model, torch.zeros(1, 3, *side))
    if classes is not None and logits.shape != (1, classes):
        raise UserError(f"the model gives a tensor of shape {tuple(logits.shape)} for one image and {classes} classes")
    trained = sum(size for size, learns in sizes if learns)
    return Built(sum(size for size, _ in sizes), trained, _why_unknown(classifier), macs)


def _why_unknown(classifier: Classifier) -> str | None:
    try:
        family_of(classifier)
    except UserError as error:
        return str(error)
    return None


def _check_attacks(job: Job, built: Built) -> None:
    """Refuse attacks that look inside a model of a family that they do not know."""
    for evaluation in job.evaluations.values():
        attacks: Any = evaluation.settings.get("attacks", ()) if evaluation.run == "audit" else ()
        inside = [name for name in attacks if needs_known_family(name)]
        if inside and built.unknown_family is not None:
            raise UserError(f"{', '.join(inside)}: {built.unknown_family}")
