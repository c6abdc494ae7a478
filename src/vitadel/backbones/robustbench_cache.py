"""RobustBench's cache of downloaded models: `models/DATASET/THREAT/NAME.pt`, or torch hub's folder of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vitadel.backbones.published import Published
from vitadel.errors import UserError

__all__ = ["find_in_cache"]

_THREATS = {"linf": "Linf", "l2": "L2", "corruptions": "corruptions"}
_ENDINGS = (".pt", ".pth", ".pth.tar", ".safetensors")


def find_in_cache(folder: Path, published: Published) -> Path:
    """The weight file of a published model below `folder`, which is the cache, the folder around it or one inside.

    Upper case does not matter. Leftovers of a download that did not finish are named, not read.
    """
    places = list(_places(folder, published))
    names = [f"{published.name}{ending}" for ending in _ENDINGS]
    names += [Path(published.file).name] if published.file else []
    for place in places:
        files = {path.name.lower(): path for path in sorted(place.iterdir()) if path.is_file()}
        for name in names:
            if name.lower() in files:
                return files[name.lower()]
    leftovers = [path for place in places for path in sorted(place.iterdir()) if _is_leftover(path, names)]
    if leftovers:
        size = leftovers[0].stat().st_size
        raise UserError(
            f"the download of '{published.spec}' is not complete: there is only '{leftovers[0]}' ({size:,} bytes). "
            "Delete it, and download the file again."
        )
    wanted = folder / published.dataset / _THREATS[published.norm] / names[0]
    ensemble = next((place for place in places if (place / f"{names[0]}_m0.pt").exists()), None)
    if ensemble is not None:
        raise UserError(f"'{published.spec}' is an ensemble in '{ensemble}': several files. It is not known here.")
    raise UserError(
        f"'{published.spec}' is not in '{folder}': neither '{wanted}' nor one of {', '.join(names[1:])}. "
        f"The weights are to be had here: {published.where}."
    )


def _places(folder: Path, published: Published) -> Iterator[Path]:
    """The folder of the model's data set and threat first; a folder that is one of these itself is searched last."""
    threat = _THREATS[published.norm]
    inside = Path(published.dataset, threat)
    for place in (folder / "models" / inside, folder / inside, folder / threat, folder):
        if place.is_dir():
            yield place


def _is_leftover(path: Path, names: list[str]) -> bool:
    """Downloaders write NAME.ptXXXX.part or NAME.ptXXXXtmp beside the file, and rename it at the end."""
    name = path.name.lower()
    unfinished = any(name.startswith(each.lower()) and name != each.lower() for each in names)
    return path.is_file() and unfinished and not name.endswith("_m0.pt")
