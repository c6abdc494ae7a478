"""An audit in shards: any order, killed and restarted, in one folder or several, the same bytes as one process."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from vitadel.errors import Interrupted, UserError
from vitadel.evaluation.audit.audit import AuditRequest, run_audit
from vitadel.evaluation.audit.audit_shards import merge_shards, run_shard
from vitadel.evaluation.engine.stages import Blocks
from vitadel.evaluation.engine.target import Target, open_as
from vitadel.runtime.distributed import Processes
from vitadel.runtime.opening import Opening
from vitadel.runtime.run_folder import Command, FolderCache, announce_run, open_run
from vitadel.runtime.run_shards import Shard, number_list, read_shard

ONE = Processes(0, 1, torch.device("cpu"))
IMAGES, BATCH = 20, 2  # ten blocks
REQUEST: dict[str, Any] = {"limit": IMAGES, "batch_size": BATCH, "eps": 1 / 255}
CHAIN = ("fgsm", "pgd-2(restarts=2)")
FAST = (
    "autoattack-fast(entropy_steps=1,margin_steps=1,targets=1,target_steps=1,best_targets=1,best_steps=1,"
    "sentinel_queries=2,sentinel_targets=1,sentinel_steps=1,escalate=false)",
    "pgd-2",
)


@pytest.fixture(scope="module")
def target() -> Target:
    return open_as(Opening.read(model="zoo:shapes-standard", data="shapes", device="cpu"))


def request_for(attacks: tuple[str, ...] = ("fgsm",), **changed: Any) -> AuditRequest:
    return AuditRequest(**{**REQUEST, "attacks": attacks, **changed})


def shard(target: Target, request: AuditRequest, text: str, out: Path) -> dict[str, Any]:
    return run_shard(target, request, ONE, read_shard(text), out=out, argv=["audit", "--no-precheck"])


def merge(*runs: Path, out: Path | None = None) -> Path:
    outcome = merge_shards(runs, ONE, lambda target, request: [], "cpu", out=out)
    assert outcome.folder is not None
    return outcome.folder.path


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: timeless(entry) for key, entry in value.items() if key != "seconds"}
    return [timeless(entry) for entry in value] if isinstance(value, list) else value


def files_of(run: Path) -> tuple[str, bytes, bytes]:
    results = json.dumps(timeless(json.loads((run / "results.json").read_text())), indent=2)
    return results, (run / "samples.parquet").read_bytes(), (run / "examples.npz").read_bytes()


class Killed(BaseException):
    """The process ends without any cleanup of its own."""


def kill_after(patched: pytest.MonkeyPatch, batches: int) -> None:
    """Let the process die while it writes a record, after so many of them."""
    saved, save = 0, FolderCache.save

    def dying(cache: FolderCache, *record: Any) -> None:
        nonlocal saved
        if saved == batches:
            raise Killed
        saved += 1
        save(cache, *record)

    patched.setattr(FolderCache, "save", dying)


def compare_shards_with_one(
    target: Target, request: AuditRequest, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every shard is killed once at a random batch, and started again."""
    run_audit(target, request, ONE, out=tmp_path / "one")
    order = [Shard(number, count) for number in range(1, count + 1)]
    chance = random.Random(0)
    chance.shuffle(order)
    done = []
    for each in order:
        with monkeypatch.context() as patched, suppress(Killed):
            kill_after(patched, chance.randrange(3))
            done.append(shard(target, request, str(each), tmp_path / "shards"))  # one whose images all fall at once
        shard(target, request, str(each), tmp_path / "shards")
    assert len(done) < count / 2
    assert files_of(merge(tmp_path / "shards")) == files_of(tmp_path / "one")


