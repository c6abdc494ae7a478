"""Recipes as documents: extending, sweeping, overriding, and reading back what was written."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

import vitadel
from vitadel.errors import UserError
from vitadel.training.recipes.build import build_recipe
from vitadel.training.recipes.compose import SECTIONS, compose, merge, rows, source, texts
from vitadel.training.recipes.yaml_files import TEXTS, recipe_text, shipped_recipes

ZOO = Path(vitadel.__file__).parent / "recipes"
BASE = """
about: a base
model: {name: vit_tiny_patch16_224, kwargs: {depth: 2, img_size: 32}}
data: {train: shapes@train, held_out: 10, limit: 100}
threat: {eps: 8/255}
objective: {use: trades, beta: 6, attack: kl-10}
plugins: {awp: {gamma: 5e-3}, epsilon_warmup: {epochs: 3}}
optimizer: {lr: 1e-3, betas: [0.9, 1/4]}
train: {epochs: 5}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)

    def writing(text: str, name: str = "mine.yaml") -> str:
        Path(name).write_text(text)
        return name

    return writing


def test_fractions_and_exponents_are_numbers_everywhere(write):
    document = compose("base.yaml")
    assert document["threat"]["eps"] == 8 / 255
    assert document["optimizer"] == {"lr": 0.001, "betas": [0.9, 0.25]}
    assert document["plugins"]["awp"]["gamma"] == 0.005


def test_texts_and_names_that_only_resemble_numbers_are_left_alone(write):
    name = write("expected: 1/2\ndata: {train: folder:a/b, test: '12', extra: 3/x}\n")
    assert compose(name) == {"expected": "1/2", "data": {"train": "folder:a/b", "test": "12", "extra": "3/x"}}


def test_extending_merges_mapping_by_mapping(write):
    name = write(
        "extends: base.yaml\nmodel: {kwargs: {depth: 4}}\noptimizer: {betas: [0.5]}\nschedule: {warmup_epochs: 1}\n"
    )
    document = compose(name)
    assert document["model"] == {"name": "vit_tiny_patch16_224", "kwargs": {"depth": 4, "img_size": 32}}
    assert document["optimizer"] == {"lr": 0.001, "betas": [0.5]}
    assert document["schedule"] == {"warmup_epochs": 1}
    assert document["about"] == "a base"
    assert "extends" not in document


def test_paths_are_taken_from_the_file_that_names_them(write, tmp_path, monkeypatch):
    write("extends: base.yaml\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert compose(tmp_path / "mine.yaml")["train"] == {"epochs": 5}


def test_a_null_takes_away_sections_plugins_and_settings(write):
    name = write("extends: base.yaml\noptimizer: null\nplugins: {awp: null}\nmodel: {kwargs: {depth: null}}\n")
    document = compose(name)
    assert "optimizer" not in document
    assert document["plugins"] == {"epsilon_warmup": {"epochs": 3}}
    assert document["model"]["kwargs"] == {"img_size": 32}


def test_a_null_stays_where_it_means_something(write):
    name = write(
        "extends: base.yaml\naudit: {limit: null}\nvalidation: {attack: null, every: null}\ndata: {limit: null}\n"
    )
    document = compose(name)
    assert document["audit"] == {"limit": None}
    assert document["validation"] == {"attack": None}
    assert document["data"]["limit"] is None


def test_another_use_starts_from_nothing():
    base = {"objective": {"use": "trades", "beta": 6, "attack": "kl-10"}}
    assert merge(base, {"objective": {"use": "mart"}}) == {"objective": {"use": "mart"}}
    assert merge(base, {"objective": {"use": "trades", "beta": 1}})["objective"]["attack"] == "kl-10"
    assert merge(base, {"objective": {"beta": 1}})["objective"] == {"use": "trades", "beta": 1, "attack": "kl-10"}
    assert base == {"objective": {"use": "trades", "beta": 6, "attack": "kl-10"}}


def test_circles_are_reported(write):
    write("extends: b.yaml\n", "a.yaml")
    write("extends: a.yaml\n", "b.yaml")
    with pytest.raises(UserError, match=r"extends itself.*a extends .*b extends .*a"):
        compose("a.yaml")


SWEEP = """
extends: base.yaml
sweep:
  - pgd-at: {objective: {use: adversarial, attack: pgd-10}}
    trades: {objective.beta: 3}
  - "": {}
    +aas: {plugins.attention_scaling: {}, plugins.awp: null}
  - 4: {threat.eps: 4/255}
    8: null
"""


def test_rows_are_the_product_of_the_axes_in_order(write):
    name = write(SWEEP)
    expected = [
        f"{method}{scaled}{eps}" for method in ("pgd-at", "trades") for scaled in ("", "+aas") for eps in ("4", "8")
    ]
    assert rows(name) == expected
    assert rows("base.yaml") == []
    document = compose(name, "trades+aas4")
    assert document["objective"] == {"use": "trades", "beta": 3, "attack": "kl-10"}
    assert document["plugins"] == {"epsilon_warmup": {"epochs": 3}, "attention_scaling": {}}
    assert document["threat"] == {"eps": 4 / 255}
    assert compose(name, "pgd-at8")["objective"] == {"use": "adversarial", "attack": "pgd-10"}
    assert "sweep" not in document


def test_a_row_can_be_extended_and_a_sweep_replaced(write):
    write(SWEEP, "table.yaml")
    document = compose(write("extends: table.yaml#trades+aas4\ntrain: {epochs: 9}\n"))
    assert document["threat"] == {"eps": 4 / 255}
    assert document["train"] == {"epochs": 9}
    assert rows(write("extends: table.yaml\n")) == rows("table.yaml")
    assert rows(write("extends: table.yaml\nsweep: [{a: {}}]\n")) == ["a"]
    assert rows(write("extends: table.yaml\nsweep: null\n")) == []


def test_rows_must_be_chosen_and_exist(write):
    name = write(SWEEP)
    with pytest.raises(UserError, match=r"choose one of its rows.*pgd-at4, pgd-at8, pgd-at\+aas4"):
        compose(name)
    with pytest.raises(UserError, match=r"no row 'trade4'.*did you mean trades4"):
        compose(name, "trade4")
    with pytest.raises(UserError, match="single training and has no row 'x'"):
        compose("base.yaml", "x")


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ("{a: {}}", "sweep must be a list of axes"),
        ("[]", "sweep must be a list of axes"),
        ("[{a: 3}]", "sweep must be a list of axes"),
        ("[{'': {}}]", "without a name"),
        ("[{a: {}, ab: {}}, {'': {}, b: {}}]", "are called 'ab'"),
    ],
)
def test_sweeps_that_make_no_sense_are_reported(write, sweep, said):
    with pytest.raises(UserError, match=said):
        rows(write(f"sweep: {sweep}\n"))


