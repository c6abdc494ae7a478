"""Flags of the studies with pictures: they are those of the orders, and mistakes in them are told."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from typer.testing import CliRunner

from vitadel.cli import study_pictures
from vitadel.errors import UserError
from vitadel.quantities import read_quantity
from vitadel.studies.accumulation import AccumulationRequest
from vitadel.studies.attention import AttentionRequest
from vitadel.studies.corruption_masks import CorruptionMasksRequest
from vitadel.studies.perturbations import PerturbationsRequest


@pytest.mark.parametrize(
    ("command", "order"),
    [
        (study_pictures.perturbations, PerturbationsRequest),
        (study_pictures.accumulation, AccumulationRequest),
        (study_pictures.attention, AttentionRequest),
        (study_pictures.corruption_masks, CorruptionMasksRequest),
    ],
)
def test_defaults_are_those_of_the_order(command, request):
    flags = inspect.signature(command).parameters
    for field in dataclasses.fields(request):
        flag = {"side": "patch_side"}.get(field.name, field.name)
        if flag in flags and field.name not in ("eps", "others", "classes"):
            default = flags[flag].default
            numbers = isinstance(default, str) and isinstance(field.default, float)  # typed, as fractions may be
            assert (read_quantity(default) if numbers else default) == field.default, flag
    assert {"limit", "batch_size", "seed", "skip_bad"} <= flags.keys()


def test_classes_are_numbers():
    done = CliRunner().invoke(study_pictures.app, ["accumulation", "--classes", "cat,dog"])
    assert isinstance(done.exception, UserError)
    assert "numbers of classes" in str(done.exception)
