"""Fifty visitors at once: every attack is answered, none is refused or lost."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from vitadel.playground.models import ModelCache

pytestmark = pytest.mark.filterwarnings("ignore")  # of a web server and its parts, in threads of their own


@pytest.mark.slow
def test_fifty_requests_at_once_are_all_answered(monkeypatch):
    pytest.importorskip("gradio")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from playground_load import visit_together

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vitadel.playground.app import serve

        with serve(ModelCache((), "shapes", torch.device("cpu")), "127.0.0.1", 0) as address:
            assert visit_together(address, visitors=50, attacks=1) == {"answered": 50}
