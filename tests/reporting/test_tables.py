"""Tables as they are read: an interval stands behind its number."""

from __future__ import annotations

import pytest

from vitadel.errors import UserError
from vitadel.reporting.tables import (
    Column,
    Table,
    check_columns,
    choose_columns,
    fold_intervals,
    narrow,
    row_texts,
    share_cells,
    share_columns,
)

SHARE = {"accuracy": 0.5, "ci95": (0.25, 0.7512)}


def test_intervals_move_behind_their_numbers_and_empty_columns_go() -> None:
    columns = (Column("model"), *share_columns("clean"), Column("n", 0), *share_columns("worst"), Column("to"))
    table = Table("caption", columns, (("a", *share_cells(SHARE, "accuracy"), 8, None, None, None, "b"),), "name")
    seen = fold_intervals(table)
    assert [column.heading for column in seen.columns] == ["model", "clean, %", "n", "to"]
    assert [column.digits for column in seen.columns] == [None, 1, 0, None]
    assert row_texts(seen.rows[0], seen) == ["a", "50.0 (25.0 to 75.1)", "8", "b"]
    assert (seen.name, seen.caption) == ("name", "caption")


def test_ends_by_bare_names_and_numbers_without_an_interval() -> None:
    columns = (Column("images"), *(Column(name, 3) for name in ("cosine", "from", "to", "median")))
    rows = (("a", 0.9, 0.8, 0.95, 0.91), ("b", 0.5, None, None, None))
    seen = fold_intervals(Table("", columns, rows))
    assert [row_texts(row, seen) for row in seen.rows] == [["a", "0.900 (0.800 to 0.950)", "0.910"], ["b", "0.500", ""]]


def test_a_table_without_intervals_is_itself() -> None:
    table = Table("", (Column("from"), Column("to")), (("a", "b"),))
    assert fold_intervals(table) == table


def test_a_table_for_a_paper_is_narrow():
    texts = (Column("data"), Column("eps"), Column("p (Holm)", 4))
    columns = (Column("run"), Column("n", 0), *share_columns("clean"), *texts)
    rows = (
        ("/home/me/runs/a", 100, 66.2, 61.5, 70.7, "folder:/home/me/photos", "8/255", 1e-9),
        ("zoo:b", 100, 99.96, 98.6, 100.0, "folder:/home/me/photos", "4/255", 0.03),
    )
    table = narrow(Table("Runs.", columns, rows))
    assert [column.heading for column in table.columns] == ["run", "clean, %", "eps", "p (Holm)"]
    assert row_texts(table.rows[0], table) == ["a", "66.2 [61.5, 70.7]", "8/255", "<0.0001"]
    assert row_texts(table.rows[1], table) == ["zoo:b", "99.96 [98.6, 100.0]", "4/255", "0.0300"]
    assert table.caption == "Runs. All rows: n 100, data folder:photos."


def test_columns_can_be_chosen():
    columns = (Column("run"), *share_columns("worst case"), Column("eps"))
    table = Table("Runs.", columns, (("a", 1.0, 0.5, 2.0, "8/255"),))
    check_columns(["eps", "Worst case"], [table])
    chosen = choose_columns(fold_intervals(table), ["eps", "Worst case"])
    assert [column.heading for column in chosen.columns] == ["eps", "worst case, %"]
    assert choose_columns(table, ["seed"]) == table  # of another table
    with pytest.raises(UserError, match="unknown column 'worst'"):
        check_columns(["worst"], [table])
