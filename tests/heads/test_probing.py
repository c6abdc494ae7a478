"""Heads as runs: the numbers are those of the pieces put together by hand, and nothing is lost or trained twice."""

from __future__ import annotations

import json

import pytest
import torch

from small_probes import linear, masks
from vitadel.adapters.tokens.token_classifier import TokenClassifier
from vitadel.adapters.tokens.token_files import load_tokens, save_tokens
from vitadel.data import open_dataset, read_batches
from vitadel.data.batches import Preprocess, balanced_subset
from vitadel.data.sources.masks import ResizeCrop, open_masked
from vitadel.errors import Interrupted, UserError
from vitadel.evaluation.engine.expected_time import StageCosts
from vitadel.heads import probe, segmentation_probe
from vitadel.heads.linear_probe import head_metadata, load_head
from vitadel.heads.probe_recipe import build_probe, pixel_attack, with_tokens
from vitadel.heads.segmentation import Segmenter
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG

ALONE = Processes(0, 1, torch.device("cpu"))


def run(document, out, tokens=None, **more):
    recipe = build_probe(with_tokens(document, tokens), "toy")
    return probe.run_probe(recipe, "toy", ALONE, out=out, **more)[0]


def model_of(document):
    return probe._load_frozen(build_probe(document, "toy").model, 0)


@pytest.fixture
def tokens(tmp_path):
    """Tokens so large that features with them are others than without."""
    values = 3 * SampleRNG.of_samples(5, range(4)).normal(16)
    save_tokens(TokenClassifier(model_of(linear()), values), tmp_path / "secret.safetensors", {})
    return tmp_path / "secret.safetensors"


def accuracy_by_hand(path, model, rows):
    probe = load_head(path / "weights" / "head.safetensors", model)
    (batch,) = read_batches(open_dataset("shapes(size=16)@test"), [rows.tolist()], Preprocess(16))
    with torch.no_grad():
        return int((probe(batch.x).argmax(1) == batch.y).sum())


@pytest.mark.parametrize("with_them", [False, True])
def test_a_probe_is_judged_with_the_model_it_was_trained_on(tmp_path, tokens, with_them):
    results = run(linear(), tmp_path / "run", tokens if with_them else None)
    model = model_of(linear())
    if with_them:
        model = load_tokens(tokens, model)
    rows = balanced_subset(torch.arange(10_000) % 10, 30, 0)
    assert results["clean"]["correct"] == accuracy_by_hand(tmp_path / "run", model, rows)
    assert (results["clean"]["n"], results["attacks"][0]["name"], results["complete"]) == (30, "fgsm", True)
    assert results["attacks"][0]["held"] <= results["clean"]["correct"]
    reported = results["probe"]
    assert (reported["trained_on"], reported["held_out"], reported["classes_trained"], len(reported["heads"])) == (
        120,
        40,
        10,
        8,
    )
    best = max(reported["heads"], key=lambda head: (head["correct"], -head["loss"]))
    assert {key: best[key] for key in ("blocks", "average", "rate")} == reported["chosen"]
    assert reported["tokens"] == (model.fingerprint if with_them else None)
    about = head_metadata(tmp_path / "run" / "weights" / "head.safetensors")
    assert (about["blocks"], len(about["classes"]), len(about["backbone_fingerprint"])) == (
        reported["chosen"]["blocks"],
        10,
        16,
    )


@pytest.mark.slow
def test_tokens_change_the_head_and_stay_secret(tmp_path, tokens):
    plain, secret = run(linear(), tmp_path / "plain"), run(linear(), tmp_path / "secret", tokens)
    assert [head["loss"] for head in plain["probe"]["heads"]] != [head["loss"] for head in secret["probe"]["heads"]]
    values = load_tokens(tokens, model_of(linear())).tokens.detach().numpy().tobytes()
    for file in (tmp_path / "secret").rglob("*"):
        assert file.is_dir() or values[:32] not in file.read_bytes(), file
    assert str(tokens) in (tmp_path / "secret" / "recipe.yaml").read_text()


