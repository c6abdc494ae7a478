"""A paper of the tests' own: two models of 4 x 4 pixel patches that train in a second, and a table about them."""

from __future__ import annotations

from typing import Any

import pytest

from vitadel.papers import paper_documents
from vitadel.reproduce import jobs

PAPER = """
paper: aas
citation: the tests' own
about: nothing
items:
  - id: table1
    title: Two trainings
    protocol: "8/255"
    gpu_hours: 1
    cost_basis: a guess
    evaluations:
      attacks: {run: audit, settings: {eps: 2/255, independent: true, limit: 20, attacks: [fgsm, pgd-2]}}
      size: {run: model}
      training: {run: training}
    columns:
      - {id: clean, title: clean, of: attacks, value: clean}
      - {id: attacked, title: attacked, of: attacks, value: "{attack}"}
      - {id: parameters, title: "parameters, M", of: size, value: parameters, percent: false}
      - {id: loss, title: loss, of: training, value: "loss:last2", percent: false}
      - {id: missing, title: missing, needs: something that is not there}
    rows:
      - {id: short, train: "FILE#short", vary: {attack: fgsm}, values: [90.0, 50.0, 1.0, null, 3.0]}
      - {id: long, train: "FILE#long", vary: {attack: pgd-2}, values: [95.0, 60.0, 1.0, null, 4.0]}
      - {id: public, model: "zoo:shapes-standard", vary: {attack: fgsm}, values: [99.0, 1.0, 2.0, null, null]}
      - {id: absent, needs: the authors' weights, values: [1.0, 2.0, null, null, null]}
    test_data: shapes@test
    orderings:
      - {claim: longer is better, column: clean, higher: [long], lower: [short]}
      - {claim: the attack hurts, rows: [short, long], higher: [clean], lower: [attacked]}
      - {claim: the public one is larger, column: parameters, higher: [public], lower: [short]}
      - {claim: what was not measured, column: missing, higher: [long], lower: [short]}
"""
RECIPE = """
about: tiny
extends: shapes/standard
model:
  kwargs: {img_size: 32, patch_size: 8, embed_dim: 24, depth: 2, num_heads: 2, mlp_ratio: 1}
data: {limit: 256, held_out: 20}
train: {epochs: 1, batch_size: 64, checkpoint_every: 2, tracker: none}
validation: {limit: 20}
sweep:
  - short: {}
    long: {train.epochs: 2}
    broken: {optimizer.lr: 1e30, model.name: vit_tiny_patch16_224}
"""


def use_tiny_paper(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, text: str = PAPER) -> paper_documents.Paper:
    """Let 'aas/table1' be the table above."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE)
    paper = paper_documents.parse_paper(text.replace("FILE", str(recipe)), "aas")
    monkeypatch.setattr(jobs, "find_item", lambda name: (paper, paper.item(name.partition("/")[2])))
    return paper
