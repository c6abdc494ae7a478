"""Tables and figures of a report as files: CSV, LaTeX and Markdown; SVG and PNG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from vitadel.errors import UserError
from vitadel.reporting.figures import Picture
from vitadel.reporting.read_runs import Run, read_all, shown_from
from vitadel.reporting.sections import OF_A_RUN, OVERVIEW
from vitadel.reporting.tables import FORMATS, tables_of
from vitadel.runtime.run_folder import write_atomically

__all__ = ["export", "pictures_of"]


def pictures_of(runs: Sequence[Run]) -> Iterator[tuple[str, Picture]]:
    """Every figure of the page, by a name that no other has."""
    shared = [section for make in OVERVIEW if (section := make(runs))]
    alone = [(place, section) for place, run in enumerate(runs, 1) for make in OF_A_RUN if (section := make(run))]
    for place, section in [*((0, section) for section in shared), *alone]:
        picture = section.content.get("picture")
        if picture is not None:
            yield f"{picture.name}-{place}" if place and len(runs) > 1 else picture.name, picture


def export(paths: Sequence[Path], out: Path) -> list[Path]:
    """Write DIR/tables and DIR/figures for papers; returns the files, which replace those of an earlier export."""
    if out.is_file():
        raise UserError(f"{out} is a file; --export takes a folder, for tables/ and figures/ below it")
    runs = read_all(paths)
    with shown_from(*runs):
        tables, pictures = tables_of(runs), list(pictures_of(runs))
    written: list[Path] = []

    def write(path: Path, content: bytes) -> None:
        write_atomically(path, content)
        written.append(path)

    for table in tables:
        for ending, convert in FORMATS.items():
            write(out / "tables" / f"{table.name}.{ending}", convert(table).encode("utf-8", errors="replace"))
    for name, picture in pictures:
        write(out / "figures" / f"{name}.svg", picture.svg_file())
        write(out / "figures" / f"{name}.png", picture.png())
    return written