@pytest.mark.slow
def test_a_probe_that_was_stopped_goes_on_and_trains_nothing_twice(tmp_path, monkeypatch):
    whole = run(linear(), tmp_path / "whole")

    def stop(*_args, **_named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(probe, "run_audit", stop)
        with pytest.raises(Interrupted):
            run(linear(), tmp_path / "run")
    assert not (tmp_path / "run" / "results.json").exists()
    with pytest.raises(UserError, match="holds an unfinished run"):
        run(linear(), tmp_path / "run")
    monkeypatch.setattr(probe, "train_probe", stop)
    again = run(linear(), tmp_path / "run", resume=True)
    for results in (whole, again):
        for entry in results["attacks"]:
            del entry["seconds"]
    assert again == whole
    heads = [(tmp_path / name / "weights" / "head.safetensors").read_bytes() for name in ("whole", "run")]
    assert heads[0] == heads[1]
    assert run(linear(), tmp_path / "run", resume=True)["probe"] == whole["probe"]
    with pytest.raises(UserError, match=r"train\.steps: was 20, now 21"):
        run(linear(train={"steps": 21}), tmp_path / "run", resume=True)


def test_other_tokens_do_not_go_on_with_a_run(tmp_path, tokens):
    run(linear(), tmp_path / "run", tokens)
    save_tokens(TokenClassifier(model_of(linear()), torch.ones(2, 16)), tokens, {})
    with pytest.raises(UserError, match="tokens fingerprint: was"):
        run(linear(), tmp_path / "run", tokens, resume=True)


def test_a_file_of_tokens_that_others_can_read_must_be_allowed(tmp_path, tokens):
    tokens.chmod(0o644)
    with pytest.raises(UserError, match="--allow-readable"):
        run(linear(), tmp_path / "run", tokens)
    assert not (tmp_path / "run").exists()
    assert run(linear(), tmp_path / "run", tokens, allow_readable=True)["complete"]


def test_a_bank_trains_no_head(tmp_path, tokens):
    with pytest.raises(UserError, match=r"beside one set of tokens, got .*: give one file"):
        run(linear(), tmp_path / "run", f"{tokens},{tokens}")


def mean_iou(predictions, truth):
    """Over all pixels, written again."""
    scores = []
    for number in range(11):
        ours, theirs = predictions == number, truth == number
        if (ours | theirs).any():
            scores.append(float((ours & theirs).sum() / (ours | theirs).sum()))
    return sum(scores) / len(scores)


@pytest.mark.slow
def test_a_segmentation_head_is_judged_by_hand(tmp_path, tokens):
    document = masks(train={"steps": 150}, audit={"eps": 24 / 255})
    results = run(document, tmp_path / "run", tokens)
    reported, recipe = results["segmentation"], build_probe(document, "toy")
    tokened = load_tokens(tokens, model_of(masks())).eval()
    head, _ = segmentation_probe._load_head(tmp_path / "run" / "weights" / "head.safetensors", tokened)
    deployed, public = Segmenter(tokened, head).eval(), Segmenter(tokened.classifier, head).eval()
    own, trained_without = segmentation_probe._load_head(
        tmp_path / "run" / "weights" / "attackers-head.safetensors", tokened
    )
    attackers = Segmenter(tokened.classifier, own).eval()
    rows = balanced_subset(torch.zeros(10_000, dtype=torch.int64), 12, 0)
    x, truth = open_masked("shapes(size=16)@test").read(rows, ResizeCrop((16, 16)))
    with torch.no_grad():
        assert reported["clean"]["mean_iou"] == pytest.approx(mean_iou(deployed(x).argmax(1), truth))
    low, high = reported["clean"]["mean_iou_ci95"]
    assert low < reported["clean"]["mean_iou"] < high
    attack = pixel_attack("pgd-3", recipe.audit)
    made_on = ["deployed segmenter", "public backbone", "public backbone, the attacker's own head"]
    assert [entry["made_on"] for entry in reported["attacks"]] == made_on
    for entry, maker in zip(reported["attacks"], (deployed, public, attackers), strict=True):
        z = attack(maker, x, truth, SampleRNG.of_samples(0, rows).stream("pgd-3"))
        with torch.no_grad():
            assert entry["mean_iou"] == pytest.approx(mean_iou(deployed(z).argmax(1), truth), abs=1e-3)
        assert (entry["void"], entry["judged_on"]) == (0, "deployed segmenter")
    direct, blind, blindest = (entry["pixel_accuracy"] for entry in reported["attacks"])
    assert direct < blind < reported["clean"]["pixel_accuracy"]
    assert direct < blindest < reported["clean"]["pixel_accuracy"]
    # The attacker's head is the one that a training without tokens ends with.
    bare = run(document, tmp_path / "bare")["segmentation"]
    assert trained_without["heads"] == bare["heads"] != reported["heads"]
    assert reported["chosen"]["rate"] == max(reported["heads"], key=lambda each: each["held_out_mean_iou"])["rate"]
    assert not (tmp_path / "run" / "partial").exists()


@pytest.mark.slow
def test_without_a_budget_an_attack_changes_nothing_and_without_tokens_there_is_one(tmp_path):
    reported = run(masks(audit={"eps": 0}), tmp_path / "run")["segmentation"]
    (attacked,) = reported["attacks"]
    for key in ("mean_iou", "mean_iou_per_image", "pixel_accuracy", "iou", "mean_iou_ci95"):
        assert attacked[key] == reported["clean"][key]
    assert reported["tokens"] is None


@pytest.mark.slow
def test_patch_tokens_kept_or_made_again_train_the_same_head(tmp_path):
    short = masks(train={"steps": 6, "batch_size": 8}, audit={"attacks": [], "limit": 2})
    kept, repeated = (
        run({**short, "data": {**short["data"], "cache_mb": size}}, tmp_path / str(size)) for size in (9, 0)
    )
    for one, other in zip(kept["segmentation"]["heads"], repeated["segmentation"]["heads"], strict=True):
        assert one["held_out_mean_iou"] == pytest.approx(other["held_out_mean_iou"], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("cache_mb", [2000, pytest.param(0, marks=pytest.mark.slow)])
def test_a_segmentation_says_its_likely_time_and_its_results_do_not_change(tmp_path, capsys, cache_mb):
    document = masks(train={"steps": 3}, head={"lrs": [0.1]}, audit={"limit": 16}, data={"cache_mb": cache_mb})
    shown = run(document, tmp_path / "shown", show_progress=True)
    assert capsys.readouterr().err.startswith("likely ")
    assert shown["segmentation"] == run(document, tmp_path / "silent")["segmentation"]


def test_the_trial_of_a_segmentation_counts_training_once(tmp_path, tokens):
    document = with_tokens(masks(train={"steps": 400}, data={"limit": 80}), tokens)
    job, _ = probe._open_job(build_probe(document, "toy"), None, ALONE, False)
    costs = StageCosts()
    job.trial("toy").run(4, ALONE, out=tmp_path / "few", costs=costs)
    assert set(costs.once) == {"patch tokens", "heads", "choice"}
    assert len(costs.seconds) == 4  # clean, and the attack on three models
    assert costs.once["heads"] > 10 * costs.outside  # 400 steps, of which 8 were tried, are most of it
    assert costs.outside + sum(costs.seconds.values()) <= costs.work


@pytest.mark.slow
def test_a_segmentation_that_was_stopped_goes_on(tmp_path, monkeypatch):
    whole, calls = run(masks(), tmp_path / "whole"), []
    breaks_rules = segmentation_probe.breaks_rules

    def stop_at_third(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return breaks_rules(*args)

    monkeypatch.setattr(segmentation_probe, "breaks_rules", stop_at_third)
    with pytest.raises(Interrupted):
        run(masks(), tmp_path / "run")
    monkeypatch.setattr(segmentation_probe, "train_patch_head", None)
    assert run(masks(), tmp_path / "run", resume=True) == whole
    assert len(calls) == 4  # three batches of the attack: two were kept, the third was made again
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == whole


@pytest.mark.parametrize(
    ("document", "reported"),
    [
        (masks(data={"size": [18, 16]}), r"cannot be cut into patches of 4 x 4.*\[16, 16\] or \[20, 16\]"),
        (masks(data={"size": [32, 16]}), "dynamic_img_size=true"),
        (masks(data={"held_out": 60_000}), "hold out fewer"),
        (linear(data={"held_out": 60_000}), "hold out fewer"),
        (linear(model={"weights": None}), "no weights for"),
        (linear(head={"blocks": [9]}), "last 9 blocks were asked for; the model has"),
        ({**linear(), "model": {"name": "resnet18", "weights": "random"}}, "no anatomy known"),
        (masks(data={"train": "parquet:missing.parquet", "classes": 11}), "nothing matches"),
    ],
)
def test_user_errors_leave_no_folder(tmp_path, document, reported):
    with pytest.raises(UserError, match=reported):
        run(document, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_model_of_any_size_takes_oblong_images(tmp_path):
    model = {"kwargs": {**masks()["model"]["kwargs"], "dynamic_img_size": True}}
    document = masks(model=model, data={"size": [12, 16]}, audit={"attacks": []})
    assert run(document, tmp_path / "run")["segmentation"]["size"] == [12, 16]


def test_a_backbone_without_a_head_can_be_probed(tmp_path):
    model = {"name": "vit_small_patch14_dinov2", "num_classes": None}
    results = [run(linear(model=model, audit={"attacks": []}), tmp_path / str(number)) for number in range(2)]
    assert results[0] == results[1]
    assert results[0]["data"]["classes"] == 10


def test_several_processes_are_refused(tmp_path):
    recipe = build_probe(linear(), "toy")
    with pytest.raises(UserError, match="one process"):
        probe.run_probe(recipe, "toy", Processes(0, 2, torch.device("cpu")), out=tmp_path / "run")


def test_classes_to_train_on_are_not_chosen_for_those_that_are_tested():
    """Of 200 classes 20 are trained and 20 tested: by chance they share 2, drawn alike they would share all."""

    class Many:
        classes = tuple(map(str, range(200)))

        def labels(self):
            return torch.arange(2000) % 200

    section = build_probe(linear(data={"held_out": 1, "limit": 20}), "toy").data
    rows, aside = probe._split(Many(), section, 0)
    tested = balanced_subset(Many().labels(), 20, 0)
    assert len(set((rows % 200).tolist()) & set((tested % 200).tolist())) <= 7
    assert (len(rows), len(aside), len(set(rows.tolist()) & set(aside.tolist()))) == (20, 1, 0)
