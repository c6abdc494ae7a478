"""Two processes beside one: how much faster an audit, a training and a corruption benchmark are on two cores.

    python benchmarks/processes.py                      # on a quiet machine with two free cores; about 15 minutes
    python benchmarks/processes.py --parts audit --images 64 --rounds 1

Each process has one thread. The time is that of the work between the start of the first and the end of the last stage,
by the wall clock, after everything is imported and read once: `torchrun` and imports are not counted. Two that
know nothing of each other, each with all of the work, show what the machine allows: twice the time of one, over theirs.
Prints a table in Markdown with the ratios of the medians. Before it starts it measures whether two cores are free, and
refuses if not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

MODEL, DATA = "zoo:shapes-robust", "shapes"
_FREE = 1.9  # of two cores


@dataclass(frozen=True)
class Work:
    part: str
    images: int
    out: str


def audit(work: Work, processes: Any) -> None:
    from vitadel.evaluation.audit.audit import AuditRequest, run_audit
    from vitadel.evaluation.engine.target import open_target

    request = AuditRequest(attacks=("pgd-20", "apgd-ce"), limit=work.images, batch_size=16)
    run_audit(open_target(MODEL, DATA), request, processes, out=work.out)


def corruptions(work: Work, processes: Any) -> None:
    from vitadel.evaluation.corruptions.request import CorruptionRequest
    from vitadel.evaluation.corruptions.run import run_corruptions
    from vitadel.evaluation.engine.target import open_target

    request = CorruptionRequest(severities=(1, 3, 5), limit=work.images, batch_size=16)
    run_corruptions(open_target(MODEL, DATA), request, processes, out=work.out)


def training(work: Work, processes: Any) -> None:
    from vitadel.training.recipes.build import build_recipe
    from vitadel.training.recipes.compose import compose
    from vitadel.training.run import run_harden

    changes = ["train.epochs=1", "train.batch_size=64", f"data.limit={max(128, 8 * work.images)}", "data.held_out=64"]
    changes += ["validation.limit=64", "data.test=null", "train.tracker=none"]
    document = compose("shapes/trades", None, changes)
    run_harden(build_recipe(document, "shapes/trades"), "shapes/trades", processes, out=work.out)


PARTS: dict[str, Callable[[Work, Any], None]] = {"audit": audit, "training": training, "corruptions": corruptions}


def spin(until: float, counts: Any, place: int) -> None:
    """Count until a moment, to see how much of a core this process gets."""
    start = time.process_time()
    while time.monotonic() < until:
        pass
    counts[place] = time.process_time() - start


def free_cores() -> float:
    counts, until = multiprocessing.Array("d", 2), time.monotonic() + 3
    runners = [multiprocessing.Process(target=spin, args=(until, counts, place)) for place in range(2)]
    for each in runners:
        each.start()
    for each in runners:
        each.join()
    return sum(counts) / 2.8  # starting them takes a moment


def one_process(work: Work, environment: dict[str, str], times: Any, place: int) -> None:
    os.environ.update(environment)
    import torch

    from vitadel.runtime.distributed import join_processes

    torch.set_num_threads(1)
    processes = join_processes("cpu")
    small = Work(work.part, 16, f"{work.out}-first")
    PARTS[work.part](small, processes)  # imports, data and compilers are warm afterwards
    processes.wait()
    start = time.monotonic()
    PARTS[work.part](work, processes)
    processes.wait()
    times[place] = time.monotonic() - start


def seconds(part: str, images: int, count: int, *, together: bool = True) -> float:
    """Wall-clock time of the work in `count` processes with one thread each: divided among them, or whole in each."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(count)}
        free.close()
        times = spawn.Array("d", count)
        runners = []
        for rank in range(count):
            own = {"OMP_NUM_THREADS": "1"}
            if together and count > 1:
                own |= {**group, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
            work = Work(part, images, str(Path(folder) / ("run" if together else f"run-{rank}")))
            runners.append(spawn.Process(target=one_process, args=(work, own, times, rank)))
            runners[-1].start()
        for each in runners:
            each.join()
        assert all(each.exitcode == 0 for each in runners), "a process failed; see above"
        return max(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--images", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--anyway", action="store_true", help="measure also where two cores are not free")
    settings = parser.parse_args()
    free = free_cores()
    if free < _FREE and not settings.anyway:
        raise SystemExit(f"{free:.2f} of two cores are free; end other work first, or use --anyway")
    print(f"{free:.2f} of two cores were free; {settings.rounds} rounds, {settings.images} images\n")
    print("| work | one process | two processes | times as fast | two unconnected |\n|---|---|---|---|---|")
    ways: dict[str, Callable[[str, int], float]] = {
        "one": lambda part, images: seconds(part, images, 1),
        "two": lambda part, images: seconds(part, images, 2),
        "unconnected": lambda part, images: seconds(part, images, 2, together=False),
    }
    for part in settings.parts:
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(settings.rounds):  # in turns, as the machine's speed may drift
            for way, measured in ways.items():
                found[way].append(measured(part, settings.images))
        one, two, unconnected = (median(found[way]) for way in ways)
        print(f"| {part} | {one:.1f} s | {two:.1f} s | {one / two:.2f} | {2 * one / unconnected:.2f} |", flush=True)
        print(f"<!-- {json.dumps(found)} -->", flush=True)


if __name__ == "__main__":
    main()
