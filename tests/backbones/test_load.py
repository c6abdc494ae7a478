"""Every kind of MODEL spec, and every way to get it wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
import transformers
from timm.layers import DropPath
from torch import Tensor, nn

from vitadel.backbones import Classifier, load, load_model, wrap
from vitadel.backbones.anatomy import family_of
from vitadel.backbones.checkpoints import build_classifier, load_classifier, save_classifier, write_checksums, zoo_names
from vitadel.backbones.load import model_names
from vitadel.backbones.record import ModelRecord
from vitadel.backbones.third_party import processor_normalization
from vitadel.errors import UserError

KWARGS = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
VIT, DEIT = "vit_tiny_patch16_224", "deit_tiny_patch16_224"
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
RECORD = ModelRecord(VIT, 7, KWARGS, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (32, 32))


def images(size: int = 32) -> Tensor:
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def saved(path: Path, record: ModelRecord = RECORD) -> Classifier:
    model = build_classifier(record)
    save_classifier(model, path)
    return model


def plain_file(path: Path, name: str = VIT, **kwargs: Any) -> nn.Module:
    """A file as timm users have it: without a record."""
    model: nn.Module = timm.create_model(name, **{**KWARGS, "num_classes": 10, **kwargs}).eval()
    torch.save(model.state_dict(), path)
    return model


def normalized(x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    return (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


# --- timm names


@pytest.mark.parametrize(("name", "mean", "std"), [(VIT, (0.5,) * 3, (0.5,) * 3), (DEIT, *IMAGENET)])
def test_normalization_comes_from_timms_data_config(name: str, mean: Any, std: Any, tmp_path: Path) -> None:
    reference = plain_file(tmp_path / "w.pt", name)
    model = load_model(name, weights=tmp_path / "w.pt", num_classes=10, kwargs=KWARGS)
    assert (model.record.mean, model.record.std) == (mean, std)
    assert not model.training
    torch.testing.assert_close(model(images()), reference(normalized(images(), mean, std)))


def test_the_record_says_how_images_are_prepared() -> None:
    record = load_model(f"{VIT}.augreg_in21k_ft_in1k", weights="random").record
    assert (record.input_size, record.crop_pct, record.interpolation) == ((224, 224), 0.9, "bicubic")
    assert (record.num_classes, record.crop_mode) == (1000, "center")


def test_flags_win_over_everything(tmp_path: Path) -> None:
    saved(tmp_path / "m.safetensors")
    for spec, weights in ((str(tmp_path / "m.safetensors"), None), (VIT, tmp_path / "m.safetensors")):
        model = load_model(spec, weights=weights, mean=(0.0,), std=(1.0,))
        assert not model.record.normalizes


def test_a_file_with_a_record_wins_over_timm_and_brings_its_shape(tmp_path: Path) -> None:
    reference = saved(tmp_path / "m.safetensors")
    model = load_model(VIT, weights=str(tmp_path / "m.safetensors"), num_classes=7)
    assert model.record == RECORD
    assert torch.equal(model(images()), reference(images()))


def test_a_wrapped_models_file_gives_its_normalization(tmp_path: Path) -> None:
    module = timm.create_model(VIT, **KWARGS, num_classes=10).eval()
    reference = wrap(module, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    save_classifier(reference, tmp_path / "w.safetensors")
    model = load_model(VIT, weights=tmp_path / "w.safetensors", num_classes=10, kwargs=KWARGS)
    assert torch.equal(model(images()), reference(images()))


def test_a_normalization_layer_in_the_file_is_used_and_noted(tmp_path: Path) -> None:
    model = timm.create_model(VIT, **KWARGS, num_classes=10).eval()
    weights = {f"model.{key}": value for key, value in model.state_dict().items()}
    weights |= {"normalize.mean": torch.tensor([0.25] * 3), "normalize.std": torch.tensor([0.75] * 3)}
    torch.save(weights, tmp_path / "w.pt")
    loaded = load_model(VIT, weights=tmp_path / "w.pt", num_classes=10, kwargs=KWARGS)
    assert (loaded.record.mean, loaded.record.std) == ((0.25,) * 3, (0.75,) * 3)
    assert "normalize.mean" in loaded.record.notes["weights"]


def test_removed_prefixes_are_in_the_notes(tmp_path: Path) -> None:
    model = plain_file(tmp_path / "w.pt")
    torch.save({"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}}, tmp_path / "w.pt")
    loaded = load_model(VIT, weights=tmp_path / "w.pt", num_classes=10, kwargs=KWARGS)
    assert loaded.record.notes["weights"] == "weights taken from 'state_dict'; prefix 'module.' removed from all keys"


def test_no_weights_explains_the_three_choices() -> None:
    with pytest.raises(UserError, match=r"--weights FILE .* --weights pretrained .* --weights random"):
        load_model(VIT)


def test_random_weights_take_any_number_of_classes() -> None:
    model = load_model(VIT, weights="random", num_classes=3, kwargs=KWARGS)
    assert model(images()).shape == (2, 3)
    assert model.record.input_size == (32, 32)
    assert load_model(VIT, weights="random", kwargs={**KWARGS, "img_size": (32, 32)}).record.input_size == (32, 32)


def test_wrong_number_of_classes(tmp_path: Path) -> None:
    plain_file(tmp_path / "w.pt")
    with pytest.raises(UserError, match=r"the file has 10 classes, the model 1000. Pass --num-classes 10"):
        load_model(VIT, weights=tmp_path / "w.pt", kwargs=KWARGS)
    saved(tmp_path / "m.safetensors")
    for spec, weights in ((str(tmp_path / "m.safetensors"), None), (VIT, tmp_path / "m.safetensors")):
        with pytest.raises(UserError, match="has 7 classes, --num-classes 10 was given"):
            load_model(spec, weights=weights, num_classes=10)


def test_nan_weights(tmp_path: Path) -> None:
    model = plain_file(tmp_path / "w.pt")
    with torch.no_grad():
        model.get_parameter("norm.bias").fill_(torch.nan)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    with pytest.raises(UserError, match=r"'norm.bias' has 24 of 24 values that are NaN"):
        load_model(VIT, weights=tmp_path / "w.pt", num_classes=10, kwargs=KWARGS)


def test_arguments_of_a_file_may_be_lists_as_recipes_write_them(tmp_path: Path) -> None:
    arguments = {**KWARGS, "img_size": [32, 32]}
    save_classifier(load_model(VIT, weights="random", num_classes=7, kwargs=arguments), tmp_path / "m.safetensors")
    again = load_model(VIT, weights=tmp_path / "m.safetensors", kwargs=arguments)
    assert again.record.input_size == (32, 32)


def test_a_file_of_another_architecture_by_its_record(tmp_path: Path) -> None:
    saved(tmp_path / "m.safetensors")
    with pytest.raises(
        UserError, match=rf"holds '{VIT}' by its own record, not '{DEIT}'. Give the file itself as MODEL"
    ):
        load_model(DEIT, weights=tmp_path / "m.safetensors")
    with pytest.raises(UserError, match=r"was built with .* by its own record, not with \{'depth': 9\}"):
        load_model(VIT, weights=tmp_path / "m.safetensors", kwargs={"depth": 9})


def test_a_model_that_has_learned_may_drop_more_or_less(tmp_path: Path) -> None:
    """Fine-tuning with another rate of drop-path: no weight depends on it, and the new rate is recorded."""
    before = saved(tmp_path / "m.safetensors")
    file = str(tmp_path / "m.safetensors")
    for spec, weights in ((file, None), (VIT, file)):
        model = load_model(spec, weights=weights, kwargs={"drop_path_rate": 0.3})
        rates = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
        assert max(rates) == pytest.approx(0.3)
        assert model.record.kwargs["drop_path_rate"] == 0.3
        assert torch.equal(model(images()), before(images()))
    zoo = load_model("zoo:shapes-standard", kwargs={"drop_path_rate": 0.1})
    assert any(isinstance(module, DropPath) for module in zoo.modules())
    with pytest.raises(UserError, match="drop the arguments depth"):
        load_model("zoo:shapes-standard", kwargs={"drop_path_rate": 0.1, "depth": 3})


def test_unknown_models_get_the_nearest_names() -> None:
    with pytest.raises(
        UserError, match=r"unknown model 'deit_tiny_patch16_2244'; did you mean .*deit_tiny_patch16_224"
    ):
        load_model("deit_tiny_patch16_2244", weights="random")
    with pytest.raises(UserError, match=r"did you mean deit_tiny_patch16_224, deit_tiny_distilled_patch16_224\?"):
        load_model("deit_tiny", weights="random")
    with pytest.raises(UserError, match=r"unknown model 'qqqqqqqq'\. It is not a timm name, a file or a folder"):
        load_model("qqqqqqqq")
    with pytest.raises(
        UserError, match=r"unknown kind of model 'pythn:' in 'pythn:a:b'; did you mean python\? Known: zoo:"
    ):
        load_model("pythn:a:b")


def test_mean_without_std_and_new_head_without_classes() -> None:
    with pytest.raises(UserError, match="give mean and std together"):
        load_model(VIT, weights="random", mean=(0.5,))
    with pytest.raises(UserError, match="a new head needs a number of classes"):
        load_model(VIT, weights="random", new_head=True)


def test_a_backbone_without_head_is_no_classifier() -> None:
    with pytest.raises(UserError, match=r"'vit_small_patch14_dinov2' has no classification head"):
        load_model("vit_small_patch14_dinov2", weights="random", kwargs={"depth": 1, "img_size": 28})


def test_an_impossible_device() -> None:
    with pytest.raises(UserError, match=r"cannot be put on device 'nonsense'.*--device cpu"):
        load_model(VIT, weights="random", kwargs=KWARGS, device="nonsense")


def fake_download(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    monkeypatch.setattr(timm, "create_model", answer)


def test_pretrained_is_timms_own_download_with_its_own_head(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = timm.create_model, []

    def create(name: str, pretrained: bool, num_classes: int | None, **kwargs: Any) -> nn.Module:
        asked.append((name, pretrained, num_classes))
        model: nn.Module = real(name, pretrained=False, num_classes=num_classes, **kwargs)
        return model

    fake_download(monkeypatch, create)
    assert load_model(DEIT, weights="pretrained", kwargs=KWARGS).record.num_classes == 1000
    assert asked == [(DEIT, True, None)]
    with pytest.raises(UserError, match="has 1000 classes, --num-classes 10 was given"):
        load_model(DEIT, weights="pretrained", num_classes=10, kwargs=KWARGS)


def test_a_failed_download_is_a_user_error_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_given: Any, **_more: Any) -> nn.Module:
        raise ConnectionError("no route to host\nmore")

    fake_download(monkeypatch, offline)
    with pytest.raises(UserError, match=rf"pretrained weights for '{DEIT}': no route to host\. .*--weights FILE"):
        load_model(DEIT, weights="pretrained")


# --- heads, sizes, small images


def test_a_new_head_keeps_the_rest(tmp_path: Path) -> None:
    reference = plain_file(tmp_path / "w.pt").state_dict()
    torch.save({k: v for k, v in reference.items() if not k.startswith("head.")}, tmp_path / "headless.pt")
    for name in ("w.pt", "headless.pt"):
        model = load_model(VIT, weights=tmp_path / name, num_classes=4, new_head=True, kwargs=KWARGS)
        own = model.backbone.state_dict()
        assert model(images()).shape == (2, 4)
        assert model.record.num_classes == 4
        assert all(torch.equal(own[key], reference[key]) for key in reference if not key.startswith("head."))
        save_classifier(model, tmp_path / "again.safetensors")
        assert torch.equal(load_classifier(tmp_path / "again.safetensors")(images()), model(images()))
    with pytest.raises(UserError, match="has no `reset_classifier`"):
        load._apply_options(nn.Linear(2, 2), ModelRecord("wrapped"), options(num_classes=3, new_head=True), "wrapped")


def options(**given: Any) -> load._Options:
    nothing: dict[str, Any] = {"weights": None, "num_classes": None, "normalization": None, "input_size": None}
    none_kept = {"patch_size": None, "new_head": False, "head_classes": None, "kwargs": {}}
    none_kept |= {"crop_pct": None, "interpolation": None}
    return load._Options(**{**nothing, **none_kept, **given})


def test_another_way_to_the_input_size() -> None:
    own = load_model(VIT, weights="random", kwargs=KWARGS).record
    record = load_model(VIT, weights="random", kwargs=KWARGS, crop_pct=0.875, interpolation="bilinear").record
    assert record == replace(own, crop_pct=0.875, interpolation="bilinear") != own


def test_another_input_size_after_loading_and_back_from_disk(tmp_path: Path) -> None:
    plain_file(tmp_path / "w.pt")
    model = load_model(VIT, weights=tmp_path / "w.pt", num_classes=10, input_size=48, kwargs=KWARGS)
    assert model(images(48)).shape == (2, 10)
    assert model.record.input_size == (48, 48)
    save_classifier(model, tmp_path / "m.safetensors")
    assert torch.equal(load_classifier(tmp_path / "m.safetensors")(images(48)), model(images(48)))


def test_a_file_that_was_trained_at_the_requested_size(tmp_path: Path) -> None:
    reference = plain_file(tmp_path / "w.pt", img_size=48)
    model = load_model(VIT, weights=tmp_path / "w.pt", num_classes=10, input_size=48, kwargs=KWARGS)
    torch.testing.assert_close(model(images(48)), reference(normalized(images(48), (0.5,) * 3, (0.5,) * 3)))


def test_input_sizes_that_cannot_be() -> None:
    with pytest.raises(UserError, match=r"50 x 50 pixels cannot be cut into patches of 8 x 8 .* 48 x 48 and 56 x 56"):
        load_model(VIT, weights="random", input_size=50, kwargs=KWARGS)
    cait = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
    with pytest.raises(UserError, match=r"'cait_xxs24_224' takes images of \(32, 32\) only"):
        load_model("cait_xxs24_224", weights="random", input_size=64, kwargs=cait)


def test_models_without_positions_of_their_own_take_any_size() -> None:
    small = {"embed_dim": 16, "depth": 1, "num_heads": 2}
    model = load_model("xcit_nano_12_p16_224", weights="random", num_classes=3, input_size=64, kwargs=small)
    assert model.record.input_size == (64, 64)
    assert model(images(64)).shape == (2, 3)


@pytest.mark.parametrize("name", [VIT, "xcit_nano_12_p16_224"])
@pytest.mark.parametrize(("flag", "patch"), [(True, 4), (8, 8)])
def test_small_images(name: str, flag: bool | int, patch: int, tmp_path: Path) -> None:
    small = {"embed_dim": 16, "depth": 1, "num_heads": 2}
    torch.save(timm.create_model(name, num_classes=10, **small).state_dict(), tmp_path / "w.pt")
    model = load_model(name, weights=tmp_path / "w.pt", num_classes=10, small_images=flag, kwargs=small)
    tokens: Any = model.backbone
    assert tokens.forward_features(images()).shape[1] == 1 + (32 // patch) ** 2
    assert (model.record.small_images, model.record.input_size, model.record.crop_pct) == (patch, (32, 32), 1.0)
    save_classifier(model, tmp_path / "m.safetensors")
    again = load_model(str(tmp_path / "m.safetensors"), small_images=flag)  # done already: nothing more happens
    assert again.record == model.record
    assert torch.equal(again(images()), model(images()))


def test_a_file_that_was_adapted_before(tmp_path: Path) -> None:
    """Others save the 4 x 4 kernel under the name of the patch-16 model."""
    small = {"embed_dim": 16, "depth": 1, "num_heads": 2}
    adapted = timm.create_model(VIT, num_classes=10, img_size=32, **small, patch_size=4).eval()
    torch.save(adapted.state_dict(), tmp_path / "w.pt")
    model = load_model(VIT, weights=tmp_path / "w.pt", num_classes=10, small_images=True, kwargs=small)
    torch.testing.assert_close(model(images()), adapted(normalized(images(), (0.5,) * 3, (0.5,) * 3)))


# --- files and folders of ours


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["weights/best.safetensors", "weights/last.safetensors", "weights/epoch3.safetensors"], 0),
        (["weights/last.safetensors", "weights/epoch3.safetensors"], 0),
        (["weights/model.safetensors", "weights/last.safetensors"], 0),
        (["weights/odd.safetensors"], 0),
        (["model.safetensors", "other.safetensors"], 0),
        (["weights/last.safetensors", "best.safetensors"], 0),
    ],
)
def test_folders_open_the_checkpoint_that_is_meant(files: list[str], chosen: int, tmp_path: Path) -> None:
    for number, file in enumerate(files):
        saved(tmp_path / file, replace(RECORD, notes={"number": str(number)}))
    assert load_model(str(tmp_path)).record.notes["number"] == str(chosen)


def test_folders_that_are_not_clear(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no \*.safetensors"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"looks like a Hugging Face model. Give it as hf:"):
        load_model(str(tmp_path))
    for name in ("a", "b"):
        saved(tmp_path / "weights" / f"{name}.safetensors")
    with pytest.raises(UserError, match=r"several checkpoints: a.safetensors, b.safetensors"):
        load_model(str(tmp_path))


def test_files_that_are_not_there_or_not_ours(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_model("runs/none")
    with pytest.raises(UserError, match="does not exist"):
        load_model("none.safetensors")
    plain_file(tmp_path / "w.pt")
    with pytest.raises(UserError, match="has no model record"):
        load_model(str(tmp_path / "w.pt"))


def test_what_brings_its_weights_takes_no_others(tmp_path: Path) -> None:
    saved(tmp_path / "m.safetensors")
    with pytest.raises(UserError, match="brings its own weights; drop 'pretrained'"):
        load_model(str(tmp_path / "m.safetensors"), weights="pretrained")
    with pytest.raises(UserError, match="built as its record says; drop the arguments depth"):
        load_model(str(tmp_path / "m.safetensors"), kwargs={"depth": 3})
    with pytest.raises(UserError, match="brings its own weights"):
        load_model("zoo:any", weights="random")


def test_a_timm_name_wins_over_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / VIT).mkdir()
    assert load_model(VIT, weights="random", kwargs=KWARGS).record.name == VIT


# --- zoo


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder with two shipped models."""
    saved(tmp_path / "zoo" / "shapes-plain.safetensors", replace(RECORD, notes={"about": "trained on shapes"}))
    saved(tmp_path / "zoo" / "shapes-trades.safetensors")
    write_checksums(tmp_path / "zoo")
    monkeypatch.setattr(resources, "files", lambda _package: tmp_path)
    return tmp_path


