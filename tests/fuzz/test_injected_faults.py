"""A run that is killed, or whose disk or clock fails: resumed, it ends with the same bytes as undisturbed.

`make test` disturbs each kind of run a few times. `VITADEL_FAULTS=3`, as in `make fuzz`, tries each fault at so many
places of each kind of run, which is 21 faults per kind.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import material
import pytest
from injector import FAULTS, KINDS, Ended, Injector, number_of, outcome, resumed, run_in_child, words_of

PLACES = int(os.environ.get("VITADEL_FAULTS", "0"))
_CODES = {"kill": -9, "terminate": 130, "interrupt": 130, "no space": 2, "write error": 2}


def cases() -> list[tuple[str, str]]:
    """Pairs of kind and fault: all of them, or two of each kind, so that each fault comes with some kinds."""
    if PLACES:
        return [(kind, fault) for kind in KINDS for fault in FAULTS]
    kinds = [kind for kind in KINDS if kind != "compare"]  # which is as `within`, and takes as long
    return [(kind, FAULTS[(row * 2 + more) % len(FAULTS)]) for row, kind in enumerate(kinds) for more in (0, 1)]


@pytest.fixture(scope="module")
def undisturbed():
    """The folder of each kind, its outcome, and its events."""
    found: dict[str, tuple[Path, dict[str, bytes], list[str]]] = {}

    def of(kind: str) -> tuple[Path, dict[str, bytes], list[str]]:
        if kind not in found:
            folder = material.folder() / f"disturbed-{kind}"
            ended = run_in_child(words_of(kind, folder), Injector())
            assert ended.code == 0, ended.errors
            found[kind] = (folder, outcome(folder), ended.events)
        return found[kind]

    return of


def places(events: int, kind: str, fault: str) -> list[int]:
    """Numbers of events, spread over all of them; other ones for each kind and fault."""
    number = max(PLACES, 1)
    shift = (list(KINDS).index(kind) * 5 + FAULTS.index(fault) * 3) % max(events // number, 1)
    return sorted({1 + min(shift + step * events // number, events - 1) for step in range(number)} if events else ())


def check_ending(ended: Ended, fault: str) -> None:
    assert "Traceback" not in ended.errors, ended.errors
    # An interrupt after the results are written, or a record that is computed again, does not change the ending.
    assert ended.code in {0, 2, _CODES.get(fault, 0)} if fault != "kill" else ended.code == -9, (ended, fault)
    if ended.code == 2:
        assert "vitadel: " in ended.errors


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "fault"), cases(), ids=lambda value: value.replace(" ", "-"))
def test_a_disturbed_run_ends_with_the_same_bytes(undisturbed, kind, fault):
    folder, expected, events = undisturbed(kind)
    words, disturbed = words_of(kind, folder), 0
    for place in places(number_of(fault, events), kind, fault):
        shutil.rmtree(folder, ignore_errors=True)
        ended = run_in_child(words, Injector(fault, place))
        check_ending(ended, fault)
        disturbed += ended.code != 0 or fault in ("clock", "read error")
        if fault == "read error":  # also of what a killed run left
            shutil.rmtree(folder, ignore_errors=True)
            run_in_child(words, Injector("kill", 1 + place * 7 % number_of("kill", events)))
            check_ending(run_in_child(resumed(words), Injector(fault, place)), fault)
        ended = run_in_child(resumed(words), Injector())
        assert ended.code == 0, (fault, place, ended)
        found = outcome(folder)
        assert found.keys() == expected.keys(), f"{fault} at event {place}"
        assert [name for name in expected if found[name] != expected[name]] == [], f"{fault} at event {place}"
    assert disturbed or not number_of(fault, events)
