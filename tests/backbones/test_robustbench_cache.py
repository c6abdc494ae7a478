"""Weights of published models in the folders that RobustBench downloads to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from test_published import FACTS, TINY, check, images, saved

from vitadel.backbones.load import load_model
from vitadel.backbones.published import find_published
from vitadel.backbones.robustbench_cache import find_in_cache
from vitadel.errors import UserError

PUBLISHED = find_published(FACTS[TINY]["model"])


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(TINY, tmp_path_factory.mktemp("weights"))


def place(weights: Path, cache: Path, name: str) -> Path:
    file = cache / "cifar10" / "Linf" / name
    file.parent.mkdir(parents=True)
    shutil.copy(weights, file)
    return file


@pytest.mark.parametrize("inner", ["..", "", "cifar10", "cifar10/Linf"])
def test_the_file_of_a_name_is_found_in_the_cache(weights: Path, tmp_path: Path, inner: str) -> None:
    place(weights, tmp_path / "models", f"{PUBLISHED.name}.pt")
    model = load_model(PUBLISHED.spec, weights=tmp_path / "models" / inner)
    with torch.no_grad():
        logits = model(torch.from_numpy(images(model.record.input_size[0])))
    check(logits, FACTS[TINY]["logits"])


def test_the_file_of_the_authors_is_found_too(tmp_path: Path) -> None:
    published = find_published("imagenet/Debenedetti2022Light_XCiT-S12")
    assert published.file is not None
    (tmp_path / published.file).touch()
    assert find_in_cache(tmp_path, published) == tmp_path / published.file


def test_unfinished_downloads_and_missing_files_are_named(weights: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models"
    part = place(weights, cache, f"{PUBLISHED.name}.pt7x1q_2.part")
    with pytest.raises(UserError, match=r"is not complete: there is only '.*\.part' \([\d,]+ bytes\)\. Delete it"):
        load_model(PUBLISHED.spec, weights=cache)
    file = part.rename(part.with_name(f"{PUBLISHED.name}.pt"))
    file.write_bytes(file.read_bytes()[:100_000])
    with pytest.raises(UserError, match="it is not complete"):
        load_model(PUBLISHED.spec, weights=cache)
    file.write_text("<!DOCTYPE html><title>Google Drive - Quota exceeded</title>")
    with pytest.raises(UserError, match="is a web page, not a weight file"):
        load_model(PUBLISHED.spec, weights=cache)
    file.rename(file.with_name("Another2020Model.pt"))
    with pytest.raises(UserError, match=rf"is not in '.*models': neither '.*cifar10/Linf/{PUBLISHED.name}\.pt'"):
        load_model(PUBLISHED.spec, weights=cache)
