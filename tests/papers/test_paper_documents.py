"""The papers' documents: complete against the papers, consistent in themselves, and not edited by accident."""

from __future__ import annotations

import re

import pytest

from vitadel.errors import UserError
from vitadel.papers import paper_documents
from vitadel.papers.paper_documents import (
    PAPERS,
    check_values,
    data_sets,
    find_item,
    parse_paper,
    published_text,
    read_paper,
    values_checksum,
)
from vitadel.training.recipes.compose import compose, rows, texts
from vitadel.training.recipes.yaml_files import shipped_recipes

# Facts counted in the papers: (rows, columns, printed values). A row is one model under one evaluation, so a row of the
# paper that shows standard and adversarial training, or two data sets, is two rows here. A column without printed
# values (the verdict of the deployed model, a page of pictures) counts as a column, and a row of ours beside the
# paper's (baselines of TORA with as much training) as a row. Figures print no numbers; those of
# figure 4 of the tokens were released.
COUNTS = {
    ("aas", "figure1"): (10, 3, 0),
    ("aas", "table1"): (12, 3, 24),
    ("aas", "table2"): (12, 3, 24),
    ("aas", "figure2"): (1, 1, 0),
    ("aas", "table3"): (21, 4, 63),
    ("aas", "table4"): (4, 2, 8),
    ("aas", "figure3"): (5, 3, 0),
    ("aas", "figure4"): (6, 2, 0),
    ("aas", "table5"): (24, 4, 96),
    ("aas", "figure5"): (6, 4, 0),
    ("light-recipe", "table1"): (6, 4, 15),
    ("light-recipe", "table2"): (5, 2, 10),
    ("light-recipe", "table3"): (32, 2, 24),
    ("light-recipe", "table4"): (14, 2, 21),
    ("light-recipe", "table5"): (5, 2, 10),
    ("light-recipe", "table6"): (9, 8, 34),
    ("light-recipe", "table7"): (8, 2, 12),
    ("light-recipe", "table8"): (3, 2, 6),
    ("light-recipe", "table9"): (4, 6, 12),
    ("light-recipe", "figure11"): (2, 2, 0),
    ("light-recipe", "figure12"): (2, 2, 0),
    ("robustness-tokens", "table1"): (16, 2, 32),
    ("robustness-tokens", "table2"): (16, 3, 48),
    ("robustness-tokens", "figure3"): (2, 1, 0),
    ("robustness-tokens", "figure4"): (16, 2, 24),
    ("robustness-tokens", "figure5"): (6, 1, 0),
    ("robustness-tokens", "table3"): (6, 4, 16),
    ("robustness-tokens", "table4"): (6, 2, 12),
    ("robustness-tokens", "figure6"): (3, 1, 0),
    ("tora", "table1"): (29, 6, 154),
    ("tora", "table2"): (15, 6, 90),
    ("tora", "table3"): (12, 10, 72),
    ("tora", "figure1"): (3, 1, 0),
    ("afat", "figure1"): (2, 4, 0),
    ("afat", "table1"): (26, 3, 78),
    ("afat", "table2"): (35, 7, 231),
    ("afat", "figure3"): (2, 4, 0),
    ("afat", "figure4"): (2, 3, 0),
    ("afat", "figure5"): (2, 1, 0),
    ("afat", "table3"): (4, 4, 16),
    ("afat", "table4"): (6, 2, 12),
    ("afat", "figure6"): (9, 2, 0),
    ("afat", "table5"): (3, 2, 6),
    ("afat", "table6"): (3, 2, 6),
    ("afat", "figure7"): (2, 2, 0),
}
# Some cells, read in the papers by themselves.
CELLS = {
    ("aas/table5", "trades+awp+aas", "autoattack"): 57.73,
    ("aas/table5", "cifar100-mart+aas", "aas"): 27.83,
    ("aas/table3", "imagenet100-gama", "aas"): 25.64,
    ("aas/table1", "10", "pgd-100"): 66.78,
    ("light-recipe/table2", "20", "apgd-ce"): 34.88,
    ("light-recipe/table4", "0.5", "apgd-ce"): 42.02,
    ("light-recipe/table9", "resnet50", "beit-l"): 45.02,
    ("light-recipe/table1", "cait-s12", "parameters"): 25.61,
    ("light-recipe/table6", "xcit-l12-standard", "clean"): 82.65,
    ("light-recipe/table6", "xcit-m12", "pgd-200"): 51.91,
    ("light-recipe/table7", "flowers102-xcit-standard", "clean"): 89.08,
    ("robustness-tokens/table2", "dinov2-l-reg+rob", "miou"): 16.2,
    ("robustness-tokens/table4", "dinov2-b", "robustified"): 46.4,
    ("tora/table2", "0.7-rob", "pgd"): 52.23,
    ("tora/table3", "single-0.9", "a"): 3.1,
    ("afat/table2", "fan-s+afat", "mce-quiet"): 49.4,
    ("afat/table5", "patchdrop", "mce"): 46.3,
}
ITEMS = [(paper, item) for paper in PAPERS for item in read_paper(paper).items]


