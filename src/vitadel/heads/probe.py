"""`vitadel probe`: heads on the frozen features of a model, with or without robustness tokens, as a run folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Unpack, cast

import torch
from torch import Tensor

from vitadel.adapters.tokens.token_files import load_tokens
from vitadel.attacks.parse import make
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.load import has_no_head, load_model
from vitadel.data import open_dataset
from vitadel.data.batches import Preprocess, check_same_classes, read_batches, split_rows, usable_rows
from vitadel.errors import UserError
from vitadel.evaluation.audit.audit import AuditRequest, run_audit
from vitadel.evaluation.audit.clean_accuracy import findings_about_training
from vitadel.evaluation.engine.expected_time import Trial
from vitadel.evaluation.engine.run import Outcome, Run, RunOptions, execute
from vitadel.evaluation.engine.target import Target
from vitadel.heads.frozen_features import FrozenModel, feature_width, token_features
from vitadel.heads.linear_probe import (
    HEAD_FILE,
    FeatureBatches,
    HeadResult,
    Probe,
    ProbeReport,
    cached_features,
    head_metadata,
    load_head,
    save_head,
    train_heads,
    train_probe,
)
from vitadel.heads.probe_recipe import ProbeRecipe, build_probe, with_tokens
from vitadel.heads.segmentation_probe import open_mask_job
from vitadel.instrument.hooks import frozen
from vitadel.quantities import duration
from vitadel.runtime.distributed import Processes, join_processes
from vitadel.training.recipes.compose import compose, deciding
from vitadel.training.recipes.probe_sections import LinearHead, MaskData, ProbeData
from vitadel.training.recipes.training_sections import ModelSection
from vitadel.training.recipes.yaml_files import TEXTS, recipe_text, translate_settings
from vitadel.training.run import title_of
from vitadel.types import Source

_TRIED = 8  # images, and steps, by which the time is estimated


class Job(Protocol):
    """A recipe with its model and data."""

    def plan(self) -> str:
        """What it will cost, in images and passes."""
        ...

    def trial(self, name: str) -> Trial | None:
        """How to do it on a few images; None if the plan has the likely time."""
        ...

    def run(self, name: str, run: Run) -> dict[str, Any]:
        """Train what the folder does not contain yet, evaluate it, and return the results."""
        ...


def probe(
    recipe: str | Path,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    row: str | None = None,
    tokens: str | Path | None = None,
    allow_readable: bool = False,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    data_root: str | Path | None = None,
) -> dict[str, Any]:
    """Train and evaluate heads by a recipe from Python: `probe("probes/shapes")`; returns results.json."""
    name = title_of(recipe, row)
    built = build_probe(with_tokens(compose(recipe, row, overrides), tokens), name)
    processes = join_processes(device)
    return run_probe(
        built, name, processes, allow_readable=allow_readable, out=out, resume=resume, data_root=data_root
    ).results


def run_probe(
    recipe: ProbeRecipe,
    name: str,
    processes: Processes,
    *,
    allow_readable: bool = False,
    show_plan: Callable[[str], None] = lambda text: None,
    data_root: str | Path | None = None,
    **options: Unpack[RunOptions],
) -> Outcome:
    """Train heads in a run folder and evaluate the best. `show_plan` gets the expected cost as a sentence."""
    if processes.count > 1:
        raise UserError(
            f"heads are trained in one process, and {processes.count} were started; start without a launcher"
        )
    root = recipe.data.root if data_root is None else data_root
    job, base = _open_job(recipe, root, processes, allow_readable)
    settings = {
        **deciding(recipe.document),
        "--data-root": None if data_root is None else str(data_root),
        "backbone": base.fingerprint,
        "tokens fingerprint": base.tokens,
    }

    def work(run: Run) -> dict[str, Any]:
        run.write("recipe.yaml", recipe_text(recipe.document).encode())
        show_plan(job.plan())
        return job.run(name, run)

    earlier: dict[str, Any] = {"not_compared": TEXTS, "translate": translate_settings}
    return execute("probe", name, settings, processes, work, trial=job.trial(name), **earlier, **options)


def _open_job(
    recipe: ProbeRecipe, root: str | Path | None, processes: Processes, allow_readable: bool
) -> tuple[Job, FrozenModel]:
    """Open model and data, before the run folder is created: an error leaves no folder."""
    classifier = _load_frozen(recipe.model, recipe.train.seed).to(processes.device)
    base = FrozenModel(classifier, classifier)
    if recipe.tokens is not None:
        if "," in recipe.tokens and not Path(recipe.tokens).exists():
            raise UserError(f"a head is trained beside one set of tokens, got '{recipe.tokens}': give one file")
        tokened = load_tokens(recipe.tokens, classifier, allow_readable=allow_readable).to(processes.device).eval()
        base = FrozenModel(cast(Classifier, tokened), classifier, tokened.fingerprint)
    if isinstance(recipe.data, MaskData):
        return open_mask_job(recipe, base, root, HEAD_FILE), base
    return _open_linear(recipe, recipe.data, base, root), base


def _load_frozen(section: ModelSection, seed: int) -> Classifier:
    """The model with its own head, which is not used, or with a random one drawn from `seed`."""
    headless = has_no_head(section.name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = load_model(
            section.name,
            weights=section.weights,
            num_classes=section.num_classes or (2 if headless else None),
            new_head=headless,
            head_classes=section.head_classes,
            **replace(section, drop_path=None).options(),
        )
    return model.requires_grad_(False)


# Linear probes


@dataclass(frozen=True, eq=False)
class _LinearJob:
    recipe: ProbeRecipe
    base: FrozenModel
    train: Source
    rows: Tensor
    held_out: Tensor
    test: Source
    root: str | Path | None
    preprocess: Preprocess

    @property
    def head(self) -> LinearHead:
        return cast(LinearHead, self.recipe.head)

    def plan(self) -> str:
        head, kept, train = self.head, len(self.held_out) + (0 if self._augments else len(self.rows)), self.recipe.train
        images = kept + (train.steps * train.batch_size if self._augments else 0)
        heads = len(head.blocks) * len(head.average) * len(head.lrs)
        size = kept * (max(head.blocks) + 1) * feature_width(self.base.model) * (2 if head.half else 4) / 1e6
        audit = self.recipe.audit
        gradients = sum(make(name, eps=audit.eps, norm=audit.norm).passes()[0] for name in audit.attacks)
        n = min(len(self.test), audit.limit or len(self.test))
        attacked = f", and at most {gradients} gradients each under {', '.join(audit.attacks)}" if audit.attacks else ""
        likely = duration(self._likely_seconds())
        return (
            f"likely {likely} without the test: {images:,} images once through the model ({size:,.1f} MB of features "
            f"kept), {heads} heads in {train.steps:,} steps of {train.batch_size}; then {n:,} test images{attacked}"
        )

    def trial(self, name: str) -> None:
        return None

    def _likely_seconds(self) -> float:
        """Of features and heads, by a trial on a few images and in a few steps."""
        head, train = self.head, self.recipe.train
        blocks, device = max(head.blocks), next(self.base.model.parameters()).device
        settings = [(count, mean) for count in head.blocks for mean in head.average]
        steps, seconds = min(_TRIED, train.steps), 0.0
        for few in (1, _TRIED):  # a first pass is slow
            start = time.perf_counter()
            some = self.rows[:few]
            features = cached_features(self.base.model, self.train, some, self.preprocess, blocks, few, device)
            passed = time.perf_counter()
            classes, size = len(self.train.classes), train.batch_size
            batches = self._views(few) if self._augments else features
            train_heads(batches, classes, settings, head.lrs, steps=steps, batch_size=size, device=device)
            trained = time.perf_counter() - passed
            images = (len(self.held_out) + (0 if self._augments else len(self.rows))) / len(features)
            seconds = images * (passed - start) + train.steps / steps * trained
        return seconds

    def run(self, name: str, run: Run) -> dict[str, Any]:
        path = run.path / HEAD_FILE
        trained = (
            load_head(path, self.base.model) if path.exists() else self._train(path, run.processes, run.show_progress)
        )
        report = head_metadata(path)["report"]
        recipe, audit = self.recipe, self.recipe.audit
        target = Target(cast(Classifier, trained), recipe.model.name, self.test, recipe.data.test, self.root)
        request = AuditRequest(
            attacks=audit.attacks,
            eps=audit.eps,
            norm=audit.norm,
            limit=audit.limit,
            batch_size=audit.batch_size,
            seed=recipe.train.seed,
        )
        outcome = run_audit(target, request, run.processes, **run.inside("audit"))
        run.copy_from("audit", "samples.parquet", "examples.npz")
        found = self._findings_about_held_out(report, outcome.results) + list(outcome.results["findings"])
        return {**outcome.results, "findings": found, "probe": {"recipe": name, "tokens": self.base.tokens, **report}}

    def _findings_about_held_out(self, report: Mapping[str, Any], results: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What speaks against the chosen head by its accuracy on held-out images."""
        chosen = [each for each in report["heads"] if report["chosen"].items() <= each.items() and each["n"]]
        if not chosen or chosen[0]["n"] != len(self.held_out):
            return []
        labels = self.train.labels()[self.held_out]
        clean = chosen[0]["correct"] / chosen[0]["n"]
        return findings_about_training(labels, clean, None, len(self.train.classes), results)

    def _train(self, path: Path, processes: Processes, shown: bool) -> Probe:
        trained, report = train_probe(
            self.base.model,
            self.train,
            self.rows,
            self.held_out,
            self.preprocess,
            self.head,
            self.recipe.train,
            device=processes.device,
            shown=shown,
            views=self._views() if self._augments else None,
        )
        save_head(trained, path, {"backbone_fingerprint": self.base.fingerprint, "report": self._summarize(report)})
        return trained

    @property
    def _augments(self) -> bool:
        return cast(ProbeData, self.recipe.data).augment

    def _views(self, images: int | None = None) -> FeatureBatches:
        """Features of random views of the first `images`, or all."""
        from vitadel.heads.random_views import ViewedFeatures

        blocks, seed = max(self.head.blocks), self.recipe.train.seed
        device = next(self.base.model.parameters()).device
        return ViewedFeatures(self.base.model, self.train, self.rows[:images], self.preprocess, blocks, seed, device)

    def _summarize(self, report: ProbeReport) -> dict[str, Any]:
        return {
            "train": self.recipe.data.train,
            "trained_on": report.trained_on,
            "classes_trained": len(self.train.labels()[self.rows].unique()),
            "held_out": len(self.held_out),
            "steps": self.recipe.train.steps,
            "batch_size": self.recipe.train.batch_size,
            "feature_bytes": report.cache_bytes,
            "chosen": asdict(report.chosen),
            "heads": [_head_entry(result) for result in report.heads],
        }


