"""The memory of a training in the terminal: 80 columns are enough."""

from __future__ import annotations

from vitadel.reporting.terminal import show_training_plan

WAY = {"images": 64, "peak_bytes": 3 * 2**30, "bytes_per_image": 40 * 2**20, "largest_batch": 1234}
LARGEST_BY_GB = {"16": 10_000, "24": 20_000, "40": 30_000, "80": 40_000}
LARGEST = {"largest_batch_by_gb": LARGEST_BY_GB}
COST = {"epochs": 1, "steps": 2, "batch_size": 64, "parameters": 3, "processes": 1, "device": "cpu", "threads": 1}


def test_memory_is_shown_with_and_without_checkpointing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    memory = {
        "device_bytes": 24 * 2**30,
        "weights_bytes": 346 * 2**20,
        "optimizer_bytes": 692 * 2**20,
        "as_set": WAY | LARGEST,
        "checkpointing": {**WAY, **LARGEST, "peak_bytes": 2**30},
    }
    cost = {**COST, "rows": [], "plugins_not_timed": [], "seconds_likely": 1.0, "seconds": 1.0, "memory": memory}
    show_training_plan("recipe", cost)
    shown = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    assert lines[1:] == [
        ["64 images", "3.00 GB", "1.00 GB"],
        ["each image", "40.0 MB", "40.0 MB"],
        ["most images, 24.00 GB (here)", "1,234", "1,234"],
        *([f"most images, {size} GB", f"{most:,}", f"{most:,}"] for size, most in LARGEST_BY_GB.items()),
    ]
    assert "weights 346.0 MB, optimizer state 692.0 MB" in " ".join(shown.split())
    show_training_plan("recipe", {**cost, "memory": {**memory, "checkpointing": None}})
    assert "checkpointing" not in capsys.readouterr().out
