"""Does `autoattack-fast` hold no more samples than `autoattack`, and what does it cost? Per sample, in the open.

    python scripts/validate_fast.py                                            # the zoo, hours on a small machine
    python scripts/validate_fast.py --case zoo:shapes-robust@8/255x100 --out runs/validate-fast
    python scripts/validate_fast.py --case zoo:cifar10-trades@l2:0.5x60 --data cifar10
    python scripts/validate_fast.py --case small:patterns100-vit-adversarial@l1:left0.5x200
    python scripts/validate_fast.py --run runs/fast-and-full --run runs/fast,runs/full       # audits made before

Each case is audited by both ensembles on the same images, each alone; both are judged alike, and every run can be
killed and started again. Reported are the samples that only one of them breaks, the interval of the difference
(Newcombe 1998, paired), an upper bound of what the fast one misses, and what both cost in passes: a forward counts one,
a gradient two; and in processor time, if no run was interrupted. A budget is Linf unless a norm is named; `left0.5` is
the one at which PGD-10 leaves half of the images of a small model (`small_models.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from cases import Case
from small_models import balanced_eps, small_model

import vitadel
from vitadel.quantities import read_quantity
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
_SECONDS = "processor-seconds.json"


def opened(case: Case, data: str) -> tuple[Any, Any, float]:
    """Model, data and budget of a case."""
    if not case.model.startswith("small:"):
        return case.model, data, read_quantity(case.eps, "eps")
    small = small_model(case.model.removeprefix("small:"), case.limit, data)
    share = case.eps.removeprefix("left")
    eps = read_quantity(case.eps, "eps") if share == case.eps else balanced_eps(small, case.norm, float(share))
    return small.model, (small.x, small.y), eps


def audited(case: Case, data: str, out: Path, batch_size: int) -> list[Path]:
    """The run folders of both ensembles, each with its processor time."""
    model, images, eps = opened(case, data)
    folders = []
    for name in BOTH:
        folder = out / f"{case.file_name}-{name}"
        resume, start = (folder / "command.json").exists(), time.process_time()
        vitadel.audit(
            model,
            images,
            attacks=name,
            eps=eps,
            norm=case.norm,
            limit=case.limit,
            batch_size=batch_size,
            independent=True,
            out=folder,
            resume=resume,
        )
        if not resume:
            write_json(folder / _SECONDS, {"seconds": time.process_time() - start})
        folders.append(folder)
    return folders


def times_faster(folders: Sequence[Path]) -> float | None:
    """The ratio of processor times; None where one run was interrupted or holds both ensembles."""
    files = [folder / _SECONDS for folder in folders]
    if len(files) < len(BOTH) or not all(file.exists() for file in files):
        return None
    theirs, ours = (json.loads(file.read_text())["seconds"] for file in files)
    return float(theirs / ours)


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


def compare(folders: Sequence[Path], name: str | None = None) -> dict[str, Any]:
    """Both ensembles in the run folders of audits, of the same images, that let each work alone; `name` the model."""
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
        "model": name or results["model"]["spec"],
        "norm": results["threat"]["norm"],
        "eps": results["threat"]["eps_text"],
        "n": n,
        "clean": results["clean"]["correct"],
        "held by autoattack": int(full_held.sum()),
        "held by autoattack-fast": int(fast_held.sum()),
        "only autoattack breaks": only_fast_holds,
        "only autoattack-fast breaks": only_full_holds,
        "difference, 95 % interval": [low, high],
        "missed at most": most_missed(only_fast_holds) / n,
        "given up": ours.get("given_up", {}),
        "processor time, times less": times_faster(folders),
        "passes per image, autoattack": passes(theirs) / n,
        "passes per image, autoattack-fast": passes(ours) / n,
        "cheaper than autoattack": passes(theirs) / passes(ours),
        "cheaper than apgd-ce and apgd-t": gradients_only / passes(ours),
        "findings": [f"{finding['verdict']}: {finding['evidence']}" for one in every for finding in one["findings"]],
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | norm | eps | n | clean | held, AutoAttack | held, fast | only AutoAttack breaks | only fast breaks "
        "| missed at most | given up, audited, broken | missed by giving up at most | passes of AutoAttack, fast "
        "| times fewer | times less processor time |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        given_up, faster = row["given up"], row["processor time, times less"]
        counts = ", ".join(str(given_up.get(name, 0)) for name in ("images", "audited", "broken"))
        cells = (
            row["model"],
            row["norm"],
            row["eps"],
            row["n"],
            row["clean"],
            row["held by autoattack"],
            row["held by autoattack-fast"],
            row["only autoattack breaks"],
            row["only autoattack-fast breaks"],
            f"{100 * row['missed at most']:.1f} points",
            counts,
            f"{100 * given_up.get('missed_share_at_most', 0):.1f} points",
            f"{row['passes per image, autoattack']:.0f}, {row['passes per image, autoattack-fast']:.0f}",
            f"{row['cheaper than autoattack']:.1f}",
            "" if faster is None else f"{faster:.1f}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="MODEL@[NORM:]EPSxIMAGES; may be given several times")
    parser.add_argument("--run", action="append", default=[], help="folders of audits, by comma; also several")
    parser.add_argument("--data", default="shapes", help="of the cases; for small models the spec of CIFAR-10")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/validate-fast"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cases = options.case or ([] if options.run else CASES)
    read = [Case.read(text) for text in cases]
    made = ((audited(case, options.data, options.out, options.batch_size), case.model) for case in read)
    given = (([Path(name) for name in text.split(",")], None) for text in options.run)
    rows: list[dict[str, Any]] = []
    for folders, name in chain(given, made):
        rows.append(compare(folders, name))
        print(json.dumps(rows[-1], indent=2))
        write_json(options.out / "validation.json", {"cases": rows})
        write_atomically(options.out / "validation.md", table(rows).encode())
    print(table(rows))


if __name__ == "__main__":
    main()
