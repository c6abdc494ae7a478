"""`vitadel recipes` and `vitadel list recipes` as a person meets them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import command_line
from vitadel.cli.main import app
from vitadel.errors import UserError
from vitadel.training.recipes.compose import compose, rows, source
from vitadel.training.recipes.yaml_files import shipped_recipes

SHIPPED = "shapes/trades"
FAULTY = "extends: shapes/trades\ntrain: {epoch: 3}\nobjective: {betta: 1}\n"


def vitadel(*words: str) -> str:
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_show_prints_the_file_with_its_comments():
    assert vitadel("recipes", "show", SHIPPED) == source(SHIPPED)
    shown = vitadel("recipes", "show", "aas/table4")
    assert shown.startswith(source("aas/table4"))
    assert shown.rstrip().endswith(f"# rows: {', '.join(rows('aas/table4'))}")


def test_show_prints_a_row_with_all_that_it_extends():
    shown = vitadel("recipes", "show", "aas/table4", "--row", "trades+aas")
    assert "eps: 8/255" in shown
    document = yaml.safe_load(shown)
    assert "clean / AutoAttack" in document["expected"]  # of the paper, and with its budget
    assert "trades+aas  65.26 / 28.04" in document["expected"]
    assert "8/255, AutoAttack on all 5,000 test images" in document["expected"]
    assert document["objective"]["use"] == "trades"
    assert document["train"] == compose("aas/table4", "trades+aas")["train"]
    composed = yaml.safe_load(vitadel("recipes", "show", SHIPPED, "--composed"))
    assert composed["train"] == compose(SHIPPED)["train"]


def test_copy_writes_a_recipe_that_runs_on_and_never_overwrites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert vitadel("recipes", "copy", SHIPPED, "new/mine.yaml").strip() == "new/mine.yaml"
    assert Path("new/mine.yaml").read_text() == source(SHIPPED)
    assert compose("new/mine.yaml") == compose(SHIPPED)
    Path("new/mine.yaml").write_text("my own work")
    with pytest.raises(UserError, match="already exists"):
        vitadel("recipes", "copy", SHIPPED, "new/mine.yaml")
    assert Path("new/mine.yaml").read_text() == "my own work"
    with pytest.raises(UserError, match=r"does not end in \.yaml"):
        vitadel("recipes", "copy", SHIPPED, "mine.txt")
    with pytest.raises(UserError, match="unknown recipe 'shapes/tradez'"):
        vitadel("recipes", "copy", "shapes/tradez", "other.yaml")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine.yaml", "new"]


def test_check_reports_what_is_good_and_every_fault_of_the_rest(tmp_path):
    for name in ("one.yaml", "two.yaml"):
        (tmp_path / name).write_text(FAULTY)
    assert vitadel("recipes", "check", SHIPPED, "aas/table4") == f"{SHIPPED}: good\naas/table4: good, 4 rows\n"
    with pytest.raises(UserError) as caught:
        vitadel("recipes", "check", str(tmp_path / "one.yaml"), SHIPPED, str(tmp_path / "two.yaml"))
    assert str(caught.value).count("has 2 problems:") == 2
    assert str(caught.value).count("did you mean epochs?") == 2
    assert str(caught.value).count("did you mean beta") == 2


def test_faults_end_with_exit_code_two_and_no_traceback(tmp_path):
    (tmp_path / "mine.yaml").write_text(FAULTY)
    done = command_line.vitadel("recipes", "check", "mine.yaml", cwd=tmp_path, code=2)
    assert done.stderr.startswith("vitadel: recipe mine.yaml has 2 problems:\n  - train: has no 'epoch'")


@pytest.mark.parametrize("place", ["objective: {use: subprocess.Popen, %s}", "plugins: {subprocess.Popen: {%s}}"])
def test_a_check_runs_no_command_that_a_recipe_names(tmp_path, monkeypatch, place):
    monkeypatch.setenv("VITADEL_TRUST_CODE", "0")
    (tmp_path / "mine.yaml").write_text("extends: shapes/trades\n" + place % "args: [touch, done]" + "\n")
    refused = command_line.vitadel("recipes", "check", "mine.yaml", cwd=tmp_path, code=2)
    assert "'subprocess.Popen', which would be imported and run" in refused.stderr
    monkeypatch.setenv("VITADEL_TRUST_CODE", "1")
    trusted = command_line.vitadel("recipes", "check", "mine.yaml", cwd=tmp_path, code=2)
    assert "'subprocess.Popen' is not a dataclass" in trusted.stderr, "no class is called that is no component"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_list_reports_every_recipe_with_its_rows(monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    listed = vitadel("list", "recipes")
    for name in shipped_recipes():
        line = next(line for line in listed.splitlines() if line.split()[:1] == [name])
        assert (f"[{len(rows(name))} rows]" in line) == bool(rows(name))
    assert "shapes/trades" not in vitadel("list", "recipes", "table5")
