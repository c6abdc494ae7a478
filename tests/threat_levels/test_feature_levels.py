"""Features alone: cosines by hand, with and without tokens, of models with any head or none."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
import torch

from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.attacks.features import feature_cosine, final_features
from vitadel.attacks.parse import make
from vitadel.attacks.settings import training_form
from vitadel.backbones.load import load_model
from vitadel.data.batches import read_batches
from vitadel.errors import UserError
from vitadel.evaluation.engine.target import open_target
from vitadel.reporting.page import render
from vitadel.reporting.read_runs import read_run
from vitadel.reproduce.measurements import read_cell
from vitadel.runtime.distributed import join_processes
from vitadel.runtime.rng import SampleRNG
from vitadel.threat_levels.feature_levels import run_feature_levels
from vitadel.threat_levels.request import ThreatLevelsRequest
from vitadel.threat_levels.run import run_threat_levels

CPU = join_processes("cpu")
SHORT = {"eps": (2 / 255,), "steps": 2, "limit": 6, "batch_size": 4}


@pytest.fixture(scope="module")
def model():
    return load_model("zoo:shapes-standard")


@pytest.fixture(scope="module")
def victim(model):
    return TokenClassifier(model, fresh_tokens(96, 4, seed=3)).eval()


def by_hand(target, source, judged, name, eps):
    indices, _ = target.selection(6, 0, False)
    (batch,) = read_batches(target.source, [indices.tolist()], target.preprocess)
    rng = SampleRNG.of_samples(0, batch.indices).stream(f"T2 {name}")
    z = training_form(make(eps[0], eps=eps[1]))(source, batch.x, batch.y, rng)
    with torch.no_grad():
        return [
            feature_cosine(final_features(judged, z), final_features(judged, batch.x), axis)
            for axis in ("token", "channel")
        ]


@pytest.mark.slow
@pytest.mark.parametrize("with_tokens", [True, False])
def test_cosines_are_those_by_hand(model, victim, tmp_path, with_tokens):
    judged = victim if with_tokens else model
    target = open_target(judged, "shapes", match=False)
    request = ThreatLevelsRequest(**SHORT, levels=("T2",), features_only=True)
    results = run_feature_levels(target, request, CPU, out=tmp_path / "run").results
    found = results["feature_levels"]
    assert found["tokens"] == (4 if with_tokens else 0)
    assert [row["attack"] for row in found["rows"]] == ["features-2", "features-30, released"]
    attack = ("features-30(paper=true)", 8 / 255)
    token, channel = by_hand(target, model, judged, "features-30, released", attack)
    cosines = found["rows"][1]["cosines"]
    assert cosines["to own, token"]["mean"] == pytest.approx(float(token.mean()), abs=1e-5)
    assert cosines["to own, channel"]["mean"] == pytest.approx(float(channel.mean()), abs=1e-5)
    assert cosines["to own, channel"]["sd"] == pytest.approx(float(channel.std()), abs=1e-5)
    if not with_tokens:
        assert cosines["to own, token"] == cosines["no tokens, token"] == cosines["to bare, token"]
    table = pq.read_table(tmp_path / "run" / "cosines.parquet")
    assert table.num_rows == 6
    cell = read_cell("threat-levels", tmp_path / "run", "cosine:to own, channel")
    assert cell.value == pytest.approx(float(channel.mean()), abs=1e-5)
    assert (cell.n, len(cell.images)) == (6, 6)
    assert "Features under attack" in render([read_run(tmp_path / "run")])


@pytest.mark.slow
def test_a_model_without_tokens_is_judged_as_it_is(model, tmp_path):
    """The public backbone is the model itself: an attack on it counts as in an audit of its own."""
    target = open_target("zoo:shapes-standard", "shapes")
    request = ThreatLevelsRequest(**SHORT, levels=("T2",), public=("pgd-3(paper=true)",), surrogates=0, bank=0)
    results = run_threat_levels(target, request, CPU, out=tmp_path / "run").results
    assert results["ladder"]["tokens"] == 0
    assert results["ladder"]["controls"] == []
    row = next(row for row in results["ladder"]["rows"] if "paper" in row["attack"])
    assert not row["in_pixels"]
    assert row["eps_text"].startswith("8/255 in normalised units")
    indices, _ = target.selection(6, 0, False)
    (batch,) = read_batches(target.source, [indices.tolist()], target.preprocess)
    rng = SampleRNG.of_samples(0, batch.indices).stream("T2 pgd-3(paper=true), public")
    with torch.no_grad():
        z = training_form(make("pgd-3(paper=true)", eps=8 / 255))(model, batch.x, batch.y, rng)
        right = (model(batch.x).argmax(1) == batch.y) & (model(z).argmax(1) == batch.y)
    assert row["held"] == int(right.sum())
    cell = read_cell("threat-levels", tmp_path / "run", "tokens:pgd-3(paper=true)")
    assert cell.value == pytest.approx(float(right.float().mean()))
    wanted = ThreatLevelsRequest(**SHORT, levels=("T3",), recipe="tokens/shapes")
    with pytest.raises(UserError, match="which T3 need"):
        run_threat_levels(target, wanted, CPU, out=tmp_path / "other")


def test_only_levels_that_move_features_are_left():
    assert ThreatLevelsRequest(features_only=True).levels == ("T0", "T2", "T6")
    for wrong, words in (
        ({"levels": ("T2", "T5")}, "T5 is judged by a classifier: of features alone there are T0, T2, T6"),
        ({"levels": ("T2",), "public": ("pgd-3",)}, "attack a classifier"),
    ):
        with pytest.raises(UserError, match=words):
            ThreatLevelsRequest(**SHORT, features_only=True, **wrong)
