"""From a spec to a source."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import cast

from vitadel.data.spec import DATA_KINDS, Request, parse_spec
from vitadel.errors import UserError, nearest_names
from vitadel.types import Source

__all__ = ["open_dataset"]


def open_dataset(
    spec: str, *, root: str | Path | None = None, split: str | None = None, skip_bad: bool | None = None
) -> Source:
    """The source that `spec` means; `root` (default ./data) is where the sets are that have no path of their own.

    Without a split, in the spec or here, the one to test on is opened. With `skip_bad`, empty classes and broken
    files are done without where that is possible; `left_out(source)` tells what that was.
    """
    folder = Path("data" if root is None else root).expanduser()
    request = parse_spec(spec, root=folder, split=split, skip_bad=skip_bad)
    kind = DATA_KINDS.get(request.kind)
    if kind is None or (":" in kind.form and ":" not in spec and request.argument):
        raise UserError(_unknown(request))
    if ":" in spec and ":" not in kind.form:
        raise UserError(f"'{spec}': {request.kind} takes no path; write {kind.form}, and --data-root DIR if need be")
    module, _, function = kind.opener.partition(":")
    opener = getattr(import_module(f"vitadel.data.sources.{module}"), function)
    return cast("Callable[[Request], Source]", opener)(request)


def _unknown(request: Request) -> str:
    path = Path(request.spec.rpartition("@")[0] or request.spec).expanduser()
    if request.spec.strip() and path.exists():
        kinds = {".parquet": "parquet", ".npz": "npz", ".tar": "shards"}
        kind = "folder" if path.is_dir() else kinds.get(path.suffix, "folder")
        return f"'{request.spec}' is a path, but not said to be of which kind; did you mean {kind}:{request.spec}?"
    forms = ", ".join(kind.form for kind in DATA_KINDS.values())
    return f"unknown data '{request.spec}'{nearest_names(request.kind, DATA_KINDS) or '.'} Known: {forms}"
