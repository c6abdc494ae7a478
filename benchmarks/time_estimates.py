"""How good likely times are: estimate and truth in processor time, as a row of a Markdown table.

    python benchmarks/time_estimates.py plan zoo:shapes-robust --limit 200           # plan, then the audit itself
    python benchmarks/time_estimates.py corruptions zoo:shapes-robust --limit 200    # any verb: at its start

Everything behind the name of this script is a command of `vitadel`. Processor time, so that other work on the machine
does not disturb; run it with OMP_NUM_THREADS=1, in an empty folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple, TextIO

import torch

from vitadel.cli.main import main as vitadel
from vitadel.quantities import duration

_LIKELY = re.compile(r"likely ([\d.]+) (s|min|h)\b(?:, at most ([\d.]+) (s|min|h)\b)?")
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


class Said(NamedTuple):
    at: float
    likely: float
    at_most: float | None


class _Listening(io.TextIOBase):
    """Standard error that notes when a likely time is written."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.said = stream, list[Said]()

    def write(self, text: str) -> int:
        if (found := _LIKELY.search(text)) and not self.said:
            at_most = float(found[3]) * _UNITS[found[4]] if found[3] else None
            self.said.append(Said(time.process_time(), float(found[1]) * _UNITS[found[2]], at_most))
        return self.stream.write(text)


def run(arguments: Sequence[str]) -> str:
    """Run a command in this process; returns its standard output."""
    sys.argv, output = ["vitadel", *arguments], io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        vitadel()
    return output.getvalue()


def main() -> None:
    arguments = sys.argv[1:]
    torch.set_num_threads(1)
    time.perf_counter = time.monotonic = time.process_time  # every clock of the estimate and of the run
    listening = _Listening(sys.stderr)
    sys.stderr = listening  # type: ignore[assignment]
    start = time.process_time()
    if arguments[0] == "plan":
        cost = json.loads(run([*arguments, "--json"]))
        listening.said = [Said(time.process_time(), cost["seconds_likely"], cost["seconds_at_most"])]
        run(["audit", *arguments[1:]])
    else:
        run(arguments)
    (said,) = listening.said or [None]
    if said is None:
        raise SystemExit("no likely time was written: the run is too short, or failed")
    spent = time.process_time() - said.at
    at_most = "" if said.at_most is None else duration(said.at_most)
    times = [duration(said.at - start), duration(said.likely), at_most, duration(spent)]
    print(f"| `{' '.join(arguments)}` | {' | '.join(times)} | {said.likely / spent:.2f} |")


if __name__ == "__main__":
    main()
