"""What a table asks for: trainings, and evaluations of the models they make, each once however often it is used."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitadel.errors import UserError, check_known, unknown_name
from vitadel.papers.paper_documents import Choose, Column, Evaluation, Item, Paper, Row, Small, find_item
from vitadel.runtime.run_folder import RunFolder
from vitadel.training.recipes.compose import compose

_DATA_KEYS = ("train", "test", "validation", "extra", "easier")
_CHOOSING = 1000  # the seed of trainings that choose a setting; results have the seeds 0, 1, ...


@dataclass(frozen=True, kw_only=True)
class TableRequest:
    """What `vitadel reproduce` is asked to do.

    `rows` and `columns` are ids, all if None. Trainings run with the seeds 0 to `seeds` - 1; None is 1, or as many as
    the experiment has. `have` gives, for a row, the run folders of its trainings, one per seed, or a model for a row
    that is not trained here. `train_data` and `test_data` replace the data of a small table or an experiment.
    """

    table: str
    rows: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    seeds: int | None = None
    small: bool = False
    data_root: str | None = None
    train_data: str | None = None
    test_data: str | None = None
    have: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seeds is not None and self.seeds < 1:
            raise UserError(f"--seeds must be at least 1, got {self.seeds}")
        if (self.train_data is None) != (self.test_data is None):
            raise UserError("--train-data and --test-data belong together: give both, or neither")


@dataclass(frozen=True)
class Training:
    """A training by a recipe. `after` are settings that name the result of another training; `choose` is a setting that
    other trainings decide."""

    recipe: str
    row: str
    seed: int
    overrides: Mapping[str, Any] = field(default_factory=dict)
    after: tuple[tuple[str, Training], ...] = ()
    choose: Choose | None = None

    @property
    def name(self) -> str:
        """The name of its folder."""
        changes = {**self.overrides, **{key: each.name for key, each in self.after}}
        if self.choose is not None:
            changes["choose"] = self.choose.model_dump(mode="json")
        return f"{slug(f'{self.recipe}-{self.row}')}{_digest(changes)}-s{self.seed}"

    @property
    def earlier(self) -> tuple[Training, ...]:
        """The trainings whose results it needs."""
        return (*(each for _, each in self.after), *self.candidates())

    def candidates(self) -> tuple[Training, ...]:
        """The trainings that choose its setting, one for each value."""
        if self.choose is None:
            return ()
        other = self._with_seed(_CHOOSING)
        return tuple(
            replace(other, overrides={**self.overrides, self.choose.key: value}, choose=None)
            for value in self.choose.values
        )

    def _with_seed(self, seed: int) -> Training:
        return replace(self, seed=seed, after=tuple((key, each._with_seed(seed)) for key, each in self.after))

    def document(self, folders: Path) -> dict[str, Any]:
        """The composed recipe. It is evaluated by the table, so there is no audit at its end."""
        results = {key: _result_of(key, folders / each.name) for key, each in self.after}
        changes = {**self.overrides, **self.chosen(folders), **results}
        return compose(self.recipe, self.row, {**changes, "data.test": None, "train.seed": self.seed})

    def chosen(self, folders: Path) -> dict[str, Any]:
        """The setting that the candidates below `folders` decide, the first of the best; nothing without a choice."""
        if self.choose is None:
            return {}
        scores = [_held_out_score(folders / each.name, self.choose.clean) for each in self.candidates()]
        return {self.choose.key: self.choose.values[scores.index(max(scores))]}


def _held_out_score(folder: Path, clean_share: float) -> float:
    score = RunFolder(folder).results()["training"]["held_out"]
    if score is None:
        raise UserError(f"{folder} has no held-out accuracy to choose by; set data.held_out in its recipe")
    clean = float(score["clean"])
    return clean if score["robust"] is None else clean_share * clean + (1 - clean_share) * float(score["robust"])


def _result_of(key: str, folder: Path) -> str:
    """What a setting takes from another training: the weights file, or the folder."""
    return str(folder / "weights" / "best.safetensors" if key.endswith("weights") else folder)


def slug(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.")


def _digest(changes: Mapping[str, Any]) -> str:
    if not changes:
        return ""
    return "-" + hashlib.sha256(json.dumps(changes, sort_keys=True, default=str).encode()).hexdigest()[:6]


@dataclass(frozen=True)
class Job:
    """One row at one seed: the training or the model behind it, and its evaluations, with all names filled in."""

    row: Row
    seed: int
    evaluations: Mapping[str, Evaluation]
    values: Mapping[str, str]
    """What each column reads."""
    test_data: str | None
    training: Training | None = None
    have: str | None = None
    other_end: Training | None = None
    """Of a row between two others: its model is halfway from `training` to this one."""

    @property
    def model_name(self) -> str:
        """Identifies the model among all jobs."""
        if self.have is not None:
            return f"{slug(self.row.id)}-given-s{self.seed}"
        if self.training is not None and self.other_end is not None:
            ends = {"ends": [self.training.name, self.other_end.name]}
            return f"{slug(self.row.id)}-between{_digest(ends)}-s{self.seed}"
        return self.training.name if self.training is not None else slug(str(self.row.model))

    def evaluation_name(self, name: str) -> str:
        """The folder of an evaluation: rows that share a model and an evaluation share the folder."""
        evaluation = self.evaluations[name].model_dump(exclude_defaults=True)
        return f"{self.model_name}-{name}{_digest({**evaluation, 'test': self.test_data})}"


@dataclass(frozen=True)
class TableJobs:
    """A table with the jobs behind its rows; rows and columns that cannot be run are in `lacking`, with the reason."""

    request: TableRequest
    paper: Paper
    item: Item
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    jobs: tuple[Job, ...]
    lacking: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.paper.paper}/{self.item.id}"

    @property
    def seeds(self) -> int:
        assert self.request.seeds is not None  # settled by `table_jobs`
        return self.request.seeds

    def trainings(self) -> list[Training]:
        """All trainings, each once, those that others start from first."""
        found: dict[str, Training] = {}

        def add(training: Training) -> None:
            for earlier in training.earlier:
                add(earlier)
            found.setdefault(training.name, training)

        for job in self.jobs:
            for training in (job.training, job.other_end):
                if training is not None and job.have is None:
                    add(training)
        return list(found.values())

    def data_specs(self, job: Job) -> list[str]:
        """The data that a job reads."""
        specs = [spec for each in job.evaluations.values() if (spec := each.data or job.test_data)]
        for each in (each for each in job.evaluations.values() if each.run == "probe"):
            recipe, _, row = str(each.recipe).partition("#")
            section = compose(recipe, row or None, each.settings)["data"]
            specs += [section[key] for key in _DATA_KEYS if section.get(key)]
        training = job.training if job.have is None else None
        while training is not None:
            section = _section(training)
            specs += [section[key] for key in _DATA_KEYS if section.get(key)]
            training = training.after[0][1] if training.after else None
        return list(dict.fromkeys(specs))


def table_jobs(request: TableRequest) -> TableJobs:
    """Resolve a request; rows and columns that are not known are refused with the nearest names."""
    paper, item = find_item(request.table)
    own = 1 if item.experiment is None else item.experiment.seeds
    request = replace(request, seeds=own if request.seeds is None else request.seeds)
    small = item.small if request.small else None
    if request.train_data is not None and not request.small and item.experiment is None:
        raise UserError(
            "--train-data and --test-data are for --small; the tables themselves read the papers' data below "
            "--data-root"
        )
    if request.small and small is None:
        others = [f"{paper.paper}/{each.id}" for each in paper.items if each.small is not None]
        raise UserError(
            f"{request.table} has no small version; of this paper {', '.join(others)} "
            f"{'has' if len(others) == 1 else 'have'} one. Run it with --plan to see what it needs."
        )
    ids = [row.id for row in item.rows if small is None or small.rows is None or row.id in small.rows]
    for name in (*(request.rows or ()), *request.have):
        if name not in ids:
            raise unknown_name("row", name, ids, f" of {request.table}")
    _check_have(request, item)
    kept = None if small is None else small.columns
    column_ids = [column.id for column in item.columns if kept is None or column.id in kept]
    for name in request.columns or ():
        check_known("column", name, column_ids, f" of {request.table}{' in small' if kept else ''}")
    rows = tuple(row for row in item.rows if row.id in (request.rows or ids))
    columns = tuple(column for column in item.columns if column.id in (request.columns or column_ids))
    lacking = {column.id: column.needs for column in columns if column.needs is not None}
    lacking |= {row.id: row.needs for row in rows if row.needs is not None and row.id not in request.have}
    jobs = tuple(
        job
        for row in rows
        if row.id not in lacking and any(column.of is not None for column in columns)
        for seed in range((request.seeds or 1) if row.has_seeds else 1)
        for job in [_job(item, row, seed, columns, request)]
    )
    return TableJobs(request, paper, item, rows, columns, jobs, lacking)


def _check_have(request: TableRequest, item: Item) -> None:
    """Refuse given runs that would not be used."""
    for name, runs in request.have.items():
        if request.rows is not None and name not in request.rows:
            raise UserError(f"--have {name}={runs[0]} is not used: --rows leaves out {name}. Add it there, or drop it.")
        if (ends := item.row(name).between) is not None:
            raise UserError(
                f"--have {name}={runs[0]}: this row is made of {ends[0]} and {ends[1]}, not trained; give runs of these"
            )
        places = (request.seeds or 1) if item.row(name).train is not None else 1
        if len(runs) > places:
            why = f"give --seeds {len(runs)}" if item.row(name).train is not None else "others have trained its model"
            raise UserError(f"--have gives {len(runs)} runs for {name}, which has room for {places}: {why}.")


def _job(item: Item, row: Row, seed: int, columns: Sequence[Column], request: TableRequest) -> Job:
    small = item.small if request.small else None
    columns = [column for column in columns if row.only is None or column.id in row.only]
    values = {column.id: (small.values if small else {}).get(column.id, column.value) for column in columns}
    evaluations = {**item.evaluations, **(small.evaluations if small else {})}
    used = dict.fromkeys(column.of for column in columns if column.of is not None)
    heads = dict.fromkeys(head for name in used if (head := evaluations[name].head) is not None)
    training = other_end = None
    if row.between is not None:
        training, other_end = (_training(item, item.row(each), seed, request) for each in row.between)
    else:
        training = _training(item, row, seed, request)
    vary = dict(row.vary)
    if item.experiment is not None and training is not None:
        # For attackers who know how the defense is trained.
        vary |= {"train": _section(training)["train"], "training": f"{training.recipe}:{training.row}"}
    filled = {name: _filled(evaluations[name], vary, request.data_root) for name in (*heads, *used)}
    given = request.have.get(row.id, ())
    test = _test_data(item, training, request)
    texts = {name: _fill(value, row.vary) for name, value in values.items()}
    return Job(row, seed, filled, texts, test, training, given[seed] if seed < len(given) else None, other_end)


def _training(item: Item, row: Row, seed: int, request: TableRequest) -> Training | None:
    small = item.small if request.small else None
    if small is not None and small.recipe is not None:
        return _small_training(small, row, seed, request)
    return None if row.train is None else _row_training(item, row, seed, request)


def _section(training: Training) -> dict[str, Any]:
    section: dict[str, Any] = compose(training.recipe, training.row, training.overrides)["data"]
    return section


def _row_training(item: Item, row: Row, seed: int, request: TableRequest) -> Training:
    """The training of a row by its own recipe, in small with the changes of the small version."""
    small = item.small if request.small else None
    first = 0 if item.experiment is not None and item.experiment.shared_start else seed
    data = compose(*_name(str(row.train)), row.set)["data"]["train"]

    def training(name: str, changes: Mapping[str, Any], seed: int) -> Training:
        recipe, inner = _name(name)
        same = compose(recipe, inner, {})["data"]["train"] == data  # a start on other data keeps its own
        given = _given_data(request) if same else {}
        return Training(recipe, inner, seed, _located(recipe, inner, {**changes, **given}, request.data_root))

    def start(key: str, name: str) -> Training:
        changes = small.set_start if small else {}
        before = tuple((each, start("", other)) for each, other in row.start_after.get(key, {}).items())
        before += _small_start(small, first, _given_data(request))
        return replace(training(name, changes, first), after=before, choose=row.choose_start if key else None)

    own = training(str(row.train), {**row.set, **(small.set if small else {})}, seed)
    after = tuple((key, start(key, name)) for key, name in row.after.items())
    after += _small_start(small, first, _given_data(request))
    return replace(own, after=after, choose=row.choose)


def _name(text: str) -> tuple[str, str]:
    recipe, _, row = text.partition("#")
    return recipe, row


def _given_data(request: TableRequest) -> dict[str, Any]:
    return {} if request.train_data is None else {"data.train": request.train_data, "data.test": request.test_data}


def _small_training(small: Small, row: Row, seed: int, request: TableRequest) -> Training:
    assert small.recipe is not None
    given = {**small.set_given, **_given_data(request)} if request.train_data is not None else {}
    after = _small_start(small, seed, given)
    return Training(small.recipe, (small.rows or {}).get(row.id, row.id), seed, given, after)


def _small_start(small: Small | None, seed: int, given: Mapping[str, Any]) -> tuple[tuple[str, Training], ...]:
    """What all trainings in small start from."""
    starts = small.after if small else {}
    return tuple((key, Training(*_name(each), seed, given)) for key, each in starts.items())


def _located(recipe: str, row: str, changes: Mapping[str, Any], root: str | None) -> dict[str, Any]:
    """The changes, with data specs that point below data/ moved below the root."""
    section = compose(recipe, row, changes)["data"]
    moved = {
        f"data.{key}": moved
        for key in _DATA_KEYS
        if section.get(key) and (moved := below_root(section[key], root)) != section[key]
    }
    return {**changes, **moved}


def below_root(spec: str, root: str | None) -> str:
    """'imagenet:data/imagenet@val' below another root."""
    return spec if root is None else re.sub(r"(?<=:)data/", lambda _: f"{root.rstrip('/')}/", spec)


def _test_data(item: Item, training: Training | None, request: TableRequest) -> str | None:
    if training is None:
        if request.test_data is not None and not request.small:
            return request.test_data
        return None if item.test_data is None else below_root(item.test_data, request.data_root)
    spec = _section(training).get("test")
    return spec if spec is not None or item.test_data is None else below_root(item.test_data, request.data_root)


def _filled(evaluation: Evaluation, vary: Mapping[str, Any], root: str | None) -> Evaluation:
    content = {key: _fill(value, vary) for key, value in evaluation.model_dump().items()}
    if content["data"] is not None:
        content["data"] = below_root(content["data"], root)
    return Evaluation.model_validate(content)


def _fill(value: Any, vary: Mapping[str, Any]) -> Any:
    """Replace {names} in texts; a text that is nothing but a name may become a list."""
    if isinstance(value, str) and value[1:-1] in vary and not isinstance(vary[value[1:-1]], str):
        return vary[value[1:-1]]
    if isinstance(value, str):
        return re.sub(r"\{(\w+)\}", lambda found: str(vary[found[1]]), value) if vary else value
    if isinstance(value, Mapping):
        return {key: _fill(each, vary) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_fill(each, vary) for each in value]
    return value
