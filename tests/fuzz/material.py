"""What hostile inputs are made from: sound files and small finished runs of each kind, made once per process."""

from __future__ import annotations

import atexit
import io
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from PIL import Image

import command_line
from small_probes import LINEAR
from small_recipes import document
from tiny_paper import PAPER, RECIPE

_CPU = ("--device", "cpu")
SHORT = ("--limit", "4", *_CPU)
MODEL = "zoo:shapes-standard"
COMPARED = ("audit", MODEL, "--attacks", "fgsm", "--no-precheck", "--eps", "1/255")
RUNS = {
    "audit": ("audit", MODEL, "--attacks", "fgsm", "--no-precheck", *SHORT),
    "attack": ("attack", MODEL, "--attacks", "fgsm", "--png", *SHORT),
    "corruptions": ("corruptions", MODEL, "--corruptions", "fog", "--severities", "1,2", *SHORT),
    "stability": ("stability", MODEL, "--masks", "2", "--no-learned", "--patch-attacks", "fgsm", *SHORT),
    "threat-levels": (
        *("threat-levels", MODEL, "--tokens", "tokens.safetensors", "--levels", "T0,T6", "--eps", "1/255"),
        *("--steps", "1", "--white-box", "", *SHORT),
    ),
    "trade-off": ("trade-off", MODEL, "--attacks", "fgsm", "--aimed", "", "--eps", "1/255", *SHORT),
    "diagnose": ("diagnose", "w.safetensors", "--data", "shapes(size=16)", "--limit", "16", "--device", "cpu"),
    "harden": ("harden", "training.yaml", "--device", "cpu"),
    "probe": ("probe", "probe.yaml", "--device", "cpu"),
    "study": ("study", "attention", MODEL, "--attack", "fgsm", *SHORT),
    "curves": ("study", "curves", MODEL, "--budgets", "0,4/255", "--steps", "1", "--restarts", "1", *SHORT),
    "inspect": ("inspect", MODEL, "--attack", "features-1", *SHORT),
    "corrupt": ("corrupt", "--corruptions", "fog", "--severities", "1", *SHORT),
    "reproduce": ("reproduce", "tests/table1", "--rows", "short,public", "--device", "cpu"),
    "within": (*COMPARED, "--within", "9", "--limit", "160", *_CPU),
    "compare": (*COMPARED, "--compare-with", "../run-within", *_CPU),
    "shards": ("audit", MODEL, "--attacks", "fgsm", "--no-precheck", "--batch-size", "2", *SHORT),
}
"""The commands that make a finished run of each kind, in a folder with the files of `write_inputs`.

Of `shards`, the folder has both of two, which are not merged. Two of them take two looks at growing samples, and
`compare` takes the run `within` as the other one.
"""
PARTS = {"shards": (("--shard", "1/2"), ("--shard", "2/2"))}


@cache
def folder() -> Path:
    """The folder of this process's material; it is removed when the process ends."""
    path = Path(tempfile.mkdtemp(prefix="vitadel-fuzz-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def inputs() -> Path:
    """Sound data files, weights, tokens and recipes."""
    path = folder() / "inputs"
    path.mkdir()
    write_inputs(path)
    return path


@cache
def run(kind: str) -> Path:
    """A finished run of this kind."""
    path = folder() / f"run-{kind}"
    if kind == "compare":
        run("within")
    with tiny_paper(inputs()):
        for part in PARTS.get(kind, ((),)):
            command_line.vitadel(*RUNS[kind], *part, "--out", str(path), cwd=inputs())
    return path


@contextmanager
def tiny_paper(place: Path) -> Iterator[None]:
    """Let `reproduce` know a table of the tests' own, with a training that takes a second; its recipe is in `place`."""
    from vitadel.papers.paper_documents import find_item, parse_paper

    paper = parse_paper(PAPER.replace("FILE", str(place / "tiny.yaml")), "aas")

    def find(name: str) -> object:
        return (paper, paper.item("table1")) if name == "tests/table1" else find_item(name)

    with patch("vitadel.reproduce.jobs.find_item", find):
        yield


def write_inputs(path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), dtype=np.uint8)
    labels = np.array([0, 1, 0, 1])
    encoded = [_png(image) for image in noise]
    for row, content in enumerate(encoded):
        place = path / "photos" / "ab"[row % 2] / f"{row}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    np.savez(path / "d.npz", images=noise, labels=labels)
    images = [{"bytes": content, "path": None} for content in encoded]
    pq.write_table(pa.table({"image": images, "label": labels}), path / "d.parquet")
    with tarfile.open(path / "d.tar", "w") as archive:
        for row, content in enumerate(encoded):
            _add(archive, f"{row:03d}.png", content)
            _add(archive, f"{row:03d}.cls", str(labels[row]).encode())
    (path / "training.yaml").write_text(yaml.safe_dump(document(train={"epochs": 1})))
    (path / "probe.yaml").write_text(yaml.safe_dump(LINEAR))
    (path / "tiny.yaml").write_text(RECIPE)
    _write_weights(path)


def _write_weights(path: Path) -> None:
    from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
    from vitadel.adapters.tokens.token_files import save_tokens
    from vitadel.backbones.checkpoints import save_classifier
    from vitadel.backbones.load import load_model

    tiny = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    made = {"num_classes": 10, "mean": (0.5,) * 3, "std": (0.5,) * 3, "kwargs": tiny}
    model = load_model("vit_tiny_patch16_224", weights="random", **made)
    save_classifier(model, path / "w.safetensors")
    other = load_model("test_vit", weights="random", num_classes=10)
    torch.save(other.backbone.state_dict(), path / "w.pt")
    shipped = load_model(MODEL)
    save_tokens(TokenClassifier(shipped, fresh_tokens(96, 3, seed=4)), path / "tokens.safetensors", {})


def _png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
