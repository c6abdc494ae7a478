"""`vitadel VERB`: the parser, and the exit codes.

0 done, 2 the user's mistake, 3 a gate of `audit` not passed, 130 interrupted, 1 our fault.
"""

from __future__ import annotations

import errno
import importlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO, cast

import typer
from typer.core import TyperGroup

from vitadel.errors import Interrupted, UserError, nearest_names
from vitadel.runtime.safe_reading import check_name
from vitadel.runtime.trusted_code import VARIABLE
from vitadel.version import __version__

_PATH_ERRORS = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS)
_DISK_ERRORS = (errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE)
_PREEMPTION = ("SIGTERM", "SIGUSR1", "SIGUSR2")  # submitit asks Slurm for the last, which all processes get
_SUITES = ("corruptions", "stability", "threat-levels")
_RENAMED_SUITES = {"ladder": "threat-levels"}
_RENAMED_FLAGS = {"--doctor": "--precheck", "--no-doctor": "--no-precheck"}


class _Verbs(TyperGroup):
    """The verbs. Renamed flags, and `audit --suite X` for the verb X, keep working and say the new name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        verb, *words = args
        if verb == "audit":
            verb, words = _suite_verb([_current_flag(word) for word in words])
        if verb in ("audit", *_SUITES):
            self._refuse_flags_of_others(ctx, verb, words)
        return super().resolve_command(ctx, [verb, *words])

    def _refuse_flags_of_others(self, ctx: Any, verb: str, words: list[str]) -> None:
        """Flags of another of these verbs would be unknown; say where they belong."""
        flags = {name: _flags(self.get_command(ctx, name)) for name in ("audit", *_SUITES)}
        for other in (name for name in flags if name != verb):
            wrong = [word for word in (word.partition("=")[0] for word in words) if word in flags[other] - flags[verb]]
            if wrong:
                names = ", ".join(wrong)
                raise UserError(f"'vitadel {verb}' has no {names}; 'vitadel {other}' has. Leave {names} out.")


def _flags(command: Any) -> set[str]:
    return {flag for each in command.params for flag in (*each.opts, *each.secondary_opts) if flag.startswith("--")}


def _current_flag(word: str) -> str:
    """Return the present name of a flag; a former name is reported on standard error."""
    if word in _RENAMED_FLAGS:
        typer.echo(f"vitadel: {word} is now called {_RENAMED_FLAGS[word]}", err=True)
    return _RENAMED_FLAGS.get(word, word)


def _suite_verb(words: list[str]) -> tuple[str, list[str]]:
    """Return the verb that the words of `audit` ask for, and the words without --suite."""
    place = next((place for place, word in enumerate(words) if word.partition("=")[0] == "--suite"), None)
    if place is None:
        return "audit", words
    _, joined, suite = words[place].partition("=")
    end = place + (1 if joined else 2)
    suite = suite if joined else " ".join(words[place + 1 : end])
    if suite not in _SUITES and suite not in _RENAMED_SUITES:
        known = nearest_names(suite, [*_SUITES, *_RENAMED_SUITES]) or "."
        raise UserError(f"unknown suite {suite!r}{known} Known: {', '.join(_SUITES)}.")
    verb = _RENAMED_SUITES.get(suite, suite)
    typer.echo(f"vitadel: audit --suite {suite} is now called {verb}", err=True)
    return verb, words[:place] + words[end:]


app = typer.Typer(
    name="vitadel",
    cls=_Verbs,
    help="Is this Vision Transformer really robust? Audit it, attack it, harden it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_PANELS = {
    "Measure": ("audit", "merge", "corruptions", "stability", "threat-levels", "trade-off", "plan"),
    "Harden": ("harden", "probe", "recipes"),
    "Analyze": ("reproduce", "diagnose", "study", "inspect", "report", "leaderboard", "ui"),
    "Tools": ("attack", "corrupt", "list", "selftest"),
}
"""The verbs; each is in the file of its name, as a function of its name or, with verbs of its own, as `app`."""

for _panel, _verbs in _PANELS.items():
    for _name in _verbs:
        _python_name = _name.replace("-", "_")
        _module = importlib.import_module(f"vitadel.cli.{_python_name}")
        if hasattr(_module, "app"):
            app.add_typer(_module.app, name=_name, rich_help_panel=_panel)
        else:
            _function = "list_names" if _name == "list" else _python_name  # `list` is Python's own
            app.command(_name, rich_help_panel=_panel)(getattr(_module, _function))


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"vitadel {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
    trust_code: bool = typer.Option(
        False,
        "--trust-code",
        help="Run Python code that a recipe file or run folder names; every verb takes this flag.",
    ),
) -> None:
    """Is this Vision Transformer really robust? Audit it, attack it, harden it."""


def resuming_command(argv: list[str], folder: Path) -> str:
    """Return the command that continues an interrupted run."""
    words = ["vitadel", *(word for word in argv if word != "--resume")]
    if not any(word == "--out" or word.startswith("--out=") for word in words):
        words += ["--out", str(folder)]
    return shlex.join([*words, "--resume"])


class _LossyStream:
    """Standard error that may have no reader left: what cannot be written is dropped, and the work goes on."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        if self.stream is not None:
            with suppress(OSError, ValueError):
                self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self.stream is not None:
            with suppress(OSError, ValueError):
                self.stream.flush()

    def isatty(self) -> bool:
        return self.stream is not None and not self.stream.closed and self.stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def main() -> None:
    """Run the console script. Wrong flags end inside `app` with exit code 2, Ctrl-C before a run with 130."""
    with redirect_stderr(cast("TextIO", _LossyStream(sys.stderr))), _preemption_as_interrupt():
        _main()


