"""Read run folders, and derive what follows from them without a model: labels and differences."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from vitadel.errors import UserError
from vitadel.runtime.run_folder import check_schema
from vitadel.runtime.safe_reading import (
    ARRAY_ERRORS,
    check_regular_file,
    parse_json,
    read_sample_table,
    read_text_file,
)

Table = Any  # pyarrow has no types
Array = np.ndarray[Any, np.dtype[Any]]

_NORMS = {"linf": "Linf", "l2": "L2", "l1": "L1", "l0": "L0"}
_FINISHED = {
    **dict.fromkeys(("audit", "attack", "diagnose"), ("model", "data", "clean", "attacks", "worst_case", "findings")),
    "study": ("model", "data", "study"),
    "inspect": ("model", "data", "activations"),
    "corrupt": ("data",),
    "reproduce": ("reproduce",),
}
"""The fields that results of a finished run have, by its verb, besides those of all runs."""

_EXAMPLE_ARRAYS = ("index", "x", "z", "label", "prediction")
_ABOUT_EXAMPLES = ("attack", "own_rules")  # single values; older runs have none


@dataclass(frozen=True)
class Run:
    """The content of a run folder; what an unfinished run has not written yet is empty or None."""

    path: Path
    command: dict[str, Any]
    results: dict[str, Any]
    environment: dict[str, Any]
    samples: Table | None
    examples: dict[str, Array] | None
    metrics: tuple[dict[str, float], ...] = ()  # of a training, one row per step and per epoch
    name: str | None = None  # given by the reader of the report

    @property
    def complete(self) -> bool:
        return self.results.get("complete") is True

    @property
    def folder(self) -> str:
        return self.path.resolve().name

    @property
    def model(self) -> str:
        return str(self.results.get("model", {}).get("spec") or self.command["settings"].get("model", "unknown model"))

    @property
    def attacks(self) -> list[dict[str, Any]]:
        """The entries of results.json about finished attacks, in their order."""
        return list(self.results.get("attacks") or [])

    @property
    def pending(self) -> list[str]:
        """Names of the requested attacks that are not finished."""
        done = {entry["name"] for entry in self.attacks}
        return [name for name in self.command["settings"].get("attacks", []) if name not in done]

    def class_name(self, label: int) -> str:
        names = self.results.get("data", {}).get("class_names", [])
        return str(names[label]) if 0 <= label < len(names) else f"class {label}"

    def column(self, name: str) -> Array:
        assert self.samples is not None
        return np.asarray(self.samples.column(name).to_numpy())

    def held(self) -> Array | None:
        """Which samples are robust against every attack within the threat model; None if there was no attack."""
        if self.samples is None:
            return None
        outside = {f"held:{entry['name']}" for entry in self.attacks if entry.get("own_rules")}
        names = [name for name in self.samples.column_names if name.startswith("held:") and name not in outside]
        if not names:
            return None
        return np.asarray(np.logical_and.reduce([self.column(name) for name in ("clean_correct", *names)]))


def read_run(path: Path) -> Run:
    """Read a run folder, whether the run is finished or not."""
    _check_is_run(path)
    command = _read_json(path / "command.json")
    if not {"verb", "settings"} <= command.keys():
        raise UserError(f"{path / 'command.json'} lacks 'verb' or 'settings', so {path} is not a run folder of Vitadel")
    _check(path / "command.json", misfit("", command, _COMMAND) or misfit("settings", command["settings"], _SETTINGS))
    environment = _read_json(path / "environment.json", required=False)
    _check(path / "environment.json", misfit("", environment, _ENVIRONMENT))
    results = _read_json(path / "results.json", required=False)
    check_schema(results, path / "results.json")
    _check(path / "results.json", next(filter(None, chain(_faults(results), _contradictions(results))), ""))
    table = path / "samples.parquet"
    samples = read_sample_table(table) if table.exists() else None
    if results.get("complete"):
        _check(path / "results.json", lacking(["seed", *_FINISHED.get(command["verb"], ())], list(results)))
        _check(path / "samples.parquet", _uncounted(samples, results))
    return Run(
        path=path,
        command=command,
        results=results,
        environment=environment,
        samples=samples,
        examples=_read_examples(path / "examples.npz"),
        metrics=_read_metrics(path / "metrics.jsonl"),
    )


def read_all(paths: Sequence[Path], names: Sequence[str] = ()) -> list[Run]:
    """Read the folders, to be called by these names, if any are given; one that is given twice is read once."""
    if not paths:
        raise UserError("a report needs at least one run folder; `vitadel audit` prints the folder it wrote")
    once: dict[Path, Path] = {}
    for path in paths:
        once.setdefault(path.resolve(), path)
    if names and len(names) != len(once):
        raise UserError(
            f"--names gives {len(names)} names for {len(once)} runs; give one for each, separated by commas"
        )
    runs = [read_run(path) for path in once.values()]
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)] if names else runs


def _check_is_run(path: Path) -> None:
    if not path.exists():
        raise UserError(f"there is no run folder {path}; `vitadel audit` prints the folder it wrote as its last line")
    if not path.is_dir():
        raise UserError(f"{path} is a file; name the run folder that holds command.json and results.json")
    if (path / "command.json").is_file():
        return
    inside = sorted(file.parent.name for file in path.glob("*/command.json"))
    hint = f" It holds run folders, name some of these: {', '.join(inside[:5])}." if inside else ""
    raise UserError(
        f"{path} is not a run folder: command.json is missing. `vitadel audit` writes run folders and prints their "
        f"path as its last line.{hint}"
    )


def damaged(path: Path | str, why: object) -> UserError:
    return UserError(f"{path} cannot be read: {why}. Run the command again, or leave this run out of the report.")


def _read_json(path: Path, required: bool = True) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        value = parse_json(read_text_file(path, "the file"), "its content")
    except UserError as error:
        raise damaged(path, str(error).rstrip(".")) from error
    if not isinstance(value, dict):
        raise damaged(path, f"it should hold a JSON object, got {type(value).__name__}")
    return value


def _uncounted(samples: Table | None, results: Mapping[str, Any]) -> str:
    """Why the results count samples that the table does not have; '' if it has all."""
    n = results.get("data", {}).get("n")
    if samples is None or n is None or len(samples) >= n:
        return ""
    return f"it has {len(samples)} rows, and the results count {n} samples"


def read_arrays(path: Path) -> dict[str, Array]:
    """All arrays of an npz file; nothing in it is unpickled."""
    check_regular_file(path, "the file of arrays")
    try:
        # Through the opened file, because numpy does not close one that turns out to be damaged.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except ARRAY_ERRORS as error:
        raise damaged(path, error) from error


def _read_examples(path: Path) -> dict[str, Array] | None:
    if not path.exists():
        return None
    arrays = read_arrays(path)
    _check(path, lacking(_EXAMPLE_ARRAYS, list(arrays)))
    shape = arrays["x"].shape
    if len(shape) != 4 or shape[1] != 3 or 0 in shape[2:] or shape != arrays["z"].shape:
        raise damaged(path, f"x and z should be images (n, 3, h, w), got {arrays['x'].shape} and {arrays['z'].shape}")
    for name in ("label", "prediction"):
        if arrays[name].shape != arrays["x"].shape[:1] or not np.issubdtype(arrays[name].dtype, np.integer):
            wanted, given = len(arrays["x"]), f"{arrays[name].shape} of {arrays[name].dtype}"
            raise damaged(path, f"{name} should be {wanted} whole numbers, got {given}")
    for name in _ABOUT_EXAMPLES:
        if name in arrays and arrays[name].ndim:
            raise damaged(path, f"{name} should be a single value, got {len(arrays[name])}")
    return arrays


def _read_metrics(path: Path) -> tuple[dict[str, float], ...]:
    if not path.exists():
        return ()
    try:
        # A training that was killed may have left an incomplete last line.
        lines = read_text_file(path, "the file").splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        if any("step" not in row for row in rows):
            raise ValueError("a row has no step")
        return tuple({str(name): float(value) for name, value in row.items()} for row in rows)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise damaged(path, error) from error


def _check(path: Path, fault: str) -> None:
    if fault:
        raise damaged(path, fault)


Fields = Mapping[str, str]
"""The types of an object's fields, by the names in `_TYPES`; fields whose name ends in `?` may be missing."""

