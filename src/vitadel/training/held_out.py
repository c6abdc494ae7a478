"""Validation on held-out images at full eps, by which models are selected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vitadel.data.batches import Batch, Preprocess, read_batches
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import judge
from vitadel.instrument.hooks import frozen
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Source, Threat

_BATCH = 128


@dataclass(frozen=True)
class Score:
    """Clean and robust accuracy of `n` held-out images, or means of another `measure`; `robust` may be None."""

    clean: float
    robust: float | None
    n: int
    measure: str = "accuracy"

    @property
    def decisive(self) -> tuple[float, float]:
        """The key by which epochs are compared: robust accuracy, then clean accuracy; of other measures the mean.

        Ties are common: a standard model has a robust accuracy of 0 in every epoch.
        """
        if self.robust is None:
            return self.clean, 0.0
        if self.measure == "accuracy":
            return self.robust, self.clean
        return (self.clean + self.robust) / 2, self.robust

    def as_metrics(self) -> dict[str, float]:
        """The values under their names in metrics.jsonl."""
        prefix = "validation_" if self.measure == "accuracy" else f"validation_{self.measure}_"
        values = {f"{prefix}clean": self.clean}
        return values if self.robust is None else {**values, f"{prefix}robust": self.robust}


@dataclass(frozen=True)
class HeldOut:
    """Images that are not trained on."""

    source: Source
    rows: Tensor
    preprocess: Preprocess
    bad: tuple[str, ...] = ()  # images that could not be read and are left out

    def without_bad(self) -> HeldOut:
        """Only the images that can be read; reads them all."""
        good, bad = [], []
        for row in self.rows.tolist():
            image = self.source.read([row])[0]
            if isinstance(image, Exception):
                bad.append(f"{self.source.name(row)}: {image}")
            else:
                good.append(row)
        if not good:
            raise UserError(f"none of the {len(bad)} held-out images can be read, the first {bad[0]}.")
        return replace(self, rows=torch.tensor(good), bad=tuple(bad))

    def _batches(self, processes: Processes) -> Iterator[Batch]:
        """This process's share of the images."""
        chunks = [part.tolist() for part in self.rows[processes.rank :: processes.count].split(_BATCH)]
        return read_batches(self.source, chunks, self.preprocess, threads=1, device=processes.device)

    def measure(
        self,
        model: nn.Module,
        shown: nn.Module,
        attack: Attack,
        metric: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]],
        name: str,
        processes: Processes,
        seed: int,
    ) -> Score:
        """Means of an objective's own metric; the attack sees the model `shown`."""
        sums = torch.zeros(2, dtype=torch.float64, device=processes.device)
        with frozen(model):
            for batch in self._batches(processes):
                rng = SampleRNG.of_samples(seed, batch.indices, batch.x.device).stream("validation")
                z = attack(shown, batch.x, batch.y, rng)
                with torch.no_grad():
                    sums += torch.stack([values.double().sum() for values in metric(model, batch.x, z)])
        clean, robust = (processes.mean(sums) * processes.count / len(self.rows)).tolist()
        return Score(clean, robust, len(self.rows), name)

    def score(self, model: nn.Module, attack: Attack | None, threat: Threat, processes: Processes, seed: int) -> Score:
        """Clean and robust accuracy, judged as in an audit; every process takes its share of the images."""
        clean = robust = 0
        with frozen(model):
            for batch in self._batches(processes):
                with torch.no_grad():
                    correct = model(batch.x).argmax(1) == batch.y
                clean += int(correct.sum())
                if attack is None or not bool(correct.any()):
                    continue
                x, y = batch.x[correct], batch.y[correct]
                rng = SampleRNG.of_samples(seed, batch.indices[correct.cpu()], x.device).stream("validation")
                robust += int(judge(model, threat, x, attack(model, x, y, rng), y).held.sum())
        counts = processes.mean(torch.tensor([clean, robust], dtype=torch.float64, device=processes.device))
        clean_all, robust_all = (counts * processes.count).round().tolist()
        n = len(self.rows)
        return Score(clean_all / n, None if attack is None else robust_all / n, n)
