"""The models shipped with the package: their names, and their files, checked against the recorded SHA-256 sums."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from vitadel.errors import UserError, nearest_names

CHECKSUMS = "SHA256SUMS"
"""In the format of sha256sum, so that `sha256sum -c SHA256SUMS` checks it, too."""


def zoo_names() -> list[str]:
    """The models shipped with the package, as `zoo:NAME`."""
    folder = resources.files("vitadel") / "zoo"
    if not folder.is_dir():
        return []
    files = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".safetensors"))
    return [f"zoo:{name.removesuffix('.safetensors')}" for name in files]


@contextmanager
def zoo_file(spec: str) -> Iterator[Path]:
    """The weight file of `zoo:NAME`; the model card has the same path with suffix .md."""
    known = zoo_names()
    if spec not in known:
        there = ", ".join(known) or "none in this installation"
        raise UserError(f"unknown zoo model '{spec}'{nearest_names(spec, known) or '.'} There are: {there}.")
    with resources.as_file(resources.files("vitadel") / "zoo" / f"{spec.removeprefix('zoo:')}.safetensors") as path:
        check_checksum(path)
        yield path


def check_checksum(path: Path) -> None:
    """Refuse a weight file that is not the one this version was released with."""
    released = f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"
    if released not in (path.parent / CHECKSUMS).read_text("utf-8").splitlines():
        raise UserError(
            f"the shipped weights '{path.name}' are not those of this version (see {CHECKSUMS}). "
            "The file was changed or damaged; install vitadel again."
        )


def write_checksums(folder: Path) -> None:
    """Record the files of a folder as released."""
    files = sorted(folder.glob("*.safetensors"))
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (folder / CHECKSUMS).write_text("".join(lines))
