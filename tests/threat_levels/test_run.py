"""A whole run on a tiny victim: the same verdicts as by hand, killed or not, and consistent numbers."""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from imagenet_a import RIGHT, answering, write_imagenet_a
from toras import classifier_of
from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.adapters.tokens.token_files import load_tokens, save_tokens
from vitadel.attacks.pgd import PGD
from vitadel.attacks.threats import Linf
from vitadel.backbones.load import load_model
from vitadel.data.batches import read_batches
from vitadel.errors import Interrupted, UserError
from vitadel.evaluation.engine.stages import judge
from vitadel.evaluation.engine.target import open_target
from vitadel.evaluation.engine.verdicts import Verdicts
from vitadel.heads.linear_probe import Probe
from vitadel.runtime.distributed import join_processes
from vitadel.runtime.rng import SampleRNG
from vitadel.threat_levels import run
from vitadel.threat_levels import token_training as training
from vitadel.threat_levels.levels import LEVELS, AttackerAssets, level_attacks
from vitadel.threat_levels.request import ThreatLevelsRequest
from vitadel.threat_levels.run import run_threat_levels
from vitadel.threat_levels.table import ThreatLevelTable
from vitadel.training.recipes.build import build_recipe
from vitadel.training.recipes.compose import compose

CPU = join_processes("cpu")
EPS = (1 / 255, 4 / 255)
TEXTS = {EPS[0]: "1/255", EPS[1]: "4/255", 8 / 255: "8/255 normalised"}


@pytest.fixture(scope="module")
def classifier():
    return load_model("zoo:shapes-standard")


@pytest.fixture(scope="module")
def target(classifier):
    return open_target(TokenClassifier(classifier, fresh_tokens(96, 4, seed=11)).eval(), "shapes")