@pytest.mark.slow
def test_sixteen_shards_killed_and_in_any_order_merge_to_the_bytes_of_one_process(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compare_shards_with_one(target, request_for(CHAIN, limit=38), 16, tmp_path, monkeypatch)


@pytest.mark.slow
def test_what_depends_on_all_images_is_decided_by_the_merge(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    request = request_for(FAST, limit=8)
    compare_shards_with_one(target, request, 2, tmp_path, monkeypatch)
    stages = {path.name for path in (Shard(1, 2).folder(tmp_path / "shards") / "partial").iterdir()}
    searched = [stage for stage in stages if stage.startswith("00")]
    assert [stage.rpartition("_")[2] for stage in searched] == ["search"]
    assert not any("pgd-2" in stage for stage in stages)


@pytest.mark.slow
def test_the_merge_computes_nothing_that_a_shard_has_computed(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    request = request_for(("fgsm", "pgd-2"), limit=12)
    for text in ("2/3", "3/3", "1/3"):
        shard(target, request, text, tmp_path)
    kill_after(monkeypatch, 0)
    assert json.loads((merge(tmp_path) / "results.json").read_text())["complete"]


def test_a_shard_that_is_done_computes_nothing(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = shard(target, request_for(), "1/10", tmp_path)
    kill_after(monkeypatch, 0)
    assert (
        shard(target, request_for(), "1/10", tmp_path)
        == first
        == {
            "shard": 1,
            "of": 10,
            "images": 2,
            "blocks": 10,
        }
    )


@pytest.mark.slow
def test_a_shard_reads_in_as_many_processes_as_are_asked_for(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def count(reader: object, chunks: object, workers: int) -> None:
        raise UserError(f"{workers} processes would read")

    monkeypatch.setattr("vitadel.data.worker_processes.read_in_processes", count)
    for workers, said in ((3, "3 processes would read"), (-1, "--workers must be auto or from 0 to 256, got -1")):
        with pytest.raises(UserError, match=said):
            run_shard(target, request_for(), ONE, Shard(1, 2), out=tmp_path / said[0], workers=workers)


@pytest.mark.slow
def test_folders_on_different_disks_are_merged_into_a_new_one(target: Target, tmp_path: Path):
    request = request_for()
    run_audit(target, request, ONE, out=tmp_path / "one")
    for number in (1, 2):
        shard(target, request, f"{number}/2", tmp_path / str(number))
    with pytest.raises(UserError, match="name it with --out"):
        merge(tmp_path / "1", tmp_path / "2")
    merged = merge(tmp_path / "2", tmp_path / "1", out=tmp_path / "merged")
    assert files_of(merged) == files_of(tmp_path / "one")
    assert merge(tmp_path / "merged") == tmp_path / "merged"  # a merged run is only read


def test_shards_without_images_are_not_missed(target: Target, tmp_path: Path):
    request = request_for(batch_size=10)  # two blocks
    assert shard(target, request, "3/3", tmp_path)["images"] == 0
    for text in ("1/3", "2/3"):
        assert shard(target, request, text, tmp_path)["images"] == 10
    shutil.rmtree(Shard(3, 3).folder(tmp_path))
    merge(tmp_path)


def test_missing_and_unfinished_shards_are_named(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for number in (3, 9):
        shard(target, request_for(), f"{number}/10", tmp_path)
    kill_after(monkeypatch, 1)
    with pytest.raises(Killed):
        shard(target, request_for(), "5/10", tmp_path)
    with pytest.raises(UserError, match=r"missing: 1, 2, 4, 6 to 8, 10; not finished: 5\. Start these again"):
        merge(tmp_path)
    assert not (tmp_path / "results.json").exists()


@pytest.mark.slow
def test_shards_of_other_settings_or_numbers_are_refused(target: Target, tmp_path: Path):
    shard(target, request_for(), "1/4", tmp_path / "a")
    with pytest.raises(UserError, match=r"different settings(.|\n)*eps: was '1/255', now '2/255'"):
        shard(target, request_for(eps=2 / 255), "2/4", tmp_path / "a")
    with pytest.raises(UserError, match=r"has shards of 4, and 2/8 is one of 8: they would overlap"):
        shard(target, request_for(), "2/8", tmp_path / "a")
    shard(target, request_for(eps=2 / 255), "2/4", tmp_path / "b")
    with pytest.raises(UserError, match=r"not shards of one run(.|\n)*eps: '1/255' and '2/255'"):
        merge(tmp_path / "a", tmp_path / "b", out=tmp_path / "out")
    shard(target, request_for(), "1/4", tmp_path / "c")
    with pytest.raises(UserError, match=r"shard 1/4 is in .*a and in .*c: shards must not overlap"):
        merge(tmp_path / "a", tmp_path / "c", out=tmp_path / "out")
    shard(target, request_for(), "2/3", tmp_path / "d")
    with pytest.raises(UserError, match=r"shards of 3 and of 4, which overlap: 1/4, 2/3"):
        merge(tmp_path / "a", tmp_path / "d", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_holds_no_shards_cannot_be_merged(tmp_path: Path):
    with pytest.raises(UserError, match="is not a run folder"):
        merge(tmp_path)
    announce_run(Command("audit", {"seed": 0}), "run", tmp_path / "whole")
    with pytest.raises(UserError, match="has no shards"):
        merge(tmp_path / "whole")
    announce_run(Command("audit", {"seed": 0}), "run", tmp_path / "big" / "shards" / "1-of-2")
    with pytest.raises(UserError, match=r"is one shard; give the folder of the whole run, .*big"):
        merge(tmp_path / "big" / "shards" / "1-of-2")
    announce_run(Command("harden", {"seed": 0}), "run", tmp_path / "trained")
    with pytest.raises(UserError, match="a run of 'vitadel harden'; only audits have shards"):
        merge(tmp_path / "trained")


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b", "-1/4", "1/0", "1/4/2", "", "1.0/4"])
def test_a_shard_out_of_range_is_refused(text: str):
    with pytest.raises(UserError, match="from 1/N to N/N"):
        read_shard(text)


def test_a_shard_needs_a_folder(target: Target):
    with pytest.raises(UserError, match="--shard needs --out"):
        run_shard(target, request_for(), ONE, Shard(1, 2))


def test_an_interrupted_shard_names_the_folder_of_the_run(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def stop(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FolderCache, "save", stop)
    with pytest.raises(Interrupted) as stopped:
        shard(target, request_for(), "1/4", tmp_path)
    assert stopped.value.folder == tmp_path


@pytest.mark.parametrize(("count", "size", "blocks", "batches"), [(1, 64, 1, 1), (96, 8, 12, 1), (50_000, 64, 61, 13)])
def test_blocks_are_at_most_64_and_no_batch_crosses_them(count: int, size: int, blocks: int, batches: int):
    indices = torch.arange(count) * 3 + 1
    found = Blocks.of(indices, size)
    assert (len(found), found.batches) == (blocks, batches)
    expected = torch.arange(count) // (size * batches)
    assert torch.equal(found.holding(indices), expected)


def test_lists_of_numbers_are_short():
    assert number_list([9, 2, 5, 6, 8, 7, 11, 12]) == "2, 5 to 9, 11, 12"


def test_a_run_that_is_announced_twice_keeps_what_other_shards_write(tmp_path: Path):
    command = Command("audit", {"seed": 0})
    announce_run(command, "run", tmp_path)
    torn = Shard(1, 2).folder(tmp_path) / ".000001.npz.abcdefgh"
    torn.parent.mkdir(parents=True)
    torn.write_bytes(b"")
    announce_run(command, "run", tmp_path)
    open_run(command, "run", out=tmp_path, resume=True).unlock()
    assert torn.exists()
