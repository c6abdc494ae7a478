"""The severities of Hendrycks & Dietterich (ICLR 2019, arXiv:1903.12261): one table each for 224, 64 and 32 pixels.

Lengths are in pixels, so a table belongs to an image size; `table_for` returns the nearest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vitadel.errors import UserError, check_known

COMMON = (
    *("gaussian_noise", "shot_noise", "impulse_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
"""The 15 corruptions that mCE averages, in the order of the benchmark."""

EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
"""The 4 validation corruptions: for choosing settings, never part of mCE."""

SEVERITIES = (1, 2, 3, 4, 5)

Row = tuple[float, ...]


@dataclass(frozen=True)
class Table:
    """The parameters of every corruption and severity, for images of about `size` pixels."""

    size: int
    rows: Mapping[str, tuple[Row, Row, Row, Row, Row]]

    def row(self, name: str, severity: int) -> Row:
        check_known("corruption", name, (*COMMON, *EXTRA))
        if isinstance(severity, bool) or severity not in SEVERITIES:
            raise UserError(
                f"the severity of a corruption is 1, 2, 3, 4 or 5, got {severity!r}; 0 would be no corruption"
            )
        return self.rows[name][severity - 1]


def _singles(one: float, two: float, three: float, four: float, five: float) -> tuple[Row, Row, Row, Row, Row]:
    return (one,), (two,), (three,), (four,), (five,)


_AT_224 = Table(
    size=224,
    rows={
        "gaussian_noise": _singles(0.08, 0.12, 0.18, 0.26, 0.38),
        "shot_noise": _singles(60, 25, 12, 5, 3),
        "impulse_noise": _singles(0.03, 0.06, 0.09, 0.17, 0.27),
        "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        "zoom_blur": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
        "snow": (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        "frost": ((1, 0.4, 1), (0.8, 0.6, 1), (0.7, 0.7, 1), (0.65, 0.7, 1), (0.6, 0.75, 1)),
        "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        "brightness": _singles(0.1, 0.2, 0.3, 0.4, 0.5),
        "contrast": _singles(0.4, 0.3, 0.2, 0.1, 0.05),
        "elastic_transform": (  # multiples of 244, a mistake of the benchmark that is kept
            (244 * 2, 244 * 0.7, 244 * 0.1),
            (244 * 2, 244 * 0.08, 244 * 0.2),
            (244 * 0.05, 244 * 0.01, 244 * 0.02),
            (244 * 0.07, 244 * 0.01, 244 * 0.02),
            (244 * 0.12, 244 * 0.01, 244 * 0.02),
        ),
        "pixelate": _singles(0.6, 0.5, 0.4, 0.3, 0.25),
        "jpeg_compression": _singles(25, 18, 15, 10, 7),
        "speckle_noise": _singles(0.15, 0.2, 0.35, 0.45, 0.6),
        "gaussian_blur": _singles(1, 2, 3, 4, 6),
        "spatter": (
            (0.65, 0.3, 4, 0.69, 0.6, 0),
            (0.65, 0.3, 3, 0.68, 0.6, 0),
            (0.65, 0.3, 2, 0.68, 0.5, 0),
            (0.65, 0.3, 1, 0.65, 1.5, 1),
            (0.67, 0.4, 1, 0.65, 1.5, 1),
        ),
        "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
    },
)

_AT_64 = Table(
    size=64,
    rows={
        "gaussian_noise": _singles(0.04, 0.08, 0.12, 0.15, 0.18),
        "shot_noise": _singles(250, 100, 50, 30, 15),
        "impulse_noise": _singles(0.01, 0.02, 0.05, 0.08, 0.14),
        "defocus_blur": ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
        "glass_blur": ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
        "motion_blur": ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
        "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        "snow": (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
        ),
        "frost": ((1, 0.3, 0.3), (0.9, 0.4, 0.3), (0.8, 0.45, 0.3), (0.75, 0.5, 0.3), (0.7, 0.55, 0.3)),
        "fog": ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
        "brightness": _singles(0.1, 0.2, 0.3, 0.4, 0.5),
        "contrast": _singles(0.4, 0.3, 0.2, 0.1, 0.05),
        "elastic_transform": (
            (0, 0, 64 * 0.08),
            (64 * 0.05, 64 * 0.3, 64 * 0.06),
            (64 * 0.1, 64 * 0.08, 64 * 0.06),
            (64 * 0.1, 64 * 0.03, 64 * 0.03),
            (64 * 0.16, 64 * 0.03, 64 * 0.02),
        ),
        "pixelate": _singles(0.9, 0.8, 0.7, 0.6, 0.5),
        "jpeg_compression": _singles(65, 58, 50, 40, 25),
        "speckle_noise": _singles(0.15, 0.2, 0.25, 0.3, 0.35),
        "gaussian_blur": _singles(0.5, 0.75, 1, 1.25, 1.5),
        "spatter": (
            (0.62, 0.1, 0.7, 0.7, 0.6, 0),
            (0.65, 0.1, 0.8, 0.7, 0.6, 0),
            (0.65, 0.3, 1, 0.69, 0.6, 0),
            (0.65, 0.1, 0.7, 0.68, 0.6, 1),
            (0.65, 0.1, 0.5, 0.67, 0.6, 1),
        ),
        "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (30, 0.2)),
    },
)

_AT_32 = Table(
    size=32,
    rows={
        "gaussian_noise": _singles(0.04, 0.06, 0.08, 0.09, 0.10),
        "shot_noise": _singles(500, 250, 100, 75, 50),
        "impulse_noise": _singles(0.01, 0.02, 0.03, 0.05, 0.07),
        "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        "snow": (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        "frost": ((1, 0.2, 0.2), (1, 0.3, 0.2), (0.9, 0.4, 0.2), (0.85, 0.4, 0.2), (0.75, 0.45, 0.2)),
        "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        "brightness": _singles(0.05, 0.1, 0.15, 0.2, 0.3),
        "contrast": _singles(0.75, 0.5, 0.4, 0.3, 0.15),
        "elastic_transform": (
            (0, 0, 32 * 0.08),
            (32 * 0.05, 32 * 0.2, 32 * 0.07),
            (32 * 0.08, 32 * 0.06, 32 * 0.06),
            (32 * 0.1, 32 * 0.04, 32 * 0.05),
            (32 * 0.1, 32 * 0.03, 32 * 0.03),
        ),
        "pixelate": _singles(0.95, 0.9, 0.85, 0.75, 0.65),
        "jpeg_compression": _singles(80, 65, 58, 50, 40),
        "speckle_noise": _singles(0.06, 0.1, 0.12, 0.16, 0.2),
        "gaussian_blur": _singles(0.4, 0.6, 0.7, 0.8, 1),
        "spatter": (
            (0.62, 0.1, 0.7, 0.7, 0.5, 0),
            (0.65, 0.1, 0.8, 0.7, 0.5, 0),
            (0.65, 0.3, 1, 0.69, 0.5, 0),
            (0.65, 0.1, 0.7, 0.69, 0.6, 1),
            (0.65, 0.1, 0.5, 0.68, 0.6, 1),
        ),
        "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
    },
)

TABLES = {table.size: table for table in (_AT_224, _AT_64, _AT_32)}
"""By image size: ImageNet-C, Tiny-ImageNet-C and CIFAR-C."""


def table_for(height: int, width: int) -> Table:
    """The table whose size is nearest to the shorter side: up to 48 pixels that of 32, up to 144 that of 64."""
    return min(TABLES.values(), key=lambda table: (abs(table.size - min(height, width)), table.size))
