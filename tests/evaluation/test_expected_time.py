"""The likely time of a run, by a trial on a few of its images."""

from __future__ import annotations

import re

import pytest
import torch

from toys import TinyNet, images
from vitadel.data import open_dataset
from vitadel.diagnosis.run import DiagnosisRequest, run_diagnosis
from vitadel.errors import UserError
from vitadel.evaluation.corruptions.corrupted_copy import CorruptedCopyRequest, write_copy
from vitadel.evaluation.corruptions.request import CorruptionRequest
from vitadel.evaluation.corruptions.run import run_corruptions
from vitadel.evaluation.engine import expected_time
from vitadel.evaluation.engine.expected_time import StageCosts, Trial, announce_time
from vitadel.evaluation.engine.target import open_target
from vitadel.evaluation.trade_off.candidates import open_candidates
from vitadel.evaluation.trade_off.run import TradeOffRequest, run_trade_off
from vitadel.runtime.distributed import Processes

CPU = Processes(0, 1, torch.device("cpu"))


def costs_two_seconds_an_image(few, processes, *, out, costs: StageCosts):
    costs.seconds = {"clean": 0.5 * few, "attack": 1.5 * few}
    costs.passes, costs.taken = {"attack": (30, 10)}, {"attack": 50.0 * few}  # half of the most
    costs.work = 2.0 * few + 3.0  # three seconds outside of stages


def test_stages_grow_with_the_images_and_other_work_does_not(capsys):
    likely = announce_time(Trial(200, costs_two_seconds_an_image), CPU)
    assert likely == {"clean": pytest.approx(100), "attack": pytest.approx(300)}
    # 100 + 300 + 3 seconds; at most twice as many for the attack.
    assert capsys.readouterr().err == "likely 6.7 min, at most 11.7 min (by a trial on 10 images)\n"


def test_several_processes_share_the_images(capsys):
    likely = announce_time(Trial(200, costs_two_seconds_an_image), Processes(0, 4, CPU.device))
    assert likely == {"clean": pytest.approx(25), "attack": pytest.approx(75)}
    assert announce_time(Trial(200, costs_two_seconds_an_image), Processes(1, 4, CPU.device)) == {}


def test_work_that_is_done_once_counts_once(capsys):
    def trains(few, processes, *, out, costs):
        costs.seconds, costs.once, costs.outside, costs.work = {"a": few}, {"training": 60.0}, 2.0, few + 2.0

    likely = announce_time(Trial(100, trains), CPU)
    assert likely == {"a": pytest.approx(100), "training": 60.0}
    assert "likely 2.7 min (by" in capsys.readouterr().err


def test_few_images_and_refused_trials_give_no_time(capsys):
    def refused(few, processes, *, out, costs):
        raise UserError("too few images")

    assert announce_time(Trial(200, refused), CPU) == {}
    assert announce_time(Trial(15, costs_two_seconds_an_image), CPU) == {}
    assert capsys.readouterr().err == ""


@pytest.fixture
def watched(monkeypatch):
    """The likely seconds of stages that a run was given."""
    given = {}

    def announce(trial, processes):
        given.update(announce_time(trial, processes))
        return given

    monkeypatch.setattr(expected_time, "announce_time", announce)
    return given


def test_a_run_says_it_at_its_start_and_its_results_do_not_change(tmp_path, capsys, watched):
    x = images(40, side=32)
    target = open_target(TinyNet32().eval(), (x, torch.arange(40) % 3))
    request = CorruptionRequest(corruptions=("gaussian_noise", "contrast"), severities=(1, 3))
    shown = run_corruptions(target, request, CPU, out=tmp_path / "shown", show_progress=True).results
    error = capsys.readouterr().err
    assert re.match(r"likely [\d.]+ s \(by a trial on 5 images\)\n", error), error
    assert set(watched) == {"clean", "corruption gaussian_noise", "corruption contrast"}
    silent = run_corruptions(target, request, CPU, out=tmp_path / "silent").results
    assert capsys.readouterr().err == ""
    assert shown["corruptions"] == silent["corruptions"]


@pytest.mark.parametrize("layout", ["png", "npy"])
def test_a_corrupted_copy_says_it_at_its_start(tmp_path, capsys, watched, layout):
    request = CorruptedCopyRequest(corruptions=("contrast",), limit=20, format=layout)
    write_copy(open_dataset("shapes"), "shapes", request, CPU, out=tmp_path / "copy", show_progress=True)
    assert re.match(r"likely [\d.]+ m?s \(by a trial on 2 images\)\n", capsys.readouterr().err)
    assert set(watched) == {"contrast"}


@pytest.mark.slow
def test_attacks_have_an_upper_bound(tmp_path, capsys, watched):
    candidates = open_candidates(["zoo:shapes-standard"], "shapes")
    request = TradeOffRequest(eps=(8 / 255,), attacks=("pgd-3",), aimed=(), limit=16)
    run_trade_off(candidates, request, CPU, out=tmp_path / "run", show_progress=True)
    assert re.search(r"likely [\d.]+ s, at most [\d.]+ s \(by a trial on 2 images\)", capsys.readouterr().err)
    assert any("pgd-3 at 8/255" in stage for stage in watched)


class TinyNet32(torch.nn.Module):
    """A linear model of 32 pixels."""

    num_classes = 3

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3 * 32 * 32, 3)
        torch.nn.init.trunc_normal_(self.head.weight, generator=torch.Generator().manual_seed(0))

    def forward(self, x):
        return self.head(x.flatten(1))


@pytest.mark.slow
def test_a_diagnosis_gives_a_likely_time_below_the_most(tmp_path):
    target = open_target(TinyNet().eval(), (images(16), torch.arange(16) % 3))
    seen = []
    run_diagnosis(target, DiagnosisRequest(limit=16), CPU, show_cost=seen.append, out=tmp_path / "run")
    assert 0 < seen[0]["seconds_likely"] <= seen[0]["seconds_at_most"]
