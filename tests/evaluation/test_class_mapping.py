"""Labels of the data become outputs of the model: by names, WordNet ids and synonyms."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import vitadel
from command_line import vitadel as command
from vitadel.backbones.class_names import imagenet_names, lemmas_of, names_in_model
from vitadel.backbones.classifier import Classifier, wrap
from vitadel.backbones.record import ModelRecord
from vitadel.data import open_dataset
from vitadel.errors import UserError
from vitadel.evaluation.engine.target import apply_class_subset, open_target, relabel_like

TENCH, ARSON, CRANE = "n01440764", "n04008634", "n02012849"  # classes 0, 744 (projectile) and 134


class Codes(nn.Module):
    """Reads the class from the mean color of an image: its three digits, one per channel. Always right."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.num_classes = outputs
        digits = torch.tensor([[k // 100, k // 10 % 10, k % 10] for k in range(outputs)])
        self.register_buffer("codes", color(digits))

    def forward(self, x: Tensor) -> Tensor:
        return -1e3 * torch.cdist(x.mean((2, 3)), self.codes)


def color(digits: Tensor) -> Tensor:
    return (digits * 25 + 10) / 255


def write_images(folder: Path, outputs: dict[str, int], count: int = 2) -> Path:
    """For each class name, images of the color of an output."""
    for name, k in outputs.items():
        (folder / name).mkdir(parents=True)
        pixels = np.broadcast_to(np.array([k // 100, k // 10 % 10, k % 10]) * 25 + 10, (8, 8, 3)).astype(np.uint8)
        for number in range(count):
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def classifier(outputs: int, names: tuple[str, ...] | None = None, origin: str = "a list") -> Classifier:
    record = ModelRecord("wrapped", outputs, classes=names, classes_from=None if names is None else origin)
    return Classifier(Codes(outputs), record)


def imagenet_model() -> Classifier:
    return classifier(1000, *imagenet_names(1000))


def audit(model, data, **settings):
    return vitadel.audit(model, data, attacks=["fgsm"], eps=1 / 255, **settings)


@pytest.mark.parametrize(
    "names",
    [
        {TENCH: 0, ARSON: 744, CRANE: 134},
        {"tench": 0, "projectile": 744, "crane (n02012849)": 134},
        {"Tinca_tinca": 0, "n04008634_projectile": 744, "great_grey_owl": 24},
    ],
)
def test_folders_of_some_classes_are_judged_on_their_outputs(tmp_path, names):
    results = audit(imagenet_model(), write_images(tmp_path / "photos", names))
    assert results["clean"] == {**results["clean"], "correct": 6, "n": 6}
    mapping = results["class_mapping"]
    assert {row["data"]: row["output"] for row in mapping["classes"]} == names
    assert mapping["judged_among"] == "all 1000 classes"
    assert any("ImageNet-1k assumed from its 1000 outputs" in each for each in results["assumptions"])


def test_the_same_images_as_imagenet_give_the_same_number(tmp_path):
    write_images(tmp_path / "photos", {TENCH: 0, ARSON: 744, CRANE: 9})  # the third is not what its folder says
    first, second = (audit(imagenet_model(), f"{kind}:{tmp_path / 'photos'}") for kind in ("folder", "imagenet"))
    assert first["clean"]["correct"] == second["clean"]["correct"] == 4
    assert first["worst_case"] == second["worst_case"]


def test_judged_among_the_datas_classes(tmp_path):
    # An image of output 9 in a folder of output 0: wrong among all classes, and right among 0 and 744.
    data = write_images(tmp_path / "photos", {TENCH: 9, ARSON: 744})
    assert audit(imagenet_model(), data)["clean"]["correct"] == 2
    results = audit(imagenet_model(), data, among="data")
    assert results["clean"]["correct"] == 4
    assert results["clean_among_all"]["correct"] == 2
    assert results["model"]["outputs"] == "2 of 1000 outputs"
    assert results["class_mapping"]["judged_among"] == "the data's 2 of 1000 classes"
    with pytest.raises(UserError, match="--among must be all or data"):
        audit(imagenet_model(), data, among="some")


def test_classes_in_another_order_are_matched_by_name(tmp_path):
    data = write_images(tmp_path / "photos", {"ape": 2, "bee": 0, "cat": 1})
    assert audit(classifier(3, ("bee", "cat", "ape")), data)["clean"]["accuracy"] == 1
    assert audit(classifier(3), data)["clean"]["accuracy"] == 0  # nothing is known: in the order of the names
    listed = tmp_path / "names.txt"
    listed.write_text("bee\ncat\nape\n")
    for classes in (listed, str(listed), ["bee", "cat", "ape"], {"ape": 2, "bee": 0, "cat": 1}):
        assert audit(classifier(3), data, classes=classes)["clean"]["accuracy"] == 1
    with pytest.raises(UserError, match="2 class names for a model with 3 outputs"):
        audit(classifier(3), data, classes=["ape", "bee"])


def test_a_file_beside_the_weights_names_the_outputs(tmp_path):
    small = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=12, num_heads=2, num_classes=3)
    save_file(small.state_dict(), tmp_path / "weights.safetensors")
    data = write_images(tmp_path / "photos", {"ape": 2, "bee": 0, "cat": 1})
    kwargs = {"img_size": 32, "depth": 1, "embed_dim": 12, "num_heads": 2}
    options = {"weights": str(tmp_path / "weights.safetensors"), "num_classes": 3, "kwargs": kwargs}

    def labels() -> list[int]:
        return open_target("vit_tiny_patch16_224", f"folder:{data}", model_options=options).source.labels().tolist()

    assert labels() == [0, 0, 1, 1, 2, 2]
    (tmp_path / "classes.txt").write_text("bee\ncat\nape\n")
    assert labels() == [2, 2, 0, 0, 1, 1]
    (tmp_path / "classes.txt").write_text("bee\ncat\n")  # of another model
    assert labels() == [0, 0, 1, 1, 2, 2]


def test_calibration_images_get_the_same_outputs(tmp_path):
    names = {TENCH: 0, ARSON: 744}
    data, more = (write_images(tmp_path / each, names) for each in ("photos", "more"))
    target = open_target(imagenet_model(), data)
    other = relabel_like(open_dataset(f"folder:{more}"), target.source)
    assert other.labels().tolist() == [0, 0, 744, 744]
    among = apply_class_subset(open_target(imagenet_model(), data, among="data"))
    assert relabel_like(open_dataset(f"folder:{more}"), among.source).labels().tolist() == [0, 0, 1, 1]


def test_more_outputs_than_classes_are_refused_without_names(tmp_path):
    data = write_images(tmp_path / "photos", {"ape": 2, "bee": 0})
    with pytest.raises(UserError, match=r"2 classes .* 3 outputs, whose classes are not known"):
        audit(classifier(3), data)
    with pytest.raises(UserError, match="none of the data's names"):
        audit(imagenet_model(), write_images(tmp_path / "other", {"sofa bed": 2, "best friend": 0}))


def test_labels_without_names_are_output_numbers():
    x = color(torch.tensor([[0.0, 0, 3], [0, 1, 2]]))[:, :, None, None].expand(-1, -1, 8, 8)
    results = audit(classifier(20), (x, torch.tensor([3, 12])))
    assert results["clean"]["accuracy"] == 1
    assert "class_mapping" not in results
    assert "labels of the data are numbers of the model's outputs" in results["assumptions"]


def test_what_models_know_of_their_classes():
    tiny = {"depth": 1, "embed_dim": 12, "num_heads": 2, "img_size": 32}
    names, origin = names_in_model(timm.create_model("vit_tiny_patch16_224", num_classes=1000, **tiny), 1000)
    assert (names[0], names[744]) == ("tench (n01440764)", "projectile (n04008634)")
    assert "ImageNet-1k" in origin
    assert names_in_model(timm.create_model("vit_tiny_patch16_224", num_classes=10, **tiny), 10) is None
    assert names_in_model(Codes(1000), 1000) is None  # a user's own
    assert len(imagenet_names(21841)[0]) == 21841

    class Labeled(Codes):
        config = type("Config", (), {"id2label": {0: "cat", 1: "dog"}, "num_labels": 2})

    assert wrap(Labeled(2)).record.classes == ("cat", "dog")
    Labeled.config.id2label = {0: "LABEL_0", 1: "LABEL_1"}
    assert wrap(Labeled(2)).record.classes is None
    assert lemmas_of("n01440764") == ("tench", "Tinca tinca")
    assert lemmas_of("n99999999") == ()


def test_names_do_not_change_the_fingerprint_and_survive_a_file(tmp_path):
    plain, named = (open_target(classifier(3, names), "shapes", match=False) for names in (None, ("a", "b", "c")))
    assert plain.model_fingerprint() == named.model_fingerprint()
    assert "classes" not in json.loads(plain.model.record.to_json())
    assert ModelRecord.from_json(named.model.record.to_json()).classes == ("a", "b", "c")


def test_head_classes_keep_the_names_and_stand_in_titles(tmp_path):
    tiny = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=12, num_heads=2)
    save_file(tiny.state_dict(), tmp_path / "w.safetensors")
    kwargs = {"img_size": 32, "depth": 1, "embed_dim": 12, "num_heads": 2}
    options = {"weights": tmp_path / "w.safetensors", "head_classes": (744, 0), "kwargs": kwargs}
    data = write_images(tmp_path / "photos", {TENCH: 0, ARSON: 744})
    out = tmp_path / "run"
    results = vitadel.audit("vit_tiny_patch16_224", data, attacks=["fgsm"], model_options=options, out=out)
    assert [row["output"] for row in results["class_mapping"]["classes"]] == [1, 0]
    assert results["model"]["outputs"] == "2 of 1000 outputs"
    command("report", str(out))
    assert "vit_tiny_patch16_224, 2 of 1000 outputs on folder:" in (out / "report.html").read_text()
