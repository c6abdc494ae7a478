"""The likely time of a run, from a trial: the same run on a few of its images.

The stages of the trial are timed, and stretched to all images. Its results are thrown away, and random numbers depend
on (seed, sample), so it changes no result.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from vitadel.errors import UserError
from vitadel.quantities import duration
from vitadel.runtime.distributed import Processes, generators_kept
from vitadel.types import Attack

_FEWEST = 16  # images of a run for which a trial is made: fewer take hardly longer than a trial


@dataclass
class StageCosts:
    """What the stages of a trial cost: seconds, the most passes of one image, and the passes that were taken.

    `work` are the seconds of all its work. `once` are those of work that does not grow with the number of images, as
    in the whole run, and `outside` what it took in the trial.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    passes: dict[str, tuple[float, float]] = field(default_factory=dict)
    taken: dict[str, float] = field(default_factory=dict)
    once: dict[str, float] = field(default_factory=dict)
    outside: float = 0.0
    work: float = 0.0

    def add_attack(self, stage: str, attack: Attack, records: Sequence[Mapping[str, Any]], models: int = 1) -> None:
        """`records` have the passes that were taken; an attack on several models takes its passes on each."""
        gradients, forwards = attack.passes()
        self.passes[stage] = models * gradients, models * forwards
        self.taken[stage] = sum(_in_forwards(float(each["gradients"]), float(each["forwards"])) for each in records)

    def at_most(self, stage: str, images: int) -> float:
        """The seconds of an attack on so many images that are robust to its last step; 0 for other stages."""
        taken = sum(self.taken.values())
        if stage not in self.passes or not taken:
            return 0.0
        each = sum(self.seconds.get(attack, 0.0) for attack in self.taken) / taken
        return images * each * _in_forwards(*self.passes[stage])


def _in_forwards(gradients: float, forwards: float) -> float:
    return 3 * gradients + forwards


class RunsOnFew(Protocol):
    def __call__(self, few: int, processes: Processes, /, *, out: Path, costs: StageCosts) -> object: ...


class Trial(NamedTuple):
    """How many samples a run has, and how to do the same run on a few of them."""

    samples: int
    run: RunsOnFew


def announce_time(trial: Trial, processes: Processes) -> Mapping[str, float]:
    """Try the run, and write its likely time to standard error; returns the likely seconds of each stage.

    Empty if there are few images, or if the trial is refused: what is wrong is then reported by the run itself.
    """
    if trial.samples < _FEWEST or not processes.is_main:
        return {}
    few = max(min(8, trial.samples // 8), min(16, trial.samples // 20))
    alone = Processes(0, 1, processes.device)
    try:
        with tempfile.TemporaryDirectory() as folder, generators_kept(processes.device):
            trial.run(1, alone, out=Path(folder) / "first", costs=StageCosts())  # a first pass is slow
            costs = StageCosts()
            trial.run(few, alone, out=Path(folder) / "few", costs=costs)
    except UserError:
        return {}
    times = trial.samples / few / processes.count
    likely = {stage: times * seconds for stage, seconds in costs.seconds.items()} | costs.once
    at_most = sum(max(times * costs.at_most(stage, few), seconds) for stage, seconds in likely.items())
    outside = max(0.0, costs.work - sum(costs.seconds.values()) - costs.outside)
    seconds = sum(likely.values()) + outside
    bound = f", at most {duration(at_most + outside)}" if costs.passes else ""
    sys.stderr.write(f"likely {duration(seconds)}{bound} (by a trial on {few} images)\n")
    return likely
