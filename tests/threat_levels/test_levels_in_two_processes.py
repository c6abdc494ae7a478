"""Two processes give the verdicts of one."""

from __future__ import annotations

import json

import pytest

from new_processes import run_together
from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.adapters.tokens.token_files import save_tokens
from vitadel.backbones.load import load_model
from vitadel.evaluation.engine.target import open_target
from vitadel.runtime.distributed import join_processes
from vitadel.threat_levels.request import ThreatLevelsRequest
from vitadel.threat_levels.run import run_threat_levels


def run_levels(tokens, recipe, out):
    request = ThreatLevelsRequest(
        eps=(4 / 255,), levels=("T0", "T3", "T6", "T7"), steps=2, white_box=(), surrogates=1, recipe=str(recipe),
        extraction=(16, 2), limit=20, batch_size=4,
    )  # fmt: skip
    target = open_target("zoo:shapes-standard", "shapes", tokens=str(tokens))
    run_threat_levels(target, request, join_processes("cpu"), out=out)


@pytest.fixture
def tokens(tmp_path):
    file = tmp_path / "tokens.safetensors"
    save_tokens(TokenClassifier(load_model("zoo:shapes-standard"), fresh_tokens(96, 4, seed=11)), file, {})
    return file


def run_with(tmp_path, tokens, processes):
    recipe, out = tmp_path / "short.yaml", tmp_path / str(processes)
    recipe.write_text(
        "extends: tokens/shapes\ndata: {limit: 8, held_out: 10}\ntrain: {batch_size: 4}\n"
        "objective: {attack: features-1}\nvalidation: {limit: 10}\n"
    )
    run_together(run_levels, tokens, recipe, out, processes=processes)
    return json.loads((out / "results.json").read_text())


@pytest.mark.slow
def test_two_processes_report_what_one_reports(tmp_path, tokens):
    one, two = (run_with(tmp_path, tokens, count) for count in (1, 2))
    assert one["complete"]
    assert two["complete"]
    for first, second in zip(one["ladder"]["rows"], two["ladder"]["rows"], strict=True):
        for field in ("level", "attack", "held", "gradient_calls", "forward_calls"):
            assert first[field] == second[field], (first["level"], field)
        assert first["cosines"] == pytest.approx(second["cosines"], abs=1e-4)
    assert one["ladder"]["worst_case"] == two["ladder"]["worst_case"]
    fits = [[entry["cosine"] for entry in each["ladder"]["extraction"]] for each in (one, two)]
    assert fits[0] == fits[1]
