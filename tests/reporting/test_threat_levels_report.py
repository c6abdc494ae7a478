"""Threat levels in the report: every number of results.json at its place, in table, words and figure."""

from __future__ import annotations

import pytest

from vitadel.reporting.kinds.threat_levels import (
    compare_threat_levels,
    control_table,
    draw_threat_levels,
    level_remarks,
    level_sentence,
    level_table,
    show_threat_levels,
)
from vitadel.reporting.read_runs import Run

SMALL, LARGE = 1 / 255, 4 / 255
BUDGETS = [{"eps": SMALL, "eps_text": "1/255"}, {"eps": LARGE, "eps_text": "4/255"}]
KINDS = {"token": 0.1, "channel": 0.2, "pooled": 0.3}


def share(value, name="robust_accuracy"):
    return {name: value, "ci95": [max(value - 0.1, 0), min(value + 0.1, 1)], "n": 10}


def row(level, attack, eps, value, *, in_pixels=True, text=None, cosines=None, **more):
    shown = {"level": level, "title": f"title of {level}", "knows": f"what {level} knows", "attack": attack}
    shown |= {"eps": eps, "eps_text": text or {SMALL: "1/255", LARGE: "4/255"}[eps], "in_pixels": in_pixels}
    return {**shown, "cosines": cosines or {}, **share(value), **more}


def measured(**changes):
    rows = [
        row("T2", "pgd-3", SMALL, 0.6),
        row("T2", "pgd-3", LARGE, 0.3),
        row("T2", "released", 8 / 255, 0.5, in_pixels=False, text="8/255 in normalised units = 1.8 /255 in pixels"),
        row("T6", "pgd-3", SMALL, 0.2),
        row("T6", "pgd-3", LARGE, 0.1),
        row("T8", "bank", LARGE, 0.15, expected_accuracy=0.25),
    ]
    worst = [{**BUDGETS[0], **share(0.2)}, {**BUDGETS[1], **share(0.1)}]
    ladder = {"budgets": BUDGETS, "rows": rows, "levels": [each for each in rows if each["in_pixels"]]}
    ladder |= {"worst_case": worst, "controls": [], "extraction": [], "left_out": [], "bank_clean_accuracy": 0.75}
    return {"ladder": {**ladder, **changes}, "clean": share(0.9, "accuracy"), "data": {"n": 10}}


def test_every_attack_has_a_row_and_every_budget_a_cell():
    rows = level_table(measured()["ladder"]).rows
    assert [(attacker, list(cells)) for attacker, _, _, *cells in rows] == [
        ("T2 title of T2", ["60.0 (50.0–70.0)", "30.0 (20.0–40.0)"]),
        ("T2 title of T2", ["", ""]),
        ("T6 title of T6", ["20.0 (10.0–30.0)", "10.0 (0.0–20.0)"]),
        ("T8 title of T8", ["", "15.0 (5.0–25.0)"]),
    ]
    # Another unit than pixels is no column: the row says the budget and the number itself.
    assert rows[1][2] == "released (8/255 in normalised units = 1.8 /255 in pixels): 50.0 (40.0–60.0)"


@pytest.mark.parametrize("kinds", [("token", "channel"), ("token", "channel", "pooled")])
def test_cosines_are_given_for_all_compared_features(kinds):
    shifts = {"to bare": 0.0, "to own": 0.4, "no tokens": -0.5}
    cosines = {f"{what}, {kind}": KINDS[kind] + shift for what, shift in shifts.items() for kind in kinds}
    (remark,) = level_remarks(measured(rows=[row("T2", "features-3", SMALL, 0.5, cosines=cosines)])["ladder"])
    pooled = "pooled" in kinds
    assert remark == (
        "Feature cosines under T2 features-3, eps 1/255: "
        f"0.10 per token, 0.20 per channel{', 0.30 pooled' * pooled} to the bare backbone; "
        f"0.50 per token, 0.60 per channel{', 0.70 pooled' * pooled} to its own; "
        f"-0.40 per token, -0.30 per channel{', -0.20 pooled' * pooled} without tokens."
    )


def test_banks_fits_and_missing_levels_are_remarks():
    fit = {"from": "scores", "queries": 128, "cosine": 0.99312, "cosine_before": 0.9}
    remarks = level_remarks(measured(extraction=[fit], left_out=["T1", "trained controls (--recipe)"])["ladder"])
    assert remarks == [
        "T8 at 4/255: one random draw of the bank is right for 25.0 % (75.0 % when clean).",
        "Tokens fitted to the scores of 128 images: feature cosine 0.9931 on other images (0.9000 before the fit).",
        "Levels not run: T1; trained controls (--recipe).",
    ]


def test_controls_stand_under_the_attack_and_its_budget():
    entry = {"control": "zero tokens", "attack": "T2 pgd-3", **BUDGETS[0], "in_pixels": True}
    entry |= {"clean": share(0.8, "accuracy"), **share(0.4)}
    other = {**entry, "attack": "T2 released", "in_pixels": False, "eps_text": "8/255", **share(0.3)}
    table = control_table(measured(controls=[entry, other])["ladder"])
    headings = [column.heading for column in table.columns]
    assert headings == ["instead of the tokens", "clean", "T2 pgd-3, 1/255", "T2 released, 8/255 normalized"]
    assert table.rows == (("zero tokens", "80.0 (70.0–90.0)", "40.0 (30.0–50.0)", "30.0 (20.0–40.0)"),)


