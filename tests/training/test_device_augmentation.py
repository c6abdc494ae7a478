"""Augmentation on the device does what the reading processes do, with the same random numbers and without waiting."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from test_data_stream import Numbered
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchvision.transforms.v2 import functional as pictures

from command_line import vitadel
from device_double import DeviceDouble
from small_recipes import recipe
from vitadel.data.batches import Preprocess
from vitadel.errors import Interrupted, UserError
from vitadel.runtime.distributed import Processes
from vitadel.training import loop
from vitadel.training.data_stream import DataStream, make_augment, make_device_augmentation, make_plain
from vitadel.training.device_augmentation import DeviceAugmentation, _jittered
from vitadel.training.recipes.instantiate import Faulty
from vitadel.training.recipes.training_sections import Augmentation
from vitadel.training.run import run_harden

CPU = torch.device("cpu")
SHAPE = (12, 10)  # not square, so that rows and columns cannot be exchanged
CROP_AND_FLIP = Augmentation(crop="pad", padding=3, hflip=0.5)
EVERYTHING = replace(CROP_AND_FLIP, color_jitter=0.4, reprob=0.6)
NUMBERS = np.random.default_rng(7)
IMAGES = [Image.fromarray(NUMBERS.integers(0, 256, (*SHAPE, 3), dtype=np.uint8)) for _ in range(40)]


class Noise(Numbered):
    """40 images of noise."""

    def read(self, indices):
        return [IMAGES[i] for i in indices]


def stream(section, batch_size=8, source=Noise, **settings):
    preprocess = Preprocess(SHAPE)
    return DataStream(
        source(40),
        torch.arange(40),
        preprocess,
        make_augment(section, preprocess),
        batch_size,
        seed=3,
        on_device=make_device_augmentation(section, preprocess),
        plain=make_plain(section, preprocess),
        repeats=section.repeated_aug,
        **settings,
    )


def pixels_by_name(a_stream, first=0, last=5):
    """Pixels in [0, 1] of every image, as the loop sees them."""
    parts = [part.to(CPU) for parts in a_stream.steps(first, last) for part in parts]
    return {int(name): x for part in parts for name, x in zip(part.names, part.x, strict=True)}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def both_ways(section, seeds, mean=(0.5, 0.25, 1.0)):
    """Bytes by the CPU's transforms, one by one, and by the device's, all at once, with the same seeds."""
    preprocess, images = Preprocess(SHAPE, mean=mean), [IMAGES[seed % 40] for seed in seeds]
    augment, on_device = make_augment(section, preprocess), replace(section, on_device=True)
    plain, late = make_augment(on_device, preprocess), make_device_augmentation(on_device, preprocess)
    drawn = late.draw(seeds)
    batch = torch.stack([plain(image, 0) for image in images])
    return torch.stack(list(map(augment, images, seeds))), late.apply(batch, drawn.table)


@pytest.mark.parametrize(
    "section",
    [
        Augmentation(),
        Augmentation(hflip=1.0),
        Augmentation(crop="pad", padding=0, hflip=0.3),
        Augmentation(padding=5, hflip=0.5),  # a padding without a crop
        CROP_AND_FLIP,
        Augmentation(reprob=1.0),
        replace(CROP_AND_FLIP, reprob=0.4),
    ],
    ids=["nothing", "flip", "no padding", "no crop", "crop and flip", "erasing", "crop, flip and erasing"],
)
def test_bytes_are_those_of_the_reading_processes(section):
    here, there = both_ways(section, range(10**12, 10**12 + 300))
    assert there.dtype == torch.uint8
    assert there.is_contiguous()
    assert torch.equal(here, there)


def test_jittered_pixels_are_those_of_torchvision_but_for_rounding():
    """Also the draws after it: erased rectangles would be elsewhere if color jitter drew another number of times."""
    here, there = both_ways(EVERYTHING, range(400))
    away = (here.int() - there.int()).abs()
    assert away.max() <= 3  # a level in the first change, times the factors after it
    assert (away > 0).float().mean() < 2e-4


@pytest.mark.parametrize("change", range(3))
@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 1.75])
def test_every_change_of_color_is_a_blend(change, factor):
    """With black, the mean gray, or the image in gray: by exact integers, and by torchvision."""
    x = torch.stack([pictures.pil_to_tensor(image) for image in IMAGES[:4]])
    row = [change, 0, 0, factor, 1, 1, 1 - factor, 0, 0]  # then twice the brightness times one
    found = _jittered(x, torch.tensor([[0.0] * 3 + row] * 4))
    gray = (2989 * x[:, 0].long() + 5870 * x[:, 1].long() + 1140 * x[:, 2].long()) // 10000
    other = [torch.zeros_like(gray), gray.double().mean((1, 2), keepdim=True).expand_as(gray), gray][change]
    exact = (factor * x.double() + (1 - factor) * other.double()[:, None]).clamp(0, 255)
    assert (exact - found).min() > -1e-3  # rounded down, as conversions to bytes do
    assert (exact - found).max() < 1 + 1e-3
    adjust = (pictures.adjust_brightness, pictures.adjust_contrast, pictures.adjust_saturation)[change]
    assert (adjust(x, factor).int() - found.int()).abs().max() <= 1


def test_gray_is_rounded_down_exactly():
    """All colors whose weighted sum is a whole level; sums of floats end below it for three of them."""
    weighted = torch.tensor([2989, 5870, 1140], dtype=torch.int32)
    colors = torch.cartesian_prod(*[torch.arange(256, dtype=torch.int32)] * 3)
    colors = colors[colors @ weighted % 10000 == 0]
    assert len(colors) == 1704
    x = colors.to(torch.uint8).T[None, :, :, None].contiguous()
    found = _jittered(x, torch.tensor([[0.0] * 3 + [2, 0, 0] + [0, 1, 1] + [1, 0, 0]]))  # no saturation left
    assert torch.equal(found[0, 0, :, 0].int(), colors @ weighted // 10000)


def test_an_image_does_not_depend_on_its_batch_on_parts_and_on_processes():
    section = replace(EVERYTHING, on_device=True)
    expected = pixels_by_name(stream(section))
    assert len(expected) == 40
    assert not same(expected, pixels_by_name(stream(replace(section, reprob=0.0))))
    assert same(expected, pixels_by_name(stream(section, batch_size=20), 0, 2))
    assert same(expected, pixels_by_name(stream(section, parts=4)))
    ranks = [pixels_by_name(stream(section, processes=2, rank=rank)) for rank in range(2)]
    assert same(expected, ranks[0] | ranks[1])


def test_an_image_depends_on_the_epoch_and_not_on_where_a_training_resumed():
    section = replace(EVERYTHING, on_device=True)
    first, second = pixels_by_name(stream(section)), pixels_by_name(stream(section), 5, 10)
    assert not any(torch.equal(first[name], second[name]) for name in first)
    resumed = pixels_by_name(stream(section), 7, 10)
    assert len(resumed) == 24
    assert all(torch.equal(second[name], resumed[name]) for name in resumed)


def test_the_stream_gives_the_pixels_of_both_ways():
    for section in (CROP_AND_FLIP, replace(CROP_AND_FLIP, repeated_aug=2), replace(CROP_AND_FLIP, reprob=0.5)):
        assert same(pixels_by_name(stream(section)), pixels_by_name(stream(replace(section, on_device=True))))


def test_the_plain_copy_of_a_repeated_batch_stays_plain():
    section = replace(CROP_AND_FLIP, repeated_aug=2, repeated_aug_by="batches")
    here, there = (list(stream(each).steps(0, 4)) for each in (section, replace(section, on_device=True)))
    for (one,), (other,) in zip(here, there, strict=True):
        assert other.plain == (other.drawn is None)
        assert torch.equal(one.to(CPU).x, other.to(CPU).x)


def test_reading_processes_send_bytes_that_are_not_augmented_and_nothing_more():
    from vitadel.training.data_stream import _Reader

    section = replace(EVERYTHING, on_device=True)
    ours = stream(section)
    part = _Reader(ours).__getitems__([(name, 0) for name in ours.names(0).tolist()])
    assert part.drawn is None
    assert torch.equal(part.x, torch.stack([pictures.pil_to_tensor(IMAGES[name]) for name in part.names.tolist()]))
    assert pickle.loads(pickle.dumps(part)).x.dtype == torch.uint8


def test_a_batch_is_augmented_once():
    ((part,),) = stream(replace(EVERYTHING, on_device=True)).steps(0, 1)
    once = part.to(CPU)
    assert once.drawn is None
    assert torch.equal(once.to(CPU).x, once.x)


def test_drawing_leaves_the_global_generators_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    DeviceAugmentation(SHAPE, (1, 2, 3), padding=2, hflip=0.5, color_jitter=0.4, reprob=0.5).draw(range(20))
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


@pytest.mark.parametrize("batch_size", [8, 40])
def test_the_cpu_never_waits_and_copies_three_tensors(batch_size):
    ((part,),) = stream(replace(EVERYTHING, on_device=True), batch_size=batch_size).steps(0, 1)
    expected = part.to(CPU)
    with DeviceDouble(floats=32) as double:  # which refuses to mix tensors of the CPU with its own
        found = part.to(double.device)
        assert found.x.device == found.y.device == double.device
        assert double.waits.total() == 0
        assert double.copies == [part.x.nbytes, part.y.nbytes, batch_size * 19 * 4]
        assert torch.equal(found.x.cpu(), expected.x)


def weights(folder: Path):
    return load_file(folder / "weights" / "last.safetensors")


SMALL = {
    "data": {"limit": 32, "held_out": 10, "test": None},
    "train": {"amp_dtype": "fp32"},
    "optimizer": {"fused": False},
    "validation": {"limit": 10},
}


@pytest.mark.slow
def test_a_training_ends_with_the_weights_of_the_reading_processes(tmp_path):
    """Crop and flip of the base recipe; dropout, attacks and order draw what they drew before."""
    for name, on_device in (("reading", False), ("device", True)):
        section = {"on_device": on_device, "mixup": 0.8}
        run_harden(recipe(**SMALL, augmentation=section), "small", Processes(0, 1, CPU), out=tmp_path / name)
    assert same(weights(tmp_path / "reading"), weights(tmp_path / "device"))


ALL_ON_DEVICE = {"on_device": True, "color_jitter": 0.4, "reprob": 0.5}


@pytest.mark.slow
def test_a_resumed_training_ends_with_the_same_weights(tmp_path, monkeypatch):
    built = recipe(**SMALL, augmentation=ALL_ON_DEVICE)
    run_harden(built, "small", Processes(0, 1, CPU), out=tmp_path / "whole")
    save = loop.save_checkpoint

    def save_and_stop(*arguments):
        save(*arguments)
        raise Interrupted(tmp_path / "parts")

    with monkeypatch.context() as patched:
        patched.setattr(loop, "save_checkpoint", save_and_stop)
        with pytest.raises(Interrupted):
            run_harden(built, "small", Processes(0, 1, CPU), out=tmp_path / "parts")
    run_harden(built, "small", Processes(0, 1, CPU), out=tmp_path / "parts", resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


@pytest.mark.slow
def test_a_training_on_a_device_ends_with_the_weights_of_the_cpu(tmp_path):
    sizes = {**SMALL, "train": {"epochs": 1, "amp_dtype": "fp32"}}
    built = recipe(**sizes, augmentation=ALL_ON_DEVICE)
    with sdpa_kernel(SDPBackend.MATH):  # the double has no fused attention
        run_harden(built, "small", Processes(0, 1, CPU), out=tmp_path / "cpu")
        with DeviceDouble() as double:
            run_harden(built, "small", Processes(0, 1, double.device), out=tmp_path / "device")
    assert same(weights(tmp_path / "cpu"), weights(tmp_path / "device"))


@pytest.mark.slow
def test_reading_processes_do_not_change_what_is_drawn():
    section = replace(EVERYTHING, on_device=True)
    assert same(pixels_by_name(stream(section)), pixels_by_name(stream(section, workers=2)))


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ({"crop": "resized"}, ["crop: resized"]),
        ({"rotation": 10.0}, ["rotation: 10"]),
        ({"auto_augment": "rand-m9-mstd0.5-inc1"}, ["auto_augment: rand-m9"]),
        ({"crop": "resized", "rotation": 5.0, "auto_augment": "rand-m9"}, ["crop: resized", "rotation: 5", "rand-m9"]),
    ],
)
def test_what_has_no_form_for_devices_is_refused_in_one_message(refused, words):
    Augmentation(**refused)  # and is fine while reading
    with pytest.raises(UserError, match="set on_device: false") as caught:
        Augmentation(**refused, on_device=True)
    assert all(word in str(caught.value) for word in words)
    assert sum(word in str(caught.value) for word in ("crop: resized", "rotation: ", "auto_augment: ")) == len(words)
    with pytest.raises(Faulty) as listed:
        recipe(augmentation={**refused, "on_device": True})
    assert len(listed.value.faults) == 1
    assert listed.value.faults[0].startswith("augmentation: on_device has no ")


def test_the_command_line_refuses_with_one_message(tmp_path):
    keys = ["augmentation.on_device=true", "augmentation.crop=resized"]
    printed = vitadel("harden", "shapes/trades", *keys, "--out", str(tmp_path / "run"), code=2)
    assert printed.stderr.count("on_device has no crop: resized") == 1
    assert not (tmp_path / "run").exists()