def test_overrides_by_text_and_by_mapping(write):
    texts_given = [
        "train.epochs=7",
        "threat.eps=4/255",
        "data.train=parquet:x=1.parquet",
        "plugins.awp=null",
        "model.kwargs={depth: 9}",
    ]
    by_text = compose("base.yaml", None, texts_given)
    mapping = {
        "train.epochs": 7,
        "threat.eps": "4/255",
        "data.train": "parquet:x=1.parquet",
        "plugins.awp": None,
        "model.kwargs": {"depth": 9},
    }
    assert by_text == compose("base.yaml", None, mapping)
    assert by_text["train"] == {"epochs": 7}
    assert by_text["threat"] == {"eps": 4 / 255}
    assert by_text["data"]["train"] == "parquet:x=1.parquet"
    assert by_text["plugins"] == {"epsilon_warmup": {"epochs": 3}}
    assert by_text["model"]["kwargs"] == {"depth": 9, "img_size": 32}


def test_a_null_for_what_is_not_there_is_reported_and_never_switches_anything_on(write):
    overrides = ["plugins.awp.gama=null", "objective.bta=null", "plugins.awpp=null", "adapter.ues=null"]
    with pytest.raises(UserError) as caught:
        build_recipe(compose("shapes/trades", None, overrides), "mine")
    for said in ("plugins.awp: has no 'gama'", "objective: has no 'bta'", "no plug-in 'awpp'", "adapter: has no 'ues'"):
        assert said in str(caught.value)
    off = ["plugins.awp=null", "plugins.weight-average=null", "plugins.awp.gamma=null"]  # which it has not
    assert not compose("shapes/trades", None, off).get("plugins")
    usual = build_recipe(compose("shapes/trades", None, ["objective.label_smoothing=null"]), "mine")
    assert usual.objective == build_recipe(compose("shapes/trades"), "mine").objective
    with pytest.raises(UserError, match="there is no plug-in 'lengths'"):  # a file beside the plug-ins
        build_recipe(compose("shapes/trades", None, ["plugins.lengths=null"]), "mine")
    without = compose("base.yaml", None, ["plugins.epsilon-warmup=null", "train.batch-size=3"])
    assert "epsilon_warmup" not in without["plugins"]


def test_the_last_override_wins(write):
    assert compose("base.yaml", None, ["threat.eps=4/255", "threat={eps: 2/255}"])["threat"]["eps"] == 2 / 255
    assert "awp" not in compose("base.yaml", None, ["plugins.awp.gamma=0.01", "plugins.awp=null"])["plugins"]
    table = write(
        "extends: base.yaml\nsweep: [{a: {objective.beta: 3, objective.attack: pgd-2, objective.use: mart}}]\n"
    )
    assert compose(table, "a")["objective"] == {"use": "mart", "beta": 3, "attack": "pgd-2"}


