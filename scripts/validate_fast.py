"""Does `autoattack-fast` hold no more samples than `autoattack`, and what does it cost? Per sample, in the open.

    python scripts/validate_fast.py                                            # the zoo, hours on a small machine
    python scripts/validate_fast.py --case zoo:shapes-robust@8/255x100 --out runs/validate-fast
    python scripts/validate_fast.py --run runs/fast-and-full --run runs/fast,runs/full       # audits made before

Each case is audited by both ensembles on the same images, each alone; both are judged alike, and every run can be
killed and started again. Reported are the samples that only one of them breaks, the interval of the difference
(Newcombe 1998, paired), an upper bound of what the fast one misses, and what both cost in passes: a forward counts one,
a gradient two.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import vitadel
from vitadel.runtime.run_folder import write_atomically, write_json
from vitadel.statistics import wilson

CASES = (
    "zoo:shapes-robust@8/255x500",
    "zoo:shapes-robust@12/255x100",
    "zoo:shapes-robust@4/255x60",
    "zoo:shapes-standard@1/255x300",
    "zoo:shapes-standard@0.75/255x60",
)
BOTH = ("autoattack", "autoattack-fast")
_CASE = re.compile(r"(?P<model>.+)@(?P<eps>[^@x]+)x(?P<limit>\d+)")


@dataclass(frozen=True)
class Case:
    model: str
    eps: str
    limit: int

    @classmethod
    def read(cls, text: str) -> Case:
        match = _CASE.fullmatch(text)
        if match is None:
            raise SystemExit(f"a case is written MODEL@EPSxIMAGES, like {CASES[0]}; got {text!r}")
        return cls(match["model"], match["eps"], int(match["limit"]))

    @property
    def folder(self) -> str:
        return re.sub(r"[^a-z0-9.]+", "-", f"{self.model}-{self.eps}-{self.limit}".lower())


def audited(case: Case, out: Path, batch_size: int) -> Path:
    folder = out / case.folder
    vitadel.audit(
        case.model,
        attacks=BOTH,
        eps=case.eps,
        limit=case.limit,
        batch_size=batch_size,
        independent=True,
        out=folder,
        resume=(folder / "command.json").exists(),
    )
    return folder


def passes(entry: dict[str, Any]) -> int:
    return 2 * int(entry["gradient_calls"]) + int(entry["forward_calls"])


def most_missed(missed: int) -> float:
    """The one-sided 95 % upper bound of a Poisson mean, by bisection on its distribution function."""
    low, high = 0.0, missed + 20.0
    for _ in range(60):
        mean = (low + high) / 2
        chance = sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(missed + 1))
        low, high = (mean, high) if chance > 0.05 else (low, mean)
    return high


def difference_interval(both: int, only_first: int, only_second: int, n: int) -> tuple[float, float]:
    """Newcombe's interval (1998, method 10) of the difference of two paired shares, first minus second."""
    neither = n - both - only_first - only_second
    one, two = (both + only_first) / n, (both + only_second) / n
    (low1, high1), (low2, high2) = wilson(both + only_first, n), wilson(both + only_second, n)
    spread = math.sqrt(one * (1 - one) * two * (1 - two)) * n
    phi = (both * neither - only_first * only_second) / spread / n if spread > 0 else 0.0

    def side(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a**2 - 2 * phi * a * b + b**2))

    return one - two - side(one - low1, high2 - two), one - two + side(high1 - one, two - low2)


def compare(folders: Sequence[Path]) -> dict[str, Any]:
    """Both ensembles in the run folders of audits, of the same images, that let each work alone."""
    every = [json.loads((folder / "results.json").read_text()) for folder in folders]
    results, entries = every[0], {entry["name"]: entry for one in every for entry in one["attacks"]}
    alone = all(entries.get(name, {}).get("counts") == "this attack alone" for name in BOTH)
    tables = [pq.read_table(folder / "samples.parquet") for folder in folders]
    asked = {(one["model"]["fingerprint"], one["threat"]["norm"], one["threat"]["eps"]) for one in every}
    alike = len(asked) == 1 and all(table["index"].equals(tables[0]["index"]) for table in tables)
    if not all(one["complete"] for one in every) or not alone or not alike:
        names = " and ".join(map(str, folders))
        asked_for = f"--independent and {', '.join(BOTH)}"
        raise SystemExit(f"{names}: not complete audits of one model, budget and set of images with {asked_for}")
    theirs, ours = (entries[name] for name in BOTH)
    columns = {name: table[name] for table in tables for name in table.column_names}
    full_held, fast_held = (columns[f"held:{name}"].to_numpy() for name in BOTH)
    n = len(full_held)
    only_fast_holds = int((fast_held & ~full_held).sum())
    only_full_holds = int((~fast_held & full_held).sum())
    both = int((fast_held & full_held).sum())
    low, high = difference_interval(both, only_fast_holds, only_full_holds, n)
    gradients_only = sum(passes(member) for member in theirs["members"][:2])
    return {
        "model": results["model"]["spec"],
        "eps": results["threat"]["eps_text"],
        "n": n,
        "clean": results["clean"]["correct"],
        "held by autoattack": int(full_held.sum()),
        "held by autoattack-fast": int(fast_held.sum()),
        "only autoattack breaks": only_fast_holds,
        "only autoattack-fast breaks": only_full_holds,
        "difference, 95 % interval": [low, high],
        "missed at most": most_missed(only_fast_holds) / n,
        "passes per image, autoattack": passes(theirs) / n,
        "passes per image, autoattack-fast": passes(ours) / n,
        "cheaper than autoattack": passes(theirs) / passes(ours),
        "cheaper than apgd-ce and apgd-t": gradients_only / passes(ours),
        "findings": [f"{finding['verdict']}: {finding['evidence']}" for one in every for finding in one["findings"]],
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | eps | n | clean | held, AutoAttack | held, fast | only AutoAttack breaks | only fast breaks "
        "| difference, 95 % interval | missed at most | passes, times fewer | than APGD-CE + APGD-T |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["difference, 95 % interval"]
        cells = (
            row["model"],
            row["eps"],
            row["n"],
            row["clean"],
            row["held by autoattack"],
            row["held by autoattack-fast"],
            row["only autoattack breaks"],
            row["only autoattack-fast breaks"],
            f"{100 * low:+.2f} to {100 * high:+.2f} points",
            f"{100 * row['missed at most']:.1f} points",
            f"{row['cheaper than autoattack']:.1f}",
            f"{row['cheaper than apgd-ce and apgd-t']:.1f}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="MODEL@EPSxIMAGES; may be given several times")
    parser.add_argument("--run", action="append", default=[], help="folders of audits, by comma; also several")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/validate-fast"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cases = options.case or ([] if options.run else CASES)
    made = ([audited(Case.read(text), options.out, options.batch_size)] for text in cases)
    given = ([Path(name) for name in text.split(",")] for text in options.run)
    rows: list[dict[str, Any]] = []
    for folders in chain(given, made):
        rows.append(compare(folders))
        print(json.dumps(rows[-1], indent=2))
        write_json(options.out / "validation.json", {"cases": rows})
        write_atomically(options.out / "validation.md", table(rows).encode())
    print(table(rows))


if __name__ == "__main__":
    main()
