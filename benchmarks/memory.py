"""Does an audit's memory grow with the data? Peak resident memory over 1,000 and over 10,000 images, each in a process.

python benchmarks/memory.py [MODEL] [DATA]
"""

from __future__ import annotations

import json
import subprocess
import sys

PROBE = """
import json, resource, sys
import vitadel
model, data, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
results = vitadel.audit(model, data, attacks=["fgsm"], eps="2/255", limit=limit, device="cpu")
print(json.dumps({"n": results["data"]["n"], "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""


def peak(model: str, data: str, limit: int) -> dict[str, float]:
    command = [sys.executable, "-c", PROBE, model, data, str(limit)]
    measured: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return measured


def main() -> None:
    model, data = (sys.argv[1:] + ["zoo:shapes-standard", "shapes"][len(sys.argv) - 1 :])[:2]
    few, many = peak(model, data, 1_000), peak(model, data, 10_000)
    print(f"{model} on {data}")
    for row in (few, many):
        print(f"  {row['n']:>6} images: peak {row['mb']:.0f} MB")
    print(f"  ratio {many['mb'] / few['mb']:.3f} (at most 1.10 wanted)")


if __name__ == "__main__":
    main()
