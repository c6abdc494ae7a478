"""An audit in shards: each attacks its own images, whenever it starts, and `merge` makes one run of them.

The images of an audit are in blocks that no batch crosses, also where one process does all of it. Shard I of N has
every N-th block. What a shard writes are therefore the very batches of the whole run, and the merge is that run,
resumed with all of them at hand. What depends on all images is left to it: the sentinels and the escalation of
`autoattack-fast`, findings, the table of samples and the examples of the report.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Unpack

from vitadel.errors import Interrupted, UserError
from vitadel.evaluation.audit.audit import AuditRequest, AuditWork, check_request, run_audit
from vitadel.evaluation.audit.protocols import compare_with_protocols
from vitadel.evaluation.engine.reopen import reopen
from vitadel.evaluation.engine.run import Outcome, Run, RunOptions, check_workers, environment, run_settings
from vitadel.evaluation.engine.stages import clean_stage
from vitadel.evaluation.engine.target import Target, apply_class_subset
from vitadel.evaluation.engine.verdicts import Verdicts, accuracy_among_all
from vitadel.instrument.hooks import frozen
from vitadel.quantities import read_quantity
from vitadel.runtime.distributed import Processes
from vitadel.runtime.opening import recorded_opening, typed_words
from vitadel.runtime.run_folder import (
    SHARDS,
    Command,
    RunFolder,
    announce_run,
    disk_errors_reported,
    open_run,
    read_command,
    write_json,
)
from vitadel.runtime.run_shards import Shard, number_list, shards_in
from vitadel.runtime.safe_reading import check_regular_file, parse_json_object, read_text_file, validated
from vitadel.runtime.trusted_code import check_code_trusted, names_code

VERB = "audit"
_FILE = "shard.json"
"""What a shard writes when it is done."""


def run_shard(
    target: Target, request: AuditRequest, processes: Processes, shard: Shard, **options: Unpack[RunOptions]
) -> dict[str, Any]:
    """Attack the images of one shard, below the folder `out` of the whole run; returns how many they were.

    A shard that was killed goes on where it was, and one that is done returns at once.
    """
    check_workers(options)
    out, argv, shown = options.get("out"), options.get("argv", ()), options.get("show_progress", False)
    if out is None:
        raise UserError("--shard needs --out: the folder that all shards share, or one for each, to be merged")
    run_path = Path(out)
    target = apply_class_subset(target)
    indices, mislabeled = target.selection(request.limit, request.seed, request.skip_bad)
    path = shard.folder(run_path)
    if not processes.on_main(path.exists):
        check_request(target, request, indices, processes.device)
    protocol = compare_with_protocols(request, target, indices)
    settings = run_settings(target, request, indices)
    how = None if target.opening is None else replace(target.opening, batch_size=request.batch_size, seed=request.seed)
    whole = Command(VERB, settings, argv, None if how is None else how.to_json())
    part = replace(whole, settings={**settings, "shard": str(shard)})

    def open_folder() -> dict[str, Any] | None:
        announce_run(whole, target.model_spec, run_path)
        _check_count(run_path, shard)
        open_run(part, target.model_spec, out=path, resume=True)
        return _summary(path)

    done = processes.on_main(open_folder)
    if done is not None:
        return done
    folder = RunFolder(path)
    run = Run(folder, processes, shown, argv, how, workers=options.get("workers"))
    work = AuditWork(run, target, request, settings, protocol)
    try:
        context, _ = work.context(indices)
        context = replace(context, of_shard=True)
        assert context.blocks is not None
        own = indices[[shard.has(block) for block in context.blocks.holding(indices).tolist()]]
        if processes.is_main:
            write_json(path / "environment.json", environment(processes.device, processes.count))
        with frozen(context.model):
            verdicts = Verdicts.of_clean(clean_stage(context, own), mislabeled)
            if len(verdicts.index):
                work.attack(context, verdicts, indices, [])
                accuracy_among_all(context, verdicts.index)
    except (KeyboardInterrupt, Interrupted):
        raise Interrupted(run_path) from None
    done = asdict(_Summary(shard.number, shard.count, len(own), len(context.blocks)))
    if processes.is_main:
        write_json(path / _FILE, done)
        folder.unlock()
    processes.wait()
    return done


@dataclass(frozen=True)
class _Summary:
    """What a shard writes about itself when it is done."""

    shard: int
    of: int
    images: int
    blocks: int


def _summary(path: Path) -> dict[str, Any] | None:
    """The summary of a shard that is done."""
    file = path / _FILE
    if not file.exists():
        return None
    written = parse_json_object(read_text_file(file, "the summary of the shard"), f"'{file}'")
    return asdict(validated(_Summary, written, f"'{file}'"))


def _check_count(run: Path, shard: Shard) -> None:
    others = sorted({each.count for each in shards_in(run)} - {shard.count})
    if others:
        raise UserError(
            f"{run} has shards of {others[0]}, and {shard} is one of {shard.count}: they would overlap; nothing was "
            f"written. Use --shard I/{others[0]}, or a different --out."
        )


def merge_shards(
    runs: Sequence[Path],
    processes: Processes,
    examine: Callable[[Target, AuditRequest], list[dict[str, Any]]],
    device: str,
    **options: Unpack[RunOptions],
) -> Outcome:
    """One run from the shards in these folders: the folder itself if it is one, else `out`, which gets copies.

    `examine` gives the findings of the precheck, if the audit has one.
    """
    out, first = options.pop("out", None), runs[0]
    if out is None and len(runs) > 1:
        raise UserError(f"{len(runs)} run folders are merged into a new one: name it with --out")
    home = first if out is None else Path(out)
    processes.on_main(lambda: _collect(runs, home))
    command = read_command(home)
    assert command is not None
    request = _request_of(command["settings"], home)
    opened = reopen(home, {"device": device, "eps": request.eps, "norm": request.norm}, ())
    checks: dict[str, Any] = {}
    if "--no-precheck" not in typed_words(command):
        checks["examine"] = lambda target: examine(target, request)
    argv = command.get("argv", ())
    opening = recorded_opening(command)
    options |= {"out": home, "resume": True, "argv": argv, "opening": opening}
    return run_audit(opened.open_target(), request, processes, verb=VERB, **checks, **options)


def _request_of(settings: Mapping[str, Any], home: Path) -> AuditRequest:
    attacks = settings.get("attacks")
    names = attacks if isinstance(attacks, list) else [attacks]
    check_code_trusted(next((str(name) for name in names if names_code(str(name))), None), f"the run folder '{home}'")
    known = {each.name: settings[each.name] for each in fields(AuditRequest) if each.name in settings}
    if "eps" in known:
        known["eps"] = read_quantity(str(known["eps"]), "eps")
    return validated(AuditRequest, known, f"'{home / 'command.json'}', field 'settings'")


def _collect(runs: Sequence[Path], home: Path) -> None:
    """Check that the folders have all shards of one run, and bring them together in `home`."""
    commands = {run: _command_of(run) for run in runs}
    first = runs[0]
    if RunFolder(home).complete and [*runs] == [home]:
        return
    folders: dict[Shard, Path] = {}
    for run, command in commands.items():
        _check_same(first, commands[first], run, command)
        own = shards_in(run)
        if not own and run.resolve().parent.name == SHARDS:
            raise UserError(f"{run} is one shard; give the folder of the whole run, {run.resolve().parents[1]}")
        if not own:
            raise UserError(f"{run} has no shards; they come from 'vitadel audit ... --shard I/N --out {run}'")
        for shard, path in own.items():
            _check_same(run, command, path, _command_of(path))
            if shard in folders:
                raise UserError(
                    f"shard {shard} is in {folders[shard].parents[1]} and in {run}: shards must not overlap. Leave one "
                    "of them out."
                )
            folders[shard] = path
    _check_complete(folders)
    if [*runs] != [home]:
        recorded = commands[first]
        how = recorded_opening(recorded).to_json()
        announce_run(Command(VERB, recorded["settings"], recorded.get("argv", ()), how), "merged", home)
        for shard, path in folders.items():
            copy = shard.folder(home)
            if not copy.exists():
                torn = copy.with_name(f".{copy.name}.copying")
                with disk_errors_reported(copy):
                    shutil.rmtree(torn, ignore_errors=True)
                    _copy_files(path, torn)
                    torn.rename(copy)


def _copy_files(folder: Path, copy: Path) -> None:
    """Copy the regular files below a folder; links to other folders are not followed."""
    for place, _, names in os.walk(folder):
        target = copy / Path(place).relative_to(folder)
        target.mkdir(parents=True)
        for name in names:
            source = Path(place) / name
            check_regular_file(source, "the file of a shard")
            shutil.copyfile(source, target / name)


def _command_of(run: Path) -> dict[str, Any]:
    command = read_command(run)
    if command is None:
        raise UserError(f"{run} is not a run folder; give those that were --out of 'vitadel audit ... --shard I/N'")
    if command["verb"] != VERB:
        raise UserError(f"{run} holds a run of 'vitadel {command['verb']}'; only audits have shards to merge")
    return command


def _check_same(first: Path, command: Mapping[str, Any], other: Path, compared: Mapping[str, Any]) -> None:
    whole = Command(VERB, command["settings"], not_compared=("shard",))
    changed = Command(VERB, compared["settings"], not_compared=("shard",)).differences(whole.settings)
    if changed:
        lines = "".join(f"\n  {line.replace(': was ', ': ').replace(', now ', ' and ')}" for line in changed)
        raise UserError(f"{first} and {other} are not shards of one run; nothing was merged. They differ in{lines}")


def _check_complete(folders: Mapping[Shard, Path]) -> None:
    counts = sorted({shard.count for shard in folders})
    if len(counts) > 1:
        raise UserError(
            f"there are shards of {' and of '.join(map(str, counts))}, which overlap: {', '.join(map(str, folders))}. "
            "Give those of one number only."
        )
    done = {shard.number: _summary(path) for shard, path in folders.items()}
    known = [summary for summary in done.values() if summary is not None]
    needed = min(counts[0], int(known[0]["blocks"])) if known else counts[0]  # others have no images
    missing = [number for number in range(1, needed + 1) if number not in done]
    unfinished = [number for number, summary in done.items() if summary is None]
    if missing or unfinished:
        reasons = [f"missing: {number_list(missing)}"] * bool(missing)
        reasons += [f"not finished: {number_list(unfinished)}"] * bool(unfinished)
        raise UserError(
            f"not all of the {counts[0]} shards are there; {'; '.join(reasons)}. Start these again by their commands: "
            "finished work is kept. If they wrote to other disks, give their folders, too, and --out for all together."
        )
