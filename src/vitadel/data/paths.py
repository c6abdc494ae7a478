"""The files that a pattern means: braces, globs, a directory, and a split by the files' names."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from braceexpand import braceexpand

from vitadel.data.spec import Request
from vitadel.data.splits import SPLIT_NAMES, pick_split
from vitadel.errors import UserError

__all__ = ["matching_files"]


def matching_files(request: Request, ending: str) -> list[Path]:
    """All files that the request's argument means, in the order of the pattern; sorted where the order is free.

    A file belongs to a split if its name begins with it ('train-00000-of-00004.parquet') or its folder is called so.
    """
    if not request.argument:
        raise UserError(f"'{request.spec}' names no file; write {request.kind}:PATTERN, e.g. {request.kind}:*{ending}")
    files: list[Path] = []
    for pattern in _expanded(request):
        found = _found(Path(pattern).expanduser(), ending)
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


def _expanded(request: Request) -> list[str]:
    try:
        return list(braceexpand(request.argument, escape=False))
    except ValueError:
        raise UserError(f"the braces in '{request.argument}' do not match; write e.g. part-{{00..07}}.tar") from None


def _found(path: Path, ending: str) -> list[Path]:
    if path.is_file():  # before the glob: a file's name may hold * or [
        return [path]
    if path.is_dir():
        return sorted(found for found in path.rglob(f"*{ending}") if found.is_file())
    return sorted(Path(found) for found in glob.glob(str(path), recursive=True) if Path(found).is_file())


def _split_of(path: Path) -> str | None:
    word = re.split(r"[-_.]", path.name)[0].lower()
    for name in (word, path.parent.name.lower()):
        if name in SPLIT_NAMES:
            return name
    return None
