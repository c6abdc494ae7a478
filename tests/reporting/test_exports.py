"""Exported files say what the run folders say: read back, they give the numbers that went in."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from run_folders import write_run
from vitadel.errors import UserError
from vitadel.reporting.exports import export, tables_of
from vitadel.reporting.page import write_report
from vitadel.reporting.read_runs import read_run
from vitadel.reporting.tables import Column, Table, as_csv, as_latex, as_markdown

ALL, HALF = [True] * 40, [True, False] * 20
HOSTILE = r"""<b>&%$#_{}~^\|*`"x" =1"""


def made(path: Path, **settings: Any) -> Path:
    return write_run(path, **{"correct": ALL, "attacks": {"fgsm": ALL, "pgd-20": HALF}, **settings})


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as text:
        return list(csv.DictReader(text))


@pytest.mark.slow
def test_numbers_come_back_from_csv_in_full(tmp_path: Path) -> None:
    correct = [True] * 39 + [False]
    runs = [
        made(tmp_path / "a", correct=correct, model="a"),
        made(tmp_path / "b", attacks={"fgsm": ALL, "pgd-20": ALL}, model="b"),
    ]
    export(runs, tmp_path / "out")
    first, second = rows_of(tmp_path / "out" / "tables" / "runs.csv")
    assert (first["run"], first["n"], first["eps"], first["finished"]) == ("a", "40", "8/255", "yes")
    assert (float(first["parameters, M"]), float(first["GMACs"])) == (5.5, 1.26)
    assert float(first["clean, %"]) == 97.5
    assert float(first["worst case, %"]) == 50.0
    assert float(first["worst case, from"]) < 50 < float(first["worst case, to"])
    assert second["attacks"] == "fgsm, pgd-20"
    attacks = rows_of(tmp_path / "out" / "tables" / "attacks.csv")
    assert [(row["run"], row["attack"], row["held"]) for row in attacks] == [
        ("a", "fgsm", "39"), ("a", "pgd-20", "20"), ("b", "fgsm", "40"), ("b", "pgd-20", "40"),
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
    assert names == tables | figures | {"model-index.yaml", "timm.csv", "results.json"}
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
    "Shares, 95 %", (Column("name"), Column("x_1", 1), Column("p", 4)),
    (("plain", 12.345, 0.00012), (HOSTILE, None, 1.0), ("=cmd|' /C calc'!A0", 3, None), ("[2ex]", -0.04, None)), "t",
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


@pytest.mark.parametrize(
    ("text", "written"),
    [
        *((number, number) for number in ("-0.3", "+12", "-1e-05", "-7.25e+3")),
        *((formula, f"'{formula}") for formula in ("-1+cmd|' /C calc'!A0", "+A1", "-", "=1", "@x", "-0.3\n=1", "-1,2")),
    ],
)
def test_text_that_is_a_number_is_left_alone(text: str, written: str) -> None:
    table = Table("", (Column("x"),), ((text,),))
    assert list(csv.reader(as_csv(table).splitlines(keepends=True)))[1] == [written]


def suite_tables(path: Path, **suite: Any) -> dict[str, list[dict[str, str]]]:
    """What is exported of a run of a suite, read back from CSV, by the names of the tables."""
    run = read_run(made(path, model="m"))
    tables = tables_of([replace(run, results={**run.results, **suite}, samples=None)])
    return {table.name: list(csv.DictReader(as_csv(table).splitlines())) for table in tables}


def spread(value: float) -> dict[str, Any]:
    return {"mean": value, "ci95": [value - 1 / 30, value + 1 / 30]}


def shares(name: str, value: float) -> dict[str, Any]:
    return {name: value, "ci95": [value - 1 / 30, value + 1 / 30]}


def exact(row: dict[str, str], name: str, middle: float, scale: float = 100) -> bool:
    """The number and both ends of its interval, to the last digit."""
    heading = f"{name}, %" if scale == 100 else name
    ends = [float(row[f"{name}, {end}"]) for end in ("from", "to")]
    return float(row[heading]) == scale * middle and ends == [scale * (middle - 1 / 30), scale * (middle + 1 / 30)]


def test_corruptions_are_numbers_in_full(tmp_path: Path) -> None:
    row = {"corruption": "motion_blur", "part_of_mce": True, "error": 2 / 3, "ce": 100 / 7}
    cells = [{"corruption": "motion_blur", "severity": 1, "error": 1 / 3}]
    mean = {"mean_error": 2 / 3, "mean_error_ci95": [0.6, 0.7], "mean_error_over": ["motion_blur"], "mean_ce": None}
    reported = {"severities": [1], "cells": cells, "rows": [row], "made": "here", **mean}
    (got,) = suite_tables(tmp_path / "a", suite="corruptions", corruptions=reported)["corruptions"]
    assert got["corruption"] == "motion blur"
    numbers = [float(got[name]) for name in ("1", "mean error, %", "CE")]
    assert numbers == pytest.approx([100 / 3, 200 / 3, 100 / 7], rel=1e-14)


def test_threat_levels_are_exported_in_full(tmp_path: Path) -> None:
    row = {"level": "T2", "title": "grey box", "knows": "weights", "attack": "pgd-20", "eps": 4 / 255, "cosines": {}}
    row |= {"eps_text": "4/255", "in_pixels": True, **shares("robust_accuracy", 1 / 7)}
    reported = {"tokens": 3, "fingerprint": "f", "budgets": [{"eps": 4 / 255, "eps_text": "4/255"}], "rows": [row]}
    reported |= {"levels": [row], "worst_case": [], "controls": [], "extraction": [], "left_out": []}
    (got,) = suite_tables(tmp_path / "a", suite="ladder", ladder=reported)["threat-ladder"]
    assert (got["attacker"], got["knows"], got["attack"], got["eps"]) == ("T2 grey box", "weights", "pgd-20", "4/255")
    assert exact(got, "accuracy", 1 / 7)


def test_a_trade_off_is_numbers_in_full(tmp_path: Path) -> None:
    rvt = {"clean": shares("accuracy", 1 / 3), "attacks": [shares("robust_accuracy", 1 / 9)]}
    entry = {"name": "low", "kind": "tora", "lambda": 0.5, "knob": None, "clean": shares("accuracy", 5 / 7)}
    worst = {"eps": 4 / 255, "eps_text": "4/255", **shares("robust_accuracy", 1 / 7)}
    entry |= {"rvt": {"joint": rvt}, "attacks": [], "worst_case": [worst]}
    areas = {name: spread(value) for name, value in (("map", 1 / 3), ("attention", 1 / 6), ("random", 1 / 9))}
    apart = {"map - random": spread(-1 / 7), "map - attention": spread(1 / 11)}
    checks = {"name": "low", "deletion": areas, "deletion_differences": apart}
    checks |= {"insertion": areas, "insertion_differences": apart}
    reported = {"budgets": [{"eps": 4 / 255, "eps_text": "4/255"}], "contenders": [entry]}
    reported |= {"rvt": {"eps_text": "1/255", "attacks": ["fgsm"]}, "maps": {"n": 5, "contenders": [checks]}}
    tables = suite_tables(tmp_path / "a", suite="trade-off", trade_off=reported)
    (got,) = tables["trade-off-of-accuracy-and-robustness-1"]
    assert (got["model"], got["what"]) == ("low", "TORA, lambda 0.5")
    assert exact(got, "clean", 5 / 7)
    assert exact(got, "worst case, 4/255", 1 / 7)
    (got,) = tables["trade-off-of-accuracy-and-robustness-2"]
    assert got["output"] == "joint"
    assert exact(got, "clean", 1 / 3)
    assert exact(got, "fgsm, 1/255", 1 / 9)
    deletion, insertion = tables["maps-of-the-adapters"]
    assert (deletion["check"], insertion["check"]) == ("deletion", "insertion")
    for name, value in (("map", 1 / 3), ("attention", 1 / 6), ("random", 1 / 9), ("map - random", -1 / 7)):
        assert exact(insertion, name, value, scale=1)


def test_stability_is_numbers_in_full(tmp_path: Path) -> None:
    def part(mean: float) -> dict[str, Any]:
        ends = {"worst": shares("accuracy", 1 / 7), "best": shares("accuracy", 6 / 7)}
        by_mask = {"lowest": 0.3, "highest": 0.4}
        histogram = {"counts": [12], "edges": [0.0, 1.0]}
        masks = {name: {**spread(1 / 6), **histogram} for name in ("first_mask", "worst_mask")}
        seen = {**spread(mean), **ends, "quartiles": [1 / 6, 2 / 6, 4 / 6], "by_mask": by_mask, "curve": [0.1, 0.9]}
        drift = {"median": [0.1, 2 / 7], "lower": [0.0, 0.1], "upper": [0.3, 0.4], "mean": [0.1, 0.2]}
        return {"accuracy": seen, "similarity": {**spread(mean), **masks}, "drift": drift}

    reported = {
        "n": 40,
        "masks": 3,
        "watched": 2,
        "patches": 16,
        "corrupted": 4,
        "similarity": "map",
        "blocks": ["1", "2"],
    }
    reported |= {"random": part(1 / 3), "transfer": part(2 / 3)}
    tables = suite_tables(tmp_path / "a", suite="stability", stability=reported)
    chance, moved = tables["stability-under-noisy-patches-1"]
    assert (chance["patches"], moved["patches"]) == ("random", "transferred")
    assert exact(chance, "mean over masks", 1 / 3)
    assert exact(moved, "mean over masks", 2 / 3)
    assert exact(chance, "worst of 3", 1 / 7)
    assert exact(chance, "best of 3", 6 / 7)
    middle = [float(chance[f"{name} quartile, %"]) for name in ("lower", "middle", "upper")]
    assert middle == pytest.approx([100 / 6, 100 / 3, 200 / 3], rel=1e-14)
    assert moved["worst of 3, %"] == moved["middle quartile, %"] == ""  # chosen once, so there is no other
    chance, moved = tables["stability-under-noisy-patches-2"]
    assert exact(chance, "cosine of attention", 1 / 3, scale=1)
    assert (float(chance["worst mask of each image"]), moved["worst mask of each image"]) == (1 / 6, "")
    assert float(moved["drift, last block"]) == 2 / 7


def test_findings_become_a_table(tmp_path: Path) -> None:
    path = made(tmp_path / "a", findings=[{"check": "steps", "verdict": "ok", "evidence": {"a": 0.5}, "advice": ""}])
    export([path], tmp_path / "out")
    (finding,) = rows_of(tmp_path / "out" / "tables" / "findings.csv")
    assert (finding["check"], finding["evidence"]) == ("steps", "a: 0.5")


def test_unfinished_runs_are_exported_as_far_as_they_got(tmp_path: Path) -> None:
    started = made(tmp_path / "a", pending=["square"])
    export([started, made(tmp_path / "b")], tmp_path / "out")
    first, _ = rows_of(tmp_path / "out" / "tables" / "runs.csv")
    assert (first["finished"], float(first["clean, %"])) == ("no", 100)
    (started / "results.json").unlink()
    export([started], tmp_path / "empty")
    (only,) = rows_of(tmp_path / "empty" / "tables" / "runs.csv")
    assert (only["clean, %"], only["n"]) == ("", "")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UserError, match="is a file; --export takes a folder"):
        export([made(tmp_path / "a")], tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    words = [sys.executable, "-m", "vitadel", "report", str(run), "--export", str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(run / "report.html")
    assert (tmp_path / "out" / "tables" / "runs.tex").exists()


@pytest.mark.slow
def test_runs_can_be_given_names(tmp_path: Path) -> None:
    runs = [made(tmp_path / "a"), made(tmp_path / "b")]
    export(runs, tmp_path / "out", ["ours", "theirs"])
    assert (tmp_path / "out" / "tables" / "runs.md").read_text().count("| ours |") == 1
    write_report(runs, tmp_path / "page.html", title="A <title>", names=["ours", "theirs"])
    page = (tmp_path / "page.html").read_text()
    assert "A &lt;title&gt;" in page
    assert "theirs" in page
    with pytest.raises(UserError, match="--names gives 1 names for 2 runs"):
        export(runs, tmp_path / "out", ["ours"])
