"""Models that the plans of several tables share, each built once in a process of the tests."""

from __future__ import annotations

import re

from vitadel.reproduce.dry_run import DryRun

__all__ = ["BUILT"]


class ForAllRates(dict):
    """Models that were built, by what they are built from but for the learning rate, of which an arm tries several."""

    def __contains__(self, key):
        return super().__contains__(self._without_rate(key))

    def __getitem__(self, key):
        return super().__getitem__(self._without_rate(key))

    def __setitem__(self, key, value):
        super().__setitem__(self._without_rate(key), value)

    def _without_rate(self, key):
        return re.sub(r"\blr=[^,)]*", "", key)


BUILT = DryRun(ForAllRates())
