"""Does `autoattack-fast` notice masked gradients, and leave honest models alone? Over the gallery of the diagnosis.

    python scripts/validate_masking.py --half chosen        # the half that thresholds were chosen on
    python scripts/validate_masking.py --half held-out      # the half for the table in docs/results.md
    python scripts/validate_masking.py --zoo --seeds 5      # false alarms: models of the zoo with several seeds

Every model is audited with `autoattack-fast(escalate=false)`: signs of masking would escalate to AutoAttack, whose
number it then has. With --compare, AutoAttack itself runs where the verdict is "ok", and must not break more than 1
image in 100 more. Finished models are not audited again.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vitadel
from vitadel.diagnosis.gallery import BROKEN_DEFENSES, HONEST_MODELS, BrokenDefense, held_out
from vitadel.errors import UserError
from vitadel.runtime.run_folder import write_atomically, write_json

FAST = "autoattack-fast(escalate=false)"
ROBUST, STANDARD = "4/255", "8/255"  # budgets for defenses around the robust and the standard model
HONEST = "1/255"  # for honest standard models, which nothing is left of at larger budgets
ZOO = ("robust", "pgd-at", "trades", "trades-awp", "mart", "aas-at", "tora", "standard", "ordinary")


@dataclass(frozen=True)
class Case:
    name: str
    family: str
    honest: bool
    eps: str
    make: Callable[[], nn.Module]
    seed: int = 0

    @property
    def file(self) -> str:
        return re.sub(r"[^a-z0-9.]+", "-", f"{'honest' if self.honest else 'broken'} {self.name} {self.seed}") + ".json"


def gallery(half: str) -> Iterator[Case]:
    out = {each.name for each in (*held_out(BROKEN_DEFENSES), *held_out(HONEST_MODELS))}
    for entry in (*HONEST_MODELS, *BROKEN_DEFENSES):
        if half == "all" or (entry.name in out) == (half == "held-out"):
            broken = isinstance(entry, BrokenDefense)
            standard = entry.base.endswith("standard") if broken else "standard" in entry.name
            eps = (STANDARD if broken else HONEST) if standard else ROBUST
            yield Case(entry.name, entry.family, not broken, eps, entry.make)


def zoo(seeds: int) -> Iterator[Case]:
    for seed in range(seeds):
        for name in ZOO:
            eps = HONEST if name in ("standard", "ordinary") else ROBUST
            spec = f"zoo:shapes-{name}"
            yield Case(f"{spec} seed {seed}", "zoo", True, eps, lambda spec=spec: vitadel.load_model(spec), seed)


def audited(case: Case, attack: str, n: int) -> dict[str, Any]:
    torch.manual_seed(0)  # defenses that draw from torch's generator
    model = case.make().eval()
    return vitadel.audit(model, "shapes", attacks=[attack], eps=case.eps, limit=n, seed=case.seed, batch_size=n)


def measure(case: Case, fast: str, n: int, compare: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"name": case.name, "family": case.family, "honest": case.honest, "eps": case.eps, "n": n}
    try:
        results = audited(case, fast, n)
    except UserError as error:
        return row | {"verdict": "refused", "reasons": [str(error)]}
    (entry,) = results["attacks"]
    findings = [each for each in results["findings"] if each["check"] == "attack-completeness"]
    row |= {
        "clean": results["clean"]["correct"],
        "fast": entry["held"],
        "verdict": findings[0]["verdict"] if findings else "nothing robust",
        "reasons": entry.get("escalation", {}).get("reasons", []),
        "doubts": entry.get("escalation", {}).get("doubts", []),
        "others": [each["check"] for each in results["findings"] if each["verdict"] != "ok" and each not in findings],
    }
    if compare and row["verdict"] == "ok" and not case.honest:
        row["autoattack"] = audited(case, "autoattack", n)["worst_case"]["held"]
    return row


def summary(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | family | eps | n | robust | verdict | signs | AutoAttack |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        signs = "; ".join(row["reasons"] or row.get("doubts", []))
        cells = [row["name"], row["family"], row["eps"], row["n"], row.get("fast", ""), row["verdict"], signs]
        lines.append("| " + " | ".join(map(str, [*cells, row.get("autoattack", "")])) + " |")
    for honest in (False, True):
        part = [row for row in rows if row["honest"] == honest]
        alarms = sum(bool(row["reasons"]) for row in part)
        passed = sum(row["verdict"] == "ok" for row in part)
        lines.append(f"\n{'honest' if honest else 'broken'}: {len(part)} models, {alarms} escalate, {passed} ok")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("chosen", "held-out", "all"), default="held-out")
    parser.add_argument("--zoo", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--n", type=int, default=48)
    parser.add_argument("--fast", default=FAST, help="the attack, e.g. with fewer steps")
    parser.add_argument("--compare", action="store_true", help="run AutoAttack where the verdict is ok")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("runs/validate-masking"))
    options = parser.parse_args()
    rows = []
    for case in zoo(options.seeds) if options.zoo else gallery(options.half):
        if options.only not in case.name:
            continue
        path = options.out / case.file
        if not path.exists():
            write_json(path, measure(case, options.fast, options.n, options.compare))
        rows.append(json.loads(path.read_text()))
        print(json.dumps(rows[-1]), flush=True)
        write_atomically(options.out / "table.md", summary(rows).encode())
    print(summary(rows))


if __name__ == "__main__":
    main()
