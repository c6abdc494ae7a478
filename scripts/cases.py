"""A model, a budget and a number of images: MODEL@[NORM:]EPSxIMAGES, like zoo:shapes-standard@linf:1/255x300."""

from __future__ import annotations

import re
from dataclasses import dataclass

_CASE = re.compile(r"(?P<model>.+)@(?:(?P<norm>linf|l2|l1):)?(?P<eps>[^@x:]+)x(?P<limit>\d+)")


@dataclass(frozen=True)
class Case:
    model: str
    norm: str
    eps: str
    limit: int

    @classmethod
    def read(cls, text: str) -> Case:
        match = _CASE.fullmatch(text)
        if match is None:
            raise SystemExit(
                f"a case is written MODEL@[NORM:]EPSxIMAGES, like zoo:shapes-standard@linf:1/255x300; got {text!r}"
            )
        return cls(match["model"], match["norm"] or "linf", match["eps"], int(match["limit"]))

    @property
    def file_name(self) -> str:
        norm = "" if self.norm == "linf" else f"-{self.norm}"
        return re.sub(r"[^a-z0-9.]+", "-", f"{self.model}{norm}-{self.eps}-{self.limit}".lower())
