"""The run engine: every kind of run opens, resumes, writes and finishes its run folder here."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor

from vitadel.data.batches import skipped
from vitadel.errors import Interrupted, UserError, nearest_names
from vitadel.evaluation.engine.stages import MemoryCache, RunContext
from vitadel.evaluation.engine.target import Target
from vitadel.instrument.hooks import count_macs
from vitadel.quantities import WORKERS, quantity_text
from vitadel.runtime.distributed import Processes, gpu_module, is_gpu
from vitadel.runtime.opening import Opening
from vitadel.runtime.run_folder import (
    SCHEMA,
    Command,
    FolderCache,
    RunFolder,
    Translate,
    open_run,
    write_atomically,
    write_json,
)
from vitadel.version import __version__

if TYPE_CHECKING:
    from vitadel.evaluation.engine.expected_time import StageCosts, Trial

Request = TypeVar("Request", bound="RunRequest")

_MOST = 2**31  # samples in a batch or in all; far beyond what a machine holds, far below what tensors can count
_PACKAGES = ("torch", "torchvision", "timm", "numpy", "accelerate", "safetensors", "pillow", "pyarrow")


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The fields that all requests share. Every field of a request decides the result of the run.

    `limit` is the size of a seeded, class-balanced subset. `skip_bad` leaves out unreadable samples; None does not, and
    error messages do not suggest the flag, because the caller has none.
    """

    limit: int | None = None
    batch_size: int = 64
    seed: int = 0
    skip_bad: bool | None = False

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size < _MOST:
            allowed = "at least 1" if self.batch_size < 1 else "below 2**31"
            raise UserError(f"--batch-size must be {allowed}, got {self.batch_size}")
        if self.limit is not None and self.limit >= _MOST:
            raise UserError(f"--limit must be below 2**31, got {self.limit}; leave it out to use all samples")


def request_from(kind: type[Request], verb: str, settings: Mapping[str, Any]) -> Request:
    """A request from the keyword arguments of a Python function; names that it does not have are refused."""
    known = [each.name for each in fields(kind)]
    for name in settings:
        if name not in known:
            near = nearest_names(name, known)
            raise UserError(f"{verb} has no setting {name!r}{near}; it takes {', '.join(known)}")
    return kind(**settings)


class RunOptions(TypedDict, total=False):
    """Where a run is written and how it is shown; nothing here changes its result."""

    out: str | Path | None  # the run folder; by default a new one below runs/
    resume: bool
    in_memory: bool  # without `out`, write nothing at all
    show_progress: bool
    costs: StageCosts | None  # of a trial: what its stages cost
    expected: Mapping[str, float]  # likely seconds of stages, if they are known already
    workers: int | None  # processes that read images; None for as many as are usual on the device
    argv: Sequence[str]  # the command line, and how it opened model and data: for command.json
    opening: Opening | None


class Outcome(NamedTuple):
    """The results, the folder they were written to, and whether this process is the main one."""

    results: dict[str, Any]
    folder: RunFolder | None
    is_main: bool


@dataclass(frozen=True)
class Run:
    """A run at work. `folder` is None if it happens in memory."""

    folder: RunFolder | None
    processes: Processes
    show_progress: bool = False
    argv: Sequence[str] = ()
    opening: Opening | None = None
    expected: Mapping[str, float] = field(default_factory=dict)
    costs: StageCosts | None = None
    workers: int | None = None
    memory: MemoryCache = field(default_factory=MemoryCache)  # in place of the folder, where there is none

    @property
    def path(self) -> Path:
        assert self.folder is not None
        return self.folder.path

    @property
    def _writes(self) -> bool:
        return self.folder is not None and self.processes.is_main

    def write(self, name: str, content: bytes | None) -> None:
        """Write a file of the run folder, in the main process; nothing if there is no content."""
        if self._writes and content is not None:
            write_atomically(self.path / name, content)

    def write_unfinished(self, results: Mapping[str, Any]) -> None:
        """Show intermediate results in results.json."""
        if self._writes:
            write_json(self.path / "results.json", {**results, "complete": False})

    def inside(self, name: str) -> RunOptions:
        """The options of a run in a folder inside this one, which is resumed together with it."""
        return self.options_inside(self.path / name)

    def options_inside(self, out: Path) -> RunOptions:
        shown: RunOptions = {"show_progress": self.show_progress, "expected": self.expected, "costs": self.costs}
        return {"out": out, "resume": True, "argv": self.argv, "workers": self.workers, **shown}

    def copy_from(self, folder: str, *names: str) -> None:
        """Copy files of a run inside this one, where it has them."""
        for name in names:
            if self._writes and (self.path / folder / name).exists():
                self.write(name, (self.path / folder / name).read_bytes())

    def context(self, target: Target, request: RunRequest, **more: Any) -> RunContext:
        """The target's model, on the device, with its data and a cache for finished batches; `more` are fields."""
        return RunContext(
            model=self.processes.place(target.model),
            source=target.source,
            preprocess=target.preprocess,
            cache=self.memory if self.folder is None else FolderCache(self.folder, self.folder.shards()),
            processes=self.processes,
            batch_size=request.batch_size,
            seed=request.seed,
            classes=target.model.record.num_classes,
            skip_bad=request.skip_bad,
            workers=self._reading_processes(),
            show_progress=self.show_progress,
            expected=self.expected,
            costs=self.costs,
            **more,
        )

    def _reading_processes(self) -> int:
        if self.workers is not None or self.processes.device.type == "cpu":  # there, the model needs the cores
            return self.workers or 0
        from vitadel.data.worker_processes import usual_workers

        return usual_workers(self.processes.count)


