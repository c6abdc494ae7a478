"""`vitadel ui`: what it passes on, and what it warns of."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from command_line import vitadel
from vitadel.cli.ui import ui
from vitadel.errors import UserError


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str, int]]:
    """What would have been served; it ends at once, as by Ctrl-C."""
    calls: list[tuple[Any, str, int]] = []

    @contextmanager
    def serve(cache: Any, host: str, port: int) -> Iterator[str]:
        calls.append((cache, host, port))
        yield f"http://{host}:{port}/"

    def stop(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "vitadel.playground.app", SimpleNamespace(serve=serve))
    monkeypatch.setattr(
        "vitadel.cli.ui.threading", SimpleNamespace(Event=lambda: SimpleNamespace(wait=lambda: stop(0)))
    )
    return calls


def run(*words: str) -> Result:
    app = typer.Typer()
    app.command()(ui)
    return CliRunner().invoke(app, words)


def test_loopback_by_default_and_silent(served: list[tuple[Any, str, int]]) -> None:
    result = run("--device", "cpu")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "playground: http://127.0.0.1:7860/ (Ctrl-C ends it)\n"
    ((cache, host, port),) = served
    assert (host, port, cache.data, cache.data_is_named) == ("127.0.0.1", 7860, "shapes", False)
    assert cache.specs[0].startswith("zoo:")


@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("::1", False), ("localhost", False), ("box", True)])
def test_other_hosts_are_warned_of(served: list[tuple[Any, str, int]], host: str, warned: bool) -> None:
    result = run("--device", "cpu", "--host", host, "--port", "8000")
    assert result.exit_code == 0
    assert ("without a password" in result.stderr) == warned
    assert served[0][1:] == (host, 8000)


def test_models_are_named_with_their_flags_and_opened_at_once(served: list[tuple[Any, str, int]]) -> None:
    name = "vit_tiny_patch16_224"
    flags = ("--weights", "random", "--num-classes", "7", "--device", "cpu")
    assert run(name, "zoo:shapes-robust", "--weights", "random", "--device", "cpu").exit_code == 1  # it has its own
    assert run(name, *flags).exit_code == 0
    opened = served[-1][0].open(name)
    assert opened.names == tuple(f"class {number}" for number in range(7))


def test_a_wrong_name_is_reported_before_anything_is_served(served: list[tuple[Any, str, int]]) -> None:
    result = run("vit_tinny_patch16_224", "--device", "cpu")
    assert isinstance(result.exception, UserError)
    assert "did you mean" in str(result.exception)
    assert served == []


def test_sigterm_ends_the_page_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads are deleted when the server's context is left."""
    left = []

    @contextmanager
    def serve(cache: Any, host: str, port: int) -> Iterator[str]:
        try:
            yield "http://here/"
        finally:
            left.append(host)

    def wait() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was not heard")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setitem(sys.modules, "vitadel.playground.app", SimpleNamespace(serve=serve))
    monkeypatch.setattr("vitadel.cli.ui.threading", SimpleNamespace(Event=lambda: SimpleNamespace(wait=wait)))
    vitadel("ui", "--device", "cpu")
    assert left == ["127.0.0.1"]
    assert signal.getsignal(signal.SIGTERM) == before
