"""Read files that may come from somebody else: regular files only, of bounded size and depth, as UTF-8."""

from __future__ import annotations

import json
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vitadel.errors import UserError

if TYPE_CHECKING:
    from pyarrow import Table

Read = TypeVar("Read")

MOST_TEXT = 256 * 2**20
"""Bytes of a JSON or text file; the results of a million samples stay far below."""

ARRAY_ERRORS = (
    *(OSError, ValueError, TypeError, KeyError, EOFError, MemoryError, RuntimeError, OverflowError),
    *(SyntaxError, zipfile.BadZipFile, zlib.error, struct.error),
)
"""What numpy raises on damaged npz files: headers that lie about sizes, other compressions, encryption."""


def check_regular_file(path: Path | str, what: str, at_most: int | None = None) -> None:
    """Refuse what would block or never end (pipes, devices, sockets), and files larger than `at_most` bytes."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        reason = "does not exist" if missing else f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise UserError(f"{what} '{path}' {reason}. Check the path (it is relative to {Path.cwd()}).") from error
    if stat.S_ISDIR(found.st_mode):
        raise UserError(f"{what} '{path}' is a folder, a file was expected. Give one of the files in it.")
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{what} '{path}' is not a regular file but a pipe, a device or a socket. Copy it to a file.")
    if at_most is not None and found.st_size > at_most:
        raise UserError(f"{what} '{path}' has {found.st_size} bytes; at most {at_most} are read. Give another file.")


def check_name(name: str, what: str) -> None:
    """Refuse names that cannot be written into results: not UTF-8, or with control characters such as a newline."""
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise UserError(f"{what} {name[:100]!a} has a name that is not UTF-8. Rename it.")
    if any(letter < " " or letter == "\x7f" for letter in name):
        raise UserError(f"{what} {name[:100]!r} has a control character, such as a newline, in its name. Rename it.")


def read_text_file(path: Path, what: str, at_most: int = MOST_TEXT) -> str:
    check_regular_file(path, what, at_most)
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{what} '{path}' cannot be read: {error}. Expected text in UTF-8.") from error


def read_json_file(path: Path, what: str) -> Any:
    return parse_json(read_text_file(path, what), f"{what} '{path}'")


def parse_json(text: str, what: str) -> Any:
    """The value of a JSON text; `what` names it in messages. NaN and Infinity are no JSON, and are never written."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise UserError(f"{what} is nested too deeply to be read. Restore the file.") from None
    except ValueError as error:
        raise UserError(f"{what} is not valid JSON: {error}. It is damaged, or was edited; restore it.") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def parse_json_object(text: str, what: str) -> dict[str, Any]:
    value = parse_json(text, what)
    if not isinstance(value, dict):
        raise UserError(f"{what} holds {type(value).__name__}, not keys and values. Restore the file.")
    return value


def validated(kind: type[Read], values: Mapping[str, Any], what: str) -> Read:
    """A dataclass from values that were read; wrong types and unknown fields are named, with what was found."""
    from pydantic import TypeAdapter, ValidationError

    unknown = sorted(set(values) - {each.name for each in fields(kind)})  # type: ignore[arg-type]
    if unknown:
        raise UserError(f"{what} has an unknown field '{unknown[0]}'. It is of a newer version, or was edited.")
    try:
        return TypeAdapter(kind).validate_python(dict(values))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "a value"
        found = repr(first["input"])[:60]
        raise UserError(f"{what}: '{place}' is wrong: {first['msg']}; found {found}. Restore the file.") from error


def read_sample_table(path: Path, wanted: Sequence[str] = ()) -> Table:
    """The `samples.parquet` of a run, with the columns that every such table has and the `wanted` ones."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_regular_file(path, "the table")
    try:
        table = pq.read_table(path)
        fault = _fault_in_samples(table, wanted)
    except (OSError, pa.ArrowException) as error:
        fault = str(error)
    if fault:
        raise UserError(f"{path} cannot be read: {fault}. Run the command again, or leave this run out.")
    return table


def _fault_in_samples(table: Table, wanted: Sequence[str]) -> str:
    """What is missing or of a wrong type; '' if nothing."""
    import pyarrow as pa

    kinds = {
        **dict.fromkeys(("index", "label", "clean_prediction"), pa.types.is_integer),
        "clean_correct": pa.types.is_boolean,
    }
    missing = [name for name in (*kinds, *wanted) if name not in table.column_names]
    if missing:
        return f"it lacks {', '.join(missing)}"
    for field in table.schema:
        fits = kinds.get(field.name) or (pa.types.is_boolean if field.name.startswith("held:") else None)
        # A benchmark in files may have no clean images at all.
        empty = (0, len(table)) if field.name.startswith("clean_") and not wanted else (0,)
        if fits is not None and (not fits(field.type) or table.column(field.name).null_count not in empty):
            return f"column '{field.name}' holds {field.type}, not all of it verdicts or labels"
    return ""
