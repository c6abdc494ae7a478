"""Memory does not grow with the data: peak of an audit over 10,000 images against 1,000."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROBE = """
import resource, sys
import torch, vitadel

class Brightness(torch.nn.Module):
    num_classes = 10
    def forward(self, x):
        centres = torch.linspace(0.05, 0.95, 10)
        return -((x.mean((1, 2, 3))[:, None] - centres).square()) * 100

results = vitadel.audit(Brightness().eval(), "shapes", attacks="fgsm", limit=int(sys.argv[1]), device="cpu")
assert results["data"]["n"] == int(sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak(limit: int) -> int:
    command = [sys.executable, "-c", PROBE, str(limit)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return int(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
def test_ten_times_the_images_take_the_same_memory():
    assert peak(10_000) <= 1.10 * peak(1_000)
