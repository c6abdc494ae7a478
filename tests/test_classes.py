"""Matching classes of data with outputs of a model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from vitadel.classes import (
    ClassNames,
    mapping_from,
    match_classes,
    read_class_list,
)
from vitadel.errors import UserError
from vitadel.quantities import are_numbers

LEMMAS = {
    "n00000001": ("tench", "Tinca tinca"),
    "n00000002": ("crane",),
    "n00000003": ("crane",),
    "n00000004": ("Cardigan", "Cardigan Welsh corgi"),
    "n00000005": ("cardigan",),
    "n00000006": ("projectile", "missile"),
    "n00000007": ("missile",),
}
MODEL = ClassNames(tuple(LEMMAS), "a list")


def synonyms(wnid: str) -> tuple[str, ...]:
    return LEMMAS.get(wnid, ())


def match(data: list[str], model: ClassNames | None = MODEL, outputs: int | None = None):
    return match_classes(data, model, outputs or (None if model is None else len(model.names)), synonyms)


@pytest.mark.parametrize(
    ("data", "outputs"),
    [
        (["n00000001", "n00000005"], (0, 4)),
        (["tinca_tinca", "Cardigan Welsh corgi"], (0, 3)),
        (["n00000003_crane", "crane (n00000002)"], (2, 1)),
        (["missile", "projectile"], (6, 5)),  # the name of one class is a synonym of another
        (["tench, Tinca tinca", "cardigan"], (0, 4)),
    ],
)
def test_names_wnids_and_synonyms_find_their_output(data, outputs):
    mapping = match(data)
    assert mapping is not None
    assert mapping.outputs == outputs
    assert mapping.changes_labels
    assert mapping.of == 7


def test_names_of_the_data_find_names_of_the_model_in_another_order():
    mapping = match(["dog", "cat"], ClassNames(("Cat", "Dog"), "its record"))
    assert mapping is not None
    assert mapping.outputs == (1, 0)
    assert mapping.changes_labels
    assert "order" in mapping.assumption
    assert not mapping.doubt
    summary = mapping.summary()
    assert summary["judged_among"] == "all 2 classes"
    assert summary["classes"][0] == {
        "data": "dog",
        "output": 1,
        "model": "Dog",
    }


def test_all_classes_in_order_need_no_unique_names():
    mapping = match(["tench", "crane", "crane", "Cardigan", "cardigan", "projectile", "missile"])
    assert mapping is not None
    assert mapping.in_order
    assert not mapping.changes_labels


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (["crane", "tench"], r"'crane' could be output 1 .* or output 2"),
        (["tench", "Tinca tinca"], "one to one"),
        (["tench", "tenhc"], r"'tenhc' is no name or synonym .* did you mean"),
        (["sofa", "lamp"], r"none of the data's names"),
    ],
)
def test_what_cannot_be_matched_is_refused_with_what_to_pass(data, words):
    with pytest.raises(UserError, match=words) as refused:
        match(data)
    assert "--classes FILE" in str(refused.value)


def test_more_outputs_than_classes_without_names_are_refused():
    with pytest.raises(UserError, match=r"3 classes .* 10 outputs") as refused:
        match(["a", "b", "c"], None, 10)
    assert all(flag in str(refused.value) for flag in ("--classes", "--head-classes", "imagenet:"))


def test_numbers_are_no_names():
    assert are_numbers(["0", "1", "2"])
    assert not are_numbers(["0", "1", "10", "2"])
    assert match(["0", "1"]) is None
    sorted_as_text = match(sorted(map(str, range(12))), None, 12)
    assert sorted_as_text is not None
    assert "sorted as text" in sorted_as_text.doubt


def test_as_many_unknown_names_are_taken_in_order_with_a_doubt():
    mapping = match(["chat", "chien"], ClassNames(("cat", "dog"), "its record"))
    assert mapping is not None
    assert mapping.in_order
    assert "none of the 2 class names" in mapping.doubt
    unnamed = match(["chat", "chien"], None, 2)
    assert unnamed is not None
    assert not unnamed.doubt
    assert "output k" in unnamed.assumption


def test_more_classes_than_outputs_are_left_to_the_labels():
    assert match(list("abcdefghijk")) is None


def test_judged_among_the_data(tmp_path):
    mapping = match(["n00000001", "n00000005"])
    assert mapping is not None
    assert mapping.judged_among("data") == "the data's 2 of 7 classes"
    assert "n00000001 is n00000001 (0)" in mapping.sentence()
    assert "judged among all 7 classes" in mapping.sentence()


def test_class_lists(tmp_path):
    text = tmp_path / "classes.txt"
    text.write_text("cat\n\ndog\n")
    assert read_class_list(text) == ("cat", "dog")
    for content, expected in (
        (["cat", "dog"], ("cat", "dog")),
        ({"1": "dog", "0": "cat"}, ("cat", "dog")),
        ({"chat": 0, "chien": "dog"}, {"chat": 0, "chien": "dog"}),
    ):
        (tmp_path / "c.json").write_text(json.dumps(content))
        assert read_class_list(tmp_path / "c.json") == expected
    for bad in ("cat\ncat\n", ""):
        text.write_text(bad)
        with pytest.raises(UserError, match="one name per output"):
            read_class_list(text)
    (tmp_path / "c.json").write_text('{"0": "a", "2": "b"}')
    with pytest.raises(UserError, match="outputs 0 to 1"):
        read_class_list(tmp_path / "c.json")
    with pytest.raises(UserError, match="cannot be read"):
        read_class_list(tmp_path / "none.txt")


def test_a_mapping_by_hand():
    model = ClassNames(("cat", "dog", "cow"), "x")
    assert mapping_from({"chat": 0, "vache": "cow"}, ["vache", "chat"], 3, model).outputs == (2, 0)
    for pairs, words in (
        ({"chat": 0, "vache": 0}, "one to one"),
        ({"chat": 0}, "no output for 'vache'"),
        ({"chat": 0, "vache": 3}, "0 to 2"),
        ({"chat": 0, "vache": "ox"}, "or its name"),
    ):
        with pytest.raises(UserError, match=words):
            mapping_from(pairs, ["vache", "chat"], 3, model)


def test_matching_needs_no_torch():
    code = "import sys, vitadel.classes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
