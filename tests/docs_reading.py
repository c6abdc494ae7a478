"""Commands and Python snippets of README.md and docs/*.md, in their order."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["REPOSITORY", "Command", "Snippet", "commands_in", "inline_commands_in", "pages", "snippets_in"]

REPOSITORY = Path(__file__).parents[1]
_OURS = ("vitadel", "torchrun", "python", "python3")
_INLINE = re.compile(r"(?<!`)`(vitadel [^`]+)`(?!`)")


@dataclass(frozen=True)
class Command:
    """A command as written on a page, without its prompt and comment."""

    page: str
    line: int
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return shlex.join(self.words)

    @property
    def out(self) -> str | None:
        """The run folder that it names with `--out`."""
        return self.words[self.words.index("--out") + 1] if "--out" in self.words[:-1] else None


@dataclass(frozen=True)
class Snippet:
    """A block of Python."""

    page: str
    line: int
    code: str


def pages() -> list[Path]:
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def commands_in(text: str, page: str) -> list[Command]:
    """Lines of fenced blocks that start with one of `_OURS`; other lines are output or set-up."""
    found = []
    for language, first, lines in _blocks(text):
        if language in ("python", "yaml", "json"):
            continue
        for offset, line in _joined(lines):
            typed = line.strip().removeprefix("$ ")
            if typed.split(" ")[0] in _OURS:
                found.append(Command(page, first + offset, tuple(shlex.split(typed, comments=True))))
    return found


def inline_commands_in(text: str, page: str) -> list[Command]:
    """Code spans in sentences and tables that start with `vitadel`."""
    outside = text.splitlines()
    for _, first, lines in _blocks(text):
        outside[first - 1 : first - 1 + len(lines)] = [""] * len(lines)
    text = "\n".join(outside)
    found = []
    for match in _INLINE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        found.append(Command(page, line, tuple(shlex.split(match[1]))))
    return found


def snippets_in(text: str, page: str) -> list[Snippet]:
    return [Snippet(page, first, "\n".join(lines)) for language, first, lines in _blocks(text) if language == "python"]


def _blocks(text: str) -> Iterator[tuple[str, int, list[str]]]:
    """Language, first line number and lines of every fenced block."""
    language: str | None = None
    first, lines = 0, []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = line.strip().startswith("```")
        if fence and language is None:
            language, first, lines = line.strip().removeprefix("```").strip(), number + 1, []
        elif fence:
            yield str(language), first, lines
            language = None
        else:
            lines.append(line)
    assert language is None, "a fenced block is not closed"


def _joined(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Lines joined with their continuations, each with the number of its first line."""
    whole, start = "", 0
    for number, line in enumerate(lines):
        start = start if whole else number
        if line.rstrip().endswith("\\"):
            whole += line.rstrip().removesuffix("\\")
            continue
        yield start, whole + line
        whole = ""
