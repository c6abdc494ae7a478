"""The evaluations behind the tables of Robustness Tokens run on models with and without tokens and classifiers."""

from __future__ import annotations

import pytest
import torch

from vitadel.backbones.load import load_model
from vitadel.heads.linear_probe import HEAD_FILE, Probe, linear_layer, save_head
from vitadel.papers.paper_documents import Evaluation, find_item
from vitadel.reproduce.evaluations import Subject, evaluate
from vitadel.reproduce.measurements import read_cell
from vitadel.runtime.distributed import join_processes

CPU = join_processes("cpu")
SHORT = {"limit": 4, "batch_size": 4, "steps": 1, "eps": ["1.8/255"]}


@pytest.mark.slow
def test_columns_of_table_2_are_measured_on_a_model_without_tokens(tmp_path):
    """By the settings of the document, shorter: features need no head, and the head of a probe is put on."""
    evaluations = find_item("robustness-tokens/table2")[1].evaluations
    model, folder = load_model("zoo:shapes-standard"), tmp_path / "head"
    (folder / "weights").mkdir(parents=True)
    says_zero = linear_layer(torch.zeros(10, 96), 100 * torch.eye(10)[0])
    save_head(Probe(model, says_zero, 1, False, list("abcdefghij")), folder / HEAD_FILE)
    subject = Subject("zoo:shapes-standard", {}, "shapes", None, heads=lambda name: tmp_path / name)
    for name, value in (("features", "cosine:to own, channel"), ("public", "tokens:pgd-30(paper=true)")):
        given = evaluations[name]
        shorter = Evaluation.model_validate({**given.model_dump(), "settings": {**given.settings, **SHORT}})
        evaluate(subject, shorter, CPU, {"out": tmp_path / f"run-{name}"})
        cell = read_cell("threat-levels", tmp_path / f"run-{name}", value)
        assert cell.n == len(cell.images) == 4
        if name == "features":
            assert -1 < cell.value < 0.9  # the attack moves them
    assert cell.value in (0.0, 0.25)  # the head says "the first class" to all, and images are of different classes
