"""Data: from a spec such as `parquet:test.parquet@val` to batches of pixels, in bounded memory.

`open_dataset` gives a `Source`: random access by stable index, images still encoded where they lie. `balanced_subset`
chooses indices, `Preprocess` fits pictures to a model, and `batches` reads them ahead of the caller.
"""

from __future__ import annotations

from vitadel.data.batches import Batch, batches
from vitadel.data.open_dataset import open_dataset
from vitadel.data.preprocess import Preprocess
from vitadel.data.spec import known_specs
from vitadel.data.subset import balanced_subset
from vitadel.data.validation import BadSample, check_labels, left_out

__all__ = [
    "BadSample",
    "Batch",
    "Preprocess",
    "balanced_subset",
    "batches",
    "check_labels",
    "known_specs",
    "left_out",
    "open_dataset",
]