_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "a number": lambda value: _is_number(value),
    "a number from 0 to 1": lambda value: _is_number(value) and 0 <= value <= 1,
    "a whole number of at least 0": lambda value: _TYPES["a whole number"](value) and value >= 0,
    "a number of at least 0": lambda value: _is_number(value) and value >= 0,
    "a whole number": lambda value: isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63,
    "an object": lambda value: isinstance(value, dict),
    "a list": lambda value: isinstance(value, list),
    "a list of texts": lambda value: _all_are("text", value),
    "two numbers": lambda value: _all_are("a number", value) and len(value) == 2,
    "two numbers from 0 to 1": lambda value: _all_are("a number from 0 to 1", value) and len(value) == 2,
    "two whole numbers": lambda value: _all_are("a whole number", value) and len(value) == 2,
    "anything": lambda value: True,
}
_COMMAND = {"verb": "text", "settings": "an object", "argv?": "a list or null"}
_SETTINGS = {"attacks?": "a list of texts"}
_ENVIRONMENT = {"packages?": "an object"}
_RESULTS = {
    **dict.fromkeys(("model?", "data?", "threat?"), "an object"),
    **dict.fromkeys(("clean?", "worst_case?", "protocol?", "published?", "study?"), "an object or null"),
    **dict.fromkeys(("sequential?", "two_phase?", "curve?"), "an object or null"),
    "assumptions?": "a list of texts or null",
    **dict.fromkeys(("attacks?", "findings?"), "a list or null"),
    **dict.fromkeys(("suite?", "precision?"), "text or null"),
}
_COUNT, _SHARE, _INTERVAL = "a whole number of at least 0", "a number from 0 to 1", "two numbers from 0 to 1"
_ROBUST = {"held": _COUNT, "n": _COUNT, "robust_accuracy": _SHARE, "ci95": _INTERVAL}
_PARTS: Mapping[str, Fields] = {
    "model": {
        **dict.fromkeys(("spec?", "family?"), "text or null"),
        "parameters?": "a whole number",
        "macs?": "a whole number or null",
    },
    "data": {
        "spec?": "text or null",
        "n?": "a whole number",
        "class_names?": "a list",
        "left_out?": "a whole number",
        **dict.fromkeys(("left_out_names?", "not_opened?"), "a list of texts"),
        "pixels?": "two whole numbers",
        "preprocessing?": "text",
    },
    "threat": {"norm?": "text or null", "eps?": "a number", "eps_text?": "text or null"},
    "clean": {"correct": _COUNT, "n": _COUNT, "accuracy": _SHARE, "ci95": _INTERVAL},
    "worst_case": _ROBUST,
    "protocol": {
        "name": "text or null",
        "nearest": "text or null",
        "differences": "an object",
        "remark": "text or null",
        **dict.fromkeys(("comparable_with?", "nearest_is?"), "text or null"),
    },
    "sequential": {"sentence": "text"},
    "two_phase": {"sentence": "text"},
    "curve": {"sentence": "text", "budgets": "a list", "median_distance": "an object", "area": "an object"},
    "published": {"model": "text", "source": "text", "consistent": "anything", "sentences": "a list of texts"},
}
_FINDING = {"check": "text", "verdict": "text", "evidence": "anything", "advice": "text or null", "title?": "text"}
_ATTACK = {
    "name": "text",
    **_ROBUST,
    "counts": "text",
    "attacked": _COUNT,
    **dict.fromkeys(("gradient_calls", "forward_calls", "seconds", "void"), "a number of at least 0"),
    "settings?": "an object",
    "members?": "a list",
    "paper_style?": "an object or null",
    "calibration?": "an object",
    "controls?": "a list",
    "gains?": "an object",
    "escalation?": "an object",
    "given_up?": "an object",
}
_MEMBER = {"name": "text", "attacked": _COUNT, "broken": _COUNT}
_CALIBRATION = {"winner": "text", "images": _COUNT, "gradients": _COUNT, "forwards": _COUNT, "candidates": "a list"}
_CANDIDATE = {"name": "text", "factors": "a list"}
_GIVEN_UP = {"images": _COUNT, "audited": _COUNT, "broken": _COUNT, "missed_share_at_most": _SHARE, "sentence": "text"}
_CONTROL = {"name": "text", "held": _COUNT, "n": _COUNT, "only_attack": _COUNT, "only_control": _COUNT, "p": _SHARE}
_PAPER_STYLE = {"ci95": _INTERVAL, "remark": "text", "clean_scaled?": _SHARE}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _contradiction(name: str, entry: Mapping[str, Any], part: str, whole: str, share: str = "") -> str:
    """Why counts cannot be true: more of a part than of the whole, or a share that is not their quotient."""
    if not all(_is_number(entry.get(key)) for key in (part, whole)):
        return ""
    if not 0 <= entry[part] <= entry[whole]:
        return f"'{name}' is impossible: {part} is {entry[part]} of {whole} {entry[whole]}"
    if not share or not _is_number(entry.get(share)) or not entry[whole]:
        return ""
    quotient = entry[part] / entry[whole]
    agrees = abs(entry[share] - quotient) < 1e-3
    return "" if agrees else f"'{name}' contradicts itself: {share} is {entry[share]:g}, {part} / {whole} {quotient:g}"