def test_every_table_and_figure_is_there_with_all_its_values():
    found = {(paper, item.id): (len(item.rows), len(item.columns), len(item.values())) for paper, item in ITEMS}
    assert found == COUNTS


@pytest.mark.parametrize(("table", "row", "column"), CELLS)
def test_cells_are_those_of_the_paper(table, row, column):
    assert find_item(table)[1].published(row, column) == CELLS[table, row, column]


def test_claims_agree_with_the_published_numbers():
    for _, item in ITEMS:
        for ordering in item.orderings:
            for higher, lower in ordering.pairs():
                numbers = item.published(*higher), item.published(*lower)
                if None not in numbers:
                    assert numbers[0] > numbers[1], (item.id, ordering.claim, higher, lower)


def test_numbers_that_stand_in_two_tables_are_the_same():
    for row in ("rvt-b", "rvt-b+afat", "fan-b", "fan-b+afat"):
        first, second = find_item("afat/table2")[1], find_item("afat/table4")[1]
        assert first.published(row, "mce") == second.published(row, "mce")
    last = find_item("light-recipe/table5")[1].row("+weight-decay").values
    assert find_item("light-recipe/table6")[1].row("xcit-s12").values[2:4] == last


def test_every_recipe_and_data_set_that_is_named_exists():
    known = {recipe: rows(recipe) for recipe in shipped_recipes()}
    for _, item in ITEMS:
        assert set(item.data) <= set(data_sets()), item.id
        named = [name for row in item.rows for name in (row.train, *row.after.values()) if name]
        if item.small is not None:
            sweep = item.small.rows.values() if item.small.rows else []
            named += [f"{item.small.recipe}#{row}" for row in sweep] + list(item.small.after.values())
        for recipe, _, row in (name.partition("#") for name in named):
            assert row in known[recipe], (item.id, recipe, row)


def test_settings_of_rows_compose_with_their_recipes():
    for recipe, row, overrides in {
        (*row.train.split("#"), tuple(row.set)): (*row.train.split("#"), row.set)
        for _, item in ITEMS
        for row in item.rows
        if row.train and row.set
    }.values():
        compose(recipe, row, overrides)


def test_edited_values_are_refused(monkeypatch):
    text = (paper_documents.files("vitadel.papers") / "aas.yaml").read_text("utf-8")
    edited = parse_paper(text.replace("56.61", "58.61"), "aas")
    with pytest.raises(UserError, match=r"papers/aas.yaml are not those that were checked .* Install vitadel again"):
        check_values(edited)
    assert values_checksum(parse_paper(text.replace("gpu_hours: 600", "gpu_hours: 601"), "aas")) == values_checksum(
        parse_paper(text, "aas")
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("aas/table6", "unknown table or figure 'table6' of aas; did you mean table[1-5]"),
        ("ass/table5", "no table or figure 'ass/table5'; did you mean aas/table5"),
        ("light-recipe/figure4", "light-recipe/figure4 shows no result to reproduce: a drawing of attention"),
        ("", "no table or figure ''"),
    ],
)
def test_unknown_tables_are_refused_with_near_names(name, said):
    with pytest.raises(UserError) as caught:
        find_item(name)
    assert re.search(said, str(caught.value)), caught.value


def test_recipes_take_their_expected_values_from_the_documents():
    expected = texts("aas/table5")["expected"]
    assert re.search(r"trades\+aas +87.46 / 59.01 / 58.03 / 57.34", expected)
    assert published_text("light-recipe/table2").splitlines()[4] == "20  56.10 / 34.88"
    recipes = paper_documents.files("vitadel").joinpath("recipes")
    for paper, item in ITEMS:  # a number stands once
        for value in {f"{value:.2f}" for value in item.values() if value >= 10 and round(value, 1) != value}:
            for folder in ("aas", "light", "tora", "afat"):
                for file in recipes.joinpath(folder).iterdir():
                    if "tiny" not in file.name:
                        assert value not in file.read_text("utf-8"), (paper, item.id, value, file.name)
