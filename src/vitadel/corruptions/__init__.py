"""The 19 common corruptions and the perturbation sequences of Hendrycks & Dietterich (ICLR 2019, arXiv:1903.12261).

`corrupt` gives the images of ImageNet-C, Tiny-ImageNet-C and CIFAR-C before these were saved as JPEG; `sequence` the
frames of ImageNet-P and CIFAR-P before these were saved as video. Every sample has its own random stream: an image is
corrupted in the same way in every batch, process and run.
"""

from __future__ import annotations

from vitadel.corruptions.apply import corrupt, minimum_size
from vitadel.corruptions.constants import COMMON, EXTRA, SEVERITIES, TABLES, Table
from vitadel.corruptions.sequences import (
    CIFAR_SEQUENCES,
    IMAGENET_SEQUENCES,
    NOISE_SEQUENCES,
    VALIDATION_SEQUENCES,
    sequence,
)

__all__ = [
    "CIFAR_SEQUENCES",
    "COMMON",
    "EXTRA",
    "IMAGENET_SEQUENCES",
    "NOISE_SEQUENCES",
    "SEVERITIES",
    "TABLES",
    "VALIDATION_SEQUENCES",
    "Table",
    "corrupt",
    "minimum_size",
    "sequence",
]