def test_settings_stay_whichever_stands_first_they_or_what_they_belong_to():
    words = ["objective.beta=3", "objective.use=mart", "objective.attack=pgd-2"]
    for request in (words, words[::-1]):
        assert compose("shapes/trades", None, request)["objective"] == {"use": "mart", "beta": 3, "attack": "pgd-2"}


def test_numbers_of_numpy_are_numbers():
    given = {"optimizer.lr": np.float64(1e-3), "train.epochs": np.int64(3), "audit.limit": np.int32(5)}
    document = compose("shapes/trades", None, given)
    values = (document["optimizer"]["lr"], document["train"]["epochs"], document["audit"]["limit"])
    assert [type(value) for value in values] == [float, int, int]


def test_settings_of_a_users_own_class_can_be_overridden(write, monkeypatch):
    monkeypatch.setenv("VITADEL_TRUST_CODE", "1")
    name = write("plugins: {my.package.Plugin: {pace: 1}}\n")
    assert compose(name, None, ["plugins.my.package.Plugin.pace=2"])["plugins"] == {"my.package.Plugin": {"pace": 2}}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.epochs", "write key=value"),
        ("train.epochs=[3", "not readable as YAML"),
        ("audit.attacks=&x [*x]", "contains itself"),
        ("model.kwargs={depth: 1, depth: 2}", "'depth' twice"),
    ],
)
def test_overrides_that_make_no_sense_are_reported(write, override, said):
    with pytest.raises(UserError, match=said):
        compose("base.yaml", None, [override])


def test_unknown_overrides_are_reported_together_and_with_the_faults_of_the_recipe(write):
    name = write("extends: shapes/trades\nobjective: {betta: 1}\nmodel: {name: null}\n")
    overrides = ["train.epoch=3", "optimzer.lr=3", "epochs=3", "threat.epsilon=null", "plugins.awp.gama=1", "extra="]
    with pytest.raises(UserError) as caught:
        build_recipe(compose(name, None, overrides), "mine")
    first, *lines = str(caught.value).splitlines()
    wanted = [
        r"it has no 'optimzer'; there is about, .*did you mean optimizer",
        r"it has no 'epochs'; .*did you mean train\.epochs\?",
        r"it has no 'extra'; .*did you mean data\.extra\?",
        r"threat: has no 'epsilon'; it takes eps, norm; did you mean eps",
        r"train: has no 'epoch'; it takes epochs, .*did you mean epochs",
        r"objective: has no 'betta'; .*did you mean beta",
        r"plugins.awp: has no 'gama'; .*did you mean gamma",
        r"model: needs 'name'",
    ]
    assert first == f"recipe mine has {len(wanted)} problems:"
    for line, said in zip(lines, wanted, strict=True):
        assert re.match(rf"  - {said}", line), (line, said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train: {epochs: 3\n", "not readable as YAML"),
        ("train: {epochs: 3, epochs: 4}\n", "'epochs' twice"),
        ("train: {? [a, b] : 3}\n", "not readable as YAML.*unhashable key"),
        ("? {a: b}\n: 3\n", "not readable as YAML.*unhashable key"),
        ("about: x\na: &x [*x]\n", "recipe 'mine.yaml' has something that contains itself in line 2"),
        ("a: &x {b: [*x]}\n", "contains itself"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("train: {epochs: 2020-99-99}\n", "not readable as YAML"),
        ("train: {epochs: !!bool perhaps}\n", "not readable as YAML"),
        ("- 1\n- 2\n", "not a document of keys"),
        ("", "not a document of keys"),
        ("extends: [base.yaml]\n", "extends takes the name of one recipe"),
        ("extends: shapes/pgdat\n", "unknown recipe 'shapes/pgdat'.*did you mean shapes/pgd-at"),
        ("extends: nowhere.yaml\n", "no recipe file"),
    ],
)
def test_files_that_make_no_sense_are_reported(write, text, said):
    with pytest.raises(UserError, match=re.compile(said, re.DOTALL)):
        compose(write(text))


def test_what_is_named_twice_without_containing_itself_is_good(write):
    assert compose(write("model: {kwargs: &x {depth: 2}}\ntrain: *x\n"))["train"] == {"depth": 2}


def test_what_is_written_reads_back_as_the_same(write):
    said = "expected: |\n  clean / robust\n    70 / 30\npaper: 'a: b'\n"
    document = compose(write(f"extends: base.yaml\n{said}threat: {{eps: 1.5/255}}\naudit: {{limit: null}}\n"))
    written = recipe_text(document)
    assert "eps: 1.5/255" in written
    assert "    70 / 30" in written
    assert compose(write(written, "again.yaml")) == document


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (8 / 255, "8/255"),
        (4 / 3, "4/3"),
        (0.2, "0.2"),
        (0.05, "0.05"),
        (1e-4, "0.0001"),
        (0.1234567890123, "0.1234567890123"),
    ],
)
def test_numbers_are_written_as_people_write_them(value, written):
    assert recipe_text({"threat": {"eps": value}}) == f"threat:\n  eps: {written}\n"


