"""Linear segmentation heads by recipe: one per learning rate; the best is evaluated clean and under attack."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from vitadel.attacks.settings import settings_of
from vitadel.backbones.anatomy import backbone_of, family_of
from vitadel.backbones.checkpoints import load_strict, read_checkpoint
from vitadel.backbones.classifier import Classifier
from vitadel.data.batches import balanced_subset, split_rows
from vitadel.data.sources.masks import Cut, MaskedImages, ResizeCrop, open_masked
from vitadel.errors import UserError
from vitadel.evaluation.engine.expected_time import StageCosts, Trial
from vitadel.evaluation.engine.run import Run, execute, result_header
from vitadel.evaluation.engine.stages import breaks_rules
from vitadel.heads.frozen_features import FrozenModel, feature_width
from vitadel.heads.probe_recipe import ProbeRecipe, pixel_attack
from vitadel.heads.segmentation import Confusion, SegmentationHead, Segmenter, slide, train_patch_head
from vitadel.instrument.hooks import frozen
from vitadel.instrument.tokens import patch_grid
from vitadel.quantities import quantity_text
from vitadel.runtime.distributed import Processes
from vitadel.runtime.progress import RESUMED, Meter, progress
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.run_folder import FolderCache, RunFolder, write_atomically
from vitadel.runtime.safe_reading import parse_json_object
from vitadel.training.recipes.probe_sections import MaskData, PatchHead

_METADATA_KEY = "vitadel-segmentation"
_SCHEMA = 1

PUBLIC = "public backbone"
"""What an attack was made on that knows model and head, but no tokens."""
OWN_HEAD = "public backbone, the attacker's own head"
"""What an attack was made on that knows neither tokens nor head, and trained one on the same images: the paper's."""
_DEPLOYED = "deployed segmenter"
_ATTACKERS = "attackers-head.safetensors"
PICTURES_FILE = "segmented.npz"
_PICTURES = 4
_TRIED = 8  # steps of a trial
_FEATURES, _HEADS, _CHOICE = "patch tokens", "heads", "choice"  # what training takes its time for


