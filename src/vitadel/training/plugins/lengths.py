"""What is told of plug-ins for which a training is too short."""

from __future__ import annotations

__all__ = ["never_begins"]


def never_begins(first: int, epochs: int) -> str | None:
    """Of one that begins at epoch `first`, counted from 0."""
    return f"begins at epoch {first} (from 0), and there are {epochs}: it will do nothing" if first >= epochs else None
