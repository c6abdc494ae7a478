"""metrics.jsonl never runs ahead of the checkpoint."""

from __future__ import annotations

import json

from vitadel.training.metrics import Metrics


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_reach_the_disk_with_their_checkpoint(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.add(1, {"loss": 0.5})
    assert not metrics.path.exists()
    metrics.save(1)
    assert steps(metrics.path) == [1]
    metrics.save(2)
    assert steps(metrics.path) == [1]


def test_a_second_life_takes_back_what_it_will_write_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    metrics = Metrics(path)
    metrics.resume(2)
    assert steps(path) == [1, 2]
    metrics.add(3, {})
    metrics.save(3)
    assert steps(path) == [1, 2, 3]


def test_a_second_life_hears_of_the_steps_of_its_epoch(tmp_path):
    """So that the first line about the epoch after a resume is about all of it."""
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "loss": float(step)} for step in range(1, 6)]
    rows.insert(3, {"step": 3, "epoch": 0})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert Metrics(path).resume(4, since=3) == [{"step": 4, "loss": 4.0}]
    assert Metrics(None).resume(4, since=3) == []


def test_other_processes_write_nothing():
    metrics = Metrics(None)
    metrics.resume(0)
    metrics.add(1, {"loss": 1.0})
    metrics.save(1)
    assert (metrics.saved, metrics.waiting) == (1, [])
