"""How many passes of an audit ask a point that it has asked before: what one forward for all members could save.

    python benchmarks/repeated_points.py                                       # autoattack-fast, zoo:shapes-robust
    python benchmarks/repeated_points.py --attacks autoattack --limit 8

A point is an image to the last bit. Reported are the forward passes of single images, and the share of them that repeat
an earlier one; gradients are counted by their forward. The clean accuracy and the judge are part of the audit.
"""

from __future__ import annotations

import argparse
from hashlib import blake2b

import torch
from torch import Tensor, nn

import vitadel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:shapes-robust")
    parser.add_argument("--attacks", default="autoattack-fast")
    parser.add_argument("--limit", type=int, default=24)
    given = parser.parse_args()
    model, seen = vitadel.load_model(given.model), set[bytes]()
    counts = {"passes": 0, "repeated": 0, "clean images": 0}
    clean: set[bytes] = set()

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        for image in inputs[0].detach().cpu().contiguous():
            point = blake2b(image.numpy().tobytes(), digest_size=16).digest()
            if not seen or len(clean) < given.limit:
                clean.add(point)  # the first stage predicts the clean images
            counts["passes"] += 1
            counts["repeated"] += point in seen
            counts["clean images"] += point in seen and point in clean
            seen.add(point)

    model.register_forward_pre_hook(count)
    vitadel.audit(model, "shapes", attacks=given.attacks, limit=given.limit, device="cpu")
    passes = counts["passes"]
    print("| model | attacks | n | forward passes | repeated | of clean images |")
    print("|---|---|---|---|---|---|")
    shares = " | ".join(f"{100 * counts[name] / passes:.2f} %" for name in ("repeated", "clean images"))
    print(f"| {given.model} | `{given.attacks}` | {given.limit} | {passes:,} | {shares} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
