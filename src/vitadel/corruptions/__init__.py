"""The 19 common corruptions and the perturbation sequences of Hendrycks & Dietterich (ICLR 2019, arXiv:1903.12261).

`corrupt` makes what the files of ImageNet-C, Tiny-ImageNet-C and CIFAR-C were made with, before they were saved as
JPEG; `sequence` what ImageNet-P and CIFAR-P were made with, before they were saved as video. Both draw from the streams
of their samples: an image is corrupted in the same way in every batch, process and run.
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
