"""Batch records from other machines: one that does not hold what it should is computed again."""

from __future__ import annotations

import numpy as np
import pytest

from vitadel.evaluation.engine.found_records import is_sound

CHUNK = [3, 5, 8]
INDEX = np.array(CHUNK)
COMMON = {"chunk": INDEX, "seconds": np.asarray(0.5)}
BAD = '[{"index": 5, "name": "b.png", "reason": "it is empty"}]'
PREDICTIONS = {
    **COMMON,
    "index": np.array([3, 8]),
    "label": np.array([0, 1]),
    "prediction": np.array([0, 9]),
    "bad": np.asarray(BAD),
}
VERDICTS = {
    **COMMON,
    "index": INDEX,
    "held": np.array([True, False, True]),
    "void": np.array([False, False, False]),
    "gradients": np.asarray(6),
    "forwards": np.asarray(3),
    "note:margin": np.array([0.1, 0.2, 0.3]),
}


@pytest.mark.parametrize(("record", "holds"), [(PREDICTIONS, "predictions"), (VERDICTS, "verdicts"), (COMMON, "")])
def test_what_a_run_writes_is_sound(record, holds):
    assert is_sound(record, CHUNK, holds, 10)
    assert not is_sound(record, [3, 5], holds, 10), "of other samples"


@pytest.mark.parametrize("name", [*PREDICTIONS])
def test_predictions_need_every_array(name):
    assert not is_sound({key: PREDICTIONS[key] for key in PREDICTIONS if key != name}, CHUNK, "predictions", 10)


@pytest.mark.parametrize("name", [name for name in VERDICTS if not name.startswith("note:")])
def test_verdicts_need_every_array(name):
    assert not is_sound({key: VERDICTS[key] for key in VERDICTS if key != name}, CHUNK, "verdicts", 10)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("index", [3, 5]),
        ("index", [8, 3]),
        ("label", [-1, 0]),
        ("label", [0, 1, 2]),
        ("prediction", [0, 10]),
        ("prediction", [0.0, 1.0]),
        ("prediction", ["a", "b"]),
        ("bad", "[]"),
        ("bad", "{"),
        ("bad", "3"),
        ("bad", '[{"index": 5}]'),
        ("bad", '[{"index": [5], "name": "b.png", "reason": "x"}]'),
        ("bad", BAD.replace("}]", "}, " + BAD[1:])),
        ("seconds", "x"),
        ("seconds", [1.0, 2.0]),
    ],
)
def test_edited_predictions_are_not_sound(name, value):
    assert not is_sound({**PREDICTIONS, name: np.asarray(value)}, CHUNK, "predictions", 10)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("index", [3, 8, 5]),
        ("held", [1, 0, 1]),
        ("held", [True, False]),
        ("void", [[True], [False], [True]]),
        ("gradients", [1, 2]),
        ("gradients", 1.5),
        ("forwards", "many"),
        ("note:margin", [0.1, 0.2]),
        ("note:margin", 0.1),
        ("note:margin", ["a", "b", "c"]),
    ],
)
def test_edited_verdicts_are_not_sound(name, value):
    assert not is_sound({**VERDICTS, name: np.asarray(value)}, CHUNK, "verdicts", 10)
