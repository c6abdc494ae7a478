"""All studies as the report and the terminal tell them: one line each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Shown

from vitadel.reporting.cells import Table, folded, texts
from vitadel.reporting.figures import Picture
from vitadel.reporting.kinds.study_accumulation import ACCUMULATION
from vitadel.reporting.kinds.study_attention import ATTENTION
from vitadel.reporting.kinds.study_corruption_masks import CORRUPTION_MASKS
from vitadel.reporting.kinds.study_curves import CURVES
from vitadel.reporting.kinds.study_perturbations import PERTURBATIONS
from vitadel.reporting.kinds.study_saturation import SATURATION
from vitadel.reporting.kinds.study_scaled_blocks import SCALED_BLOCKS
from vitadel.reporting.read_runs import Run
from vitadel.reporting.study import Study, Told

__all__ = ["STUDIES", "draw_study", "show_study", "study_content", "study_sentence", "study_tables"]

# The name is that of the command, and with _ for - that of the module below vitadel.studies, in which `study_NAME` and
# its order (CurvesOrder, CorruptionMasksOrder) are found.
STUDIES: Mapping[str, Study] = {
    "curves": CURVES,
    "saturation": SATURATION,
    "scaled-blocks": SCALED_BLOCKS,
    "perturbations": PERTURBATIONS,
    "accumulation": ACCUMULATION,
    "attention": ATTENTION,
    "corruption-masks": CORRUPTION_MASKS,
}


def _told_in(run: Run) -> tuple[Study, Told] | None:
    """None for a run that is no study, one not finished, or one by a newer version that knows more of them."""
    told = run.results.get("study")
    if not told or not run.complete or told["name"] not in STUDIES:
        return None
    return STUDIES[told["name"]], told


def draw_study(run: Run) -> Picture | None:
    found = _told_in(run)
    return None if found is None else found[0].draw(run)


def study_sentence(told: Told) -> str:
    study = STUDIES.get(told["name"])
    return f"A study of a kind that is not known here: {told['name']}." if study is None else study.sentence(told)


def study_content(run: Run) -> tuple[str, dict[str, Any]] | None:
    """Title and content of the section; None if there is none."""
    found = _told_in(run)
    if found is None or (picture := found[0].draw(run)) is None:
        return None
    study, told = found
    tables = [
        {
            "caption": table.caption,
            "headings": [column.heading for column in table.columns],
            "rows": [texts(row, table) for row in table.rows],
        }
        for table in map(folded, study.tables(told))
    ]
    content = {"picture": picture, "caption": study.caption, "tables": tables, "remarks": study.remarks(told)}
    return study.title, content


def study_tables(run: Run) -> list[Table]:
    """With numbers in full, for files."""
    found = _told_in(run)
    return [] if found is None else [replace(table, name="") for table in found[0].tables(found[1])]


def show_study(results: Mapping[str, Any]) -> None:
    """Sentence, tables and remarks in the terminal."""
    console, told = Console(), results["study"]
    study = STUDIES[told["name"]]
    console.print(escape(study.sentence(told)))
    for table in map(folded, study.tables(told)):
        shown = Shown(title=escape(table.caption), title_justify="left")
        for column in table.columns:
            shown.add_column(escape(column.heading), justify="left" if column.digits is None else "right")
        for row in table.rows:
            shown.add_row(*map(escape, texts(row, table)))
        console.print(shown)
    for remark in study.remarks(told):
        console.print(f"[dim]{escape(remark)}[/]")
