"""What `autoattack-fast` measures on its sentinels before it attacks them: do single steps keep their promise, and is
attention saturated?

The search sees the steps that it takes, most of them at the border of the budget. Steps of three lengths from the image
and from a random point of the budget show masking at each of these lengths, as the checks `gain-ratio` and
`attention-saturation` of the diagnosis do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.attacks.attention_scaling.gaps import ROUNDS_TO_ONE, precision_of
from vitadel.attacks.gain_ratio import SCALES, kept_promises
from vitadel.attacks.per_sample import SampleInfo, images_and_info_of, images_of
from vitadel.errors import UserError
from vitadel.instrument.attention import score_statistics
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Threat

KEPT, ONE_HOT = "kept", "one_hot"
"""The sample info: `kept_promises` from the image and from a random point, (samples, 2, scales); if the attention of
the model is known, the share of one-hot rows in each attention, (samples, attentions)."""


@dataclass(frozen=True)
class Probe:
    """Proposes the images themselves, with what it measured as info."""

    threat: Threat

    __call__ = images_of
    run_with_info = images_and_info_of

    def run(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, with_info: bool) -> tuple[Tensor, SampleInfo]:
        x = x.detach()
        starts = (x, self.threat.random(x, rng.stream("promise")))
        kept = torch.stack([kept_promises(model, start, y, self.threat) for start in starts], dim=1)
        return x.clone(), {KEPT: kept, **_one_hot_rows(model, x)}

    def passes(self) -> tuple[int, int]:
        return 2, 2 * (1 + len(SCALES)) + 1


@torch.no_grad()
def _one_hot_rows(model: nn.Module, x: Tensor) -> SampleInfo:
    """The share of each sample's rows that are one-hot to the last bit; NaN where every row has a single key."""
    plain = getattr(model, "_orig_mod", model)  # a compiled model does not run its own modules
    try:
        with frozen(plain), score_statistics(plain) as gaps:
            plain(x)
            rows = [gap.reshape(len(x), -1) for gap in gaps]
    except UserError:
        return {}
    limit = ROUNDS_TO_ONE[precision_of(plain)]
    shares = [((row > limit) & row.isfinite()).sum(1) / row.isfinite().sum(1) for row in rows]
    return {ONE_HOT: torch.stack(shares, dim=1).double()}