def test_the_terminal_shows_every_control_in_full_at_eighty_columns(monkeypatch, capsys, tmp_path):
    """With the four budgets of the suite, nothing is cut short."""
    budgets = [{"eps": level / 255, "eps_text": f"{level}/255"} for level in (1, 2, 4, 8)]
    entries = [
        {"control": name, "attack": attack, **budget, "in_pixels": True, "clean": share(0.9, "accuracy")}
        | share(0.4 + 0.001 * place)
        for name in ("no tokens", "tokens trained to change nothing")
        for attack in ("T2 features-30", "T2 pgd-30, victim's head", "T2 pgd-30, own head")
        for place, budget in enumerate(budgets)
    ]
    released = {**entries[0], "attack": "T2 released", "in_pixels": False, "eps": 8 / 255, "eps_text": "8/255"}
    rows = [{**row("T4", "pgd-30, bare and 2 sets", SMALL, 0.987), **budget} for budget in budgets]
    shown = measured(budgets=budgets, rows=rows, worst_case=[], controls=[*entries, {**released, **share(0.123)}])
    shown |= {"model": {"spec": "m"}, "seed": 0}
    shown["data"]["spec"] = "d"
    shown["ladder"] |= {"tokens": 10, "fingerprint": "f"}
    monkeypatch.setenv("COLUMNS", "80")
    show_threat_levels(run_of(tmp_path, shown))
    said = capsys.readouterr().out
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= 80
    words = " ".join(said.replace("│", " ").split())
    for attack in ("T2 features-30", "T2 pgd-30, own head"):
        assert attack in words
    assert words.count("(30.3–50.3)") == 6  # at 8/255: two controls, three attacks
    assert words.count("(88.7–100.0)") == 4
    assert "T2 released, 8/255" in words
    assert "(2.3–22.3)" in words


def test_the_sentence_puts_the_papers_setting_beside_full_knowledge(tmp_path):
    assert level_sentence(run_of(tmp_path, measured())) == (
        "Of 10 images 90.0 % are classified correctly when clean; at 1/255 60.0 % if the tokens stay unknown (T2), "
        "20.0 % if they are known (T6), 20.0 % in the worst case; at 4/255 30.0 % if the tokens stay unknown (T2), "
        "10.0 % if they are known (T6), 10.0 % in the worst case."
    )


def test_the_figure_is_accuracy_against_knowledge(tmp_path):
    picture = draw_threat_levels(run_of(tmp_path, measured()))
    assert picture is not None
    (axes,) = picture.figure.axes
    curves = [line for bar in axes.containers for line in [bar.lines[0]] if len(line.get_xdata())]
    drawn = [(list(map(float, line.get_xdata())), [round(y, 6) for y in line.get_ydata()]) for line in curves]
    # A line per budget over T2 and T6; the bank is another victim, so its point is on no line.
    assert drawn == [([0, 1], [60, 20]), ([0, 1], [30, 10]), ([2], [15])]
    assert [line.get_linestyle() for line in curves] == ["-", "-", "None"]
    assert [tick.get_text().split("\n")[0] for tick in axes.get_xticklabels()] == ["T2", "T6", "T8"]
    assert axes.get_xlabel() == "what the attacker knows"
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"clean", "eps 1/255", "eps 4/255"}


def run_of(folder, results):
    return Run(folder, {}, results, {}, None, None)


def test_two_runs_stand_beside_each_other_level_by_level(tmp_path):
    """The second has no bank, and one budget less."""
    rows = [row("T2", "pgd-3", SMALL, 0.55), row("T6", "pgd-3", SMALL, 0.4)]
    other = measured(budgets=BUDGETS[:1], rows=rows, levels=rows, worst_case=[{**BUDGETS[0], **share(0.35)}])
    runs = {"as published": run_of(tmp_path / "as-published", measured()), "through": run_of(tmp_path / "b", other)}
    found = compare_threat_levels(runs)
    assert found is not None
    (table,) = found.tables
    assert [column.heading for column in table.columns] == ["attacker", "eps", "as published", "through"]
    assert [list(row) for row in table.rows] == [
        ["clean", "", "90.0 (80.0–100.0)", "90.0 (80.0–100.0)"],
        ["T2 title of T2", "1/255", "60.0 (50.0–70.0)", "55.0 (45.0–65.0)"],
        ["T2 title of T2", "4/255", "30.0 (20.0–40.0)", ""],
        ["T6 title of T6", "1/255", "20.0 (10.0–30.0)", "40.0 (30.0–50.0)"],
        ["T6 title of T6", "4/255", "10.0 (0.0–20.0)", ""],
        ["T8 title of T8", "4/255", "15.0 (5.0–25.0)", ""],
        ["worst case", "1/255", "20.0 (10.0–30.0)", "35.0 (25.0–45.0)"],
        ["worst case", "4/255", "10.0 (0.0–20.0)", ""],
    ]
    (axes,) = found.picture.figure.axes
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == [f"{label}, eps {text}" for label in ("as published", "through") for text in ("1/255", "4/255")]


def test_a_run_without_levels_is_compared_with_nothing(tmp_path):
    empty = run_of(tmp_path / "empty", measured(levels=[]))
    assert compare_threat_levels({"a": run_of(tmp_path / "a", measured()), "b": empty}) is None
