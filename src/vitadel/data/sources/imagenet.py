"""ImageNet and its relatives as folders of WordNet ids, labeled 0..999 in the usual order.

`imagenet:DIR` (Russakovsky et al. 2015), `imagenet-a:DIR` (Hendrycks et al. 2021, arXiv:1907.07174),
`imagenet-r:DIR` (arXiv:2006.16241) and `imagenet-c:DIR` (Hendrycks & Dietterich 2019, arXiv:1903.12261).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from timm.data import ImageNetInfo

from vitadel.data.batches import skip_advice
from vitadel.data.sources.folders import ImageFiles, class_folders, files_below, split_folder
from vitadel.data.spec import DataRequest, whole_number
from vitadel.errors import UserError
from vitadel.quantities import SEED
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.safe_reading import read_text_file

_WNID = re.compile(r"n\d{8}")
_SHIPPED_LISTS = {"light-recipe": Path(__file__).with_name("imagenet_light_recipe.txt")}


@lru_cache(maxsize=1)
def class_numbers() -> Mapping[str, int]:
    """Map WordNet ids to class numbers."""
    return {wnid: number for number, wnid in enumerate(ImageNetInfo().label_names())}


@lru_cache(maxsize=1)
def imagenet_classes() -> tuple[str, ...]:
    """1000 short names; the WordNet id is added where two classes share one ('crane', 'maillot')."""
    info = ImageNetInfo()
    short = [description.split(",")[0] for description in info.label_descriptions()]
    times = Counter(short)
    return tuple(
        name if times[name] == 1 else f"{name} ({wnid})" for name, wnid in zip(short, info.label_names(), strict=True)
    )


def named_like_imagenet(classes: Sequence[str]) -> bool:
    """Whether these are ImageNet's 1000 classes in order, by WordNet ids or by 90 % of the names.

    Sources spell names differently ('great_white_shark', 'crane bird') but use the same order.
    """
    if len(classes) != len(imagenet_classes()):
        return False
    info = ImageNetInfo()
    known = zip(info.label_names(), info.label_descriptions(), strict=True)
    meant = [{wnid, *(name.strip().lower() for name in names.split(","))} for wnid, names in known]
    written = [name.replace("_", " ").lower().split(",")[0].partition(" (n")[0] for name in classes]
    return sum(name in names for name, names in zip(written, meant, strict=True)) >= 0.9 * len(classes)


def _numbers_of_benchmark(kind: str) -> tuple[int, ...] | None:
    """The 200 classes of ImageNet-A or -R, which a model chooses from in these benchmarks; None for all 1000."""
    if kind not in ("imagenet-a", "imagenet-r"):
        return None
    listed = files("timm.data").joinpath("_info", f"{kind.replace('-', '_')}_synsets.txt").read_text("utf-8")
    return tuple(sorted(class_numbers()[wnid] for wnid in listed.split()))


def open_imagenet(request: DataRequest) -> ImageFiles:
    """Open DIR/n01440764/*.JPEG, or DIR/val and DIR/train; samples are sorted by class, then by path.

    `imagenet:DIR(list=FILE)` selects the images that a text file lists, one 'n01440764/name.JPEG' per line.
    `imagenet:DIR(classes=100,seed=0)` selects the images of 100 classes, drawn with the seed; `classes=FILE` those of a
    text file with one WordNet id per line, and `classes=light-recipe` those of Debenedetti's thesis (2022). Labels are
    then 0, 1, ... in the order of ImageNet, or of the file.
    """
    settings: dict[str, Any] = request.read_settings(list=Path, classes=str, seed=_seed)
    listed = settings.get("list")
    chosen = _chosen_classes(request, settings)
    root = request.path("a folder with sub-folders such as n01440764")
    # ImageNet's own test split has no labels, so validation comes first.
    if request.kind == "imagenet":
        root = split_folder(request, root, order=("val", "validation"))
    else:
        request.refuse_split()
    among = _numbers_of_benchmark(request.kind)
    found: list[str] = []
    empty = []
    for name in _wnid_folders(root, request, among, chosen):
        members = sorted(f"{name}/{path}" for path in files_below(root / name))
        found += members
        if not members:
            empty.append(name)
    if empty and found and not request.skip_bad:
        raise UserError(
            f"class '{empty[0]}' is empty: no image in '{root / empty[0]}'; add images"
            f"{skip_advice(request.skip_bad, ', or skip it')}"
        )
    skipped = tuple(f"class '{name}' is empty" for name in empty)
    if listed is not None:
        found = _only_listed(found, Path(os.path.expanduser(listed)), root)
    return _image_files(root, found, request, skipped=skipped, among=among, chosen=chosen)


def _seed(text: str) -> int:
    number = whole_number(text)
    if not SEED.holds(number):
        raise UserError(f"the seed must be {SEED.words}")
    return number


def _chosen_classes(request: DataRequest, settings: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The WordNet ids that `classes` selects, in the order of their labels; None for all classes."""
    classes = settings.get("classes")
    if classes is None:
        if "seed" in settings:
            raise UserError(f"'{request.spec}': seed belongs to a number of classes, as in (classes=100,seed=0)")
        return None
    if request.kind != "imagenet":
        raise UserError(f"{request.kind} has a fixed set of 200 classes; drop classes={classes}")
    if not re.fullmatch(r"[+-]?\d+", classes):
        if "seed" in settings:
            raise UserError(f"'{request.spec}': classes names a list, which needs no seed; drop one of them")
        shipped = _SHIPPED_LISTS.get(classes)
        return _classes_in_file(shipped or Path(os.path.expanduser(classes)))
    count, known = int(classes), tuple(class_numbers())
    if not 2 <= count <= len(known):
        raise UserError(f"'{request.spec}': classes must be from 2 to {len(known)}, or a file of WordNet ids")
    rng = SampleRNG.of_samples(settings.get("seed", 0), [0]).stream("classes of ImageNet")
    return tuple(known[number] for number in sorted(rng.permutation(len(known))[0, :count].tolist()))


def _classes_in_file(file: Path) -> tuple[str, ...]:
    """The WordNet ids of a list; what follows the id on its line is a comment."""
    lines = read_text_file(file, "list of classes").splitlines()
    ids = [line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#")]
    strange = next((name for name in ids if name not in class_numbers()), None)
    if strange is not None:
        raise UserError(f"the list of classes '{file}' has '{strange}', which is not one of the 1000 ImageNet classes")
    if len(ids) < 2 or len({*ids}) < len(ids):
        what = "names a class twice" if len(ids) > 1 else f"names {len(ids)} classes"
        raise UserError(f"the list of classes '{file}' {what}; it takes 2 or more WordNet ids, one per line")
    return tuple(ids)


def _only_listed(found: Sequence[str], file: Path, root: Path) -> list[str]:
    """The listed files in the usual order; all of them must exist, or the selection would change."""
    wanted = set(read_text_file(file, "list of images").split())
    missing = sorted(wanted - set(found))
    if missing or not wanted:
        what = f"names {len(missing)} images that are not below '{root}': {missing[0]}" if missing else "is empty"
        raise UserError(f"the list of images '{file}' {what}; it takes lines such as n01440764/ILSVRC2012_val_1.JPEG")
    return [name for name in found if name in wanted]


def open_imagenet_c(request: DataRequest) -> ImageFiles:
    """Open DIR/corruption/severity/wnid/*.JPEG; DIR may be all of it, one corruption, or one severity."""
    request.read_settings()
    request.refuse_split()
    root = request.path("the folder of ImageNet-C, of one corruption, or of one severity")
    found = sorted(files_below(root))
    return _image_files(root, found, request, parts=_parts(root, found))


def wnid_number(path: str, root: Path, request: DataRequest) -> int:
    """The class of a file by its parent folder, which must be a WordNet id of ImageNet-1k."""
    folder = _folders(root, path)[-1]
    if folder not in class_numbers():
        raise UserError(
            f"'{root / path}' is not in a folder of an ImageNet class; {request.kind} expects WordNet ids such as "
            f"n01440764 as the names of the lowest folders"
        )
    return class_numbers()[folder]


def _image_files(
    root: Path,
    found: Sequence[str],
    request: DataRequest,
    *,
    skipped: tuple[str, ...] = (),
    parts: Mapping[str, range] | None = None,
    among: tuple[int, ...] | None = None,
    chosen: Sequence[str] | None = None,
) -> ImageFiles:
    if not found:
        raise UserError(f"'{root}' holds no images; {request.kind} expects folders such as n01440764 with .JPEG files")
    numbers = list(class_numbers().values()) if chosen is None else [class_numbers()[wnid] for wnid in chosen]
    label = {number: place for place, number in enumerate(numbers)}
    return ImageFiles(
        root=root,
        classes=tuple(imagenet_classes()[number] for number in numbers),
        files=tuple(found),
        targets=torch.tensor([label[wnid_number(path, root, request)] for path in found]),
        skipped=skipped,
        parts=parts or {},
        among=among,
    )


def _wnid_folders(
    root: Path, request: DataRequest, among: Sequence[int] | None, chosen: Sequence[str] | None
) -> list[str]:
    names = class_folders(root) if root.is_dir() else []
    if not names:
        raise UserError(
            f"'{root}' has no sub-folders; {request.kind} expects one per class, named by its WordNet id "
            f"(n01440764 ...). Images in one flat folder have no labels: sort them into such folders first"
        )
    for name in names:
        if name not in class_numbers():
            hint = "" if _WNID.fullmatch(name) else "; for classes with other names use folder:DIR"
            raise UserError(f"'{root / name}' is not one of the 1000 ImageNet classes{hint}")
        if among is not None and class_numbers()[name] not in among:
            raise UserError(f"'{root / name}' is not one of the 200 classes of {request.kind}; use imagenet:{root}")
    if chosen is None:
        return names
    missing = [name for name in chosen if name not in names]
    if missing:
        raise UserError(
            f"'{request.spec}' selects {len(chosen)} classes, and '{root}' has no folder for {len(missing)} of them: "
            f"{missing[0]}. Give the whole ImageNet, or a list of classes that are there: classes=FILE"
        )
    return sorted(chosen)


def _parts(root: Path, found: Iterable[str]) -> dict[str, range]:
    """Map 'fog/3' to its range of samples; the names are the two folders above the class, which may be above root."""
    parts: dict[str, range] = {}
    start = 0
    for (corruption, severity), members in groupby(found, key=lambda path: _folders(root, path)[-3:-1]):
        end = start + sum(1 for _ in members)
        parts[f"{corruption}/{severity}"] = range(start, end)
        start = end
    return parts


def _folders(root: Path, path: str) -> list[str]:
    """The names of the folders above a file, padded to at least three."""
    return ["", "", "", *f"{root.absolute().as_posix()}/{path}".split("/")[:-1]]
