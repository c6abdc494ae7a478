"""Read and check the papers' documents: every table and figure with its published values and what is behind them.

A row is one model under one evaluation. It names the recipe row that trains it (`train`, with changes in `set`), or a
`model` that others have trained; `vary` fills the {names} in the evaluations. A column names an evaluation, and the
value that it reads from it. `needs` says what is missing where a row or a column cannot be run yet.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from vitadel.errors import UserError, check_known, nearest_names, unknown_name
from vitadel.papers.experiments import Experiment

PAPERS = ("aas", "light-recipe", "robustness-tokens", "tora", "afat")
SETTLE = "settle"
"""The document of our own experiments on the papers' claims."""
DOCUMENTS = (*PAPERS, SETTLE)
Verb = Literal["audit", "corruptions", "stability", "trade-off", "threat-levels", "study", "probe", "training", "model"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Evaluation(_Part):
    """A run of one verb on a row's model.

    `settings` are fields of its request, fractions as text. `data` is a data spec; by default the test data of the
    training, or of the table for a model that is not trained here. A study has its `name`, a probe its `recipe`; `head`
    is the evaluation, a probe, whose head the model gets. `options` say how the model is opened, such as the crop of a
    protocol; `branch` is the head of a TORA that is evaluated: acc, rob, or joint for both.
    """

    run: Verb | Literal["activations"]
    name: str | None = None
    recipe: str | None = None
    head: str | None = None
    data: str | None = None
    options: Mapping[str, Any] = {}
    branch: str | None = None
    settings: Mapping[str, Any] = {}


class Column(_Part):
    """`value` says what is read from the evaluation `of`; 'page' is a figure, shown by the evaluation's own page."""

    id: str
    title: str
    of: str | None = None
    value: str = ""
    better: Literal["higher", "lower", "none"] = "higher"
    percent: bool = True
    digits: int = 2
    needs: str | None = None


class Choose(_Part):
    """A setting that is chosen among `values` on held-out images, by trainings with a seed that no result has.

    The best has the highest `clean` share of clean accuracy and the rest of robust accuracy.
    """

    key: str
    values: tuple[float, ...]
    clean: float = 0.5


class Row(_Part):
    """`values` are the published numbers in the order of the columns; null where the paper prints none.

    `only` are the columns that mean something for this row; all by default.
    """

    id: str
    title: str | None = None
    train: str | None = None
    set: Mapping[str, Any] = {}
    after: Mapping[str, str] = {}
    """Settings of the recipe that name the result of another training: {key: recipe#row}."""
    start_after: Mapping[str, Mapping[str, str]] = {}
    """The same for the trainings that `after` names, by its keys: {key of after: {key: recipe#row}}."""
    choose: Choose | None = None
    choose_start: Choose | None = None
    """A setting of the trainings that `after` names."""
    between: tuple[str, str] | None = None
    """Two rows of TORA with one start: the fusion halfway between theirs, which is not trained."""
    model: str | None = None
    options: Mapping[str, Any] = {}
    vary: Mapping[str, Any] = {}
    only: tuple[str, ...] | None = None
    values: tuple[float | None, ...] = ()
    note: str | None = None
    needs: str | None = None

    @property
    def has_seeds(self) -> bool:
        """Whether it is trained here, or made of what is."""
        return self.train is not None or self.between is not None


class Ordering(_Part):
    """A claim of the paper: `higher` is above `lower`, pair by pair.

    With `column`, both name rows; with `rows`, both name columns that are compared in each of these rows. `misprint`
    marks a claim that the paper's own numbers contradict.
    """

    claim: str
    column: str | None = None
    rows: tuple[str, ...] = ()
    higher: tuple[str, ...]
    lower: tuple[str, ...]
    misprint: bool = False

    def pairs(self) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
        """((row, column) that is higher, (row, column) that is lower), for every comparison of the claim."""
        for more, less in zip(self.higher, self.lower, strict=True):
            if self.column is not None:
                yield (more, self.column), (less, self.column)
            for row in self.rows:
                yield (row, more), (row, less)


class Small(_Part):
    """The same table in small: rows of the sweep of `recipe`, which have the ids of the table's rows.

    `rows` maps ids to recipe rows where they differ. `columns` are those that can be had in small; all by default.
    `set_given` changes the recipe for data that the user gives. Without `recipe`, rows are trained by their own
    recipes, changed by `set`, and what they start from by `set_start`. `after` are settings of all these trainings that
    name the result of another one: {key: recipe#row}.
    """

    about: str
    minutes: int
    recipe: str | None = None
    set: Mapping[str, Any] = {}
    set_start: Mapping[str, Any] = {}
    rows: Mapping[str, str] | None = None
    columns: tuple[str, ...] | None = None
    evaluations: Mapping[str, Evaluation] = {}
    values: Mapping[str, str] = {}
    """What columns read, by their ids, where it differs from the table's."""
    after: Mapping[str, str] = {}
    set_given: Mapping[str, Any] = {}


class Figure(_Part):
    """How results are drawn: the columns `x` against `y`, with marks of the size of `size`; or the columns `profile`,
    one after the other, with a line for each row."""

    x: str | None = None
    y: str | None = None
    size: str | None = None
    profile: tuple[str, ...] = ()

    def columns(self) -> list[str]:
        return [name for name in (self.x, self.y, self.size, *self.profile) if name is not None]


class Item(_Part):
    """A table or figure, or an experiment of our own."""

    id: str
    title: str
    protocol: str
    data: tuple[str, ...] = ()
    gpu_hours: float
    cost_basis: str
    evaluations: Mapping[str, Evaluation] = {}
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    test_data: str | None = None
    orderings: tuple[Ordering, ...] = ()
    notes: tuple[str, ...] = ()
    small: Small | None = None
    experiment: Experiment | None = None
    figure: Figure | None = None

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.id == name)

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.id == name)

    def published(self, row: str, column: str) -> float | None:
        values = self.row(row).values
        return values[[each.id for each in self.columns].index(column)] if values else None

    def values(self) -> list[float]:
        """All published values."""
        return [value for row in self.rows for value in row.values if value is not None]

    @model_validator(mode="after")
    def _consistent(self) -> Item:
        rows, columns = [row.id for row in self.rows], [column.id for column in self.columns]
        for names in (rows, columns):
            if len(set(names)) < len(names):
                raise ValueError(f"{self.id}: an id is given twice in {names}")
        for row in self.rows:
            if row.values and len(row.values) != len(columns):
                raise ValueError(f"{self.id}, row {row.id}: {len(row.values)} values for {len(columns)} columns")
            if not set(row.only or ()) <= set(columns):
                raise ValueError(f"{self.id}, row {row.id}: only names a column that is not there")
            if all(each is None for each in (row.train, row.between, row.model, row.needs)):
                raise ValueError(f"{self.id}, row {row.id}: give train, between, model or needs")
            if not set(row.between or ()) <= set(rows):
                raise ValueError(f"{self.id}, row {row.id}: between names a row that is not there")
        for column in self.columns:
            if column.of is None and column.needs is None:
                raise ValueError(f"{self.id}, column {column.id}: give the evaluation (of) or needs")
            if column.of is not None and column.of not in self.evaluations:
                raise ValueError(f"{self.id}, column {column.id}: there is no evaluation {column.of!r}")
        for ordering in self.orderings:
            for pair in ordering.pairs():
                for cell in pair:
                    if cell[0] not in rows or cell[1] not in columns:
                        raise ValueError(f"{self.id}, {ordering.claim!r}: there is no cell {', '.join(cell)}")
        for contrast in self.experiment.contrasts if self.experiment is not None else ():
            if (contrast.column is None) == (not contrast.rows):
                raise ValueError(f"{self.id}, contrast {contrast.id}: give column or rows")
            for cell in (*contrast.cells("plus"), *contrast.cells("minus")):
                if cell[0] not in rows or cell[1] not in columns:
                    raise ValueError(f"{self.id}, contrast {contrast.id}: there is no cell {', '.join(cell)}")
        for name in self.figure.columns() if self.figure is not None else ():
            if name not in columns:
                raise ValueError(f"{self.id}: the figure names a column that is not there, {name}")
        return self


