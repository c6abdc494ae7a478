"""Data: from a spec such as `parquet:test.parquet@val` to batches of pixels, in bounded memory.

`open_dataset` returns a `Source`: random access by stable index, with images still encoded on disk. `balanced_subset`
chooses indices, `Preprocess` resizes and crops images for a model, and `read_batches` reads ahead of the caller.
"""

from __future__ import annotations

from vitadel.data.batches import BadSample, Batch, Preprocess, balanced_subset, check_labels, read_batches, skipped
from vitadel.data.spec import known_specs, open_dataset

__all__ = [
    "BadSample",
    "Batch",
    "Preprocess",
    "balanced_subset",
    "check_labels",
    "known_specs",
    "left_out",
    "open_dataset",
    "read_batches",
    "skipped",
]

left_out = skipped  # the former name
