from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pictures import picture

from vitadel.data import BadSample, check_labels, open_dataset, skipped
from vitadel.errors import UserError
from vitadel.types import Source


def labelled(tmp_path: Path, labels: list[int]) -> Source:
    np.savez(tmp_path / "set.npz", images=np.stack([picture(0)] * len(labels)), labels=np.array(labels))
    return open_dataset(f"npz:{tmp_path}/set.npz")


def test_labels_that_fit(tmp_path: Path) -> None:
    source = labelled(tmp_path, [0, 2, 1])
    assert check_labels(source, 3) == check_labels(source, 10) == check_labels(source, 3, skip_bad=True) == ()
    assert skipped(source) == ()


def test_a_label_outside_names_the_sample_the_range_and_the_cause(tmp_path: Path) -> None:
    source = labelled(tmp_path, [0, 12, 1, 10])
    with pytest.raises(UserError) as caught:
        check_labels(source, 10, skip_bad=False)
    message = str(caught.value)
    for part in (
        "sample 1 (set.npz row 1)",
        "label 12 is outside 0..9",
        "2 of 4 samples",
        "13 classes and the model 10",
        "--num-classes 13",
        "--skip-bad",
    ):
        assert part in message
    with pytest.raises(UserError) as caught:
        check_labels(source, 10)
    assert "--skip-bad" not in str(caught.value)  # where there is no such flag
    assert check_labels(source, 10, skip_bad=True) == (
        BadSample(1, "set.npz row 1", "label 12 is outside 0..9"),
        BadSample(3, "set.npz row 3", "label 10 is outside 0..9"),
    )


def test_a_missing_label(tmp_path: Path) -> None:
    source = labelled(tmp_path, [0, -1, 1])
    with pytest.raises(UserError, match=r"sample 1 .* has no label that can be read.*correct the labels"):
        check_labels(source, 2)
    assert [bad.index for bad in check_labels(source, 2, skip_bad=True)] == [1]


def test_leaving_everything_out_is_no_way_out(tmp_path: Path) -> None:
    source = labelled(tmp_path, [5, 6])
    with pytest.raises(UserError, match="2 of 2 samples") as caught:
        check_labels(source, 3, skip_bad=True)
    assert "--skip-bad" not in str(caught.value)
