"""No hostile input ends in a traceback, hangs, is silently accepted, or changes files that are not the run's.

`make test` tries the same inputs every time, `make fuzz` new ones (campaign.py). What was found is in corpus.json.
"""

from __future__ import annotations

import json
from pathlib import Path

import hostile
import hostile_outside
import material
import pytest
from driver import Case, Edit, Replacement, attempt
from hypothesis import HealthCheck, Phase, given, settings

CORPUS = json.loads((Path(__file__).parent / "corpus.json").read_text())

settings.register_profile(
    "fixed",
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
PROFILE = settings.get_profile("fixed")


def ends_well(case: Case) -> None:
    ending = attempt(case)
    assert not ending.faults, "\n".join([*ending.faults, ending.message])


@pytest.mark.slow
@pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: entry["about"])
def test_what_was_found_ends_well(entry):
    edits = tuple(
        Edit(
            each["name"],
            None if each.get("place") is None else tuple(each["place"]),
            *(each[key] for key in ("value", "start", "length")),
        )
        for each in entry.get("edits", ())
    )
    files = tuple(entry.get("files", {}).items())
    ends_well(
        Case(
            tuple(entry["words"]),
            entry.get("base", "inputs"),
            edits,
            files,
            entry.get("works", False),
            entry.get("wrong", False),
            tuple(Replacement(**each) for each in entry.get("replaced", ())),
        )
    )


@pytest.fixture(scope="module", autouse=True)
def _made():
    """Make the material before hypothesis generates: it draws random numbers."""
    material.inputs()


@pytest.fixture(scope="module")
def finished_runs():
    for kind in material.RUNS:
        material.run(kind)


def are_accepted(cases: list[Case]) -> None:
    for case in cases:
        ending = attempt(case)
        assert (ending.code, ending.faults) in ((0, ()), ("started", ())), (case, ending)


@pytest.mark.slow
def test_sound_inputs_are_accepted():
    are_accepted(hostile.sound())


@pytest.mark.slow
def test_sound_inputs_from_elsewhere_are_accepted():
    are_accepted(hostile_outside.sound())


@pytest.mark.slow
@settings(PROFILE, max_examples=25)
@given(hostile.arguments())
def test_arguments(case):
    ends_well(case)


@pytest.mark.slow
@settings(PROFILE, max_examples=30)
@given(hostile.models())
def test_models(case):
    ends_well(case)


@settings(PROFILE, max_examples=25)
@given(hostile.attack_strings())
def test_attack_strings(case):
    ends_well(case)


@pytest.mark.slow
@settings(PROFILE, max_examples=40)
@given(hostile.data_specs())
def test_data_specs(case):
    ends_well(case)


@pytest.mark.slow
@settings(PROFILE, max_examples=40)
@given(hostile.data_files())
def test_data_files(case):
    ends_well(case)


@pytest.mark.slow
@settings(PROFILE, max_examples=40)
@given(hostile.arrays())
def test_arrays(case):
    ends_well(case)


@pytest.mark.slow
@settings(PROFILE, max_examples=40)
@given(hostile.recipes())
def test_recipes(case):
    ends_well(case)


@pytest.mark.slow
@settings(PROFILE, max_examples=60)
@given(hostile.run_folders())
def test_run_folders(finished_runs, case):
    ends_well(case)


@pytest.mark.slow
@settings(PROFILE, max_examples=40)
@given(hostile.checkpoints())
def test_checkpoints(case):
    ends_well(case)


@pytest.mark.slow
@settings(PROFILE, max_examples=10)
@given(hostile_outside.merges())
def test_merges(case):
    ends_well(case)


@pytest.mark.slow
@settings(PROFILE, max_examples=8)
@given(hostile_outside.comparisons())
def test_comparisons(finished_runs, case):
    ends_well(case)


@settings(PROFILE, max_examples=12)
@given(hostile_outside.divisions())
def test_divisions(case):
    ends_well(case)


@pytest.mark.slow
@settings(PROFILE, max_examples=8)
@given(hostile_outside.foreign_attacks())
def test_foreign_attacks(case):
    ends_well(case)


@settings(PROFILE, max_examples=15)
@given(hostile_outside.storage_urls())
def test_storage_urls(case):
    ends_well(case)
