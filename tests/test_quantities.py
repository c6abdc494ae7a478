"""Fractions are read everywhere a number is."""

from __future__ import annotations

import pytest

from vitadel.errors import UserError
from vitadel.quantities import quantity_text, read_quantity, read_value


@pytest.mark.parametrize(
    ("text", "value"), [("8/255", 8 / 255), ("0.5", 0.5), ("1e-3", 1e-3), (" 3 / 4 ", 0.75), (2, 2.0), ("0.0e5", 0.0)]
)
def test_numbers_as_people_write_them(text, value):
    assert read_quantity(text) == value


@pytest.mark.parametrize("text", ["", "eight", "1/0", "nan", "inf", "8/", "1/2/3", "1e-400", "8/inf"])
def test_other_things_are_refused(text):
    with pytest.raises(UserError):
        read_quantity(text, "eps")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (8 / 255, "8/255"),
        (0.5, "0.5"),
        (0.25 / 255, "0.25/255"),
        (64 / 255, "64/255"),
        (3.0, "3"),
        (0.0, "0"),
        (0.1234, "0.1234"),
    ],
)
def test_amounts_are_written_as_gray_levels_where_they_are_some(value, text):
    assert quantity_text(value) == text
    assert read_quantity(text) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("False", False), ("12", 12), ("1/4", 0.25), ("token", "token")]
)
def test_settings_get_their_type_from_how_they_are_written(text, value):
    assert read_value(text) == value
    assert type(read_value(text)) is type(value)