def _head_entry(result: HeadResult) -> dict[str, Any]:
    loss = result.loss if result.loss < float("inf") else None  # JSON has no infinity
    return {**asdict(result.setting), "correct": result.correct, "n": result.n, "loss": loss}


def _open_linear(recipe: ProbeRecipe, section: ProbeData, base: FrozenModel, root: str | Path | None) -> _LinearJob:
    model = base.model
    train, test = open_dataset(section.train, root=root), open_dataset(section.test, root=root)
    check_same_classes(test, train, f"data.test ({section.test})")
    rows, held_out = _split(train, section, recipe.train.seed)
    preprocess = Target(model, recipe.model.name, train, section.train).preprocess
    (first,) = read_batches(train, [rows[:1].tolist()], preprocess)
    device, blocks = next(model.parameters()).device, cast(LinearHead, recipe.head).blocks
    with frozen(model), torch.no_grad():  # raises if the model has no such tokens or fewer blocks
        token_features(model, first.to(device).x, max(blocks))
    return _LinearJob(recipe, base, train, rows, held_out, test, root, preprocess)


def _split(source: Source, section: ProbeData, seed: int) -> tuple[Tensor, Tensor]:
    rows = usable_rows(source, len(source.classes))
    # Another seed than the audit's, which would select few images of exactly the tested classes.
    return split_rows(source.labels(), rows, section.held_out, section.limit, seed, limit_seed=seed + 2)