@dataclass(frozen=True, eq=False)
class _PatchMaps:
    """Patch maps and masks of some images, by their place among `rows`; kept in main memory, or made when asked for."""

    segmenter: Segmenter
    data: MaskedImages
    rows: Tensor
    cut: ResizeCrop
    device: torch.device
    kept: tuple[Tensor, Tensor] | None = None
    views: Callable[[int], Cut] | None = None  # the random cut of a step

    def __getitem__(self, places: Tensor) -> tuple[Tensor, Tensor]:
        return self.at(places, self.cut)

    def at(self, places: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
        if self.kept is not None:
            maps, masks = self.kept
            return maps[places].to(self.device), masks[places].to(self.device)
        pixels, masks = self.data.read(self.rows[places], cut)
        with frozen(self.segmenter.model), torch.no_grad():
            return self.segmenter.patch_map(pixels.to(self.device)), masks.to(self.device)

    def keeping(self, batch_size: int, shown: bool) -> _PatchMaps:
        with progress("patch tokens", len(self.rows), shown) as meter:
            parts = []
            for places in torch.arange(len(self.rows)).split(batch_size):
                maps, masks = self[places]
                parts.append((maps.cpu(), masks.to("cpu", torch.uint8)))
                meter.advance(len(places))
        maps, masks = (torch.cat(each) for each in zip(*parts, strict=True))
        return _PatchMaps(self.segmenter, self.data, self.rows, self.cut, self.device, (maps, masks))

    def shuffled(self, steps: int, batch_size: int, seed: int, meter: Meter) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches in one random order of all images after the other."""
        rounds = -(-steps * batch_size // len(self.rows))
        order = (
            SampleRNG.of_samples(seed, range(rounds)).stream("segmentation order").permutation(len(self.rows)).flatten()
        )
        for step, places in enumerate(order[: steps * batch_size].split(batch_size)):
            batch = self.at(places, self.cut if self.views is None else self.views(step))
            meter.advance(1)  # before the yield: nothing runs after the last one
            yield batch


@dataclass(frozen=True, eq=False)
class _MaskJob:
    recipe: ProbeRecipe
    base: FrozenModel
    train: MaskedImages
    rows: Tensor
    held_out: Tensor
    test: MaskedImages
    test_rows: Tensor
    cut: ResizeCrop
    head_file: Path

    @property
    def model(self) -> Classifier:
        return self.base.model

    @property
    def head(self) -> PatchHead:
        return cast(PatchHead, self.recipe.head)

    @property
    def cache_bytes(self) -> int:
        """Of patch tokens and masks of all images to train and choose on."""
        height, width = self.cut.size
        pixels = torch.zeros(1, 3, height, width, device=next(self.model.parameters()).device)
        tall, wide = patch_grid(self.model, pixels)
        each = tall * wide * feature_width(self.model) * 4 + height * width
        return (len(self.rows) + len(self.held_out)) * each

    @property
    def keeps(self) -> bool:
        return not self.data.augment and self.cache_bytes <= self.data.cache_mb * 1e6

    @property
    def data(self) -> MaskData:
        return cast(MaskData, self.recipe.data)

    def _view(self, step: int) -> Cut:
        from vitadel.heads.random_views import RandomScaleCrop

        return RandomScaleCrop(self.cut.size, self.cut.interpolation, self.recipe.train.seed, step)

    def plan(self) -> str:
        train, rates, audit = self.recipe.train, len(self.head.lrs), self.recipe.audit
        images, size = len(self.rows) + len(self.held_out), f"{self.cache_bytes / 1e6:,.0f} MB of patch tokens"
        passes = (
            f"{images:,} images once through the model ({size} kept)"
            if self.keeps
            else f"{rates * train.steps * train.batch_size:,} images through the model "
            f"({'new views in every step' if self.data.augment else f'{size} exceed data.cache_mb'})"
        )
        gradients = sum(pixel_attack(name, audit).steps for name in audit.attacks)
        gradients *= 1 if self.base.tokens is None else 3
        attacked = f", {gradients} gradients each under {', '.join(audit.attacks)}" if audit.attacks else ""
        if attacked and self.base.tokens is not None:
            attacked += "; and the same training once more for an attacker's own head, without the tokens"
        return (
            f"{passes}, {rates} {'head' if rates == 1 else 'heads'} in {train.steps:,} steps of {train.batch_size}; "
            f"then {len(self.test_rows):,} test images of {self.cut.size[0]} x {self.cut.size[1]}{attacked}"
        )

    def trial(self, name: str) -> Trial:
        """The same run on a few images to train on, to choose on and to test, in a few steps."""

        def on_few(few: int, alone: Processes, *, out: Path, costs: StageCosts) -> None:
            train, data = self.recipe.train, self.data
            short = replace(train, steps=min(_TRIED, train.steps))
            recipe = replace(self.recipe, train=short, data=data if self.keeps else replace(data, cache_mb=0))
            rows, held_out, test_rows = (each[:few] for each in (self.rows, self.held_out, self.test_rows))
            small = replace(self, recipe=recipe, rows=rows, held_out=held_out, test_rows=test_rows)
            execute("probe", name, {}, alone, lambda run: small.run(name, run), out=out, costs=costs)
            costs.outside = sum(costs.once.values())
            images = (len(self.rows) + len(self.held_out)) / (len(rows) + len(held_out))
            times = {_FEATURES: images, _HEADS: train.steps / short.steps, _CHOICE: len(self.held_out) / len(held_out)}
            costs.once = {stage: times[stage] * seconds for stage, seconds in costs.once.items()}

        return Trial(len(self.test_rows), on_few)

    def run(self, name: str, run: Run) -> dict[str, Any]:
        path, device = run.path / self.head_file, run.processes.device
        if not path.exists():
            self._train(path, run)
        head, report = _load_head(path, self.model)
        segmenter = Segmenter(self.model, head.to(device)).eval()
        clean = self._judge("clean", segmenter, None, None, run)
        makers = {_DEPLOYED: segmenter}
        if self.recipe.audit.attacks and self.base.tokens is not None:
            makers[PUBLIC] = Segmenter(self.base.classifier, segmenter.head).eval()
            makers[OWN_HEAD] = self._attackers(path.with_name(_ATTACKERS), run)
        attacks = [
            self._judge(attack, segmenter, maker, where, run)
            for attack in self.recipe.audit.attacks
            for where, maker in makers.items()
        ]
        self._write_pictures(segmenter, makers, run)
        summary = {"recipe": name, "tokens": self.base.tokens, **report, "clean": clean, "attacks": attacks}
        return {**self._about(), "segmentation": summary}

    def _write_pictures(self, segmenter: Segmenter, makers: Mapping[str, Segmenter], run: Run) -> None:
        """A few test images with truth and predictions, clean and under the first attack of the weakest attacker."""
        audit, device = self.recipe.audit, run.processes.device
        rows = self.test_rows[:_PICTURES]
        x, masks = (part.to(device) for part in self.test.read(rows, self.cut))
        with frozen(segmenter), torch.no_grad():
            found = {"images": x, "truth": masks, "clean": segmenter(x).argmax(1)}
        for attack in audit.attacks[:1]:
            *_, maker = makers.values()
            rng = SampleRNG.of_samples(self.recipe.train.seed, rows, device).stream(attack)
            with frozen(maker):
                z = pixel_attack(attack, audit)(maker, x, masks, rng).clamp(0, 1)
            with frozen(segmenter), torch.no_grad():
                found |= {"attacked images": z, "attacked": segmenter(z).argmax(1)}
        arrays = {
            name: (255 * each).round().byte().permute(0, 2, 3, 1) if each.dim() == 4 else each.byte()
            for name, each in found.items()
        }
        content = io.BytesIO()
        np.savez_compressed(content, **{name: each.cpu().numpy() for name, each in arrays.items()})
        run.write(PICTURES_FILE, content.getvalue())

    def _attackers(self, path: Path, run: Run) -> Segmenter:
        """The public backbone with a head that was trained as the defender's, but without the tokens."""
        public = replace(self, base=FrozenModel(self.base.classifier, self.base.classifier))
        if not path.exists():
            public._train(path, run)
        head, _ = _load_head(path, public.model)
        return Segmenter(public.model, head.to(run.processes.device)).eval()

    def _train(self, path: Path, run: Run) -> None:
        """A head for every rate; the one with the best mIoU of the held-out images is saved."""
        train, classes = self.recipe.train, len(self.train.classes)
        device, shown = run.processes.device, run.show_progress
        fresh = SegmentationHead(feature_width(self.model), classes, train.seed)
        source = Segmenter(self.model, fresh)
        maps, aside = (_PatchMaps(source, self.train, rows, self.cut, device) for rows in (self.rows, self.held_out))
        if self.data.augment:
            maps = replace(maps, views=self._view)
        if self.keeps:
            with _timed(run, _FEATURES):
                maps, aside = maps.keeping(train.batch_size, shown), aside.keeping(train.batch_size, shown)
        heads, scores = [], []
        for rate in self.head.lrs:
            head = SegmentationHead(feature_width(self.model), classes, train.seed).to(device)
            with _timed(run, _HEADS), progress(f"head, rate {rate:g}", train.steps, shown) as meter:
                batches = maps.shuffled(train.steps, train.batch_size, train.seed, meter)
                settings = {"rate": rate, "decay": self.head.weight_decay, "warm_up": self.head.warmup_share}
                train_patch_head(head, batches, steps=train.steps, **settings)
            confusion = Confusion(classes)
            with _timed(run, _CHOICE), torch.no_grad():
                for places in torch.arange(len(aside.rows)).split(train.batch_size):
                    patch_map, masks = aside[places]
                    confusion.add(head(patch_map, self.cut.size).argmax(1), masks)
            heads.append(head)
            scores.append(confusion.mean_iou())
        best = max(range(len(scores)), key=scores.__getitem__)
        report = {
            "train": self.recipe.data.train,
            "trained_on": len(self.rows),
            "held_out": len(self.held_out),
            "steps": train.steps,
            "batch_size": train.batch_size,
            "size": list(self.cut.size),
            "chosen": {"rate": self.head.lrs[best]},
            "heads": [{"rate": r, "held_out_mean_iou": s} for r, s in zip(self.head.lrs, scores, strict=True)],
        }
        _save_head(heads[best], path, self.base, self.train.classes, report)

    def _judge(
        self,
        attack: str,
        segmenter: Segmenter,
        maker: Segmenter | None,
        where: str | None,
        run: Run,
    ) -> dict[str, Any]:
        """Scores of the test images, or of what an attack on `maker` makes of them; batches done are kept."""
        audit, seed = self.recipe.audit, self.recipe.train.seed
        stage = attack if where is None else f"{attack} on {where}"
        crafted = None if maker is None else pixel_attack(attack, audit)
        confusion, cache, void = Confusion(len(self.test.classes)), FolderCache(RunFolder(run.path)), 0
        device, start = next(segmenter.head.parameters()).device, time.perf_counter()
        meters = progress(stage, len(self.test_rows), run.show_progress, run.expected.get(stage))
        with meters as meter, frozen(segmenter):
            for number, rows in enumerate(self.test_rows.split(audit.batch_size)):
                piece = cache.find(stage, number)
                if piece is None or piece["rows"].tolist() != rows.tolist():
                    x, masks = (part.to(device) for part in self.test.read(rows, self.cut))
                    broke = torch.zeros(len(x), dtype=torch.bool, device=device)
                    if crafted is not None and maker is not None:
                        rng = SampleRNG.of_samples(seed, rows, device).stream(attack)
                        z = crafted(maker, x, masks, rng)
                        broke = breaks_rules(crafted.threat, x, z)
                        x = torch.where(broke.view(-1, 1, 1, 1), x, z.clamp(0, 1))  # the clean image counts instead
                    own = Confusion(len(self.test.classes))
                    if crafted is None and self.data.stride is not None:
                        self._judge_whole(own, segmenter, rows.tolist(), device)
                    else:
                        with torch.no_grad():
                            own.add(segmenter(x).argmax(1), masks)
                    piece = {"rows": rows.numpy(), "matrix": own.matrix.numpy(), "counts": own.counts.numpy()}
                    piece["void"] = np.asarray(int(broke.sum()))
                    cache.save(stage, number, piece)
                    meter.advance(len(rows))
                else:
                    meter.advance(len(rows), RESUMED)
                confusion.take_in(torch.from_numpy(piece["matrix"]), torch.from_numpy(piece["counts"]))
                void += int(piece["void"])
        if run.costs is not None:
            run.costs.seconds[stage] = time.perf_counter() - start
        scores = _scores(confusion, self.test.classes, seed)
        if crafted is None:
            return scores
        settings = {**settings_of(crafted), "norm": audit.norm, "eps": quantity_text(audit.eps), "seed": seed}
        return {"name": attack, "made_on": where, "judged_on": _DEPLOYED, "settings": settings, "void": void, **scores}

    def _judge_whole(self, confusion: Confusion, segmenter: Segmenter, rows: list[int], device: torch.device) -> None:
        """Predict images at their own size, from windows that slide over them; the shorter side is that of a window."""
        (height, width), stride = self.cut.size, cast(int, self.data.stride)
        for row in rows:
            image, values = self.test.pair(row)
            scale = max(height / image.height, width / image.width)
            sides = (max(height, round(scale * image.height)), max(width, round(scale * image.width)))
            x = ResizeCrop(sides, self.cut.interpolation).image(image)[None].to(device) / 255
            mask = torch.from_numpy(values)[None]
            with torch.no_grad():
                confusion.add(slide(segmenter, x, self.cut.size, stride, mask.shape[1:]).argmax(1), mask)

    def _about(self) -> dict[str, Any]:
        audit, classes = self.recipe.audit, self.test.classes
        return {
            **result_header(self.recipe.train.seed),
            "model": {
                "spec": self.recipe.model.name,
                "parameters": sum(p.numel() for p in self.model.parameters()),
                "family": family_of(self.model),
                "fingerprint": self.base.fingerprint,
                "notes": self.model.record.lasting_notes,
            },
            "data": {
                "spec": self.recipe.data.test,
                "n": len(self.test_rows),
                "classes": len(classes),
                "class_names": list(classes),
            },
            "threat": {"norm": audit.norm, "eps": audit.eps, "eps_text": quantity_text(audit.eps)},
            "batch_size": audit.batch_size,
        }


@contextmanager
def _timed(run: Run, stage: str) -> Iterator[None]:
    """Add the seconds to what the stage costs once, whatever the number of test images."""
    start = time.perf_counter()
    yield
    if run.costs is not None:
        run.costs.once[stage] = run.costs.once.get(stage, 0.0) + time.perf_counter() - start


def open_mask_job(recipe: ProbeRecipe, base: FrozenModel, root: str | Path | None, head_file: Path) -> _MaskJob:
    """Open images and masks, and see that the model takes images of their size; `head_file` lies in the run folder."""
    section, model = cast(MaskData, recipe.data), base.model
    size = section.size or model.record.input_size
    if size is None:
        raise UserError("the model names no input size; give data.size, [height, width]")
    _check_size(model, size)
    if section.stride is not None and section.stride > min(size):
        raise UserError(
            f"data.stride is {section.stride} and windows have {size[0]} x {size[1]} pixels, so some pixels would be "
            f"in none of them; give at most {min(size)}"
        )
    options: dict[str, Any] = {"classes": section.classes, "void": section.void, "from_one": section.from_one}
    train, test = (open_masked(spec, root=root, **options) for spec in (section.train, section.test))
    seed, cut = recipe.train.seed, ResizeCrop(size, model.record.interpolation)
    train_labels, test_labels = (torch.zeros(len(images), dtype=torch.int64) for images in (train, test))
    every = torch.arange(len(train))
    rows, held_out = split_rows(train_labels, every, section.held_out, section.limit, seed, limit_seed=seed)
    test_rows = balanced_subset(test_labels, recipe.audit.limit, seed)
    train.read(rows[:1], cut), test.read(test_rows[:1], cut)  # raises if none can be read
    return _MaskJob(recipe, base, train, rows, held_out, test, test_rows, cut, head_file)


def _check_size(model: Classifier, size: tuple[int, int]) -> None:
    backbone: Any = backbone_of(model)
    patch = getattr(getattr(backbone, "patch_embed", None), "patch_size", 1)
    tall, wide = patch if isinstance(patch, tuple) else (patch, patch)
    height, width = size
    if height % tall or width % wide:
        below, above = (
            [max(1, (pixels + up * (side - 1)) // side) * side for pixels, side in ((height, tall), (width, wide))]
            for up in (0, 1)
        )
        raise UserError(
            f"images of {height} x {width} pixels cannot be cut into patches of {tall} x {wide}: set data.size to "
            f"multiples of them, such as {below} or {above}"
        )
    try:
        patch_grid(model, torch.zeros(1, 3, height, width, device=next(model.parameters()).device))
    except (AssertionError, RuntimeError, UserError) as error:  # timm's own and ours, by how the model is wrapped
        own = " x ".join(map(str, model.record.input_size or ("?",)))
        raise UserError(
            f"data.size is {height} x {width} pixels, and '{model.record.name}' is built for {own}. Set data.size to "
            "that, model.input_size to another square, or model.kwargs.dynamic_img_size=true for any size."
        ) from error


def _scores(confusion: Confusion, classes: tuple[str, ...], seed: int) -> dict[str, Any]:
    data_set, per_image = confusion.intervals(seed)
    iou = {
        name: None if value != value else value for name, value in zip(classes, confusion.iou().tolist(), strict=True)
    }
    return {
        "images": confusion.images,
        "mean_iou": confusion.mean_iou(),
        "mean_iou_ci95": list(data_set),
        "mean_iou_per_image": confusion.mean_iou_per_image(),
        "mean_iou_per_image_ci95": list(per_image),
        "pixel_accuracy": confusion.accuracy(),
        "iou": iou,
    }


# The head's file


def _save_head(
    head: SegmentationHead,
    path: Path,
    base: FrozenModel,
    classes: tuple[str, ...],
    report: dict[str, Any],
) -> None:
    about = {
        "schema": _SCHEMA,
        "model": base.classifier.record.name,
        "backbone_fingerprint": base.fingerprint,
        "classes": list(classes),
        "report": report,
    }
    weights = {key: value.detach().cpu().contiguous() for key, value in head.state_dict().items()}
    write_atomically(path, safetensors.torch.save(weights, metadata={_METADATA_KEY: json.dumps(about)}))


def _load_head(path: Path, model: Classifier) -> tuple[SegmentationHead, dict[str, Any]]:
    checkpoint = read_checkpoint(path)
    try:
        about = parse_json_object(checkpoint.metadata[_METADATA_KEY], f"'{path}'")
        head, report = SegmentationHead(feature_width(model), len(about["classes"])), dict(about["report"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"'{path}' is no segmentation head, or damaged ({error!r}). Remove it to train it again."
        ) from error
    load_strict(head, checkpoint.weights, str(path))
    return head.eval(), report
