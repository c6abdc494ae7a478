"""Exit with 0 if this Python has a torch and a matching torchvision that Vitadel can use (see pyproject.toml)."""

from __future__ import annotations

import sys

try:
    import torch
    import torchvision  # noqa: F401  (fails to import with a torch that it was not built for)
except Exception:
    sys.exit(1)
sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6))
