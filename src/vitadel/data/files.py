"""The files of a pattern with braces or globs, of a folder, and of a split by the files' names."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

from braceexpand import braceexpand

from vitadel.data.spec import SPLIT_NAMES, DataRequest, pick_split
from vitadel.errors import UserError

_MOST_FILES = 1_000_000


def matching_files(request: DataRequest, ending: str) -> list[Path]:
    """All files that the request's argument matches, in the order of the pattern; globs and folders are sorted.

    A file belongs to a split if its name begins with it ('train-00000-of-00004.parquet') or its folder has its name.
    """
    if not request.argument:
        raise UserError(f"'{request.spec}' names no file; write {request.kind}:PATTERN, e.g. {request.kind}:*{ending}")
    files: list[Path] = []
    for pattern in expand_braces(request.argument):
        found = _find(Path(os.path.expanduser(pattern)), ending)
        if not found:
            raise UserError(
                f"nothing matches '{pattern}' (from {request.spec}); expected a {ending} file, a folder of "
                f"them, or a pattern such as 'part-{{00..07}}{ending}'"
            )
        files += found
    files = list(dict.fromkeys(files))
    splits = dict.fromkeys(split for path in files if (split := _split_of(path)))
    if request.split is None and len(splits) < 2:
        return files  # nothing to choose between
    if not splits:
        raise UserError(
            f"'{request.spec}': no split '{request.split}' can be picked, as the files' names do not begin with the "
            f"name of a split ({', '.join(SPLIT_NAMES)}); name the files themselves instead"
        )
    chosen = pick_split(splits, request.split, f"'{request.argument}'")
    return [path for path in files if _split_of(path) == chosen]


def expand_braces(pattern: str) -> list[str]:
    _check_count(pattern)
    try:
        return list(braceexpand(pattern, escape=False))
    except ValueError:
        raise UserError(f"the braces in '{pattern}' do not match; write e.g. part-{{00..07}}.tar") from None


def _check_count(pattern: str) -> None:
    """Refuse braces that stand for more names than there can be files, before they are expanded."""
    count = 1
    for first, last in re.findall(r"\{(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.-?\d+)?\}", pattern):
        count *= abs(int(last) - int(first)) + 1
    for listed in re.findall(r"\{([^{}]*,[^{}]*)\}", pattern):
        count *= listed.count(",") + 1
    if count > _MOST_FILES or re.search(r"\d{19}", pattern):
        raise UserError(f"'{pattern[:80]}' stands for more than {_MOST_FILES} names; name fewer files, or a folder")


def _find(path: Path, ending: str) -> list[Path]:
    if path.is_file():  # before the glob: a file's name may contain * or [
        return [path]
    if path.is_dir():
        return sorted(found for found in path.rglob(f"*{ending}") if found.is_file())
    return sorted(Path(found) for found in glob.glob(str(path), recursive=True) if Path(found).is_file())


def _split_of(path: Path) -> str | None:
    word = re.split(r"[-_.]", path.name)[0].lower()
    return next((name for name in (word, path.parent.name.lower()) if name in SPLIT_NAMES), None)
