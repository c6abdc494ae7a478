"""Compare published models, filled by a formula, with the logits of their original code.

    python scripts/check_published.py FACTS [LAYOUT ...]

FACTS is a folder with layouts/*.json (keys, shapes and rules), fingerprints.json and models.json. Each layout is
filled, saved in its published container, and loaded twice: as `published:NAME`, and under the plain timm name, where
the file must be recognized. One line per layout; the exit code is 1 if one differs.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from published_fill import fill, images
from vitadel.backbones.load import load_model
from vitadel.backbones.published import Published, catalogue
from vitadel.errors import UserError

_NO_ENTRY = {  # layouts of the authors' own code for models that are listed by their RobustBench layout
    "singh2023_repo_deit_s_cvst": "Singh2023Revisiting_ViT-S-ConvStem",
    "singh2023_repo_vit_b_cvst": "Singh2023Revisiting_ViT-B-ConvStem",
    "singh2023_repo_convnext_base_cvst": "Singh2023Revisiting_ConvNeXt-B-ConvStem",
    "clip_full_vit_b_32_laion_gelu": "fare4-clip-vit-b-32-(laion)",
    "timm_convnext_tiny_new": "singh-convnext-t",
    "timm_swin_base_patch4_window7_224_old": "RodriguezMunoz2024Characterizing_Swin-B",
    "timm_swin_large_patch4_window7_224_old": "RodriguezMunoz2024Characterizing_Swin-L",
}
_PLAIN = {  # what a user would call models that timm has under no name of their own
    "convstem_vit_small": "deit_small_patch16_224",
    "convstem_vit_medium": "deit3_medium_patch16_224",
    "convstem_vit_base": "vit_base_patch16_224",
    "convstem_convnext_isotropic_small": "convnext_small",
    "mimir_swin_base": "swin_base_patch4_window7_224",
    "mimir_swin_large": "swin_large_patch4_window7_224",
    "meansparse_swin_large": "swin_large_patch4_window7_224",
    "meansparse_convnext_large": "convnext_large",
}


def make_weights(layout: dict[str, Any], normalization: tuple[Any, Any] | None) -> dict[str, Tensor]:
    weights = {}
    for key, canonical, shape, rule, dtype in layout["keys"]:
        if rule == "constant" or rule.startswith("ignore"):
            value = torch.zeros(shape, dtype=getattr(torch, dtype))
            last = key.rpartition(".")[2]
            if last in ("mean", "std") and normalization is not None:
                value = torch.tensor(normalization[last == "std"]).view(shape)
        else:
            value = torch.from_numpy(fill(rule, canonical, shape))
        weights[key] = value
    return weights


def contain(layout: str, weights: dict[str, Tensor]) -> object:
    """The weights in the container that files of this layout have."""
    numbers = {"top1": np.float64(70.0), "loss": 1.0}
    if layout.startswith("xcit"):
        return {
            "epoch": 1,
            "step_count_global": 2,
            "model": weights,
            "model_ema": None,
            "hparams": {},
            "metrics": numbers,
        }
    if layout.startswith("mo2022"):
        return {"state_dict": weights, "epoch": 1, "opt": {"state": {}, "param_groups": []}}
    if layout.startswith("mimir_swin"):
        return {"model_state_dict": {f"module.base_model.{key}": value for key, value in weights.items()}}
    if layout.startswith("mimir"):
        options = argparse.Namespace(lr=0.1, out=Path("out"))
        return {"model": weights, "optimizer": {"param_groups": []}, "epoch": 1, "scaler": {}, "args": options}
    if layout.startswith("singh2023_repo"):
        return {f"module.base_model.{key}": value for key, value in weights.items()}
    if layout.startswith("singh2023"):
        return {"state_dict": {f"model.{key}": value for key, value in weights.items()}}
    if layout.startswith("clip_vit"):
        return {"vision_encoder_state_dict": weights}
    if layout.startswith("timm_swin") and layout.endswith("old"):
        return {"state_dict": {f"module.{key}": value for key, value in weights.items()}}
    return weights


def distance(logits: Tensor, expected: dict[str, Any]) -> float:
    """The largest relative difference of all numbers; infinite if the largest logits are of other classes."""
    worst = 0.0
    for row, image in zip(logits.double(), expected["images"], strict=True):
        first = torch.tensor(image["first10"], dtype=torch.float64)
        pairs = [
            (float((row[: len(first)] - first).abs().max()), float(first.abs().max())),
            (abs(float(row.norm()) - image["l2"]), image["l2"]),
            (abs(float(row.mean()) - image["mean"]), image["std"]),
            (abs(float(row.std(unbiased=False)) - image["std"]), image["std"]),
        ]
        if int(row.argmax()) != image["argmax"] or len(row) != image["n"]:
            return float("inf")
        worst = max([worst, *(difference / size for difference, size in pairs)])
    return worst


class Check:
    """One layout."""

    def __init__(self, facts: Path, name: str) -> None:
        self.name = name
        self.layout = json.loads((facts / "layouts" / f"{name}.json").read_text("utf-8"))
        oracles = json.loads((facts / "fingerprints.json").read_text("utf-8"))["fingerprints"]
        self.oracle = oracles.get(re.sub("^clip_full", "clip", name))
        self.published = self._published(json.loads((facts / "models.json").read_text("utf-8"))["models"])

    def _published(self, models: list[dict[str, Any]]) -> Published:
        wanted = _NO_ENTRY.get(self.name)
        for entry in models:
            row = (entry["robustbench"] or {}).get("id") or re.sub("[ /]", "-", entry["name"].lower())
            if row == wanted or (wanted is None and entry["layout"] == self.name):
                dataset = {10: "cifar10", 100: "cifar100"}.get(entry["num_classes"], "imagenet")
                return next(each for each in catalogue() if (each.name, each.dataset) == (row, dataset))
        raise SystemExit(f"no model has the layout {self.name}")

    def options(self) -> dict[str, Any]:
        """The normalization of the oracle, where that was made on other pixels than the model takes."""
        found = (self.oracle or {"info": {}})["info"].get("normalisation")
        if isinstance(found, str) and "none" in found and self.published.mean != (0.0, 0.0, 0.0):
            return {"mean": (0, 0, 0), "std": (1, 1, 1)}
        return {}

    def run(self, folder: Path) -> dict[str, Any]:
        normal = (self.published.mean, self.published.std)
        path = folder / "weights.pth"
        torch.save(contain(self.name, make_weights(self.layout, normal)), path)
        model = load_model(self.published.spec, weights=path, **self.options())
        pixels = torch.from_numpy(images(self.published.size))
        with torch.no_grad():
            result: dict[str, Any] = {"plain": None, "probe": None}
            logits = model(pixels)
            if self.oracle is not None:
                result["plain"] = distance(logits, self.oracle["logits"])
            if self.oracle is not None and "probe" in self.oracle:
                del model
                weights = make_weights(self.layout, normal)
                self._scale(weights)
                torch.save(contain(self.name, weights), path)
                del weights
                model = load_model(self.published.spec, weights=path, **self.options())
                result["probe"] = distance(model(pixels), self.oracle["probe"]["logits"])
        del model
        gc.collect()
        return result | {"recognized": self._recognized(path)}

    def _scale(self, weights: dict[str, Tensor]) -> None:
        for key, canonical, *_ in self.layout["keys"]:
            for start, factor in self.oracle["probe"]["scaled"].items():
                if canonical.startswith(start):
                    weights[key] = weights[key] * factor

    def _recognized(self, path: Path) -> str:
        """What loading the file under the plain timm name says: a name of a published model, or nothing."""
        name = self.published.model
        name = _PLAIN.get(name, name.removeprefix("convstem_"))
        classes = {} if self.published.dataset == "imagenet" else {"num_classes": 10 ** (1 + ("100" in self.name))}
        try:
            notes = load_model(name, weights=path, **classes).record.notes
            said, kind = " ".join((notes.get("looks like", ""), notes.get("assumed", ""))).strip(), "loaded"
        except UserError as error:
            said, kind = str(error), "refused"
        return f"{kind}, {'named' if self.published.spec in said else 'stated' if said else 'SILENT'}"


def _size(facts: Path, name: str) -> int:
    keys = json.loads((facts / "layouts" / f"{name}.json").read_text("utf-8"))["keys"]
    return sum(math.prod(shape) for _, _, shape, _, _ in keys)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("facts", type=Path)
    parser.add_argument("layouts", nargs="*")
    given = parser.parse_args()
    layouts = (given.facts / "layouts").glob("*.json")
    names = given.layouts or sorted((path.stem for path in layouts), key=lambda name: _size(given.facts, name))
    failed = 0
    for name in names:
        started = time.process_time()
        tolerance = 2e-2 if name.startswith("meansparse") else 1e-3
        with tempfile.TemporaryDirectory() as folder:
            check = Check(given.facts, name)
            try:
                found = check.run(Path(folder))
            except UserError as error:
                found = {"plain": float("inf"), "probe": None, "recognized": str(error)}
        bad = any(value is not None and not value <= tolerance for value in (found["plain"], found["probe"]))
        bad |= "SILENT" in found["recognized"]
        failed += bad
        shown = ["-" if found[key] is None else f"{found[key]:.1e}" for key in ("plain", "probe")]
        verdict = "DIFFERS" if bad else "ok"
        seconds = time.process_time() - started
        print(f"{verdict:8}{name:42}{shown[0]:>9}{shown[1]:>9}  {seconds:5.0f} s  {found['recognized']}", flush=True)
        gc.collect()
    print(f"{len(names) - failed} of {len(names)} layouts hold")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