def _contradictions(results: Mapping[str, Any]) -> Iterator[str]:
    for name, key in (("threat", "eps"), ("data", "n")):
        value: Any = (results.get(name) or {}).get(key)
        if _is_number(value) and value < 0:
            yield f"'{name}' is impossible: {key} is {value}"
    yield _contradiction("clean", results.get("clean") or {}, "correct", "n", "accuracy")
    yield _contradiction("worst_case", results.get("worst_case") or {}, "held", "n", "robust_accuracy")
    if results.get("suite") is not None:
        return
    for entry in results.get("attacks") or []:
        yield _contradiction(entry["name"], entry, "held", "n", "robust_accuracy")
        if sum(other["name"] == entry["name"] for other in results["attacks"]) > 1:
            yield f"attack '{entry['name']}' is listed twice"
        yield from (_contradiction(each["name"], each, "broken", "attacked") for each in entry.get("members", []))


def _all_are(kind: str, value: Any) -> bool:
    return isinstance(value, list) and all(map(_TYPES[kind], value))


def _faults(results: Mapping[str, Any]) -> Iterator[str]:
    """What keeps the fields that every kind of run may have from being shown."""
    yield misfit("", results, _RESULTS)
    present = {name: results[name] for name in _PARTS if results.get(name) is not None}
    yield from (misfit(name, value, _PARTS[name]) for name, value in present.items())
    protocol = results.get("protocol") or {}
    # A protocol that is named also says what the run may be compared with.
    wanted = [name for key, name in (("name", "comparable_with"), ("nearest", "nearest_is")) if protocol.get(key)]
    yield lacking(wanted, [name for name in wanted if protocol.get(name)])
    yield from (misfit("findings", entry, _FINDING) for entry in results.get("findings") or [])
    for entry in results.get("attacks") or []:
        if results.get("suite") is not None:  # suites have sections of their own for their attacks
            yield misfit("attacks", entry, {"name": "text"})
            continue
        yield misfit("attacks", entry, _ATTACK)
        yield from (misfit("members", member, _MEMBER) for member in entry.get("members", []))
        if entry.get("gains") is not None:
            yield misfit("gains", entry["gains"], {"points": "a list"})
            yield from (
                "" if _is_point(point) else "a point of 'gains' should be two numbers"
                for point in entry["gains"].get("points", [])
            )
        if entry.get("calibration") is not None:
            yield misfit("calibration", entry["calibration"], _CALIBRATION)
            yield from (misfit("candidates", each, _CANDIDATE) for each in entry["calibration"]["candidates"])
        if entry.get("given_up"):
            yield misfit("given_up", entry["given_up"], _GIVEN_UP)
        yield from (misfit("controls", each, _CONTROL) for each in entry.get("controls") or [])
        if entry.get("paper_style") is not None:
            style = entry["paper_style"]
            name = "accuracy" if "accuracy" in style else "robust_accuracy"  # before the whole set was counted
            yield misfit("paper_style", style, _PAPER_STYLE | {name: _SHARE})


