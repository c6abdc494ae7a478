"""What an attack's notes say about its number."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from vitadel.attacks.autoattack.fast import STAGES
from vitadel.evaluation.audit.evidence import escalation_of, findings_about, given_up_of
from vitadel.evaluation.engine.stages import NOTE, MemberResult


def leg(name: str, held: list[bool], **notes: list[float]) -> MemberResult:
    piece = {"index": np.arange(len(held)), "held": np.asarray(held)}
    return MemberResult(name, [piece | {f"{NOTE}{key}": np.asarray(values) for key, values in notes.items()}])


def notes_of(
    falls: dict[str, int], n: int = 1000, met: int = 60, alive: int = 30, flat: int = 0, broken: int = 0, ahead: int = 0
) -> list[MemberResult]:
    """The search, in which `falls` were broken, and Square on `met` of the others."""
    fell = [STAGES.index(stage) for stage, count in falls.items() for _ in range(count)]
    fell += [-1] * (n - len(fell))
    place = np.arange(n)
    missing = np.where(place >= n - flat, np.inf, 0.5)
    notes = {"fell_in": fell, "kept_alive": place >= n - alive, "missing": missing, "margin": np.full(n, -1.0)}
    notes["far"] = place >= 10
    search = leg("search", [value < 0 for value in fell], **notes)
    reached = np.where(np.arange(met) < ahead, -0.5, -2.0)
    sentinels = leg("square-sentinel-1", [row >= broken for row in range(met)], square_margin=reached)
    sentinels.records[0]["index"] = np.arange(n - met, n)
    return [search, sentinels] if met else [search]


def test_an_ordinary_course_is_ok_and_says_what_it_is_not():
    (finding,) = findings_about("autoattack-fast", notes_of({"cross-entropy": 300, "targets": 20}), 1000)
    assert finding["verdict"] == "ok"
    assert "680 samples are robust to the search; Square checked 60 of them" in finding["evidence"]
    assert "not an AutoAttack number" in finding["advice"]


@pytest.mark.parametrize(
    ("falls", "more", "reported"),
    [
        ({}, {"broken": 2}, "FAB or Square broke 2 of the 60"),
        ({}, {"ahead": 9}, "Square came closer to the boundary than the gradients on 9 of 60 samples"),
        ({"kept alive": 2}, {}, "2 of 30 far samples were misclassified when given all restarts, so about 64 more"),
        ({}, {"met": 0}, "0 robust samples are too few to exclude masked gradients"),
        ({}, {"met": 3}, "3 robust samples are too few"),
        ({"restarts": 9}, {}, "restarts still broke 9"),
        ({"cross-entropy": 300, "targets": 130}, {}, "130 samples withstood the cross-entropy"),
        ({}, {"flat": 3}, "3 robust samples have no gradient"),
    ],
)
def test_warnings_offer_the_full_ensemble(falls, more, reported):
    (finding,) = findings_about("autoattack-fast", notes_of(falls, **more), 1000)
    assert finding["verdict"] == "suspicious"
    assert reported in finding["evidence"]
    assert "--attacks autoattack" in finding["advice"]


def test_few_samples_suffice_if_hardly_any_is_robust():
    (finding,) = findings_about("autoattack-fast", notes_of({"cross-entropy": 997}, met=3, alive=1), 1000)
    assert finding["verdict"] == "ok"


def test_an_escalation_is_reported_with_its_reasons():
    members = notes_of({}, broken=2)
    members.append(leg("apgd-t", [False] * 30 + [True] * 968))
    members[-1].records[0] |= {"gradients": np.asarray(7), "forwards": np.asarray(8)}
    (finding,) = findings_about("autoattack-fast", members, 1000)
    assert finding["verdict"] == "suspicious"
    assert "all of AutoAttack ran and broke 32 more samples: FAB or Square broke 2 of the 60" in finding["evidence"]
    fields = escalation_of(members)
    assert fields["escalated"]
    assert fields["escalation"]["reasons"] == ["FAB or Square broke 2 of the 60 samples they were run on"]
    assert (fields["escalation"]["broken"], fields["escalation"]["gradient_calls"]) == (30, 7)
    assert escalation_of([leg("apgd-ce", [True])]) == {}


def test_square_beating_gradients_is_suspicious():
    strong, weak = leg("square", [False] * 5 + [True] * 95), leg("square", [False] + [True] * 499)
    (finding,) = findings_about("autoattack", [leg("apgd-ce", [True] * 100), strong], 100)
    assert finding["verdict"] == "suspicious"
    assert "broke 5 samples" in finding["evidence"]
    assert findings_about("autoattack", [leg("apgd-ce", [True] * 500), weak], 500) == []
    assert findings_about("square", [strong], 100) == []
    lucky = leg("square", [False] * 2 + [True] * 98)  # of a hundred, two may be luck
    assert findings_about("autoattack", [leg("apgd-ce", [True] * 100), lucky], 100) == []


def given_up(falls: dict[str, int], audited: int, broken: int = 0) -> list[MemberResult]:
    """Of the last 400 of 1000 samples, given up, the last `audited` were attacked to the end, and `broken` of them."""
    members, place = notes_of(falls), np.arange(1000)
    record = members[0].records[0]
    record |= {f"{NOTE}given_up": place >= 600, f"{NOTE}audited": place >= 1000 - audited}
    record[f"{NOTE}fell_in"][1000 - broken :] = STAGES.index("best targets")
    record["held"][1000 - broken :] = False
    return members


def test_what_giving_up_may_have_missed_has_an_exact_bound():
    found = given_up_of(given_up({"cross-entropy": 300}, audited=40), 1000)["given_up"]
    # So many of 400 that none of 40 random ones is among them with a chance of 5 %.
    most = max(k for k in range(400) if math.comb(400 - k, 40) > 0.05 * math.comb(400, 40))
    assert (found["images"], found["audited"], found["broken"]) == (400, 40, 0)
    assert found["missed_at_most"] == most
    assert found["missed_share_at_most"] == most / 1000
    assert f"at most {most / 10:.1f} points are missed" in found["sentence"]


def test_a_broken_audit_raises_the_bound_and_is_not_counted_as_missed():
    none, one = (given_up_of(given_up({}, audited=40, broken=k), 1000)["given_up"] for k in (0, 1))
    assert one["broken"] == 1
    assert one["missed_at_most"] > none["missed_at_most"]


def test_if_too_many_were_given_up_the_whole_search_answers_for_them():
    """One broken audit of 40 stands for nine others, more than 1 of 500 in 1000 samples."""
    members = given_up({}, audited=40, broken=1)
    whole = replace(notes_of({"targets": 5}, 360, met=0)[0], name="whole-search")
    whole.records[0]["index"] = np.arange(600, 960)
    members.insert(1, whole)
    found = given_up_of(members, 1000)
    assert found["given_up"]["missed_at_most"] == 0
    assert "all were attacked to the end after all" in found["given_up"]["sentence"]
    (finding,) = findings_about("autoattack-fast", members, 1000)
    assert "994 samples are robust to the search" in finding["evidence"]
    assert "40 of these attacked to the end (1 broken), and then all others" in finding["evidence"]


def test_nothing_is_missed_where_autoattack_ran_after_all_or_nothing_was_given_up():
    members = given_up({}, audited=40)
    assert not given_up_of([*members, leg("apgd-ce", [True] * 1000)], 1000)
    assert not given_up_of(notes_of({}), 1000)
