"""Benchmarks read from files: the same images in every part, the same numbers as on the fly, and what is missing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from vitadel.backbones.classifier import Classifier
from vitadel.backbones.record import ModelRecord
from vitadel.data import open_dataset
from vitadel.data.sources.shapes import Shapes
from vitadel.errors import UserError
from vitadel.evaluation.corruptions.corrupted_copy import CorruptedCopyRequest, write_copy
from vitadel.evaluation.corruptions.request import CorruptionRequest
from vitadel.evaluation.corruptions.results import Origin, PredictionSet, SequenceScores, corruption_results
from vitadel.evaluation.corruptions.run import corruptions
from vitadel.evaluation.corruptions.scores import ALEXNET_ERRORS, ALEXNET_FLIPS
from vitadel.evaluation.engine.target import open_target
from vitadel.evaluation.engine.verdicts import Verdicts
from vitadel.reporting.page import write_report
from vitadel.runtime.distributed import Processes

TENCH, GOOSE = "n01440764", "n01855672"  # classes 0 and 99
ALONE = Processes(0, 1, torch.device("cpu"))
PARTS = ("contrast", "gaussian_noise", "fog")


class DarkTenches(nn.Module):
    """A thousand outputs, of which the tench is for dark corners and the goose for bright ones."""

    num_classes = 1000

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.full((len(x), 1000), -9.0)
        gray = x[:, :, :4, :4].mean((1, 2, 3))
        logits[:, 0], logits[:, 99] = 0.5 - gray, gray - 0.5
        return logits


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("benchmark")
    chance = np.random.default_rng(0)
    for wnid, low, high in ((TENCH, 0, 200), (GOOSE, 60, 256)):
        (tmp_path / "val" / wnid).mkdir(parents=True)
        for number in range(12):
            pixels = chance.integers(low, high, (1, 1, 3)) + chance.integers(-20, 20, (16, 16, 3))
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.save(tmp_path / "val" / wnid / f"{number:02d}.png")
    return tmp_path


@pytest.fixture(scope="module")
def written(clean):
    request = CorruptedCopyRequest(corruptions=PARTS, batch_size=7)
    write_copy(open_dataset(f"imagenet:{clean}/val"), "imagenet", request, ALONE, out=clean / "c")
    return clean


@pytest.fixture
def copied(written, tmp_path):
    """A copy that a test may damage."""
    shutil.copytree(written, tmp_path / "copy")
    return tmp_path / "copy"


def judged(root: Path, data: str, **settings):
    return corruptions(DarkTenches().eval(), data.format(root), device="cpu", **settings)


def cells(results):
    return {(cell["corruption"], cell["severity"]): cell["correct"] for cell in results["corruptions"]["cells"]}


@pytest.mark.slow
def test_files_without_loss_give_the_numbers_of_the_fly(copied):
    made = judged(copied, "imagenet:{}/val", corruptions=PARTS)
    read = judged(copied, "imagenet-c:{}/c", clean_data=f"imagenet:{copied}/val", out=copied / "run")
    assert cells(made) == cells(read)
    assert len(set(cells(made).values())) > 3  # not all the same anyway
    assert read["clean"] == made["clean"]
    assert 12 < made["clean"]["correct"] < 24
    for name in ("mean_ce", "mean_error"):
        assert read["corruptions"][name] == pytest.approx(made["corruptions"][name])
    assert [row["relative_ce"] for row in read["corruptions"]["rows"]] == pytest.approx(
        [
            next(row["relative_ce"] for row in made["corruptions"]["rows"] if row["corruption"] == each["corruption"])
            for each in read["corruptions"]["rows"]
        ]
    )
    assert read["corruptions"]["mce"] is None  # three corruptions are not fifteen
    assert read["corruptions"]["left_out"]["snow"].startswith("not in imagenet-c:")
    assert made["corruptions"]["remarks"][0].startswith("Made in memory")
    (size,) = read["corruptions"]["remarks"]
    assert (
        size
        == made["corruptions"]["remarks"][1]
        == ("Corrupted at 16 x 16 pixels, and the benchmark at 224 x 224: no mCE and no mFR.")
    )


def test_without_clean_images_there_is_no_relative_error(copied):
    results = judged(copied, "imagenet-c:{}/c", corruptions=("fog",), out=copied / "run")
    assert results["clean"] is None
    assert results["corruptions"]["relative_mce"] is None
    assert "--clean-data" in results["corruptions"]["remarks"][-1]
    table = pq.read_table(copied / "run" / "samples.parquet").to_pydict()
    assert set(table["clean_prediction"]) == {None}
    assert len(table["prediction:fog/5"]) == 24
    write_report([copied / "run"], copied / "run" / "report.html")
    page = (copied / "run" / "report.html").read_text()
    reported = f"(no mCE, which takes 15 at 5 severities and 224 pixels) {results['corruptions']['mean_ce']:.1f}"
    assert reported in page
    assert not (copied / "run" / "figures" / "classes.png").exists()  # nothing is known about clean images


def test_a_limit_takes_the_same_images_in_every_part(copied):
    results = judged(copied, "imagenet-c:{}/c", limit=10, clean_data=f"imagenet:{copied}/val", out=copied / "run")
    table = pq.read_table(copied / "run" / "samples.parquet").to_pydict()
    assert results["clean"]["n"] == 10
    assert table["label"] == [0] * 5 + [99] * 5
    whole = judged(copied, "imagenet-c:{}/c", out=copied / "whole")
    everything = pq.read_table(copied / "whole" / "samples.parquet").to_pydict()
    assert whole["data"]["n"] == 24
    for name in PARTS:
        column = everything[f"prediction:{name}/4"]
        assert table[f"prediction:{name}/4"] == [column[row] for row in table["index"]]


def test_a_picture_that_cannot_be_read_leaves_all_versions_of_it_out(copied):
    broken = copied / "c" / "fog" / "2" / GOOSE / "03.png"
    broken.write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"fog/2/n01855672/03\.png\) cannot be read"):
        judged(copied, "imagenet-c:{}/c")
    results = judged(copied, "imagenet-c:{}/c", skip_bad=True)
    assert {cell["n"] for cell in results["corruptions"]["cells"]} == {23}
    assert results["data"]["left_out_names"] == [f"fog/2/{GOOSE}/03.png"]
    for part in ("fog/4", "gaussian_noise/1"):  # the same image in other versions, and another one
        (copied / "c" / part / GOOSE / "03.png").write_bytes(b"no picture")
    (copied / "c" / "contrast" / "5" / TENCH / "00.png").write_bytes(b"no picture")
    results = judged(copied, "imagenet-c:{}/c", skip_bad=True)
    assert {cell["n"] for cell in results["corruptions"]["cells"]} == {22}
    assert results["data"]["left_out"] == 2
    assert {name.split("/", 2)[2] for name in results["data"]["left_out_names"]} == {
        f"{TENCH}/00.png",
        f"{GOOSE}/03.png",
    }


def test_what_is_missing_is_listed(copied):
    (copied / "c" / "fog" / "2" / GOOSE / "03.png").unlink()
    (copied / "c" / "contrast" / "5" / TENCH / "11.png").unlink()
    with pytest.raises(UserError) as caught:
        judged(copied, "imagenet-c:{}/c")
    assert f"contrast/5/{TENCH}/11.png" in str(caught.value)
    assert f"fog/2/{GOOSE}/03.png" in str(caught.value)
    assert cells(judged(copied, "imagenet-c:{}/c", corruptions=("gaussian_noise",)))
    shutil.rmtree(copied / "c" / "fog" / "4")
    with pytest.raises(UserError, match="is not complete: fog/4 missing"):
        judged(copied, "imagenet-c:{}/c")
    with pytest.raises(UserError, match="there is no 'snow'"):
        judged(copied, "imagenet-c:{}/c", corruptions=("snow",))
    with pytest.raises(UserError, match="has no sequences"):
        judged(copied, "imagenet-c:{}/c", corruptions=("contrast",), severities=(1,), perturbations=None)


def test_other_clean_data_is_refused(copied):
    shutil.copytree(copied / "val", copied / "fewer")
    (copied / "fewer" / TENCH / "05.png").unlink()
    with pytest.raises(UserError, match=f"lacks images of the benchmark: {TENCH}/05.png"):
        judged(copied, "imagenet-c:{}/c", clean_data=f"imagenet:{copied}/fewer")
    with pytest.raises(UserError, match="is not the clean version"):
        judged(copied, "imagenet-c:{}/c", clean_data="shapes")


class Corner(nn.Module):
    num_classes = 10

    def forward(self, x: Tensor) -> Tensor:
        return -(x[:, :, 3, 3].mean(1)[:, None] - torch.linspace(0.05, 0.95, 10)).square()


@pytest.mark.slow
def test_arrays_in_the_layout_of_cifar_give_the_numbers_of_the_fly(tmp_path):
    source, names = Shapes("test", size=32), ("brightness", "impulse_noise")
    request = CorruptedCopyRequest(corruptions=names, format="npy", limit=30, batch_size=8)
    write_copy(source, "shapes", request, ALONE, out=tmp_path / "CIFAR-10-C")
    made = corruptions(Corner().eval(), source, corruptions=names, limit=30, device="cpu")
    read = corruptions(Corner().eval(), "cifar10-c", data_root=tmp_path, device="cpu")
    assert cells(made) == cells(read)
    assert read["corruptions"]["mean_error"] == pytest.approx(made["corruptions"]["mean_error"])
    assert "mce" not in read["corruptions"]
    for size in (24, 48):  # a model for other sizes sees the same images, and only then are they resized
        larger = Classifier(Corner(), ModelRecord("toy:larger", num_classes=10, input_size=(size, size), crop_pct=0.8))
        both = [
            corruptions(larger.eval(), source, corruptions=names, limit=30, device="cpu"),
            corruptions(larger.eval(), "cifar10-c", data_root=tmp_path, device="cpu"),
        ]
        assert cells(both[0]) == cells(both[1])
        assert cells(both[0]) != cells(made)
    one = corruptions(Corner().eval(), "cifar10-c/brightness/3", data_root=tmp_path, device="cpu", severities=(3,))
    assert cells(one) == {("brightness", 3): cells(made)["brightness", 3]}


def test_all_fifteen_at_five_severities_make_an_mce(clean):
    """Chosen verdicts for 24 images; every score is worked out from the errors alone."""
    chance, n = np.random.default_rng(3), 24
    label = torch.tensor([0] * 12 + [99] * 12)
    wrong = {(name, level): chance.random(n) < 0.15 * level for name in ALEXNET_ERRORS for level in range(1, 6)}
    predictions = {part: np.where(column, 7, label.numpy()) for part, column in wrong.items()}
    verdicts = Verdicts(torch.arange(n), label, torch.where(torch.arange(n) < 3, 7, label), [])
    scores = SequenceScores(np.full(n, 0.1), np.zeros(n), 31)
    files = Origin("the benchmark's files", False, (224, 224))
    found = PredictionSet(files, verdicts, True, predictions, dict.fromkeys(ALEXNET_FLIPS, scores), {})
    target = open_target(DarkTenches().eval(), f"imagenet:{clean}/val")
    settings = {"model_fingerprint": "0"}
    results = corruption_results(target, CorruptionRequest(), found, settings)
    ce, relative = {}, {}
    for name, alexnet in ALEXNET_ERRORS.items():
        errors = [wrong[name, level].sum() / n for level in range(1, 6)]
        ce[name] = 100 * sum(errors) / sum(alexnet.values())
        relative[name] = 100 * (sum(errors) - 5 * 3 / n) / (sum(alexnet.values()) - 5 * 0.435)
    reported = results["corruptions"]
    assert {row["corruption"]: row["ce"] for row in reported["rows"]} == pytest.approx(ce)
    assert reported["mce"] == pytest.approx(sum(ce.values()) / 15)
    assert reported["relative_mce"] == pytest.approx(sum(relative.values()) / 15)
    quiet = [value for name, value in ce.items() if not name.endswith("_noise")]
    assert reported["mce_without_noise"] == pytest.approx(sum(quiet) / 12)
    for name in ("mce", "relative_mce", "mce_without_noise", "mean_error"):
        low, high = reported[f"{name}_ci95"]
        assert low < reported[name] < high
    mfr = sum(0.1 / value for value in ALEXNET_FLIPS.values()) / 10 * 100
    assert results["perturbations"]["mfr"] == pytest.approx(mfr)
    fewer = {part: column for part, column in predictions.items() if part[0] != "frost"}
    found = PredictionSet(replace(files, in_memory=True), verdicts, True, fewer, {}, {"frost": "no photos"})
    reported = corruption_results(target, CorruptionRequest(), found, settings)["corruptions"]
    assert reported["mce"] is None
    assert reported["relative_mce"] is None
    assert reported["mce_without_noise"] is None
    assert reported["mean_ce"] == pytest.approx((sum(ce.values()) - ce["frost"]) / 14)
    small = replace(files, shape=(64, 64))
    found = PredictionSet(small, verdicts, True, predictions, dict.fromkeys(ALEXNET_FLIPS, scores), {})
    results = corruption_results(target, CorruptionRequest(), found, settings)
    reported = results["corruptions"]
    assert [reported[name] for name in ("mce", "relative_mce", "mce_without_noise")] == [None] * 3
    assert reported["mean_ce"] == pytest.approx(sum(ce.values()) / 15)
    assert results["perturbations"]["mfr"] is None


def test_a_sequence_for_validation_takes_nothing_from_the_ten(clean):
    n = 24
    label = torch.zeros(n, dtype=torch.int64)
    share = {name: 0.02 * (1 + place) for place, name in enumerate(ALEXNET_FLIPS)}
    sequences = {name: SequenceScores(np.full(n, value), np.zeros(n), 31) for name, value in share.items()}
    sequences |= dict.fromkeys(("spatter", "shear"), SequenceScores(np.ones(n), np.full(n, 9.0), 31))
    origin = Origin("made on the fly", True, (224, 224))
    predicted = PredictionSet(origin, Verdicts(torch.arange(n), label, label, []), True, {}, sequences, {})
    target = open_target(DarkTenches().eval(), f"imagenet:{clean}/val")

    def reported(request, predicted):
        settings = {"model_fingerprint": "0"}
        return corruption_results(target, request, predicted, settings)["perturbations"]

    found = reported(CorruptionRequest(), predicted)
    rates = {name: 100 * value / ALEXNET_FLIPS[name] for name, value in share.items()}
    assert {row["perturbation"]: row["flip_rate"] for row in found["rows"] if "flip_rate" in row} == pytest.approx(
        rates
    )
    assert found["mfr"] == pytest.approx(sum(rates.values()) / 10)
    assert found["mean_flip_probability"] == pytest.approx(0.02 * 55 / 10)
    assert found["mean_top5_distance"] == 0
    assert found["mean_flip_probability_over"] == list(ALEXNET_FLIPS)
    assert [row["perturbation"] for row in found["rows"] if not row["counted"]] == ["spatter", "shear"]
    assert [remark[:40] for remark in found["remarks"]] == ["Made in memory: ImageNet-P's own videos "]
    assert "mfr" not in reported(CorruptionRequest(difficulty=2), predicted)
    alone = reported(CorruptionRequest(), replace(predicted, sequences={"shear": sequences["shear"]}))
    assert (alone["mean_flip_probability"], alone["mfr"]) == (1, None)


def sized(size: int, **more) -> Classifier:
    record = ModelRecord("toy:sized", num_classes=1000, input_size=(size, size), **more)
    return Classifier(DarkTenches(), record).eval()


@pytest.mark.slow
@pytest.mark.parametrize("size", [24, 224, 240])
def test_large_pictures_are_corrupted_at_the_size_of_the_benchmark_whatever_the_model_takes(tmp_path, size):
    """Else a copy of the same pictures, read as ImageNet-C is, gives another number."""
    chance = np.random.default_rng(4)
    for wnid in (TENCH, GOOSE):
        (tmp_path / "val" / wnid).mkdir(parents=True)
        for number in range(6):
            coarse = Image.fromarray(chance.integers(70, 180, (30, 26, 3)).astype(np.uint8))
            coarse.resize((260, 300), Image.Resampling.NEAREST).save(tmp_path / "val" / wnid / f"{number}.png")
    names = ("gaussian_noise", "pixelate")
    write_copy(open_dataset(f"imagenet:{tmp_path}/val"), "", CorruptedCopyRequest(names), ALONE, out=tmp_path / "c")
    model = sized(size, crop_pct=0.9, interpolation="bicubic")
    tables = []
    for data in (f"imagenet:{tmp_path}/val", f"imagenet-c:{tmp_path}/c"):
        out = tmp_path / data.partition(":")[0]
        results = corruptions(model, data, corruptions=names, device="cpu", batch_size=5, out=out)
        assert results["corruptions"]["corrupted_at"] == [224, 224]
        assert not any("no mCE" in remark for remark in results["corruptions"]["remarks"])
        tables.append(pq.read_table(out / "samples.parquet").to_pydict())
    columns = [name for name in tables[0] if name.startswith("prediction:")]
    assert len(columns) == 10
    assert {name: tables[0][name] for name in columns} == {name: tables[1][name] for name in columns}
    assert len({tuple(tables[0][name]) for name in columns}) > 1  # they depend on how strong it is


def test_pictures_of_a_benchmark_are_never_cropped_again(tmp_path):
    """A bright rim around a dark middle: anyone who crops sees a tench."""
    pixels = np.full((16, 16, 3), 250, np.uint8)
    pixels[4:12, 4:12] = 5
    folder = tmp_path / "contrast" / "1" / GOOSE
    folder.mkdir(parents=True)
    Image.fromarray(pixels).save(folder / "rim.png")
    for size in (16, 8):  # as large as the pictures, and smaller
        record = ModelRecord("toy:rim", num_classes=1000, input_size=(size, size), crop_pct=0.5)
        model = Classifier(DarkTenches(), record).eval()
        settings = {"severities": (1,), "device": "cpu"}
        assert cells(corruptions(model, f"imagenet-c:{tmp_path}", **settings)) == {("contrast", 1): 1}
    made = corruptions(model, f"imagenet:{tmp_path}/contrast/1", corruptions=("brightness",), **settings)
    assert made["clean"]["correct"] == 0  # other data is prepared as the model wants it
