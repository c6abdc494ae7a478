"""Flags of the studies with pictures: they are those of the orders, and mistakes in them are told."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from typer.testing import CliRunner

from vitadel.quantities import read_amount
from vitadel.cli import study_pictures
from vitadel.errors import Mistake
from vitadel.studies.accumulation import AccumulationOrder
from vitadel.studies.attention import AttentionOrder
from vitadel.studies.corruption_masks import CorruptionMasksOrder
from vitadel.studies.perturbations import PerturbationsOrder


@pytest.mark.parametrize(
    ("command", "order"),
    [
        (study_pictures.perturbations, PerturbationsOrder),
        (study_pictures.accumulation, AccumulationOrder),
        (study_pictures.attention, AttentionOrder),
        (study_pictures.corruption_masks, CorruptionMasksOrder),
    ],
)
def test_defaults_are_those_of_the_order(command, order):
    flags = inspect.signature(command).parameters
    for field in dataclasses.fields(order):
        flag = {"side": "patch_side"}.get(field.name, field.name)
        if flag in flags and field.name not in ("eps", "others", "classes"):
            default = flags[flag].default
            numbers = isinstance(default, str) and isinstance(field.default, float)  # typed, as fractions may be
            assert (read_amount(default) if numbers else default) == field.default, flag
    assert {"limit", "batch_size", "seed", "skip_bad"} <= flags.keys()


def test_classes_are_numbers():
    done = CliRunner().invoke(study_pictures.app, ["accumulation", "--classes", "cat,dog"])
    assert isinstance(done.exception, Mistake)
    assert "numbers of classes" in str(done.exception)
