"""`vitadel VERB`: the parser, and how every verb ends: 0 done, 2 the user's mistake, 130 interrupted, 1 our fault."""

from __future__ import annotations

import errno
import shlex
import sys
from pathlib import Path
from typing import NoReturn

import typer

from vitadel.cli import (
    attack,
    audit,
    corrupt,
    diagnose,
    harden,
    inspect,
    listing,
    plan,
    probe,
    recipes,
    report,
    selftest,
    study,
    trade_off,
    ui,
)
from vitadel.errors import Interrupted, UserError
from vitadel.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="vitadel",
    help="Is this Vision Transformer really robust? Audit it, attack it, harden it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("audit")(audit.audit)
app.command("attack")(attack.attack)
app.command("diagnose")(diagnose.diagnose)
app.command("harden")(harden.harden)
app.command("probe")(probe.probe)
app.command("trade-off")(trade_off.trade_off)
app.command("corrupt")(corrupt.corrupt)
app.command("inspect")(inspect.inspect)
app.command("plan")(plan.plan)
app.command("report")(report.report)
app.command("list")(listing.listing)
app.add_typer(recipes.app, name="recipes")
app.add_typer(study.app, name="study")
app.command("selftest")(selftest.selftest)
app.command("ui")(ui.ui)


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"vitadel {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="print the version"),
) -> None:
    """Is this Vision Transformer really robust? Audit it, attack it, harden it."""


def resuming_command(argv: list[str], folder: Path) -> str:
    """What to type to go on with an interrupted run."""
    words = ["vitadel", *(word for word in argv if word != "--resume")]
    if not any(word == "--out" or word.startswith("--out=") for word in words):
        words += ["--out", str(folder)]
    return shlex.join([*words, "--resume"])


def main() -> None:
    """The console script. Wrong flags end inside `app` with exit code 2, Ctrl-C before a run with 130."""
    try:
        app()
    except UserError as mistake:
        _end(f"vitadel: {mistake}", 2)
    except Interrupted as stop:
        again = resuming_command(sys.argv[1:], stop.folder)
        _end(f"vitadel: interrupted; what is done is saved. Go on with:\n  {again}", 130)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _end(f"vitadel: no space left where the output goes: {error.strerror}. Files of the run are kept.", 2)


def _end(message: str, code: int) -> NoReturn:
    sys.stderr.write(message + "\n")
    sys.exit(code)
