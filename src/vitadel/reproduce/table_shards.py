"""Several processes on one table: parts I/N of its rows, in one folder, on a cluster or side by side here."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from vitadel.errors import Interrupted
from vitadel.runtime.run_shards import without_flags


def new_folder(name: str) -> Path:
    return Path("runs") / f"reproduce-{name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"


def run_side_by_side(out: Path, devices: Sequence[str]) -> None:
    """Start this command once for each device, as a part of the table each, and wait for all of them.

    What a part could not do is reported when the table is put together. Ctrl-C stops all of them; finished work stays.
    """
    words = without_flags(sys.argv[1:], "--device", "--out", "--shard")
    commands = [
        [
            sys.executable,
            "-m",
            "vitadel",
            *words,
            "--out",
            str(out),
            "--device",
            device,
            "--shard",
            f"{place}/{len(devices)}",
        ]
        for place, device in enumerate(devices, start=1)
    ]
    started = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    try:
        for process in started:
            process.wait()
    except KeyboardInterrupt:
        for process in started:
            process.wait()
        raise Interrupted(out) from None