def test_the_zoo_is_derived_from_the_files():
    files = {str(path.relative_to(ZOO).with_suffix("")) for path in ZOO.rglob("*.yaml")}
    assert set(shipped_recipes()) == files
    laptop = {"standard", "pgd-at", "fast-at", "trades", "trades-awp", "mart", "aas-at", "mo"}
    for folder in ("shapes", "cifar10-tiny", "imagenette-tiny"):
        there = {name for name in files if name.startswith(f"{folder}/")} - {
            "shapes/epsilon-warmup",
            "cifar10-tiny/pretrained",
        }
        assert there == {f"{folder}/{job}" for job in laptop}


def test_the_tables_of_the_papers_have_their_rows():
    methods = ["pgd-at", "trades", "trades+awp", "mart", "xcit", "mo"]
    table5 = [f"{data}{method}{scaled}" for data in ("", "cifar100-") for method in methods for scaled in ("", "+aas")]
    assert rows("aas/table5") == table5
    assert rows("aas/table4") == ["pgd-at", "pgd-at+aas", "trades", "trades+aas"]
    assert rows("aas/table3") == ["cifar10", "cifar100", "imagenet100"]
    assert rows("aas/table1") == rows("aas/table2") == ["cifar10", "cifar100"]
    assert rows("aas/figure3b") == [f"depth-{depth}" for depth in (8, 12, 16, 20)]
    assert rows("aas/figure5") == [f"gap-{gap}" for gap in (2, 10, 30, 50, 110)]
    assert len(rows("light/augmentation")) == 2 * 16
    assert len(rows("light/weight-decay")) == 2 * 7
    assert rows("light/epsilon-warmup") == ["0", "5", "10", "20", "30"]
    assert rows("light/components") == ["deit-s", "xcit-s12", "+warm-up", "+augmentation", "+weight-decay"]


def test_the_parts_of_the_light_recipe_add_up_to_it():
    whole, parts = compose("light/imagenet", "s12-4"), compose("light/components", "+weight-decay")
    for section in set(SECTIONS) - {"augmentation"}:
        assert parts.get(section) == whole.get(section), section
    off = {"auto_augment": None, "mixup": 0, "cutmix": 0, "reprob": 0}
    assert parts["augmentation"] == whole["augmentation"] | off
    before = compose("light/components", "+augmentation")
    assert before["optimizer"] == whole["optimizer"] | {"weight_decay": 0.05}
    assert "plugins" not in compose("light/components", "xcit-s12")


def test_numbers_of_the_papers():
    scratch = compose("light/cifar10-scratch", "real")
    assert scratch["train"]["epochs"] + scratch["schedule"]["cooldown_epochs"] == 300
    for folder, step in (("shapes", 8), ("cifar10-tiny", 5), ("imagenette-tiny", 5)):
        assert compose(f"{folder}/mart")["objective"]["attack"] == f"pgd-2(step={step}/255,noise=0.001)"


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_opens_with_what_one_wants_to_know(name):
    lines = source(name).splitlines()
    head = lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]
    verb = "probe" if name.startswith(("probes/", "segmentation/")) else "harden"
    assert any(line.startswith(f"# run: vitadel {verb} {name}") for line in head)
    assert any(line.startswith("# expected: ") and "ours: " in line for line in head)
    assert any(line.startswith("# time: ") for line in head)
    assert set(texts(name)) == set(TEXTS)
    run = next(line for line in head if line.startswith("# run: ")).split()
    if rows(name):
        assert run[run.index("--row") + 1] in rows(name)


@pytest.fixture(scope="module")
def shipped():
    """All shipped files as they are written."""
    return {name: yaml.safe_load(source(name)) for name in shipped_recipes()}


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_says_its_own_things_only(shipped, name):
    document = shipped[name]
    base = "extends" not in document
    bases = (
        "light/imagenet",
        "aas/table5",
        "shapes/pgd-at",
        "tokens/deit-tiny",
        "tora/imagenet",
        "afat/imagenet",
        "convstem/imagenet",
        "mimir/pretrain",
        "mimir/finetune",
        "probes/shapes",
        "segmentation/shapes",
    )
    assert base == (name in bases)
    assert "expected" in document or "ours, n =" not in texts(name)["expected"]  # a parent's numbers are not its own
    assert document["about"] not in [text["about"] for other, text in shipped.items() if other != name]
