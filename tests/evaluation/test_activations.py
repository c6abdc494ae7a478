"""Massive activations over many images: against one pass over all of them, and where they were planted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.attacks.parse import make
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.record import ModelRecord
from vitadel.data import open_dataset
from vitadel.data.batches import Preprocess, balanced_subset, read_batches
from vitadel.errors import Interrupted, UserError
from vitadel.evaluation import activations
from vitadel.evaluation.activations import ActivationsRequest, inspect_activations
from vitadel.evaluation.engine.target import Target
from vitadel.instrument.massive_activations import massive_activations
from vitadel.runtime.distributed import join_processes
from vitadel.runtime.rng import SampleRNG
from vits import make_vit

CPU = join_processes("cpu")
LOOK = ActivationsRequest("features-2", eps=4 / 255, limit=7, batch_size=3)
LAYERS = ["input of blocks.0", "blocks.0", "blocks.1"]


def classifier_of(name: str) -> Classifier:
    return Classifier(make_vit(name), ModelRecord(name, num_classes=5, input_size=(32, 32)))


def subject_of(classifier: Classifier) -> Target:
    return Target(classifier, "tiny", open_dataset("shapes"), "shapes")


def tokened_of(classifier: Classifier, placement: str = "prefix") -> TokenClassifier:
    return TokenClassifier(classifier, fresh_tokens(24, 3, scale=20.0), placement=placement)


def all_images(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    labels = target.source.labels()
    indices = balanced_subset(labels, LOOK.limit, LOOK.seed, torch.arange(len(labels)))
    (batch,) = read_batches(target.source, [indices.tolist()], Preprocess(32))
    return batch.indices, batch.x


def seen(results: dict[str, Any], number: int) -> list[list[float]]:
    entry = results["activations"]["conditions"][number]
    return [entry["lower"], entry["median"], entry["upper"]]


@pytest.mark.parametrize("placement", ["prefix", "append"])
def test_five_conditions_as_one_pass_over_all_images_gives_them(tmp_path: Path, placement: str) -> None:
    classifier = classifier_of("dinov2_registers")
    target, tokened = subject_of(classifier), tokened_of(classifier, placement)
    results, _, _ = inspect_activations(target, tokened, LOOK, CPU, out=tmp_path / "run")
    indices, x = all_images(target)
    attack = make("features-2(stop_when_fooled=false)", eps=4 / 255)
    rng = SampleRNG.of_samples(0, indices)
    zeros = torch.zeros(7, dtype=torch.long)
    transferred, adaptive = attack(classifier, x, zeros, rng), attack(tokened, x, zeros, rng)
    expected = [
        (classifier, x, "clean"),
        (classifier, transferred, "attacked"),
        (tokened, x, "clean, with tokens"),
        (tokened, transferred, "attacked, with tokens"),
        (tokened, adaptive, "attacked through the tokens"),
    ]
    reported = results["activations"]
    assert reported["layers"] == LAYERS
    assert [entry["name"] for entry in reported["conditions"]] == [name for _, _, name in expected]
    for number, (model, images, _) in enumerate(expected):
        by_hand = massive_activations(model, images).values
        quarters = by_hand.double().quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), dim=1)
        torch.testing.assert_close(torch.tensor(seen(results, number)), quarters.float(), rtol=1e-4, atol=1e-4)
    assert seen(results, 1) != seen(results, 4)
    assert max(entry["largest_change"] for entry in reported["conditions"]) <= 4 / 255 + 1e-6
    assert reported["conditions"][1]["largest_change"] > 1 / 255


def test_planted_values_are_placed(tmp_path: Path) -> None:
    """In the position of patch 4 (token 5), whatever stands around it; and tokens of size 20 do not count."""
    classifier = classifier_of("vit")
    with torch.no_grad():
        classifier.backbone.get_parameter("pos_embed")[0, 5, 3] = 1000.0
    results, _, _ = inspect_activations(subject_of(classifier), tokened_of(classifier), LOOK, CPU, out=tmp_path / "run")
    for entry in results["activations"]["conditions"]:
        place = entry["places"][0]
        assert (place["kind"], place["token"], place["channel"]) == ("patch", "patch 4", 3)
        assert place["kind_share"] == place["token_share"] == place["channel_share"] == place["same_place_share"] == 1
        assert 990 < entry["median"][0] < 1010


def test_shares_count_images() -> None:
    reported = activations._places([-1, -1, 4, 5], [7, 8, 8, 8])
    assert (reported["kind"], reported["kind_share"]) in [("class", 0.5), ("patch", 0.5)]
    assert (reported["token"], reported["token_share"]) == ("class", 0.5)
    assert (reported["channel"], reported["channel_share"], reported["same_place_share"]) == (8, 0.75, 0.25)


def test_few_images_are_warned_of(tmp_path: Path) -> None:
    target = subject_of(classifier_of("vit"))
    few, folder, _ = inspect_activations(target, None, LOOK, CPU, out=tmp_path / "few")
    assert "n = 7 is too few" in few["activations"]["warning"]
    assert "n = 1 is no evidence" in few["activations"]["warning"]
    assert len(few["activations"]["conditions"]) == 2
    assert json.loads((folder.path / "results.json").read_text()) == json.loads(json.dumps(few))
    assert not (folder.path / "partial").exists()
    enough = ActivationsRequest("features-1", limit=100, batch_size=50)
    assert inspect_activations(target, None, enough, CPU, out=tmp_path / "enough")[0]["activations"]["warning"] is None


def test_an_interrupted_look_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, calls = subject_of(classifier_of("vit")), []
    whole, _, _ = inspect_activations(target, None, LOOK, CPU, out=tmp_path / "whole")
    real = activations.inspect_batch

    def tired(*given: Any) -> Any:
        calls.append(len(given[2]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(activations, "inspect_batch", tired)
    with pytest.raises(Interrupted):
        inspect_activations(target, None, LOOK, CPU, out=tmp_path / "run")
    again, _, _ = inspect_activations(target, None, LOOK, CPU, out=tmp_path / "run", resume=True)
    assert calls == [3, 3, 3, 1]  # the first batch is not done twice
    assert again == whole


def test_no_tokens_and_no_secrets_in_the_folder(tmp_path: Path) -> None:
    classifier = classifier_of("vit")
    tokened = tokened_of(classifier)
    results, folder, _ = inspect_activations(subject_of(classifier), tokened, LOOK, CPU, out=tmp_path / "run")
    assert results["model"]["tokens"] == tokened.fingerprint
    values = [f"{value:.3f}" for value in tokened.tokens.flatten().tolist()]
    for path in folder.path.rglob("*.json"):
        assert not any(value in path.read_text() for value in values), path


def test_user_errors_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is calibrated on other images first"):
        ActivationsRequest("aas+pgd-3")
    with pytest.raises(UserError, match="unknown attack"):
        ActivationsRequest("featurs-30")
    with pytest.raises(UserError, match="at least 1, got 0"):
        ActivationsRequest(batch_size=0)
    record = ModelRecord("other", num_classes=5, input_size=(32, 32))
    unknown = Classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 5)), record)
    with pytest.raises(UserError, match="no anatomy known"):
        inspect_activations(subject_of(unknown), None, LOOK, CPU, out=tmp_path / "none")
    assert not (tmp_path / "none").exists()