def _is_point(value: Any) -> bool:
    return _TYPES["two numbers"](value)


def lacking(wanted: Sequence[str], present: Sequence[str]) -> str:
    """'it lacks a, b', or nothing."""
    missing = [name for name in wanted if name not in present]
    return f"it lacks {', '.join(missing)}" if missing else ""


def misfit(name: str, value: Any, expected: Fields) -> str:
    """What is missing from the object called `name`, or has the wrong type; '' if nothing."""
    fields = value if isinstance(value, Mapping) else {}
    missing = lacking([key for key in expected if not key.endswith("?")], list(fields))
    if missing:
        return f"{missing} in '{name}'" if name else missing
    for key, kind in ((key.removesuffix("?"), kind) for key, kind in expected.items()):
        given = fields.get(key)
        fits = _TYPES[kind.removesuffix(" or null")]
        if key in fields and not (fits(given) or (given is None and kind.endswith("or null"))):
            where = f"'{key}' in '{name}'" if name else f"'{key}'"
            return f"{where} should be {kind}, got {'null' if given is None else type(given).__name__}"
    return ""


def threat_text(run: Run) -> str:
    """'Linf 8/255', or nothing for a run without a threat."""
    known = aspects(run)
    return f"{known['norm']} {known['eps']}" if known["norm"] and known["eps"] else ""


