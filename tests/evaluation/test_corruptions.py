"""The suite `corruptions`: what is counted, from which images, and that nothing else changes it."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from new_processes import run_together
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.record import ModelRecord
from vitadel.corruptions import COMMON, corrupt, sequence
from vitadel.corruptions.sequences import CIFAR_SEQUENCES
from vitadel.data.batches import balanced_subset
from vitadel.data.sources.shapes import Shapes
from vitadel.errors import Interrupted, UserError
from vitadel.evaluation.corruptions import corrupted_copy, prediction_flips
from vitadel.evaluation.corruptions.run import corruptions
from vitadel.runtime.rng import SampleRNG

SOME = ("gaussian_noise", "contrast", "pixelate")


class Brightness(nn.Module):
    """Ten classes by mean brightness."""

    num_classes = 10

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.stop_at = 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        if self.stop_at is not None and self.seen > self.stop_at:
            raise KeyboardInterrupt
        centres = torch.linspace(0.05, 0.95, 10, dtype=x.dtype)
        return -((x.mean((1, 2, 3))[:, None] - centres).square()) * 100


class Corner(nn.Module):
    """Ten classes by the brightness of one pixel, which a little noise changes."""

    num_classes = 10

    def forward(self, x: Tensor) -> Tensor:
        return -(x[:, :, 3, 3].mean(1)[:, None] - torch.linspace(0.05, 0.95, 10)).square()


class Always(nn.Module):
    """Class 3, whatever it is shown."""

    num_classes = 10

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(torch.full((len(x),), 3), 10).to(x.dtype)


def source() -> Shapes:
    return Shapes("test", size=16)


def run(model: nn.Module, **settings):
    settings = {"limit": 40, "corruptions": SOME, "device": "cpu"} | settings
    return corruptions(model.eval(), source(), **settings)


def chosen(limit: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = balanced_subset(source().labels(), limit, 0)
    pixels, label, _ = source().render(rows)
    return rows, pixels.float() / 255, label


def test_errors_are_those_of_images_corrupted_by_hand(tmp_path):
    rows, x, label = chosen(40)
    results = run(Brightness(), severities=(1, 5), out=tmp_path / "run")
    table = pq.read_table(tmp_path / "run" / "samples.parquet").to_pydict()
    assert table["index"] == rows.tolist()
    for cell in results["corruptions"]["cells"]:
        name, level = cell["corruption"], cell["severity"]
        z = corrupt(x, name, level, SampleRNG.of_samples(0, rows))
        said = Brightness()(z).argmax(1)
        assert table[f"prediction:{name}/{level}"] == said.tolist()
        right = int((said == label).sum())
        assert (cell["correct"], cell["n"]) == (right, 40)
        assert cell["error"] == pytest.approx(1 - right / 40)
        assert cell["ci95"][0] <= cell["accuracy"] <= cell["ci95"][1]
    mean = np.mean([cell["error"] for cell in results["corruptions"]["cells"]])
    assert results["corruptions"]["mean_error"] == pytest.approx(mean)
    low, high = results["corruptions"]["mean_error_ci95"]
    assert low <= mean <= high
    assert results["clean"]["correct"] == int((Brightness()(x).argmax(1) == label).sum())
    assert results["complete"]
    assert "mce" not in results["corruptions"]  # these are not ImageNet's classes
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == results
    assert not (tmp_path / "run" / "partial").exists()


def test_a_constant_model_is_wrong_by_the_share_of_other_labels():
    results = run(Always(), perturbations=("rotate", "gaussian_noise"))
    assert results["clean"]["accuracy"] == 0.1
    assert {cell["error"] for cell in results["corruptions"]["cells"]} == {0.9}
    assert results["corruptions"]["mean_error"] == pytest.approx(0.9)
    for row in results["perturbations"]["rows"]:
        assert (row["flip_probability"], row["top5_distance"]) == (0, 0)


def test_a_perfect_model_has_no_error(monkeypatch):
    monkeypatch.setattr(Shapes, "labels", lambda self: torch.full((len(self),), 3))
    results = run(Always())
    assert results["clean"]["accuracy"] == 1
    assert results["corruptions"]["mean_error"] == 0
    assert results["corruptions"]["mean_error_ci95"] == [0, 0]


def test_one_forward_per_image_corruption_and_severity():
    model = Brightness()
    run(model, severities=(2, 3, 4))
    assert model.seen == 40 * (1 + 3 * 3) + 1  # and one image to count multiply-adds


def test_a_model_that_always_flips(monkeypatch):
    def blinking(x, name, rng, difficulty):
        return torch.stack([torch.full_like(x, level) for level in (0.02, 0.98, 0.02, 0.98)])

    monkeypatch.setattr(prediction_flips, "sequence", blinking)
    reported = run(Brightness(), corruptions=(), perturbations=("rotate", "shot_noise"))["perturbations"]
    rotate, noise = reported["rows"]
    assert (rotate["flip_probability"], rotate["frames"]) == (1, 4)
    assert noise["flip_probability"] == pytest.approx(2 / 3)  # the third frame is like the first
    assert rotate["top5_distance"] == 15
    assert reported["mean_flip_probability"] == pytest.approx(5 / 6)
    assert "mfr" not in reported


@pytest.mark.parametrize("name", ["translate", "gaussian_noise"])
def test_flips_are_those_of_sequences_made_by_hand(name, tmp_path):
    rows, x, _ = chosen(20)
    results = run(Corner(), limit=20, corruptions=(), perturbations=(name,), out=tmp_path / "run")
    frames = sequence(x, name, SampleRNG.of_samples(0, rows))
    said = torch.stack([Corner()(frame).argmax(1) for frame in frames])
    before = said[:1] if name == "gaussian_noise" else said[:-1]
    flipped = (said[1:] != before).double().mean(0)
    assert float(flipped.sum()) > 0
    table = pq.read_table(tmp_path / "run" / "samples.parquet").to_pydict()
    assert table[f"flips:{name}"] == pytest.approx(flipped.tolist())
    assert results["perturbations"]["rows"][0]["flip_probability"] == pytest.approx(float(flipped.mean()))


def test_large_pictures_move_behind_their_frame(monkeypatch):
    """At 56 pixels the sequence is made of 64, as at 224 of 256."""
    shapes = []
    made = prediction_flips.sequence

    def watched(x, *more):
        frames = made(x, *more)
        shapes.append((x.shape[2:], frames.shape[3:]))
        return frames

    monkeypatch.setattr(prediction_flips, "sequence", watched)
    corruptions(Always(), Shapes("test", size=56), corruptions=(), perturbations=("tilt",), limit=10, device="cpu")
    assert set(shapes) == {((64, 64), (56, 56))}


def test_small_pictures_move_as_small_ones_before_a_large_model_sees_them(tmp_path):
    rows, x, _ = chosen(10)
    model = Classifier(Corner(), ModelRecord("toy:large", num_classes=10, input_size=(64, 64), crop_pct=0.8)).eval()
    settings = {"corruptions": (), "limit": 10, "device": "cpu"}
    corruptions(model, source(), perturbations=("translate",), out=tmp_path / "run", **settings)
    frames = sequence(x, "translate", SampleRNG.of_samples(0, rows))
    assert frames.shape[3:] == (16, 16)
    said = []
    for frame in (frames * 255).round().byte().permute(0, 1, 3, 4, 2).numpy():
        images = [Image.fromarray(pixels).resize((80, 80), Image.Resampling.BICUBIC) for pixels in frame]
        cut = np.stack([np.asarray(image)[8:72, 8:72] for image in images])
        said.append(Corner()(torch.from_numpy(cut).permute(0, 3, 1, 2) / 255).argmax(1))
    said = torch.stack(said)
    flipped = (said[1:] != said[:-1]).double().mean(0)
    assert float(flipped.sum()) > 0
    table = pq.read_table(tmp_path / "run" / "samples.parquet").to_pydict()
    assert table["flips:translate"] == pytest.approx(flipped.tolist())
    reported = corruptions(model, source(), perturbations=None, **settings | {"limit": 2})["perturbations"]
    assert [row["perturbation"] for row in reported["rows"]] == list(CIFAR_SEQUENCES)
    assert reported["corrupted_at"] == [16, 16]


@pytest.mark.slow
def test_batch_size_changes_nothing(tmp_path):
    tables = []
    for size in (1, 7, 64):
        run(Corner(), limit=10, batch_size=size, perturbations=("scale",), out=tmp_path / str(size))
        tables.append(pq.read_table(tmp_path / str(size) / "samples.parquet").to_pydict())
    assert tables[0] == tables[1] == tables[2]


@pytest.mark.slow
def test_interrupted_and_resumed_it_comes_to_the_same_without_doing_it_again(tmp_path):
    whole = run(Brightness(), batch_size=8)
    model, out = Brightness(), tmp_path / "run"
    model.stop_at = 40 + 5 * 20  # amid the first corruption
    with pytest.raises(Interrupted):
        run(model, batch_size=8, out=out)
    assert not (out / "results.json").exists()
    again = Brightness()
    resumed = run(again, batch_size=8, out=out, resume=True)
    assert resumed["corruptions"] == whole["corruptions"]
    assert again.seen == 40 * (1 + 3 * 5) - 40 - 5 * 16 + 1  # two batches of eight were done; one counts multiply-adds
    with pytest.raises(UserError, match="started with different settings"):
        run(Brightness(), batch_size=8, out=out, resume=True, severities=(1,))


def run_shapes(out):
    chosen = {"corruptions": ("contrast",), "severities": (1, 4), "perturbations": ("brightness",)}
    corruptions("zoo:shapes-standard", "shapes", limit=12, batch_size=4, device="cpu", out=out, **chosen)


@pytest.mark.slow
def test_two_processes_report_what_one_reports(tmp_path):
    reported = []
    for count in (1, 2):
        run_together(run_shapes, tmp_path / str(count), processes=count)
        reported.append((tmp_path / str(count) / "results.json").read_text())
    assert reported[0] == reported[1]


def test_what_cannot_be_had_is_left_out_and_reported_unless_it_was_asked_for(monkeypatch):
    def without_photos(x, name, *more):
        if name == "frost":
            raise UserError("no photos of frost here")
        return x

    monkeypatch.setattr(corrupted_copy, "corrupt", without_photos)
    reported = run(Always(), corruptions=None, severities=(1,))["corruptions"]
    assert reported["left_out"] == {"frost": "no photos of frost here"}
    assert reported["mean_error_over"] == [name for name in COMMON if name != "frost"]
    with pytest.raises(UserError, match="no photos of frost"):
        run(Always(), corruptions=("frost", "fog"))


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"severities": (0,)}, "some of 1, 2, 3, 4, 5, each once; got 0"),
        ({"severities": (6,)}, "got 6"),
        ({"severities": ()}, "got none"),
        ({"severities": (1, 1)}, "got 1, 1"),
        ({"corruptions": ("fogg",)}, "unknown corruption 'fogg'; did you mean fog"),
        ({"corruptions": ("fog", "fog")}, "listed twice"),
        ({"perturbations": ("rotation",)}, "unknown perturbation 'rotation'; did you mean rotate"),
        ({"corruptions": (), "perturbations": ()}, "no corruption and no perturbation"),
        ({"difficulty": 4}, "--difficulty must be 1, 2 or 3, got 4"),
        ({"batch_size": 0}, "at least 1, got 0"),
        ({"precision": "int8"}, "unknown precision 'int8'"),
        ({"clean_data": "shapes"}, "--clean-data goes with a benchmark's own files"),
        ({"eps": 1}, "corruptions has no setting 'eps'"),
    ],
    ids=str,
)
def test_user_errors_are_reported(settings, reported):
    with pytest.raises(UserError) as caught:
        run(Always(), **settings)
    assert reported in str(caught.value)
