"""Shipped weights are those that were released."""

from __future__ import annotations

import hashlib
from importlib import resources

import pytest

from vitadel.backbones.checkpoints import CHECKSUMS, check_checksum, write_checksums, zoo_names
from vitadel.backbones.load import load_model
from vitadel.errors import UserError


def test_every_shipped_file_is_listed():
    folder = resources.files("vitadel") / "zoo"
    listed = {line.split()[1] for line in (folder / CHECKSUMS).read_text().splitlines()}
    assert listed == {f"{name.removeprefix('zoo:')}.safetensors" for name in zoo_names()}


def test_a_changed_file_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"as released")
    write_checksums(tmp_path)
    assert (tmp_path / CHECKSUMS).read_text() == f"{hashlib.sha256(b'as released').hexdigest()}  model.safetensors\n"
    check_checksum(path)
    path.write_bytes(b"as Released")
    with pytest.raises(UserError, match="not those of this version"):
        check_checksum(path)


def test_a_retired_model_says_why_and_what_to_use():
    with pytest.raises(UserError, match=r"'zoo:shapes-aas-at' is no longer shipped: .* were 1.*zoo:cifar10-aas-at"):
        load_model("zoo:shapes-aas-at")
