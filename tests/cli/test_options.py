"""Groups of flags: typer sees each field as a flag, and the verb gets them packed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from vitadel.cli.options import expand_groups, flag_names


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option(help="how wide")]
    height: Annotated[int, typer.Option(help="how high")] = 2
    as_json: Annotated[bool, typer.Option("--json")] = False


ONE_WIDE = Size(1)


def app_around(seen: list[object], size: Size = ONE_WIDE) -> typer.Typer:
    app = typer.Typer()

    @app.command()
    @expand_groups
    def measure(
        name: Annotated[str, typer.Argument()] = "box", size: Size = size, loud: Annotated[bool, typer.Option()] = False
    ) -> None:
        """Measure NAME."""
        seen.append((name, size, loud))

    return app


def test_the_verb_gets_its_group_packed():
    seen: list[object] = []
    assert CliRunner().invoke(app_around(seen), ["tin", "--height", "5", "--json", "--loud"]).exit_code == 0
    assert seen == [("tin", Size(1, 5, True), True)]


def test_defaults_are_those_of_the_instance_that_the_verb_names():
    seen: list[object] = []
    CliRunner().invoke(app_around(seen, Size(7, height=9)), [])
    assert seen == [("box", Size(7, 9), False)]


def test_help_shows_every_flag_once_with_its_text():
    shown = CliRunner().invoke(app_around([]), ["--help"]).output
    for flag in ("--width", "--height", "--json", "--loud"):
        assert shown.count(f"{flag} ") >= 1
    assert "how wide" in shown
    assert "Measure NAME" in shown
    assert "--size" not in shown


def test_a_wrong_value_is_reported_with_its_flag():
    result = CliRunner().invoke(app_around([]), ["--height", "tall"])
    assert result.exit_code == 2
    assert "--height" in result.output


def test_names_of_flags():
    assert flag_names(Size) == ("width", "height", "as_json")
