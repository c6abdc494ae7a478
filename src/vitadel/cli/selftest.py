"""`vitadel selftest`: checks the installation by attacking models whose answer is known in closed form."""

from __future__ import annotations

import typer


def selftest() -> None:
    """Check the installation (about a minute).

    Attacks models whose robustness is known in closed form.
    """
    from vitadel.evaluation.selftest import selftest as checks

    failed = 0
    for check in checks():
        failed += not check.passed
        typer.echo(f"{'ok    ' if check.passed else 'FAILED'} {check.name}: {check.evidence}")
    if failed:
        typer.echo(f"{failed} checks failed: please report this with the lines above.", err=True)
        raise typer.Exit(1)
    typer.echo("all checks passed")
