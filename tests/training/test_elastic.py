"""torchrun's elastic restart: a process is killed, the group starts again and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from new_processes import program, run_together, start
from small_recipes import document

TRUST = {"VITADEL_TRUST_CODE": "1"}


def launched(*words: str) -> None:
    """What `torchrun --nproc-per-node 2 --max-restarts 1 -m vitadel ...` does, with processes that have torch."""
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="test",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="forkserver",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
    )
    elastic_launch(settings, program)(*words)


@pytest.mark.slow
def test_a_group_with_a_killed_process_restarts_and_ends_with_the_same_weights(tmp_path: Path):
    """Killed at step 4 of 6, after the checkpoint of step 3: step 4 is done again."""
    file, killed = tmp_path / "recipe.yaml", tmp_path / "killed"
    plugins = {"stopping.Killed": {"at_step": 4, "rank": 1, "file": str(killed)}}
    changes = {"data": {"test": None}, "train": {"checkpoint_every": 3}, "plugins": plugins}
    file.write_text(yaml.safe_dump(document(**changes)))
    words = ("harden", str(file), "--device", "cpu", "--resume", "--out")
    said = start(launched, *words, str(tmp_path / "cut"), environment=TRUST).finish()
    assert killed.exists()
    assert "resuming after step 3" in said.stderr + said.stdout
    run_together(program, *words, str(tmp_path / "whole"), environment=TRUST)
    one, other = (load_file(tmp_path / run / "weights" / "last.safetensors") for run in ("whole", "cut"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    rows = [(tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in ("whole", "cut")]
    assert len(rows[0]) == len(rows[1]) == 8  # six steps and two epochs, none twice
