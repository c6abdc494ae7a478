"""Run folders: atomic, found again, never overwritten."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time

import pytest

from vitadel.errors import UserError
from vitadel.runtime.run_folder import Command, open_run, write_atomically, write_json

SETTINGS = {"model": "m", "attacks": ("fgsm",), "seed": 0}


def begin(path, resume=False, verb="audit", settings=SETTINGS):
    return open_run(Command(verb, settings, ["audit", "m"]), "m", out=path, resume=resume)


def files(path):
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_new_folder_records_its_command(tmp_path):
    run = begin(tmp_path / "run")
    command = json.loads((run.path / "command.json").read_text())
    assert command["verb"] == "audit"
    assert command["settings"]["attacks"] == ["fgsm"]
    assert not run.complete


def test_an_unfinished_run_goes_on_only_when_asked(tmp_path):
    begin(tmp_path / "run")
    before = files(tmp_path)
    with pytest.raises(UserError, match=r"unfinished run.*--resume"):
        begin(tmp_path / "run")
    assert begin(tmp_path / "run", resume=True).path == tmp_path / "run"
    assert files(tmp_path) == before


def test_two_processes_do_not_work_in_one_folder(tmp_path):
    folder, reported = tmp_path / "run", tmp_path / "told"
    code = f"""
import pathlib, time
from vitadel.runtime.run_folder import Command, open_run
open_run(Command("audit", {dict(SETTINGS)!r}), "m", out=pathlib.Path({str(folder)!r}), resume=False)
pathlib.Path({str(reported)!r}).touch()
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as other:
        while not reported.exists():
            assert other.poll() is None
            time.sleep(0.05)
        with pytest.raises(UserError, match="another process is working in"):
            begin(folder, resume=True)
        other.kill()
    run = begin(folder, resume=True)  # however it ended
    assert begin(folder, resume=True) == run


def test_settings_that_are_not_compared_do_not_prevent_resuming(tmp_path):
    begin(tmp_path / "run", settings={**SETTINGS, "about": "one"})
    other = {**SETTINGS, "about": "another"}
    with pytest.raises(UserError, match="about: was 'one', now 'another'"):
        begin(tmp_path / "run", resume=True, settings=other)
    again = {"out": tmp_path / "run", "resume": True}
    assert open_run(Command("audit", other, not_compared=("about",)), "m", **again).path == tmp_path / "run"


def test_other_settings_are_named_one_by_one(tmp_path):
    begin(tmp_path / "run")
    before = files(tmp_path)
    with pytest.raises(
        UserError, match=r"(?s)different settings.*attacks: was \['fgsm'\], now \['pgd-5'\].*seed: was 0, now 1"
    ):
        begin(tmp_path / "run", resume=True, settings={**SETTINGS, "attacks": ("pgd-5",), "seed": 1})
    assert files(tmp_path) == before


def test_another_verb_and_another_folder_are_refused(tmp_path):
    begin(tmp_path / "run", verb="harden")
    with pytest.raises(UserError, match="'vitadel harden', not of 'vitadel audit'"):
        begin(tmp_path / "run", resume=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"meow")
    with pytest.raises(UserError, match="not a run folder"):
        begin(tmp_path / "photos", resume=True)
    with pytest.raises(UserError, match="is a file"):
        begin(tmp_path / "photos" / "cat.png")
    assert files(tmp_path / "photos") == {(tmp_path / "photos" / "cat.png").relative_to(tmp_path / "photos"): b"meow"}


def test_resume_without_a_folder_finds_the_newest_unfinished_run_of_the_same_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = begin(None)
    write_json(first.path / "results.json", {"complete": True})
    other = open_run(Command("audit", {**SETTINGS, "seed": 5}), "other", out=None, resume=False)
    second = open_run(Command("audit", SETTINGS), "same", out=None, resume=False)
    assert begin(None, resume=True).path == second.path
    assert other.path != second.path


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EACCES])
def test_a_full_disk_keeps_the_old_file(tmp_path, monkeypatch, fault):
    target = tmp_path / "results.json"
    write_atomically(target, b"old")

    def refuse(descriptor):
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(UserError, match="no space left.*--resume" if fault == errno.ENOSPC else "cannot write"):
        write_atomically(target, b"new")
    assert files(tmp_path) == {target.relative_to(tmp_path): b"old"}


def test_not_a_number_never_reaches_json(tmp_path):
    with pytest.raises(ValueError, match="Out of range float values"):
        write_json(tmp_path / "x.json", {"accuracy": float("nan")})
