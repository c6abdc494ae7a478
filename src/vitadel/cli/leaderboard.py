"""`vitadel leaderboard`: many audits on one static page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitadel.cli.options import option


def leaderboard(
    runs: Annotated[list[Path], typer.Argument(help="run folders of audits")],
    out: Annotated[Path, option("HTML file")] = Path("leaderboard.html"),
) -> None:
    """Write a static, sortable page that ranks audits.

    Models share a rank as long as their images do not separate them.
    """
    from vitadel.reporting.leaderboard import write_leaderboard

    count = write_leaderboard(runs, out)
    typer.echo(f"{count} runs", err=True)
    typer.echo(str(out))
