"""Every table and figure can be planned, offline; rows that are missing features say so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from built_models import BUILT

from vitadel.errors import UserError
from vitadel.evaluation.audit.protocols import RVT
from vitadel.papers.paper_documents import PAPERS, find_item, read_paper
from vitadel.reproduce.dry_run import DryRun, count_classes
from vitadel.reproduce.gpu_hours import A100, training_hours
from vitadel.reproduce.jobs import TableRequest, table_jobs
from vitadel.reproduce.table_plan import plan_table, plan_text, summaries
from vitadel.training.recipes.build import build_recipe
from vitadel.training.recipes.compose import compose, rows

TABLES = [f"{paper}/{item.id}" for paper in PAPERS for item in read_paper(paper).items]
# What cannot be run yet, exactly: (table, row or column). Rows of others' models need their weights.
NEEDS = {"light-recipe/table6": {"resnext-152"}}
OTHERS = {
    "tora/table1": 16,
    "afat/table1": 10,
    "afat/table2": 8,
}


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_every_row_of_every_table_can_be_planned(table, tmp_path):
    jobs = table_jobs(TableRequest(table=table, data_root=str(tmp_path)))
    plan = plan_table(jobs, BUILT)
    assert all(0 < each["trained"] <= each["parameters"] for each in plan["trainings"])
    item = find_item(table)[1]
    assert set(plan["needs"]) == NEEDS.get(table, set()) or len(plan["needs"]) == OTHERS[table]
    planned = {row for each in plan["evaluations"].values() for row in each["rows"]}
    runnable = {row.id for row in item.rows} - set(plan["needs"])
    assert planned == (runnable if any(column.of for column in item.columns) else set())
    text = plan_text(plan)
    assert item.title in text
    assert "estimate" in text
    stated, found = set(item.data), {each["data"] for each in plan["files"]}
    assert found <= stated
    assert found == stated or any(column.needs for column in item.columns)
    for each in plan["files"]:
        assert each["path"].startswith(str(tmp_path))
        assert not each["there"]


@pytest.mark.slow
@pytest.mark.parametrize("table", [name for name in TABLES if find_item(name)[1].small])
def test_every_small_table_can_be_planned(table):
    plan = plan_table(table_jobs(TableRequest(table=table, small=True, seeds=2)), BUILT)
    assert plan["trainings"]
    assert not plan["files"]
    item = find_item(table)[1]
    assert item.small.minutes <= 60
    assert set(item.small.rows) <= {row.id for row in item.rows}


@pytest.mark.slow
def test_models_are_built_without_memory_and_have_the_sizes_of_the_slides():
    rows = "head-0.1", "single-0.1", "adapterfusion-0.1", "tora-0.1", "matched-0.1"
    built = BUILT.build_models(table_jobs(TableRequest(table="tora/table3", rows=rows, columns=("clean",))))
    sizes = {name.removeprefix("tora-imagenet-"): (each.parameters, each.trained) for name, each in built.items()}
    assert sizes["head-0.1-s0"] == (88_105_656, 1_538_000)
    assert sizes["single-0.1-s0"] == (88_250_384, 1_682_728)
    assert sizes["tora-s0"] == (111_194_424, 24_626_768)
    assert sizes["matched-0.1-s0"][1] == pytest.approx(24_626_768, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "changed", "said"),
    [
        (
            "tora/table3",
            {"model.name": "vit_base_patch61_224"},
            r"row tora-0.1: .*\n.*unknown model 'vit_base_patch61_224'",
        ),
        ("tora/table3", {"model.kwargs": {"depht": 6}}, "row tora-0.1.*depht"),
        ("tora/table3", {"model.name": "resnet50"}, "row tora-0.1: no anatomy known for timm.models.resnet.ResNet"),
        ("tora/table3", {"adapter.kind": "adapterfusion"}, "row tora-0.1: phase 2 has other settings than its start"),
        ("tora/table3", {"optimizer.name": "adamv"}, "row tora-0.1: .*\n.*timm has no optimizer 'adamv'"),
    ],
)
def test_what_cannot_be_built_is_found_in_the_plan(table, changed, said):
    jobs = table_jobs(TableRequest(table=table, rows=("tora-0.1",), columns=("clean",)))
    (job,) = jobs.jobs
    wrong = replace(job, training=replace(job.training, overrides=changed))
    with pytest.raises(UserError, match=said):
        plan_table(replace(jobs, jobs=(wrong,)))


@pytest.mark.parametrize(
    ("spec", "classes"),
    [
        ("cifar10@train", 10),
        ("imagenet:data/imagenet@train", 1000),
        ("imagenet:data/imagenet(classes=light-recipe)@train", 100),
        ("imagenet:data/imagenet(classes=7,seed=0)", 7),
        ("shapes(size=16,texture=8/255,faintest=1)@train", 10),
        ("caltech101@train", 102),
        ("folder:data/cifar100", 100),
    ],
)
def test_heads_have_as_many_classes_as_the_data(spec, classes):
    assert count_classes(spec) == classes


def test_hours_are_passes_times_the_cost_of_a_pass():
    """Ten steps of PGD and an update are 34 forward passes of an image; AAS trains 110 epochs on CIFAR-10."""
    recipe = build_recipe(compose("aas/table5", rows("aas/table5")[0], {"objective.attack": "pgd-10"}), "table 5")
    images = 50_000 - recipe.data.held_out
    gradients, forwards = recipe.objective.attack.passes()
    assert gradients == 10
    expected = images * recipe.epochs * (4 + 30 + forwards) * 5e9 / A100 / 3600
    assert training_hours(recipe, 5 * 10**9, 10) == pytest.approx(expected)
    assert training_hours(recipe, None, 10) is None
    tenth = replace(recipe, data=replace(recipe.data, train="imagenet:data/imagenet(classes=100,seed=0)@train"))
    ratio = (128_116.7 - recipe.data.held_out) / images
    assert training_hours(tenth, 5 * 10**9, 100) == pytest.approx(ratio * expected)
    unknown = replace(recipe, data=replace(recipe.data, train="folder:somewhere@train"))
    assert training_hours(unknown, 5 * 10**9, 10) is None


@pytest.mark.slow
def test_the_least_hours_are_no_more_than_those_stated():
    """Both are estimates; what a paper's document states counts the same trainings, and attacks and audits beside."""
    for table in ("tora/table1", "light-recipe/table4"):
        plan = plan_table(table_jobs(TableRequest(table=table)), BUILT)
        hours = [each["a100_hours"] for each in plan["trainings"]]
        assert all(each is not None and each > 0 for each in hours)
        assert sum(hours) <= find_item(table)[1].gpu_hours
        assert all(each["h100_hours"] == each["a100_hours"] / (989 / 312) for each in plan["trainings"])
        text = plan_text(plan)
        assert f"at least {hours[0]:.2g} or {hours[0] / (989 / 312):.2g} h" in text
        cost = find_item(table)[1].gpu_hours
        assert f"about {cost:g} hours of an A100 (at least {cost / (989 / 312):.2g} of an H100)" in text


