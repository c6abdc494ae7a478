"""The time that is left, as progress shows it."""

from __future__ import annotations

import pytest

from vitadel.runtime.progress import RESUMED, Pace, progress


def test_at_first_the_expected_time_counts_and_later_the_pace():
    pace = Pace(100, expected=60.0, started=0.0)
    assert pace.seconds_left(0.0) == 60
    assert pace.seconds_left(20.0) == 40
    pace.advance(50, "")
    assert pace.seconds_left(10.0) == 10  # half took 10 s, whatever was expected
    pace.advance(50, "")
    assert pace.seconds_left(20.0) == 0


def test_a_little_progress_moves_the_expectation_a_little():
    pace = Pace(100, expected=100.0, started=0.0)
    pace.advance(5, "")  # at the pace of 200 s
    assert 100 < pace.seconds_left(10.0) + 10 < 200


def test_nothing_is_said_where_nothing_is_known():
    assert Pace(10, started=0.0).seconds_left(5.0) is None
    assert Pace(10, expected=3.0, started=0.0).seconds_left(5.0) is None  # longer than expected


def test_what_was_done_before_a_resume_is_no_pace():
    pace = Pace(100, expected=100.0, started=0.0)
    pace.advance(50, RESUMED)
    assert pace.seconds_left(0.0) == 50
    pace.advance(25, "")
    assert pace.seconds_left(10.0) == pytest.approx(10)


def test_a_long_stage_says_at_once_how_long(capsys):
    with progress("attack", 40, expected=90.0) as meter:
        assert "attack: 0/40, 90.0 s left" in capsys.readouterr().err
        meter.advance(40, "3 broken")
    assert capsys.readouterr().err == "attack: 40/40 (3 broken)\n"
    with progress("attack", 40, expected=2.0):
        assert capsys.readouterr().err == ""