@contextmanager
def _preemption_as_interrupt() -> Iterator[None]:
    """Let the signals by which clusters announce preemption do what Ctrl-C does at that moment; later ones do nothing.

    Workers inherit this, and keep the usual meaning: they are ended by SIGTERM.
    """
    signals = [getattr(signal, name) for name in _PREEMPTION if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process, stopping = os.getpid(), False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        if os.getpid() != process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not stopping:
            stopping = True
            handler = signal.getsignal(signal.SIGINT)
            (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    before = {number: signal.signal(number, stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _main() -> None:
    typed = sys.argv[1:]
    try:
        for word in (each for each in typed if not each.isprintable()):
            check_name(word.replace("\n", " ") if "=" in word else word, "argument")  # overrides may be YAML
        _read_trust()
        app()
    except UserError as mistake:
        _end(f"vitadel: {mistake}", 2)
    except Interrupted as stop:
        again = resuming_command(typed, stop.folder)
        _end(f"vitadel: interrupted; finished work is saved. Continue with:\n  {again}", 130)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _end(f"vitadel: no space left where the output goes: {error.strerror}. Files of the run are kept.", 2)
        if error.errno in _DISK_ERRORS:
            where = "" if error.filename is None else f" at {error.filename}"
            _end(f"vitadel: the disk fails{where}: {error.strerror}. Finished work is kept; continue with --resume.", 2)
        if error.errno not in _PATH_ERRORS or error.filename is None:
            raise
        name = str(error.filename)
        shown = name if len(name) < 200 else f"{name[:100]}... ({len(name)} characters)"
        _end(f"vitadel: the path {shown!r} cannot be used: {error.strerror}. Give another path.", 2)


def _read_trust() -> None:
    """Take --trust-code, which every verb accepts, from the command line, for this process and its workers."""
    if "--trust-code" in sys.argv:
        sys.argv = [word for word in sys.argv if word != "--trust-code"]
        os.environ[VARIABLE] = "1"


def _end(message: str, code: int) -> NoReturn:
    sys.stderr.write(message + "\n")
    sys.exit(code)