def test_an_attack_that_looks_inside_a_cnn_is_found_in_the_plan():
    jobs = table_jobs(TableRequest(table="tora/table1", rows=("resnet-50",), columns=("clean",)))
    (job,) = jobs.jobs
    audit = job.evaluations["attacks"]
    inside = audit.model_copy(update={"settings": {**audit.settings, "attacks": ["aas+pgd-5"]}})
    with pytest.raises(UserError, match=r"tora/table1, row resnet-50: aas\+pgd-5: "):
        DryRun().build_models(replace(jobs, jobs=(replace(job, evaluations={"attacks": inside}),)))


def test_all_columns_of_tora_follow_rvts_protocol():
    for table in ("tora/table1", "tora/table2", "tora/table3"):
        jobs = table_jobs(TableRequest(table=table)).jobs
        evaluations = [each for job in jobs for each in job.evaluations.values() if each.data or each.settings]
        assert {str(each.options) for each in evaluations} == {str(RVT.model_options)}
        attacked = [each.settings for each in evaluations if each.run == "audit" and each.data is None]
        assert all(each["attacks"] == list(RVT.attacks) and each["eps"] == RVT.eps for each in attacked)
        assert all(each["independent"] for each in attacked)
        assert not any(each.get("limit") for each in attacked)


def test_heads_of_tora_have_columns_for_the_variants_of_imagenet():
    jobs = table_jobs(TableRequest(table="tora/table2", rows=("0.5-acc", "0.5-rob", "0.5-joint")))
    assert [job.evaluations["c"].branch for job in jobs.jobs] == ["acc", "rob", "joint"]
    assert len({job.evaluation_name("a") for job in jobs.jobs}) == 3
    assert len({job.evaluation_name("heads") for job in jobs.jobs}) == 1


def test_every_lambda_has_rows_of_every_fusion_and_of_baselines_with_as_much_training():
    for recipe, lambdas in (("tora/imagenet", (1, 3, 5, 7, 9)), ("tora/imagenette-deit-tiny", (1, 5, 9))):
        for number in lambdas:
            tora, other = (compose(recipe, f"{kind}-0.{number}", {}) for kind in ("lambda", "adapterfusion"))
            assert other["adapter"] == {
                **tora["adapter"],
                "kind": "adapterfusion",
                "start": "runs/adapterfusion",
            }
            assert {**other, "adapter": tora["adapter"]} == tora
        for number in (1, 5, 9):
            long, matched = (compose(recipe, f"{kind}-0.{number}", {}) for kind in ("long", "matched"))
            assert long["train"]["epochs"] > matched["train"]["epochs"] > 0
            assert matched["adapter"]["kind"] == long["adapter"]["kind"] == "single"


def test_the_five_tables_that_users_try_first_have_a_small_version():
    tables = "aas/table5", "light-recipe/table2", "light-recipe/table4", "robustness-tokens/table4", "tora/table2"
    for table in (*tables, "afat/table5"):
        assert find_item(table)[1].small is not None


def test_the_list_has_every_table_and_figure():
    names = [name for name, _ in summaries()]
    assert set(TABLES) <= set(names)
    assert len(names) == len(set(names))
    assert dict(summaries())["aas/table5"].startswith("Six methods of adversarial training")


def test_rows_that_share_a_model_share_its_training_and_evaluation():
    jobs = table_jobs(TableRequest(table="tora/table2"))
    assert len(jobs.jobs) == 15
    assert [each.row for each in jobs.trainings()] == ["tora", *(f"lambda-0.{k}" for k in (1, 3, 5, 7, 9))]
    assert len({job.evaluation_name("heads") for job in jobs.jobs}) == 5


def test_data_specs_move_below_the_root():
    (job,) = table_jobs(TableRequest(table="aas/table4", rows=("trades",), data_root="/big/disk")).jobs
    assert job.training.overrides["data.train"] == "imagenet:/big/disk/imagenet(classes=100,seed=0)@train"
    assert job.test_data == "imagenet:/big/disk/imagenet(classes=100,seed=0)@val"


def test_seeds_multiply_trainings_but_not_models_of_others():
    jobs = table_jobs(TableRequest(table="light-recipe/table9", seeds=3))
    assert sum(job.training is None for job in jobs.jobs) == 2
    assert sum(job.training is not None for job in jobs.jobs) == 6
