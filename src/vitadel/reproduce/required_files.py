"""The files that a table needs: which are there, which are missing, where to get them, and what runs without them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vitadel.data.spec import DATA_KINDS, open_dataset
from vitadel.errors import UserError
from vitadel.papers.paper_documents import DataSet, data_sets
from vitadel.reproduce.jobs import Job, TableJobs
from vitadel.training.recipes.compose import compose

DEFAULT_ROOT = "data"
_OTHER_FILES = "Other files with the same classes: --train-data SPEC --test-data SPEC."


@dataclass(frozen=True)
class Required:
    """A data set that some rows need."""

    name: str
    data: DataSet
    path: Path
    rows: tuple[str, ...]

    @property
    def there(self) -> bool:
        return self.path.exists()


def required_files(table: TableJobs) -> list[Required]:
    """The data sets of all jobs, in the order of the table's list."""
    root = Path(table.request.data_root or DEFAULT_ROOT)
    needed: dict[str, list[str]] = {}
    for job in table.jobs:
        for name in _names(table, job):
            rows = needed.setdefault(name, [])
            if job.row.id not in rows:
                rows.append(job.row.id)
    known = data_sets()
    return [
        Required(name, known[name], root / known[name].path, tuple(needed[name])) for name in known if name in needed
    ]


def _names(table: TableJobs, job: Job) -> list[str]:
    """The data sets that a job reads: by the kind of the spec, as in cifar10@test, or by its path."""
    found = []
    for spec in table.data_specs(job):
        place = spec.partition("@")[0].partition("(")[0]
        for name, data in data_sets().items():
            if place == name or place.endswith(f"/{data.path}"):
                found.append(name)
    return found


def published_weights(table: TableJobs) -> list[str]:
    """Models that start from weights which timm downloads."""
    names = [str(job.row.model) for job in table.jobs if job.row.options.get("weights") == "pretrained"]
    for training in table.trainings():
        section = compose(training.recipe, training.row, training.overrides).get("model", {})
        if section.get("weights") == "pretrained":
            names.append(section["name"])
    return list(dict.fromkeys(names))


def check_files(table: TableJobs) -> None:
    """Refuse to start if data is missing: say which, where it comes from, and what can run without it."""
    missing = [each for each in required_files(table) if not each.there]
    if not missing:
        _check_complete(table)
        return
    blocked = {row for each in missing for row in each.rows}
    rows = list(dict.fromkeys(job.row.id for job in table.jobs))
    free = [row for row in rows if row not in blocked]
    lines = [
        f"  {each.path}: {each.data.title}, {each.data.gigabytes:g} GB, from {each.data.where}"
        f"{f'. {each.data.note}' if each.data.note else ''}"
        for each in missing
    ]
    without = f"Without it: --rows {','.join(free)}." if free else "No row can run without it."
    small = (
        f" In small: vitadel reproduce {table.name} --small." if table.item.small and not table.request.small else ""
    )
    if table.item.experiment is not None:
        small += f" {_OTHER_FILES}"
    raise UserError(
        f"{table.name} needs data that is not below {table.request.data_root or DEFAULT_ROOT}:\n"
        + "\n".join(lines)
        + f"\nPut it there, or give the folder with --data-root. {without}{small}"
    )


def _check_complete(table: TableJobs) -> None:
    """Open the sets that torchvision compares with checksums: a changed file must not end a row after hours."""
    for spec in dict.fromkeys(spec for job in table.jobs for spec in table.data_specs(job)):
        kind = DATA_KINDS.get(re.split(r"[@(]", spec, maxsplit=1)[0])
        if kind is None or not kind.opener.startswith("torchvision_sets:"):
            continue
        try:
            open_dataset(spec, root=table.request.data_root)
        except UserError as error:
            other = f" {_OTHER_FILES}" if table.item.experiment is not None else ""
            raise UserError(f"{table.name}: {error}{other}") from error
