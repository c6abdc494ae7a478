"""What every study keeps: whole results, a sentence and a figure, the same after a kill and in other batches.

Each study runs on a model of our own; and on each family of transformers and torchvision runs one of them, so that
every study meets such a model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import vitadel
from other_vits import OTHERS, make_other, one_of_each_family
from vitadel.attacks.attention_scaling import aas
from vitadel.cli.study import STUDIES
from vitadel.errors import Interrupted
from vitadel.evaluation.engine.target import Target, open_target
from vitadel.reporting.exports import export
from vitadel.reporting.kind import kind_of
from vitadel.reporting.page import render
from vitadel.reporting.read_runs import read_run
from vitadel.reporting.terminal import show_run
from vitadel.runtime.distributed import Processes
from vitadel.runtime.run_folder import FolderCache
from vitadel.studies import find_study

HERE = Processes(0, 1, torch.device("cpu"))
# As little as each can do; a study that is not here runs with its own settings.
SMALL: dict[str, dict[str, Any]] = {
    "curves": {"attack": "pgd-2", "budgets": (0.0, 8 / 255), "steps": (1, 2), "restarts": (1, 2)},
    "saturation": {"attack": "fgsm", "images": 2},
    "gradients": {"images": 2},
    "scaled-blocks": {"attack": "fgsm", "ways": ("last",), "every": 99, "images": 2},
    "perturbations": {"attack": "pgd-2"},
    "accumulation": {"most": 2, "starts": 2, "steps": 3},
    "attention": {"attack": "pgd-2"},
    "corruption-masks": {"fills": 2, "training_steps": 1},
}


SHORT_PROBES = patch.object(aas, "_PROBE_STEPS", 2)
"""Attention factors are compared by a shorter attack."""
OWN = "zoo:shapes-standard"
LIBRARIES = list(zip(cycle(sorted(STUDIES)), one_of_each_family(0), strict=False))


@pytest.fixture(scope="module", params=[*((name, OWN) for name in sorted(STUDIES)), *LIBRARIES], ids=" ".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Study and model."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture(scope="module")
def name(case: tuple[str, str]) -> str:
    return case[0]


@pytest.fixture(scope="module")
def target(case: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A model of another library gets images that it classifies correctly, from a file."""
    if case[1] == OWN:
        return open_target(OWN, "shapes")
    folder = tmp_path_factory.mktemp("library")
    module, images = make_other(case[1]).float(), np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), np.uint8)
    model = vitadel.wrap(module)
    with torch.no_grad():
        labels = model(torch.from_numpy(images).permute(0, 3, 1, 2) / 255).argmax(1).numpy()
    np.savez(folder / "images.npz", images=images, labels=labels)
    return open_target(model, f"npz:{folder}/images.npz")


Measure = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def measure(name: str, target: Target) -> Measure:
    make_request, study = find_study(name)

    def run(out: Path, **more: Any) -> dict[str, Any]:
        resume = more.pop("resume", False)
        request = make_request(**{"limit": 4, "batch_size": 2, **SMALL.get(name, {}), **more})
        assert dataclasses.is_dataclass(request)
        with SHORT_PROBES:
            results: dict[str, Any] = study(target, request, HERE, out=out, resume=resume, argv=["study", name]).results
        return results

    return run


@pytest.fixture(scope="module")
def done(name: str, measure: Measure, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study") / name
    assert json.loads(json.dumps(measure(out), allow_nan=False)) == json.loads((out / "results.json").read_text())
    return out


@pytest.mark.slow
def test_results_are_whole(name: str, target: Target, done: Path) -> None:
    results = json.loads((done / "results.json").read_text())
    assert results["complete"]
    assert results["study"]["name"] == name
    assert results["model"]["spec"] == target.model_spec
    assert results["model"]["fingerprint"]
    assert results["data"]["n"] == 4
    assert results["threat"] == {"norm": "linf", "eps": 8 / 255, "eps_text": "8/255"}
    assert results["study"]["n"] > 0
    assert json.loads((done / "command.json").read_text())["verb"] == "study"
    assert not (done / "partial").exists()


@pytest.mark.slow
def test_it_is_reported(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = read_run(done)
    sentence = kind_of(run).sentence(run)
    assert len(sentence) > 40
    (section,) = kind_of(run).sections(run)
    picture = section.picture
    assert picture is not None
    assert len(picture.alt) > 40
    page = render([run])
    assert section.title in page
    assert "No results" not in page
    written = {path.relative_to(tmp_path).as_posix() for path in export([done], tmp_path)}
    assert {f"figures/{picture.name}.svg", f"figures/{picture.name}.png"} <= written
    tables = [path for path in written if path.startswith("tables/study")]
    assert {Path(path).suffix for path in tables} == {".csv", ".tex", ".md"}
    show_run(done)
    assert sentence[:20] in capsys.readouterr().out


@pytest.mark.slow
def test_a_study_that_was_killed_comes_to_the_same(
    done: Path, measure: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves, save = 0, FolderCache.save

    def dying(cache: FolderCache, *piece: Any) -> None:
        nonlocal saves
        if saves == 3:  # after the clean predictions and a first piece of its own
            raise KeyboardInterrupt
        saves += 1
        save(cache, *piece)

    with monkeypatch.context() as patched:
        patched.setattr(FolderCache, "save", dying)
        with pytest.raises(Interrupted):
            measure(tmp_path / "run")
    assert saves == 3
    again = measure(tmp_path / "run", resume=True)
    assert again == json.loads((done / "results.json").read_text())
    assert measure(tmp_path / "run", resume=True) == again


@pytest.mark.slow
def test_other_batches_give_the_same_numbers(done: Path, measure: Measure, tmp_path: Path) -> None:
    there = measure(tmp_path / "run", batch_size=4)["study"]
    assert list(_differences(there, json.loads((done / "results.json").read_text())["study"], "study")) == []


def test_every_study_and_every_family_of_other_libraries_is_met() -> None:
    assert {study for study, _ in LIBRARIES} == set(STUDIES)
    assert {OTHERS[library].family for _, library in LIBRARIES} == {other.family for other in OTHERS.values()}


def test_differences_are_found() -> None:
    one, other = {"a": [1, 0.5], "b": "x"}, {"a": [1, 0.6], "b": "y"}
    assert list(_differences(one, other, "study")) == ["study.a[1]: 0.5 and 0.6", "study.b: x and y"]
    assert list(_differences({"a": 1}, {"b": 1}, "study")) == ["study: {'a': 1} and {'b': 1}"]
    assert list(_differences([0.5], [0.5004], "study")) == []


def _differences(one: Any, other: Any, where: str) -> Iterator[str]:
    """Where two results differ by more than what rounding may do to numbers on the way through an attack."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from _differences(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for place, (mine, yours) in enumerate(zip(one, other, strict=True)):
            yield from _differences(mine, yours, f"{where}[{place}]")
    elif one != (pytest.approx(other, rel=0.02, abs=1e-3) if isinstance(one, float) else other):
        yield f"{where}: {one} and {other}"
