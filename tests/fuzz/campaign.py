"""Many hostile inputs, each tried whatever the others did, as `make fuzz` calls it.

PYTHONPATH=tests python tests/fuzz/campaign.py [INPUTS OF EACH KIND] [SEED] [KIND ...]

Prints how many of each kind ended in a traceback, a hang or a silent success, and each such input.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from dataclasses import asdict

import hostile
import hostile_outside
import material
from driver import Case, Ending, attempt
from hypothesis import HealthCheck, Phase, given, seed, settings

KINDS = {
    "arguments": hostile.arguments,
    "models": hostile.models,
    "attack strings": hostile.attack_strings,
    "data specs": hostile.data_specs,
    "data files": hostile.data_files,
    "arrays": hostile.arrays,
    "recipes": hostile.recipes,
    "run folders": hostile.run_folders,
    "checkpoints": hostile.checkpoints,
    "merges": hostile_outside.merges,
    "comparisons": hostile_outside.comparisons,
    "divisions": hostile_outside.divisions,
    "attacks of others": hostile_outside.foreign_attacks,
    "storage": hostile_outside.storage_urls,
}

_RUNS = {
    "arguments": ("audit", "shards"),
    "run folders": tuple(material.RUNS),
    "merges": ("shards",),
    "comparisons": ("within", "audit", "corruptions", "harden", "shards", "compare"),
}


def sort_of(ending: Ending) -> str:
    """In which way a case ended other than promised; '' if it did not."""
    if not ending.faults:
        return ""
    first = ending.faults[0]
    sorts = {"traceback": "traceback", "a traceback": "traceback", "hang": "hang", "a wrong input": "silent success"}
    return next((name for start, name in sorts.items() if first.startswith(start)), "other")


def try_many(kind: str, inputs: int, number: int) -> Counter[str]:
    found: Counter[str] = Counter()

    @seed(number)
    @settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(KINDS[kind]())
    def each(case: Case) -> None:
        ending = attempt(case)
        found.update(["inputs", sort_of(ending)])
        if ending.faults:
            print(json.dumps(asdict(case)), *ending.faults, sep="\n  ", flush=True)

    each()
    return found


def main() -> int:
    default = ["300", str(random.randrange(2**31))]
    inputs, number = (int(word) for word in (sys.argv[1:3] + default[len(sys.argv[1:3]) :]))
    print(f"seed {number}, {inputs} inputs of each kind")
    total: Counter[str] = Counter()
    sorts = ("inputs", "traceback", "hang", "silent success", "other")
    for kind in sys.argv[3:] or KINDS:
        for needed in _RUNS.get(kind, ()):  # made before hypothesis generates, because it draws random numbers
            material.run(needed)
        found = try_many(kind, inputs, number)
        total += found
        print(f"{kind}:", ", ".join(f"{found[name]} {name}" for name in sorts), flush=True)
    print("all:", ", ".join(f"{total[name]} {name}" for name in sorts))
    return int(any(total[name] for name in sorts[1:]))


if __name__ == "__main__":
    sys.exit(main())
