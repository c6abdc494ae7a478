"""command.json records how a run opened model and data; commands suggested after it open them in the same way."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import typer.main

from vitadel.cli.main import app
from vitadel.errors import UserError
from vitadel.runtime.opening import Opening, next_command, recorded_opening, typed_words

COMMANDS = typer.main.get_command(app).commands
FIELDS = {each.name for each in fields(Opening)} - {"new_head", "kwargs"}
OLD_COMMAND = {  # as the version before the field `opening` wrote it
    "verb": "audit",
    "argv": [
        *("audit", "vit_tiny_patch16_224", "--weights", "tiny.safetensors", "--num-classes=10", "--mean=0.5"),
        *(
            "--std",
            "0.25,0.25,0.5",
            "--input-size",
            "32",
            "--crop-pct=7/8",
            "--interpolation",
            "bicubic",
            "--crop-mode=squash",
        ),
        *("--head-classes", "0, 217,482", "--small-images", "--tokens=a,b", "--allow-readable", "--data=cifar10"),
        *("--data-root", "/data", "--skip-bad", "--batch-size", "16", "--seed=3", "--device", "cpu"),
        *("--attacks", "pgd-20", "--eps", "4/255", "--no-doctor", "--limit", "100", "--independent"),
    ],
    "settings": {"model": "vit_tiny_patch16_224", "data": "cifar10", "seed": 3, "eps": "4/255", "norm": "linf"},
    "version": "0.9.0",
}
OPENED = Opening(
    data="cifar10",
    weights="tiny.safetensors",
    num_classes=10,
    mean=(0.5, 0.5, 0.5),
    std=(0.25, 0.25, 0.5),
    input_size=32,
    crop_pct=0.875,
    interpolation="bicubic",
    crop_mode="squash",
    head_classes=(0, 217, 482),
    class_file="names.txt",
    among="data",
    small_images=True,
    tokens="a,b",
    allow_readable=True,
    data_root="/data",
    skip_bad=True,
    batch_size=16,
    seed=3,
    device="cpu",
)


def test_the_field_is_read_as_it_was_written():
    command = json.loads(json.dumps({"verb": "audit", "argv": ["x.py"], "opening": OPENED.to_json()}))
    assert recorded_opening(command) == OPENED
    assert recorded_opening({"verb": "audit", "opening": {"seed": 1, "of_a_newer_version": 2}}) == Opening(seed=1)


@pytest.mark.parametrize("opening", [{"mean": 5}, {"seed": "x"}, {"crop_pct": []}, {"head_classes": 3}])
def test_a_damaged_opening_is_reported(opening: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"command\.json, field 'opening': .* is wrong"):
        recorded_opening({"verb": "audit", "opening": opening})


def test_python_callers_may_give_arrays_and_patch_sizes() -> None:
    opening = Opening.read(mean=torch.tensor([0.5, 0.25, 0.125]), std=np.float32([0.5]), small_images=4)
    assert (opening.mean, opening.std) == ((0.5, 0.25, 0.125), (0.5, 0.5, 0.5))
    assert "--small-images" in opening.flags()
    assert "4" not in opening.flags()


def test_folders_without_the_field_are_read_from_the_words_typed():
    assert recorded_opening(OLD_COMMAND) == replace(OPENED, class_file=None, among="all")


@pytest.mark.parametrize(("first", "typed"), [("audit", True), ("corruptions", True), ("x.py", False), ("", False)])
def test_runs_of_the_command_line_are_known_by_their_verb(first, typed):
    """The runs of suites are recorded as audits, whichever verb started them."""
    words = [first, "m", "--seed", "1"]
    assert typed_words({"verb": "audit", "argv": words}) == (words if typed else [])


def test_words_of_another_program_are_not_read():
    assert recorded_opening({**OLD_COMMAND, "argv": ["/bin/pytest", "--seed", "3"]}) == Opening()
    assert recorded_opening({"verb": "audit", "argv": None, "settings": {}}) == Opening()


@pytest.mark.parametrize("verb", ["audit", "diagnose"])
def test_the_next_command_says_every_field_by_a_flag_that_the_verb_has(verb):
    command = shlex.split(next_command(OPENED, verb, "a model", "shapes", "l2", "0.5", "--attacks", "fgsm"))
    assert command[:5] == ["vitadel", verb, "a model", "--data", "shapes"]
    assert command[-6:] == ["--norm", "l2", "--eps", "0.5", "--attacks", "fgsm"]
    declared = {each.name: each for each in COMMANDS[verb].params}
    assert declared.keys() >= FIELDS
    kept = command[5:-6]
    assert {word for word in kept if word.startswith("--")} == {
        "--classes" if name == "class_file" else f"--{name.replace('_', '-')}" for name in FIELDS - {"model", "data"}
    }
    again = recorded_opening({"verb": verb, "argv": [verb, "a model", "--data", "cifar10", *kept]})
    assert again == OPENED


def test_the_next_command_leaves_out_what_is_the_default():
    assert next_command(Opening(), "diagnose", "m", "shapes", "l2", "1") == (
        "vitadel diagnose m --data shapes --norm l2 --eps 1"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"mean": "0.5,0.5"}, "--mean takes one number or three"),
        ({"head_classes": "0,cat"}, "--head-classes takes class numbers"),
        ({"crop_pct": "much"}, "--crop-pct 'much' is not a number"),
    ],
)
def test_wrong_values(flags, message):
    with pytest.raises(UserError, match=message):
        Opening.read(**flags)


def test_raw_pixels_are_mean_0_and_std_1():
    assert Opening.read(no_normalize=True) == Opening(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    with pytest.raises(UserError, match="--no-normalize is --mean 0 --std 1; give it or"):
        Opening.read(no_normalize=True, mean="0.5")


def test_arguments_of_the_constructor_are_read_and_repeated():
    typed = ["depth=12", "global_pool=avg", "window_size=[7, 7]", "qkv_bias=false"]
    opening = Opening.read(model_kwargs=typed)
    assert opening.kwargs == {"depth": 12, "global_pool": "avg", "window_size": (7, 7), "qkv_bias": False}
    words = opening.flags()
    assert Opening.read(model_kwargs=words[1::2]) == opening
    assert set(words[::2]) == {"--model-kwargs"}


@pytest.mark.parametrize("text", ["depth", "=3", "depth=", "a b=1", "depth=[1"])
def test_other_arguments_are_refused(text):
    with pytest.raises(UserError, match="--model-kwargs"):
        Opening.read(model_kwargs=[text])