class Paper(_Part):
    """A paper: its tables and figures, and the figures that show no result."""

    paper: str
    citation: str
    about: str
    notes: tuple[str, ...] = ()
    items: tuple[Item, ...]
    illustrations: Mapping[str, str] = {}

    def item(self, name: str) -> Item:
        return next(item for item in self.items if item.id == name)


class DataSet(_Part):
    """Files that tables need. `path` is below --data-root; `made` is the command that makes them, if there is one."""

    title: str
    path: str
    where: str
    gigabytes: float
    note: str = ""


def read_paper(name: str) -> Paper:
    """The document of a paper, by its id; published values that were edited are refused."""
    check_known("paper", name, DOCUMENTS)
    paper = parse_paper(files(__package__).joinpath(f"{name}.yaml").read_text("utf-8"), name)
    check_values(paper)
    return paper


@cache
def parse_paper(text: str, name: str) -> Paper:
    """A document from its text, checked."""
    try:
        document = Paper.model_validate(_shared_parts_expanded(yaml.safe_load(text)))
    except (yaml.YAMLError, ValidationError) as error:
        raise UserError(f"the document of the paper '{name}' cannot be read: {error}") from error
    assert document.paper == name
    return document


def _shared_parts_expanded(document: Mapping[str, Any]) -> dict[str, Any]:
    """`shared` holds parts that are used several times through YAML's anchors."""
    return {key: value for key, value in document.items() if key != "shared"}


