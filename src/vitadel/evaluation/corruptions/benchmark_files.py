"""Corruption benchmarks stored as files: the sample of each image in each part, and checks that none is missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from vitadel.data import balanced_subset, open_dataset
from vitadel.data.sources.folders import ImageFiles
from vitadel.data.sources.videos import VideoFrames
from vitadel.errors import UserError, nearest_names
from vitadel.types import Source

Part = tuple[str, int]
_PART = re.compile(r"([^/]+)/([1-9])")
_NAMED = 10  # missing files that a message names


@dataclass(frozen=True, eq=False)
class StoredImages:
    """Corrupted images on disk: `samples[corruption, severity][k]` is image k in that part of the source."""

    samples: Mapping[Part, Tensor] = field(repr=False)
    label: Tensor = field(repr=False)
    names: Sequence[str] = field(repr=False)  # of each image, without corruption and severity; empty in arrays
    corruptions: tuple[str, ...] = ()

    def chosen(self, limit: int | None, seed: int) -> Tensor:
        """Numbers of images, class-balanced and the same in every part."""
        return balanced_subset(self.label, limit, seed)


@dataclass(frozen=True, eq=False)
class VideoSequences:
    """Sequences on disk: `frames[perturbation]` has a row of samples for each video, (videos, frames).

    `rows` are the numbers of these videos among all of a perturbation.
    """

    frames: Mapping[str, Tensor] = field(repr=False)
    label: Tensor = field(repr=False)
    rows: Tensor = field(repr=False)


def stored_images(
    source: Source, where: str, asked: Sequence[str] | None, usual: Sequence[str], severities: Sequence[int]
) -> StoredImages | None:
    """The requested parts of the benchmark at `where`, by default those of its `usual` corruptions that are there.

    None if the source is not stored by corruption and severity.
    """
    found = _parts(source)
    if not found:
        return None
    there = list(dict.fromkeys(corruption for corruption, _ in found))
    wanted = [name for name in usual if name in there] if asked is None else list(asked)
    for name in wanted:
        if name not in there:
            raise UserError(
                f"there is no '{name}' in {where}; there are: {', '.join(there)}{nearest_names(name, there)}"
            )
    if not wanted:
        raise UserError(f"{where} holds none of {', '.join(usual)}; there are: {', '.join(there)}")
    missing = [f"{name}/{level}" for name in wanted for level in severities if (name, level) not in found]
    if missing:
        raise UserError(
            f"{where} is not complete: {_some(missing)} missing. Unpack the whole benchmark, or choose with "
            "--corruptions and --severities"
        )
    stretches = {(name, level): found[name, level] for name in wanted for level in severities}
    labels = source.labels()
    names = _aligned({f"{name}/{level}": _members(source, part) for (name, level), part in stretches.items()})
    samples = {part: torch.arange(rows.start, rows.stop) for part, rows in stretches.items()}
    return StoredImages(samples, labels[next(iter(samples.values()))], names, tuple(wanted))


def video_sequences(
    source: Source, asked: Sequence[str] | None, usual: Sequence[str], limit: int | None, seed: int
) -> VideoSequences | None:
    """The sequences of the requested perturbations, of the same images in each; None if the source has no videos."""
    if not isinstance(source, VideoFrames):
        return None
    root = source.root.absolute().as_posix()
    videos: dict[str, dict[str, range]] = {}
    for path, frames in source.parts.items():
        *_, perturbation, wnid, name = f"{root}/{path}".split("/")
        videos.setdefault(perturbation, {})[f"{wnid}/{name}"] = frames
    wanted = [name for name in usual if name in videos] if asked is None else list(asked)
    missing = [name for name in wanted if name not in videos]
    if missing or not wanted:
        gone = f"no {_some(missing)}" if missing else f"none of {', '.join(usual)}"
        raise UserError(f"'{source.root}' holds {gone}; there are: {', '.join(videos)}")
    _aligned({name: list(videos[name]) for name in wanted})
    first = [frames.start for frames in videos[wanted[0]].values()]
    label = source.labels()[first]
    rows = balanced_subset(label, limit, seed)
    sequences = {name: _frames(name, videos[name])[rows] for name in wanted}
    return VideoSequences(sequences, label[rows], rows)


def in_clean_data(images: StoredImages, spec: str, root: str | Path | None) -> tuple[Source, Tensor]:
    """Clean data, and for each image of a benchmark its sample there: by name, or in arrays by place."""
    clean = open_dataset(spec, root=root)
    if isinstance(clean, ImageFiles) and images.names:
        place = {_stem(_tail(path)): sample for sample, path in enumerate(clean.files)}
        gone = [name for name in images.names if _stem(name) not in place]
        if gone:
            raise UserError(f"--clean-data {spec} lacks images of the benchmark: {_some(gone)}")
        rows = torch.tensor([place[_stem(name)] for name in images.names])
    else:
        rows = torch.arange(len(clean))
    if len(rows) != len(images.label) or not torch.equal(clean.labels()[rows], images.label):
        raise UserError(
            f"--clean-data {spec} is not the clean version of this benchmark: it has {len(rows)} images with labels of "
            f"its own, and the benchmark {len(images.label)} in each part"
        )
    return clean, rows


def _parts(source: Source) -> dict[Part, range]:
    parts: Mapping[str, range] = getattr(source, "parts", {})
    split = {_PART.fullmatch(name): rows for name, rows in parts.items()}
    return {(found[1], int(found[2])): rows for found, rows in split.items() if found}


def _members(source: Source, rows: range) -> list[str]:
    """The names of images, the same in every part; empty for arrays, where the position identifies an image."""
    return [_tail(source.files[row]) for row in rows] if isinstance(source, ImageFiles) else []


def _aligned(parts: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """The names that all parts have, in their order; a `UserError` if a part lacks one."""
    (first, names), *others = parts.items()
    everything = set(names).union(*(members for _, members in others))
    gone = [f"{part}/{name}" for part, members in parts.items() for name in sorted(everything.difference(members))]
    if gone:
        raise UserError(
            f"the parts of the benchmark do not hold the same images; missing: {_some(gone)}. Unpack it again, as "
            "errors of different images must not be compared"
        )
    assert all(list(members) == list(names) for _, members in others), f"{first} is sorted differently"
    return names


def _frames(perturbation: str, videos: Mapping[str, range]) -> Tensor:
    lengths = {len(frames) for frames in videos.values()}
    if len(lengths) > 1:
        usual = max(lengths)
        odd = [name for name, frames in videos.items() if len(frames) != usual]
        raise UserError(f"videos of '{perturbation}' have {usual} frames, but not {_some(odd)}; replace these files")
    return torch.stack([torch.arange(frames.start, frames.stop) for frames in videos.values()])


def _tail(path: str) -> str:
    """Class and file."""
    return "/".join(path.split("/")[-2:])


def _stem(name: str) -> str:
    return name.rpartition(".")[0] or name


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