def test_zoo_models_are_found_by_name(zoo: Path) -> None:
    assert zoo_names() == ["zoo:shapes-plain", "zoo:shapes-trades"]
    assert load_model("zoo:shapes-plain").record.notes == {"about": "trained on shapes"}
    names = model_names()
    assert list(names)[:2] == zoo_names()
    assert (names["zoo:shapes-plain"], names["zoo:shapes-trades"]) == ("trained on shapes", VIT)
    assert "python:package.module:function" in names


def test_unknown_zoo_models(zoo: Path) -> None:
    with pytest.raises(
        UserError, match=r"unknown zoo model 'zoo:shapes-plan'; did you mean .*There are: zoo:shapes-plain"
    ):
        load_model("zoo:shapes-plan")
    with pytest.raises(UserError, match=r"unknown model 'shapes-trades'; did you mean zoo:shapes-trades"):
        load_model("shapes-trades")


def test_an_installation_without_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "files", lambda _package: tmp_path)
    assert zoo_names() == []
    with pytest.raises(UserError, match="There are: none in this installation"):
        load_model("zoo:anything")


# --- python factories

FACTORIES = """
import torch
from torch import nn

class Means(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
    def forward(self, x):
        return x.mean(dim=(2, 3)) * self.scale

def model(): return Means()
def normalising():
    import vitadel
    return vitadel.wrap(Means(), (0.5,), (0.5,))
def needs(size): return Means()
def breaks(): raise KeyError("weights.bin")
def text(): return "model"
number = 3
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"factories_{abs(hash(tmp_path)):x}"
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    (tmp_path / f"{name}_broken.py").write_text("import torch\nvalue = 1 / 0\n")
    (tmp_path / f"{name}_needy.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    return name


def test_a_factory_in_the_working_folder(factories: str) -> None:
    before = list(sys.path)
    model = load_model(f"python:{factories}:model", num_classes=3)
    assert sys.path == before
    assert torch.equal(model(images()), images().mean(dim=(2, 3)))
    assert (model.record.name, model.record.num_classes) == (f"python:{factories}:model", 3)
    assert not model.backbone.training
    shifted = load_model(f"python:{factories}:model", mean=(0.5,), std=(0.25,))
    torch.testing.assert_close(shifted(images()), (images().mean(dim=(2, 3)) - 0.5) / 0.25)


def test_what_a_factory_prints_is_not_among_the_results(tmp_path, monkeypatch, capsys) -> None:
    text = "import torch\nprint('importing')\ndef model():\n    print('making')\n    return torch.nn.Identity()\n"
    (tmp_path / "talkative.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    load_model("python:talkative:model", num_classes=3)
    assert capsys.readouterr() == ("", "importing\nmaking\n")


def test_a_factory_that_returns_a_classifier(factories: str) -> None:
    model = load_model(f"python:{factories}:normalising")
    torch.testing.assert_close(model(images()), (images().mean(dim=(2, 3)) - 0.5) / 0.5)
    assert not isinstance(model.backbone, Classifier)


def test_a_factory_takes_a_weight_file(factories: str, tmp_path: Path) -> None:
    safetensors.torch.save_file({"scale": torch.tensor([3.0])}, tmp_path / "w.safetensors")
    model = load_model(f"python:{factories}:model", weights=tmp_path / "w.safetensors")
    torch.testing.assert_close(model(images()), images().mean(dim=(2, 3)) * 3)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("{name}", "names no function. Write python:package.module:function"),
        ("{name}:", "names no function"),
        (":model", "names no function"),
        ("{name}_missing:model", "there is no Python module '{name}_missing'"),
        ("{name}_broken:model", r"importing '{name}_broken' failed: ZeroDivisionError.*\({name}_broken.py, line 2\)"),
        ("{name}_needy:model", "importing '{name}_needy' failed: ModuleNotFoundError.*a_module_that_is_not_there"),
        ("{name}:modle", "has no 'modle'; did you mean model"),
        ("{name}:number", "is a int, not a function"),
        ("{name}:breaks", r"failed: KeyError: 'weights.bin' \({name}.py, line \d+\)"),
        ("{name}:needs", "failed: TypeError.*missing 1 required positional argument: 'size'"),
        ("{name}:text", "returned str; it must return an nn.Module"),
    ],
)
def test_factories_that_fail_say_why(factories: str, spec: str, said: str) -> None:
    with pytest.raises(UserError, match=said.replace("{name}", factories)):
        load_model("python:" + spec.replace("{name}", factories))


def test_factories_take_neither_words_nor_arguments(factories: str) -> None:
    with pytest.raises(UserError, match="must be a file, got 'pretrained'"):
        load_model(f"python:{factories}:model", weights="pretrained")
    with pytest.raises(UserError, match="takes no arguments; drop depth"):
        load_model(f"python:{factories}:model", kwargs={"depth": 1})


# --- Hugging Face: tiny models and processors of the real library


def saved_vit(folder: Path, *, processor: bool = True, head: bool = True) -> Any:
    """A tiny ViT for three classes, saved as transformers does."""
    shape = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 32}
    config = transformers.ViTConfig(**shape, image_size=24, patch_size=8, num_labels=3)
    model = (transformers.ViTForImageClassification if head else transformers.ViTModel)(config).eval()
    model.save_pretrained(folder)
    if processor:
        vit_processor().save_pretrained(folder)
    return model


def vit_processor(**changes: Any) -> Any:
    numbers = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "size": {"height": 24, "width": 24}}
    return transformers.ViTImageProcessor(**{**numbers, **changes})


def test_a_hugging_face_model_answers_as_with_its_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = saved_vit(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    model = load_model("hf:./model")
    pixels = (images(24) * 255).round() / 255
    bytes_in = [(image * 255).round().to(torch.uint8) for image in pixels]
    with torch.no_grad():
        expected = original(vit_processor()(bytes_in, return_tensors="pt")["pixel_values"]).logits
        torch.testing.assert_close(model(pixels), expected, rtol=1e-4, atol=1e-5)
    assert (model.record.name, model.record.num_classes, model.record.input_size) == ("hf:./model", 3, (24, 24))
    assert family_of(model) == "hf-vit"


EDGE, SQUARE = {"shortest_edge": 256}, {"height": 224, "width": 224}


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("ViT", {"size": SQUARE}, (224, 1.0, "squash")),
        ("CLIP", {"size": EDGE, "crop_size": SQUARE, "do_center_crop": True}, (224, 224 / 256, "center")),
        ("CLIP", {"size": EDGE, "crop_size": SQUARE, "do_center_crop": False}, (256, 1.0, "center")),
        ("ConvNext", {"size": {"shortest_edge": 224}, "crop_pct": 0.875}, (224, 0.875, "center")),
        ("ConvNext", {"size": {"shortest_edge": 384}, "crop_pct": 0.875}, (384, 1.0, "squash")),
    ],
)
def test_a_processors_geometry_in_timms_terms(kind: str, changes: Any, expected: Any, tmp_path: Path) -> None:
    saved_vit(tmp_path, processor=False)
    getattr(transformers, f"{kind}ImageProcessor")(**changes, resample=2).save_pretrained(tmp_path)
    record = load_model(f"hf:{tmp_path}").record
    size, crop_pct, crop_mode = expected
    assert (record.input_size, record.crop_pct, record.crop_mode) == ((size, size), crop_pct, crop_mode)
    assert record.interpolation == "bilinear"


def test_a_timm_model_inside_transformers(tmp_path: Path) -> None:
    """Its processor has no numbers of its own; taking the defaults would silently leave out the normalization."""
    config = transformers.TimmWrapperConfig(architecture=DEIT, num_labels=1000, model_args=dict(KWARGS))
    config.pretrained_cfg = timm.create_model(DEIT, **KWARGS).pretrained_cfg
    transformers.TimmWrapperForImageClassification(config).save_pretrained(tmp_path)
    record = load_model(f"hf:{tmp_path}").record
    assert (record.mean, record.std) == IMAGENET
    assert (record.input_size, record.crop_pct, record.crop_mode) == ((224, 224), 0.9, "center")


@pytest.mark.parametrize(
    ("kind", "changes", "by_hand"),
    [
        ("ViT", {}, lambda byte: (byte / 255 - 0.2) / 0.5),
        ("ViT", {"do_normalize": False}, lambda byte: byte / 255),
        (
            "EfficientNet",
            {"rescale_factor": 1 / 127.5, "rescale_offset": True},
            lambda byte: (byte / 127.5 - 1 - 0.2) / 0.5,
        ),
        ("ViT", {"do_rescale": False}, lambda byte: (byte - 0.2) / 0.5),
    ],
    ids=["usual", "no normalizing", "offset", "no rescaling"],
)
def test_processors_arithmetic_on_bytes_equals_ours_on_pixels(kind: str, changes: Any, by_hand: Any) -> None:
    numbers = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    mean, std = processor_normalization(getattr(transformers, f"{kind}ImageProcessor")(**numbers, **changes))
    for byte in (0, 51, 255):
        assert (byte / 255 - mean[1]) / std[1] == pytest.approx(by_hand(byte))


def test_an_untrained_head_is_not_evaluated(tmp_path: Path) -> None:
    saved_vit(tmp_path, head=False)
    with pytest.raises(UserError, match=r"no trained weights for classifier.bias, classifier.weight: it is a backbone"):
        load_model(f"hf:{tmp_path}")


def test_hugging_face_failures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"folder './model' for 'hf:./model' does not exist"):
        load_model("hf:./model")
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match=r"'hf:./model' could not be loaded as an image classifier: .*\. Check"):
        load_model("hf:./model")
    saved_vit(tmp_path / "model", processor=False)
    with pytest.raises(UserError, match=r"has no image processor that can be read: .*\. Give mean and std"):
        load_model("hf:./model")
    assert load_model("hf:./model", mean=(0.5,), std=(0.5,)).record.mean == (0.5,) * 3
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"needs the package transformers. Install it: pip install 'vitadel\[hf\]'"):
        load_model("hf:org/name")
