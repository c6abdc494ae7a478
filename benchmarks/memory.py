"""Does an audit's memory grow with the data? Resident memory while an audit reads generated images, in its own process.

python benchmarks/memory.py [IMAGES]
"""

from __future__ import annotations

import json
import subprocess
import sys

PROBE = """
import json, os, sys, tempfile
import numpy as np, torch, vitadel
from PIL import Image

class Generated(torch.utils.data.Dataset):
    classes = [str(number) for number in range(10)]

    def __init__(self, count):
        self.targets = [index % 10 for index in range(count)]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        noise = np.random.default_rng(index).integers(-20, 21, (16, 16, 3))
        return Image.fromarray((noise + 25 * (index % 10) + 20).clip(0, 255).astype(np.uint8)), index % 10

class Brightness(torch.nn.Module):
    num_classes = 10
    images, memory = 0, []

    def forward(self, x):
        self.images += len(x)
        if self.images >= 2_000 * (len(self.memory) + 1):
            pages = int(open("/proc/self/statm").read().split()[1])
            self.memory.append((self.images, pages * os.sysconf("SC_PAGE_SIZE") / 2**20))
        centers = (torch.arange(10) * 25 + 20) / 255
        return -((x.mean((1, 2, 3))[:, None] - centers).square()) * 100

model, count = Brightness().eval(), int(sys.argv[1])
with tempfile.TemporaryDirectory() as folder:
    settings = {"attacks": "fgsm", "eps": "8/255", "batch_size": 256, "device": "cpu", "out": folder + "/run"}
    results = vitadel.audit(model, Generated(count), **settings)
assert results["data"]["n"] == count
import resource
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"memory": model.memory, "peak": peak, "clean": results["clean"]["accuracy"]}))
"""


def measure(count: int) -> dict[str, object]:
    """Resident memory in MB after every 2,000 images that the model saw, and the peak."""
    done = subprocess.run([sys.executable, "-c", PROBE, str(count)], check=True, capture_output=True, text=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    few, many = measure(10_000), measure(count)
    series = many["memory"]
    assert isinstance(series, list)
    print(f"{count:,} generated images, seen by the model and resident memory:")
    for images, memory in series[:: max(1, len(series) // 12)]:
        print(f"  {images:>9,}: {memory:6.0f} MB")
    print(f"peak {many['peak']:.0f} MB; of 10,000 images {few['peak']:.0f} MB")


if __name__ == "__main__":
    main()