def find_item(name: str) -> tuple[Paper, Item]:
    """The table or figure PAPER/ID."""
    paper_name, _, inner = name.partition("/")
    if paper_name in DOCUMENTS:
        paper = read_paper(paper_name)
        ids = [item.id for item in paper.items]
        if inner in ids:
            return paper, paper.item(inner)
        if inner in paper.illustrations:
            raise UserError(f"{name} shows no result to reproduce: {paper.illustrations[inner]}")
        raise unknown_name("table or figure", inner, ids, f" of {paper_name}")
    known = [f"{paper}/{item.id}" for paper in DOCUMENTS for item in read_paper(paper).items]
    near = nearest_names(name, known) or "."
    raise UserError(f"there is no table or figure '{name}'{near} `vitadel reproduce` lists all of them.")


@cache
def data_sets() -> dict[str, DataSet]:
    """The data sets that tables name, by id."""
    document = yaml.safe_load(files(__package__).joinpath("datasets.yaml").read_text("utf-8"))
    return {name: DataSet.model_validate(entry) for name, entry in document.items()}


# Published values stand here once; a number changed by mistake would be compared with as if the paper had printed it.


def values_checksum(paper: Paper) -> str:
    """SHA-256 over all published values with their rows and columns, the claims, and the designs of experiments."""
    content: list[Any] = [
        [
            item.id,
            [column.id for column in item.columns],
            [[row.id, list(row.values)] for row in item.rows if row.values],
            [[ordering.claim, list(ordering.pairs())] for ordering in item.orderings],
        ]
        for item in paper.items
    ]
    content += [[item.id, item.experiment.model_dump()] for item in paper.items if item.experiment is not None]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def recorded_checksums() -> dict[str, str]:
    recorded: dict[str, str] = json.loads(files(__package__).joinpath("checksums.json").read_text("utf-8"))
    return recorded


def check_values(paper: Paper) -> None:
    if values_checksum(paper) != recorded_checksums().get(paper.paper):
        raise UserError(
            f"the published values or claims in papers/{paper.paper}.yaml are not those that were checked against the "
            f"paper: the file was edited, or is damaged. Install vitadel again; if you corrected a value, compare the "
            f"whole table with the paper and run scripts/check_papers.py --accept {paper.paper}."
        )


# Text for recipes and lists


def published_text(names: str) -> str:
    """What papers report, as text for a recipe: 'paper/table' or several, separated by commas."""
    return "\n".join(_item_text(*find_item(name.strip())) for name in names.split(","))


def _item_text(paper: Paper, item: Item) -> str:
    if item.experiment is not None:
        return f"`vitadel reproduce {paper.paper}/{item.id}` runs and decides it.\n{item.experiment.text()}"
    printed = [row for row in item.rows if row.values]
    shown = [place for place, _ in enumerate(item.columns) if any(row.values[place] is not None for row in printed)]
    if not shown:
        return f"{item.id}: {item.title}; no numbers are printed"
    width = max(len(row.id) for row in printed)
    lines = [f"{row.id:{width}}  {_values(row.values, shown, item.columns)}" for row in printed]
    head = f"{item.id}: {' / '.join(item.columns[place].title for place in shown)}"
    return "\n".join([head, *lines, f"Protocol: {item.protocol}.", *item.notes])


def _values(values: Sequence[float | None], places: Sequence[int], columns: Sequence[Column]) -> str:
    return " / ".join(value_text(values[place], columns[place]) for place in places)


def value_text(value: float | None, column: Column) -> str:
    """A value as the paper prints it."""
    return "-" if value is None else f"{value:.{column.digits}f}"