def check_workers(options: RunOptions) -> None:
    """Refuse a number of reading processes that cannot be meant."""
    workers = options.get("workers")
    if workers is not None and not WORKERS.holds(workers):
        raise UserError(f"--workers must be auto or {WORKERS.words}, got {workers}")


def run_settings(target: Target, request: RunRequest, indices: Tensor, **more: Any) -> dict[str, Any]:
    """What a resumed run must agree in: model and data with their fingerprints, the request, and `more`."""
    settings = {
        "model": target.model_spec,
        "model_fingerprint": target.model_fingerprint(),
        "data": target.data_spec,
        "data_fingerprint": target.data_fingerprint(indices),
        **asdict(request),
        "skip_bad": bool(request.skip_bad),
    }
    eps = settings.get("eps")
    if eps is not None:
        settings["eps"] = [quantity_text(each) for each in eps] if isinstance(eps, tuple) else quantity_text(eps)
    return settings | more


def execute(
    verb: str,
    name: str,
    settings: Mapping[str, Any],
    processes: Processes,
    work: Callable[[Run], dict[str, Any]],
    *,
    target: Target | None = None,
    not_compared: Collection[str] = (),
    translate: Translate = dict,
    trial: Trial | None = None,
    **options: Unpack[RunOptions],
) -> Outcome:
    """Do the `work` in a run folder, whose results.json gets what it returns, or in memory.

    How `target` was opened is recorded, unless the options say it. A finished run is only read. A resumed one must
    agree in all `settings` except those `not_compared`; `translate` renames those of earlier versions. Ctrl-C raises
    `Interrupted` with this run's folder, also if a run inside it was interrupted. A new run whose progress is shown
    first says its likely time, by the `trial`.
    """
    check_workers(options)
    out, folder = options.get("out"), None
    argv = options.get("argv") or sys.argv
    opening = options.get("opening") or (None if target is None else target.opening)
    if opening is not None:
        opening = replace(opening, **{name: settings[name] for name in ("batch_size", "seed") if name in settings})
    if out is not None or not options.get("in_memory"):
        how = None if opening is None else opening.to_json()
        command = Command(verb, settings, argv, how, not_compared, translate)
        path, resume = None if out is None else Path(out), options.get("resume", False)
        # Only the main process touches the disk.
        folder = processes.on_main(lambda: open_run(command, name, out=path, resume=resume))
        if folder.complete:
            return Outcome(folder.results(), folder, processes.is_main)
        if processes.is_main:
            write_json(folder.path / "environment.json", environment(processes.device, processes.count))
    elif processes.count > 1:
        raise UserError("several processes need a run folder to share; give one with out=...")
    shown, expected = options.get("show_progress", False), options.get("expected", {})
    try:
        if trial is not None and shown and not expected and not options.get("resume"):
            from vitadel.evaluation.engine.expected_time import announce_time

            expected = announce_time(trial, processes)
        run = Run(folder, processes, shown, argv, opening, expected, options.get("costs"), options.get("workers"))
        start = time.perf_counter()
        results = {**work(run), "complete": True}
        if run.costs is not None:
            run.costs.work = time.perf_counter() - start
    except (KeyboardInterrupt, Interrupted):
        if folder is None:
            raise
        raise Interrupted(folder.path) from None
    if folder is not None and processes.is_main:
        write_json(folder.path / "results.json", results)
        folder.finish()
    processes.wait()
    return Outcome(results, folder, processes.is_main)


def result_header(seed: int, *, suite: str | None = None) -> dict[str, Any]:
    """The first fields of every `results.json`; the engine sets `complete` when the run is finished."""
    named = {} if suite is None else {"suite": suite}
    return {"schema": SCHEMA, "version": __version__, "complete": False, **named, "seed": seed}


def describe_target(target: Target, fingerprint: str, n: int, bad: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields `model`, `assumptions`, `data` and `class_mapping` of the results; `n` samples, without `bad` ones."""
    return {
        "model": {
            "spec": target.model_spec,
            "parameters": sum(p.numel() for p in target.model.parameters()),
            "macs": count_macs(target.model, target.preprocess.shape),
            "family": target.family,
            "fingerprint": fingerprint,
            "outputs": target.restriction or None,
            "notes": target.model.record.lasting_notes,
        },
        "assumptions": target.assumptions,
        "data": {
            "spec": target.data_spec,
            "n": n,
            "classes": len(target.source.classes),
            "class_names": list(target.source.classes),
            "pixels": list(target.preprocess.shape),
            "preprocessing": target.preprocess.about,
            "left_out": len(bad),
            "left_out_names": [entry["name"] for entry in bad[:20]],
            "not_opened": list(skipped(target.source)),
        },
        **({} if target.mapping is None else {"class_mapping": target.mapping.summary(target.among)}),
    }


def environment(device: torch.device, processes: int) -> dict[str, Any]:
    """The content of environment.json; nothing personal: no host name, no user, no paths."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "vitadel": __version__,
        "python": sys.version.split()[0],
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": versions,
        "device": str(device),
        "device_name": gpu_module(device).get_device_name(device) if is_gpu(device) else platform.processor() or "cpu",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": processes,
    }
