"""Exported files say what the run folders say: read back, they give the numbers that went in."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from run_folders import write_run
from vitadel.errors import Mistake
from vitadel.reporting.exports import export
from vitadel.reporting.tables import Column, Table, as_csv, as_latex, as_markdown

ALL, HALF = [True] * 40, [True, False] * 20
HOSTILE = r"""<b>&%$#_{}~^\|*`"x" =1"""


def made(path: Path, **settings: Any) -> Path:
    return write_run(path, **{"correct": ALL, "attacks": {"fgsm": ALL, "pgd-20": HALF}, **settings})


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as text:
        return list(csv.DictReader(text))


def test_numbers_come_back_from_csv_in_full(tmp_path: Path) -> None:
    correct = [True] * 39 + [False]
    runs = [made(tmp_path / "a", correct=correct, model="a"), made(tmp_path / "b", attacks={"fgsm": ALL}, model="b")]
    export(runs, tmp_path / "out")
    first, second = rows_of(tmp_path / "out" / "tables" / "runs.csv")
    assert (first["run"], first["n"], first["eps"], first["finished"]) == ("a", "40", "8/255", "yes")
    assert float(first["clean, %"]) == 97.5
    assert float(first["worst case, %"]) == 50.0
    assert float(first["worst case, from"]) < 50 < float(first["worst case, to"])
    assert second["attacks"] == "fgsm"
    attacks = rows_of(tmp_path / "out" / "tables" / "attacks.csv")
    assert [(row["run"], row["attack"], row["held"]) for row in attacks] == [
        ("a", "fgsm", "39"), ("a", "pgd-20", "20"), ("b", "fgsm", "40"),
    ]  # fmt: skip
    clean, worst = rows_of(tmp_path / "out" / "tables" / "pairs.csv")
    assert (clean["only A"], clean["only B"], float(clean["A - B, points"])) == ("0", "1", -2.5)
    assert float(worst["p (McNemar)"]) == 2 / 2**20  # twenty images, all of them b's
    classes = rows_of(tmp_path / "out" / "tables" / "classes-1.csv")
    assert [(row["class"], row["n"], float(row["worst case, %"])) for row in classes[:2]] == [
        ("disc", "10", 100.0), ("square", "10", 0.0),
    ]  # fmt: skip


def test_one_run_needs_no_numbers_in_names(tmp_path: Path) -> None:
    written = export([made(tmp_path / "a"), tmp_path / "a" / ".." / "a"], tmp_path / "out")
    names = {str(path.relative_to(tmp_path / "out")) for path in written}
    tables = {f"tables/{name}.{ending}" for name in ("runs", "attacks", "classes") for ending in ("csv", "tex", "md")}
    figures = {f"figures/{name}.{end}" for name in ("accuracy", "classes", "examples") for end in ("svg", "png")}
    assert names == tables | figures
    assert names == {
        str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()
    }


def test_figures_are_pictures(tmp_path: Path) -> None:
    export([made(tmp_path / "a", class_names=(HOSTILE, "\x00<script>"))], tmp_path / "out")
    for name in ("accuracy", "classes", "examples"):
        root = ElementTree.parse(tmp_path / "out" / "figures" / f"{name}.svg").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert float(root.attrib["width"].removesuffix("pt")) > 400
        assert not [element for element in root.iter() if element.tag.endswith("script")]
        with Image.open(tmp_path / "out" / "figures" / f"{name}.png") as picture:
            assert picture.width > 1000


TABLE = Table(
    "t", "Shares, 95 %", (Column("name"), Column("x_1", 1), Column("p", 4)),
    (("plain", 12.345, 0.00012), (HOSTILE, None, 1.0), ("=cmd|' /C calc'!A0", 3, None), ("[2ex]", -0.04, None)),
)  # fmt: skip


def test_latex_parses_back() -> None:
    text = as_latex(TABLE)
    body = text[text.index(r"\midrule") + len(r"\midrule") : text.index(r"\bottomrule")].strip()
    lines = [line.removesuffix(r"\\").strip() for line in body.splitlines()]
    cells = [[_untexed(cell) for cell in re.split(r"(?<!\\)&", line)] for line in lines]
    assert cells == [
        ["plain", "12.3", "0.0001"], [HOSTILE, "", "1.0000"], ["=cmd|' /C calc'!A0", "3", ""], ["[2ex]", "-0.0", ""],
    ]  # fmt: skip
    assert r"\caption{Shares, 95 \%}" in text
    assert r"\begin{tabular}{lrr}" in text
    assert all(line.startswith("{}") for line in lines)  # else [2ex] would be the spacing of the line before


def _untexed(cell: str) -> str:
    words = {"backslash": "\\", "asciitilde": "~", "asciicircum": "^", "less": "<", "greater": ">"}
    cell = re.sub(r"\\text(\w+)\{\}", lambda found: words[found[1]], cell.strip().removeprefix("{}"))
    return re.sub(r"\\([&%$#_{}])", r"\1", cell.replace(r"\char34{}", '"'))


def test_markdown_parses_back() -> None:
    caption, blank, heading, rule, *lines = as_markdown(TABLE).splitlines()
    assert (caption, blank, heading, rule) == ("*Shares, 95 %*", "", r"| name | x\_1 | p |", "|---|---:|---:|")
    cells = [[_unmarked(cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert [row[0] for row in cells] == ["plain", HOSTILE, "=cmd|' /C calc'!A0", "[2ex]"]
    assert cells[0][1:] == ["12.3", "0.0001"]
    assert "<b>" not in "".join(lines)


def _unmarked(cell: str) -> str:
    cell = re.sub(r"\\([\\`*_\[\]|#])", r"\1", cell.strip())
    return cell.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


def test_csv_never_holds_a_formula() -> None:
    rows = list(csv.reader(as_csv(TABLE).splitlines()))
    assert rows[1] == ["plain", "12.345", "0.00012"]
    assert rows[2][0] == HOSTILE
    assert rows[3] == ["'=cmd|' /C calc'!A0", "3", ""]
    assert rows[4][1] == "-0.04"  # a negative number is a number


def test_findings_become_a_table(tmp_path: Path) -> None:
    path = made(tmp_path / "a", findings=[{"check": "steps", "verdict": "ok", "evidence": {"a": 0.5}, "advice": ""}])
    export([path], tmp_path / "out")
    (finding,) = rows_of(tmp_path / "out" / "tables" / "findings.csv")
    assert (finding["check"], finding["evidence"]) == ("steps", "a: 0.5")


def test_unfinished_runs_are_exported_as_far_as_they_got(tmp_path: Path) -> None:
    begun = made(tmp_path / "a", pending=["square"])
    export([begun, made(tmp_path / "b")], tmp_path / "out")
    first, _ = rows_of(tmp_path / "out" / "tables" / "runs.csv")
    assert (first["finished"], float(first["clean, %"])) == ("no", 100)
    (begun / "results.json").unlink()
    export([begun], tmp_path / "empty")
    (only,) = rows_of(tmp_path / "empty" / "tables" / "runs.csv")
    assert (only["clean, %"], only["n"]) == ("", "")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(Mistake, match="is a file; --export takes a folder"):
        export([made(tmp_path / "a")], tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_from_the_command_line(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    words = [sys.executable, "-m", "vitadel", "report", str(run), "--export", str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(run / "report.html")
    assert (tmp_path / "out" / "tables" / "runs.tex").exists()
