"""A model and its data: what does not belong together is told."""

from __future__ import annotations

import pytest

from vitadel.errors import Mistake
from vitadel.evaluation.subject import open_subject


@pytest.mark.parametrize("data", ["shapes", "shapes(size=32)@test"])
def test_a_zoo_model_of_other_images_is_not_judged_on_the_built_in_ones(data):
    with pytest.raises(Mistake, match=r"trained on cifar10.*--data cifar10@test"):
        open_subject("zoo:cifar10-trades", data)


def test_a_zoo_model_of_shapes_is():
    assert open_subject("zoo:shapes-robust", "shapes").model_spec == "zoo:shapes-robust"


def test_an_unknown_name_is_told_as_such():
    with pytest.raises(Mistake, match="unknown zoo model"):
        open_subject("zoo:cifar10-tredes", "shapes")
