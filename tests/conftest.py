"""Puts this folder on the path, so that tests share their small models: `from vits import ...`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