@pytest.fixture(scope="module")
def sets(classifier, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    files = []
    for seed in (1, 2, 3):
        files.append(str(folder / f"{seed}.safetensors"))
        save_tokens(TokenClassifier(classifier, fresh_tokens(96, 4, seed=seed)), files[-1], {})
    return files


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Two steps on a handful of images: how tokens are trained is not what is tested here."""
    file = tmp_path_factory.mktemp("recipe") / "short.yaml"
    file.write_text(
        "extends: tokens/shapes\ndata: {limit: 8, held_out: 10}\ntrain: {batch_size: 4}\n"
        "objective: {attack: features-1}\nvalidation: {limit: 10}\n"
    )
    return str(file)


def request_of(sets, recipe, **changes):
    settings = {
        "eps": EPS,
        "steps": 3,
        "queries": 10,
        "white_box": ("apgd-ce(steps=5)",),
        "surrogates": tuple(sets[:2]),
        "bank": (sets[2],),
        "recipe": recipe,
        "extraction": (16, 3),
        "limit": 12,
        "batch_size": 8,
    }
    if "T6" not in changes.get("levels", LEVELS):
        del settings["white_box"]
    return ThreatLevelsRequest(**{**settings, **changes})


@pytest.fixture(scope="module")
def finished(target, sets, recipe, classifier, tmp_path_factory):
    out = tmp_path_factory.mktemp("levels") / "run"
    other = load_model("zoo:shapes-robust")
    return run_threat_levels(target, request_of(sets, recipe), CPU, out=out, other=other).results, out


@pytest.mark.slow
def test_every_level_runs_at_every_budget(finished):
    results, _ = finished
    ladder = results["ladder"]
    assert results["complete"]
    assert ladder["left_out"] == ["T2 with the attacker's own head (--attacker-head)"]
    climbed = {(entry["level"], entry["eps"]) for entry in ladder["levels"]}
    assert climbed == {(code, eps) for code in LEVELS for eps in EPS}
    assert {entry["control"] for entry in ladder["controls"]} == {
        "no tokens",
        "untrained tokens",
        "zero tokens",
        "tiny resize",
        "tiny weight noise",
        "tokens trained on noise",
        "tokens trained to change nothing",
    }


@pytest.mark.slow
def test_numbers_fit_together(finished):
    results, out = finished
    ladder, n = results["ladder"], results["data"]["n"]
    rows = {(row["level"], row["attack"], row["eps"]): row for row in ladder["rows"]}
    samples = pq.read_table(out / "samples.parquet").to_pandas()
    assert len(samples) == n == 12
    columns = [name for name in samples.columns if name.startswith("held:")]
    assert columns == [f"held:{attack['name']}" for attack in results["attacks"]]
    assert [attack["held"] for attack in results["attacks"]] == [samples[name].sum() for name in columns]
    assert any(name.endswith("released at 8/255 normalised") for name in columns)
    for (level, attack, eps), row in rows.items():
        column = samples[f"held:{level} {attack} at {TEXTS[eps]}"]
        assert row["held"] == column.sum()
        assert row["n"] == n
        assert row["ci95"][0] <= row["robust_accuracy"] <= row["ci95"][1]
    for worst in ladder["worst_case"]:
        same = [
            row for row in ladder["rows"] if row["eps"] == worst["eps"] and row["in_pixels"] and row["level"] != "T8"
        ]
        assert worst["held"] <= min(row["held"] for row in same)
    by_level = {(entry["level"], entry["eps"]): entry["held"] for entry in ladder["levels"]}
    # Untrained tokens hardly change the model: only where attacks reach far does knowing them show in 12 images.
    assert by_level["T6", EPS[1]] <= by_level["T2", EPS[1]]
    assert all(by_level["T6", eps] < by_level["T1", eps] for eps in EPS)
    assert all(by_level[code, EPS[1]] <= by_level[code, EPS[0]] for code in ("T5", "T6"))
    assert results["worst_case"]["held"] == ladder["worst_case"][-1]["held"]


@pytest.mark.slow
def test_a_transfer_level_is_what_one_gets_by_hand(finished, target, sets, classifier):
    """T2 with the victim's head: crafted on the bare backbone, judged on the victim."""
    _, out = finished
    eps = EPS[1]
    indices, _ = target.selection(12, 0, False)
    held = {}
    for batch in read_batches(target.source, [part.tolist() for part in indices.split(8)], target.preprocess):
        attack = PGD(Linf(eps), steps=3, stop_when_fooled=False)
        rng = SampleRNG.of_samples(0, batch.indices).stream("T2 pgd-3, victim's head")
        z = attack(classifier, batch.x, batch.y, rng)
        clean = target.model(batch.x).argmax(1) == batch.y
        verdict = judge(target.model, Linf(eps), batch.x, z, batch.y)
        held |= dict(zip(batch.indices.tolist(), (clean & verdict.held).tolist(), strict=True))
    samples = pq.read_table(out / "samples.parquet").to_pandas()
    reported = dict(zip(samples["index"], samples["held:T2 pgd-3, victim's head at 4/255"], strict=True))
    assert reported == held


@pytest.mark.slow
def test_a_victim_and_attackers_choose_between_the_classes_that_count(tmp_path):
    bare, other = classifier_of(classes=1000), classifier_of(classes=1000)
    for each in (bare, other):
        answering(each.backbone.head)
    tokened = open_target(TokenClassifier(bare, fresh_tokens(24, 2, seed=1)).eval(), write_imagenet_a(tmp_path / "a"))
    request = ThreatLevelsRequest(
        eps=EPS[:1], levels=("T0", "T1", "T5", "T6"), steps=2, queries=5, white_box=("apgd-ce(steps=2)",), batch_size=2
    )
    results = run_threat_levels(tokened, request, CPU, out=tmp_path / "run", other=other).results
    assert results["data"]["classes"] == 200
    assert results["clean"]["correct"] == RIGHT
    assert {row["level"] for row in results["ladder"]["rows"]} == {"T0", "T1", "T5", "T6"}
    assert all(row["held"] == RIGHT for row in results["ladder"]["rows"] if row["level"] == "T0")  # what noise can do


@pytest.mark.slow
def test_a_bank_counts_images_that_every_set_gets_right(finished, target, sets, classifier):
    results, _ = finished
    indices, _ = target.selection(12, 0, False)
    (batch,) = read_batches(target.source, [indices.tolist()], target.preprocess)
    with torch.no_grad():
        each = [model(batch.x).argmax(1) == batch.y for model in (target.model, load_tokens(sets[2], classifier))]
    assert results["ladder"]["bank_clean_accuracy"] == pytest.approx(float(torch.stack(each).double().mean()))
    rows = [row for row in results["ladder"]["rows"] if row["level"] == "T8"]
    assert len(rows) == len(EPS)
    for row in rows:
        assert row["expected_accuracy"] >= row["robust_accuracy"] - 1e-12
        assert row["judged_on"] == "every set of the bank"
    assert len(results["ladder"]["bank"]) == 2


@pytest.mark.slow
def test_cosines_are_reported_both_ways(finished):
    results, _ = finished
    (row, *_) = [row for row in results["ladder"]["rows"] if row["level"] == "T2" and row["attack"] == "features-3"]
    names = {f"{what}, {axis}" for what in ("to bare", "to own", "no tokens") for axis in ("token", "channel")}
    assert set(row["cosines"]) == names
    assert all(-1 <= value <= 1 for value in row["cosines"].values())
    assert row["cosines"]["no tokens, token"] < 0.9999


@pytest.mark.slow
def test_no_token_and_no_salt_is_written(finished, target):
    _, out = finished
    secret = target.model.tokens.detach().numpy().astype(np.float32)
    for file in out.rglob("*"):
        if file.is_file() and file.suffix in (".json", ".parquet", ".html"):
            content = file.read_bytes()
            assert secret.tobytes()[:64] not in content
            assert target.model.salt.hex().encode() not in content
    for file in (out / "sets").rglob("*.safetensors"):
        assert file.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_broken_off_and_resumed_it_reports_the_same(target, sets, recipe, tmp_path, monkeypatch):
    real, calls = run.judge, 0

    def fragile(*arguments):
        nonlocal calls
        calls += 1
        if calls == 15:
            raise RuntimeError("power cut")
        return real(*arguments)

    request, other = request_of(sets, recipe, eps=EPS[1:], limit=8, batch_size=4), load_model("zoo:shapes-robust")
    results = run_threat_levels(target, request, CPU, out=tmp_path / "whole", other=other).results
    monkeypatch.setattr(run, "judge", fragile)
    with pytest.raises(RuntimeError, match="power cut"):
        run_threat_levels(target, request, CPU, out=tmp_path / "run", other=other)
    assert not json.loads((tmp_path / "run" / "results.json").read_text())["complete"]
    monkeypatch.undo()
    again = run_threat_levels(target, request, CPU, out=tmp_path / "run", other=other, resume=True).results

    def plain(reported):
        rows = [{key: value for key, value in row.items() if key != "seconds"} for row in reported["ladder"]["rows"]]
        return rows, reported["ladder"]["controls"], reported["ladder"]["worst_case"], reported["clean"]

    # Token sets that are trained here are named by salted fingerprints, which differ; what they do does not.
    assert plain(again) == plain(results)


@pytest.mark.slow
def test_heads_of_victim_and_attacker_are_put_on_the_frozen_features(target, sets, recipe, tmp_path):
    torch.manual_seed(1)
    theirs, ours = torch.nn.Linear(96, 10), torch.nn.Linear(96, 10)
    request = request_of(sets, recipe, levels=("T0", "T5"), eps=EPS[:1])
    results = run_threat_levels(
        target,
        request,
        CPU,
        out=tmp_path / "run",
        head=lambda model: Probe(model, ours, 1, False),
        own_head=lambda model: Probe(model, theirs, 1, False),
    ).results
    indices, _ = target.selection(12, 0, False)
    (batch,) = read_batches(target.source, [indices.tolist()], target.preprocess)
    with torch.no_grad():
        right = Probe(target.model, ours, 1, False)(batch.x).argmax(1) == batch.y
    assert results["clean"]["correct"] == int(right.sum()) < 15
    assets = AttackerAssets(target.model, own_head=lambda model: Probe(model, theirs, 1, False))
    (own,) = [attack for attack in level_attacks(("T2",), assets, 3, 10, ()) if "own head" in attack.name]
    assert own.source.head is theirs
    assert own.source.model is target.model.classifier


def test_a_model_without_tokens_is_reported(tmp_path):
    plain = open_target("zoo:shapes-standard", "shapes")
    with pytest.raises(UserError, match=r"judge secret tokens, and 'zoo:shapes-standard' has none.*--tokens FILE"):
        run_threat_levels(plain, ThreatLevelsRequest(limit=10, recipe="tokens/shapes"), CPU, out=tmp_path / "run")


@pytest.mark.parametrize(
    "changes", [{"levels": ("T1",)}, {"levels": ("T3", "T4"), "surrogates": 0}, {"levels": ("T8",), "bank": ()}]
)
def test_at_least_one_attack_must_be_available(target, sets, recipe, tmp_path, changes):
    with pytest.raises(
        UserError, match=f"no attack is available for {', '.join(changes['levels'])}: T1 needs .*--other"
    ):
        run_threat_levels(target, request_of(sets, recipe, **changes), CPU, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("count", "placement"), [(3, "prefix"), (4, "append")])
def test_the_sets_of_a_bank_are_alike(target, classifier, sets, recipe, tmp_path, count, placement):
    file = str(tmp_path / "other.safetensors")
    save_tokens(TokenClassifier(classifier, fresh_tokens(96, count, seed=8), placement=placement), file, {})
    reported = (
        rf"set 1 of --bank has {count} tokens \({placement}, layers \[0\]\), the victim 4 tokens \(prefix, layers"
    )
    with pytest.raises(UserError, match=reported):
        run_threat_levels(target, request_of(sets, recipe, levels=("T8",), bank=(file,)), CPU, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    # An attacker may guess the number of tokens, and their place, as it likes.
    request = request_of(sets, recipe, levels=("T3", "T4"), surrogates=(file,), eps=EPS[:1], steps=1, limit=4)
    results = run_threat_levels(target, request, CPU, out=tmp_path / "run").results
    assert [row["attack"] for row in results["ladder"]["rows"]] == ["pgd-1, set 1", "pgd-1, bare and 1 set"]


def test_another_model_must_have_the_same_classes(target, sets, recipe, tmp_path):
    torch.manual_seed(0)
    kwargs = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
    other = load_model("vit_tiny_patch16_224", weights="random", num_classes=7, kwargs=kwargs)
    with pytest.raises(UserError, match="has 7 classes, the victim 10"):
        run_threat_levels(target, request_of(sets, recipe, levels=("T1",)), CPU, out=tmp_path / "run", other=other)


def test_the_worst_case_keeps_what_was_found_at_smaller_budgets(target):
    """A transfer attack may lose an image again at a larger budget; the smaller perturbation is still there."""
    indices, _ = target.selection(4, 0, False)
    verdicts = Verdicts(indices, target.source.labels()[indices], target.source.labels()[indices], [])
    table = ThreatLevelTable(
        ThreatLevelsRequest(eps=EPS, levels=("T2",), recipe="x"), verdicts, AttackerAssets(target.model), {}
    )
    held = {EPS[0]: [True, False, True, True], EPS[1]: [True, True, False, True], 8 / 255: [False, True, True, True]}
    for eps, verdicts in held.items():
        name, in_pixels = ("released", False) if eps == 8 / 255 else ("pgd", True)
        table.rows.append({"level": "T2", "attack": name, "eps": eps, "in_pixels": in_pixels})
        table.robust[f"T2 {name}", eps] = torch.tensor(verdicts)
    assert table.worst(EPS[0]).tolist() == [True, False, True, True]
    assert table.worst(EPS[1]).tolist() == [False, False, False, True]  # the released attack changes 2 gray levels
    by_level = {(code, eps): robust.tolist() for code, eps, robust in table.by_level()}
    assert by_level["T2", EPS[1]] == [True, True, False, True]
    bank = ThreatLevelTable(
        ThreatLevelsRequest(eps=EPS, levels=("T8",), recipe="x"), verdicts, AttackerAssets(target.model), {}
    )
    bank.rows.append({"level": "T8", "attack": "pgd", "eps": EPS[0], "in_pixels": True})
    bank.robust["T8 pgd", EPS[0]] = torch.tensor([False] * 4)
    assert bank.worst(EPS[1]) is None
    table.rows.append({"level": "T8", "attack": "pgd", "eps": EPS[0], "in_pixels": True})
    table.robust["T8 pgd", EPS[0]] = torch.tensor([False] * 4)  # for some set of the bank
    table.by_victim["T8 pgd", EPS[0]] = torch.tensor([True, True, True, False])
    assert table.worst(EPS[0]).tolist() == [True, False, True, False]


def test_who_sees_verdicts_keeps_what_it_found_by_moving_features(target):
    """T6: all images are attacked at every budget, for their cosines, and one that fell before stays fallen."""
    indices, _ = target.selection(3, 0, False)
    labels = target.source.labels()[indices]
    assets, verdicts = AttackerAssets(target.model), Verdicts(indices, labels, labels, [])
    table = ThreatLevelTable(ThreatLevelsRequest(eps=EPS, levels=("T2", "T6"), recipe="x"), verdicts, assets, {})
    for attack in [attack for attack in level_attacks(("T2", "T6"), assets, 3, 10, ()) if attack.name == "features-3"]:
        for eps, right in ((EPS[0], [False, True, True]), (EPS[1], [True, True, False])):
            zero = np.asarray(0)
            piece = {"right:tokens": np.asarray(right), "void": np.zeros(3, bool), "seconds": zero}
            table.add(attack, eps, [{**piece, "gradients": zero, "forwards": zero}], torch.ones(3, dtype=torch.bool))
    assert table.robust["T6 features-3", EPS[1]].tolist() == [False, True, False]
    assert table.robust["T2 features-3", EPS[1]].tolist() == [True, True, False]


def test_the_secret_itself_is_no_surrogate(target, sets, recipe, tmp_path):
    file = tmp_path / "own.safetensors"
    save_tokens(TokenClassifier(target.model.classifier, target.model.tokens.detach()), file, {})
    request = request_of(sets, recipe, levels=("T3",), surrogates=(sets[0], str(file)))
    with pytest.raises(UserError, match="set 2 of --surrogates is the same as the victim's own tokens"):
        run_threat_levels(target, request, CPU, out=tmp_path / "run")
    twice = request_of(sets, recipe, levels=("T3",), surrogates=(sets[0], sets[0]))
    with pytest.raises(UserError, match="set 2 of --surrogates is the same as set 1 of --surrogates"):
        run_threat_levels(target, twice, CPU, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_attackers_do_not_train_on_the_audited_images(target, sets, recipe, tmp_path):
    request = request_of(sets, recipe, levels=("T7",), attacker_data="shapes@test")
    with pytest.raises(UserError, match="--attacker-data shapes@test are the audited images, shapes"):
        run_threat_levels(target, request, CPU, out=tmp_path / "run")


def test_nor_do_those_who_have_the_recipe_s_images(target, sets, recipe, tmp_path):
    request = request_of(sets, recipe, levels=("T3",), surrogates=1)
    audited = dataclasses.replace(target, data_spec=build_recipe(compose(recipe), "short").data.train)
    with pytest.raises(UserError, match=r"trains surrogates on, shapes.*, are the audited images"):
        run_threat_levels(audited, request, CPU, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_attacker_s_head_must_have_the_victim_s_classes(target, sets, recipe, tmp_path):
    head = torch.nn.Linear(96, 3)
    own = partial(Probe, head=head, blocks=1, average=False, classes=["a", "b", "c"])
    with pytest.raises(UserError, match="the attacker's own head has 3 classes, the victim 10"):
        run_threat_levels(target, request_of(sets, recipe, levels=("T2",)), CPU, out=tmp_path / "run", own_head=own)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_resumed_run_has_the_same_heads(target, sets, recipe, tmp_path):
    request = request_of(sets, recipe, levels=("T0",), eps=EPS[:1])
    heads = [torch.nn.Linear(96, 10) for _ in range(2)]
    run_threat_levels(
        target, request, CPU, out=tmp_path / "run", own_head=lambda model: Probe(model, heads[0], 1, False)
    )
    with pytest.raises(UserError, match="own_head: was"):
        run_threat_levels(
            target,
            request,
            CPU,
            out=tmp_path / "run",
            resume=True,
            own_head=lambda model: Probe(model, heads[1], 1, False),
        )


def test_ctrl_c_in_a_training_inside_names_the_whole_run(target, sets, recipe, tmp_path, monkeypatch):
    def interrupted(*arguments, **named):
        raise Interrupted(named["out"])

    monkeypatch.setattr(training, "run_harden", interrupted)
    with pytest.raises(Interrupted) as seen:
        run_threat_levels(target, request_of(sets, recipe, levels=("T3",), surrogates=1), CPU, out=tmp_path / "run")
    assert seen.value.folder == tmp_path / "run"


def test_controls_see_noise_of_the_attack_s_budget_in_pixels(tmp_path):
    file = tmp_path / "released.yaml"
    file.write_text("extends: tokens/shapes\nthreat: {eps: 8/255}\nobjective: {attack: 'features-30(paper=true)'}\n")
    budgets = {"tokens/shapes": 2 / 255, "tokens/deit-tiny": 2 / 255, str(file): 8 / 255 * 0.229}
    for recipe, budget in budgets.items():
        changes = training.control_changes(training.read_recipe(recipe))
        assert len(changes) == 2
        assert all(each["threat.eps"] == pytest.approx(budget) for each in changes.values())
        assert all(each["objective.attack"] == "noise" for each in changes.values())


def test_white_box_attacks_are_those_of_t6():
    assert ThreatLevelsRequest(levels=("T6",)).white_box == ("apgd-ce", "apgd-t")
    assert ThreatLevelsRequest(levels=("T2",)).white_box == ()
    assert ThreatLevelsRequest(levels=("T2",), white_box=()).white_box == ()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"eps": ()}, "at least one budget, such as 1/255,4/255"),
        ({"eps": (8.0,)}, "eps 8 is larger than the whole pixel range.*Did you mean 8/255"),
        ({"eps": (1 / 255, 1.0)}, "above 0 and below 1.*got 1. Try 1/255,4/255"),
        ({"eps": (0.0,)}, "above 0 and below 1.*got 0"),
        ({"eps": (-1 / 255,)}, "must not be negative"),
        ({"levels": ()}, "no threat level is given; choose from T0, T1, T2"),
        ({"levels": ("T99",)}, "unknown threat level"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"extraction": (0, 5)}, "extraction is .images to query, steps of the fit., each at least 1"),
        ({"surrogates": -1}, "surrogates is a number"),
        ({"white_box": ("pgt-3",)}, "unknown attack 'pgt-3'"),
        ({"public": ("pgt-3",)}, "unknown attack 'pgt-3'"),
        ({"public": ("pgd-3",), "levels": ("T6",)}, "--public pgd-3 is for T2, which is not among --levels"),
        ({"white_box": ("pgd-3", "fgsm"), "levels": ("T2",)}, "--white-box pgd-3,fgsm is for T6.*--levels T2: add T6"),
        ({"guess": (5, 0)}, "--guess is a list of numbers of tokens, each at least 1 and none twice; got 5,0"),
        ({"guess": (1, 5, 20)}, "names 3 numbers of tokens, and --surrogates 2 sets .* give --surrogates 3"),
        ({"guess": (5,), "levels": ("T6",)}, "--guess 5 is for attackers who train tokens .T3, T4. or fit them .T7."),
        ({"white_box": ("patch-fool",)}, "its own threat model"),
        ({"white_box": ("eot:2+aas+pgd-3",)}, "needs calibration images"),
        ({"levels": ("T3",)}, "--surrogates 2 .*Give the recipe of the tokens with --recipe"),
    ],
    ids=lambda each: str(each)[:20],
)
def test_wrong_requests_are_refused(wrong, words):
    with pytest.raises(UserError, match=words):
        ThreatLevelsRequest(**{"recipe": None if "levels" in wrong else "tokens/shapes", **wrong})