def run_labels(runs: Sequence[Run]) -> list[str]:
    """What to call each run: its model, with the folder's name where models repeat, with a number where those do."""
    labels = [run.name or run.model + (f", {restricted}" if (restricted := kept_outputs(run)) else "") for run in runs]
    twice = {label for label, count in Counter(labels).items() if count > 1}
    labels = [f"{label} ({run.folder})" if label in twice else label for label, run in zip(labels, runs, strict=True)]
    twice = {label for label, count in Counter(labels).items() if count > 1}
    return [f"{label} [{place}]" if label in twice else label for place, label in enumerate(labels, start=1)]


def kept_outputs(run: Run) -> str:
    """'10 of 1000 outputs' if the model was restricted to some of its classes; else nothing."""
    return str(run.results.get("model", {}).get("outputs") or "")


def aspects(run: Run) -> dict[str, str]:
    """What must agree between runs before their numbers may be compared, as text; '' where it is not known."""
    settings, data, threat = run.command["settings"], run.results.get("data", {}), run.results.get("threat", {})
    norm = str(threat.get("norm") or settings.get("norm") or "")
    return {
        "data": str(data.get("spec") or settings.get("data") or ""),
        "selection": str(settings.get("data_fingerprint") or ""),
        "n": f"{data['n']:,}" if "n" in data else "",
        "size": " x ".join(map(str, _attacked_size(run))),
        "precision": str(run.results.get("precision") or settings.get("precision") or ""),
        "norm": _NORMS.get(norm, norm),
        "eps": str(threat.get("eps_text") or settings.get("eps") or ""),
        "attacks": ", ".join(entry["name"] for entry in run.attacks),
        "outputs": kept_outputs(run),
    }


def _attacked_size(run: Run) -> tuple[int, ...]:
    """Height and width of the attacked images; older results have it only in the examples."""
    pixels = run.results.get("data", {}).get("pixels")
    if pixels is not None:
        return tuple(pixels)
    return () if run.examples is None else run.examples["x"].shape[2:]


def faced(run: Run) -> frozenset[str]:
    """The attacks that the worst case counts, in any order."""
    return frozenset(entry["name"] for entry in run.attacks if not entry.get("own_rules"))


def differing_aspects(runs: Sequence[Run]) -> list[str]:
    """The aspects in which the runs do not all agree."""
    known = [{**aspects(run), "attacks": faced(run)} for run in runs]
    names = [name for name in known[0] if _several(name, [entry[name] for entry in known])] if known else []
    # A different data set or number of images implies a different selection.
    return [name for name in names if name != "selection" or not {"data", "n"} & set(names)]


def _several(name: str, values: Sequence[object]) -> bool:
    """Whether they differ; a size or precision that an older run did not record counts as equal."""
    return len({value for value in values if value or name not in ("size", "precision")}) > 1
