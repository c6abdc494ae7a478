"""Caltech-101 (Fei-Fei et al. 2004): 30 images of each class are for training, the others for testing.

The data has no split of its own. 30 images per class, with the background as class 102, are TensorFlow Datasets' split,
which Debenedetti (2022) uses; which images these are depends there on the order in which a file system lists folders,
so they are drawn here, always in the same way: 3060 images for training and 6084 for testing.
"""

from __future__ import annotations

import torch

from vitadel.data.sources.folders import ImageFiles, class_folders, files_below
from vitadel.data.spec import DataRequest, pick_split
from vitadel.errors import UserError
from vitadel.runtime.rng import SampleRNG

_FOLDER = "101_ObjectCategories"
_PER_CLASS = 30


def open_caltech101(request: DataRequest) -> ImageFiles:
    """Open 101_ObjectCategories below `--data-root` or its folder caltech101."""
    request.read_settings()
    split = pick_split(("test", "train"), request.split, "caltech101")
    places = [request.root / "caltech101" / _FOLDER, request.root / _FOLDER]
    root = next((place for place in places if place.is_dir()), None)
    if root is None:
        raise UserError(
            f"caltech101: there is no folder '{places[0]}' or '{places[1]}'. Nothing is downloaded automatically: get "
            f"caltech-101.zip from https://data.caltech.edu/records/mzrjq-6wc02 and unpack {_FOLDER}.tar.gz of it "
            "there, or give another folder with --data-root"
        )
    names = class_folders(root)
    files: list[str] = []
    targets: list[int] = []
    for label, name in enumerate(names):
        found = sorted(f"{name}/{path}" for path in files_below(root / name))
        if len(found) <= _PER_CLASS:
            raise UserError(f"'{root / name}' has {len(found)} images, and {_PER_CLASS} of a class are for training")
        order = SampleRNG.of_samples(0, [label]).stream("split of Caltech-101").permutation(len(found))[0].tolist()
        chosen = sorted(order[:_PER_CLASS] if split == "train" else order[_PER_CLASS:])
        files += [found[place] for place in chosen]
        targets += [label] * len(chosen)
    return ImageFiles(root, tuple(names), tuple(files), torch.tensor(targets))
