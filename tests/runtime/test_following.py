"""The command to type after a run opens model and images as the run did, whatever flags there will be."""

from __future__ import annotations

import shlex

import pytest
import typer.main

from vitadel.cli.flag_groups import flags_of
from vitadel.cli.main import app
from vitadel.cli.options import Choice, Sampling
from vitadel.runtime.next_command import next_command

COMMANDS = typer.main.get_command(app).commands
OPENING = {*flags_of(Choice), *flags_of(Sampling), "device"} - {"data", "limit"}  # the results know these two better


def words_after(verb, *words):
    following = "diagnose" if verb == "audit" else "audit"
    command = next_command([verb, "m", *words], following, "m", "shapes", "linf", "8/255", after=verb)
    start, end = ["vitadel", following, "m", "--data", "shapes"], ["--norm", "linf", "--eps", "8/255"]
    told = shlex.split(command)
    assert (told[: len(start)], told[-len(end) :]) == (start, end)
    return told[len(start) : -len(end)]


@pytest.mark.parametrize("verb", ["audit", "diagnose"])
def test_all_flags_that_open_are_kept_and_no_others(verb):
    declared = {each.name: each for each in COMMANDS[verb].params if each.param_type_name == "option"}
    assert declared.keys() >= OPENING
    for name, option in declared.items():
        for flag in option.opts:
            written = [[flag]] if option.is_flag else [[flag, "value"], [f"{flag}=value"]]
            for words in written:
                assert words_after(verb, *words) == (words if name in OPENING else []), flag


def test_a_cut_head_stays_cut():
    assert words_after("audit", "--head-classes", "0,217,482", "--limit", "5") == ["--head-classes", "0,217,482"]


def test_words_of_another_verb_are_not_taken_over():
    command = next_command(["study", "m", "--seed", "3"], "diagnose", "a model", "shapes", "l2", "0.5", after="audit")
    assert command == "vitadel diagnose 'a model' --data shapes --norm l2 --eps 0.5"
