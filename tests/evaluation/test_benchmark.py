"""`vitadel.benchmark` on images whose robustness is known in closed form."""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.datasets
from torch import Tensor, nn

import vitadel
from vitadel.attacks.autoattack.standard import autoattack
from vitadel.attacks.registry import ATTACKS
from vitadel.corruptions.constants import COMMON
from vitadel.errors import UserError
from vitadel.evaluation import benchmark as module
from vitadel.types import Attack, Threat

LEVELS = 20 + 24 * np.arange(10)  # gray levels of the classes; the borders between them are 12 away
OFFSETS = (2, 13, 6, 2, 6, 2, 13, 2)  # 2: robust at 8/255; 6: correct only when clean; 13: wrong
LABELS = (1, 2, 3, 4, 5, 6, 7, 8)


class NearestGray(nn.Module):
    """The class whose gray level is nearest to the mean pixel: linear, so a sign step of eps moves the mean by eps."""

    def forward(self, x: Tensor) -> Tensor:
        level = torch.as_tensor(LEVELS / 255, dtype=x.dtype)
        mean = x.mean((1, 2, 3))[:, None]
        return 200 * (mean * level - level.square() / 2)


def flat(gray: int) -> np.ndarray[Any, Any]:
    return np.full((3, 32, 32), gray, np.uint8)


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-10 and CIFAR-10-C in the layout of their files; torchvision gets the checksums of these."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()

    def put(name: str, content: dict[str, Any]) -> str:
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    grays = [LEVELS[label] + offset for label, offset in zip(LABELS, OFFSETS, strict=True)]
    batch = {"data": np.stack([flat(gray).ravel() for gray in grays]), "labels": list(LABELS)}
    cls = torchvision.datasets.CIFAR10
    monkeypatch.setattr(cls, "train_list", [["data_batch_1", put("data_batch_1", batch)]])
    monkeypatch.setattr(cls, "test_list", [["test_batch", put("test_batch", batch)]])
    meta = put("batches.meta", {"label_names": list("abcdefghij")})
    monkeypatch.setattr(cls, "meta", {"filename": "batches.meta", "key": "label_names", "md5": meta})
    (tmp_path / "CIFAR-10-C").mkdir()
    np.save(tmp_path / "CIFAR-10-C" / "labels.npy", np.tile(LABELS, 5))
    for number, name in enumerate(COMMON):  # the first `number` images of severity 1 are wrong, all else is right
        wrong = [severity == 1 and place < number for severity in range(1, 6) for place in range(len(LABELS))]
        rows = [LEVELS[label] + 20 * bad for label, bad in zip(np.tile(LABELS, 5), wrong, strict=True)]
        np.save(tmp_path / "CIFAR-10-C" / f"{name}.npy", np.stack([flat(row).transpose(1, 2, 0) for row in rows]))
    return tmp_path


@pytest.mark.slow
def test_the_first_images_under_autoattack(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(data_dir)
    asked: list[dict[str, Any]] = []

    @wraps(autoattack)
    def shorter(threat: Threat, **settings: Any) -> Attack:
        """On a linear model the first steps decide."""
        asked.append(settings)
        return autoattack(threat, steps=10, targets=2, queries=50)

    monkeypatch.setitem(ATTACKS, "autoattack", replace(ATTACKS["autoattack"], build=shorter))
    Path("model_info/cifar10/Linf").mkdir(parents=True)
    Path("model_info/cifar10/Linf/Ours2026Gray.json").write_text('{"link": "https://example.org", "eps": null}')
    found = vitadel.benchmark(
        NearestGray().eval(), n_examples=6, dataset="cifar10", threat_model="Linf", eps=8 / 255, data_dir=data_dir,
        to_disk=True, model_name="Ours2026Gray", aa_state_path=data_dir / "state", log_path=data_dir / "log.txt",
        device="cpu",
    )  # fmt: skip
    assert found == (5 / 6, 3 / 6)
    assert not any(asked), "AutoAttack with its own settings"
    assert capsys.readouterr().out.endswith("Clean accuracy: 83.33%\nAdversarial accuracy: 50.00%\n")
    info = json.loads(Path("model_info/cifar10/Linf/Ours2026Gray.json").read_text())
    expected = {"clean_acc": "83.33", "autoattack_acc": "50.00", "eps": "8/255", "link": "https://example.org"}
    assert expected.items() <= info.items()
    assert "83.33%" in (data_dir / "log.txt").read_text()
    results = json.loads((data_dir / "state" / "results.json").read_text())
    assert results["data"]["spec"] == "cifar10@test, the first 6"
    assert results["attacks"][0]["name"] == "autoattack"


def test_a_model_given_by_name_is_recorded_by_it(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTACKS, "autoattack", ATTACKS["noise"])
    given: dict[str, Any] = {"eps": 8 / 255, "data_dir": data_dir, "device": "cpu", "n_examples": 2}
    vitadel.benchmark("zoo:cifar10-standard", aa_state_path=data_dir / "state", **given)
    assert json.loads((data_dir / "state" / "results.json").read_text())["model"]["spec"] == "zoo:cifar10-standard"


def test_corruptions_are_the_mean_of_all_kinds_and_severities(data_dir: Path) -> None:
    found = vitadel.benchmark(NearestGray().eval(), 4, threat_model="corruptions", data_dir=data_dir, device="cpu")
    wrong = sum(min(number, 4) for number in range(15))
    assert found == (pytest.approx(3 / 4), pytest.approx(1 - wrong / (15 * 5 * 4)))


def test_the_list_of_corruptions_is_the_common_one() -> None:
    assert sorted(module._CORRUPTIONS) == sorted(COMMON)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"eps": None}, "the threat model Linf needs eps"),
        ({"threat_model": "corruptions"}, "the threat model corruptions has no eps"),
        ({"threat_model": "L7"}, "unknown threat_model 'L7'; allowed: Linf, L2, corruptions"),
        ({"to_disk": True}, "needs model_name"),
        ({"n_examples": 0}, "at least 1"),
        ({"dataset": "imagenet"}, "imagenet_test_image_ids.txt' does not exist"),
        ({"preprocessing": "Res999"}, "unknown preprocessing"),
        ({"preprocessing": lambda image: torch.full((3, 32, 32), 0.3)}, "normalization belongs into the model"),
    ],
)
def test_wrong_arguments(data_dir: Path, changed: dict[str, Any], message: str) -> None:
    given = {"eps": 8 / 255, "data_dir": data_dir, "device": "cpu", "n_examples": 4, **changed}
    with pytest.raises(UserError, match=message):
        vitadel.benchmark(NearestGray().eval(), **given)


def test_a_model_of_another_size_and_one_in_train_mode(data_dir: Path) -> None:
    larger = vitadel.wrap(NearestGray(), input_size=224, num_classes=10)
    with pytest.raises(UserError, match="attacks cifar10 at 32 x 32 pixels, and this model takes 224 x 224"):
        vitadel.benchmark(larger.eval(), eps=8 / 255, data_dir=data_dir)
    with pytest.warns(UserWarning, match="train mode"):
        vitadel.benchmark(NearestGray().train(), 2, threat_model="corruptions", data_dir=data_dir, device="cpu")


def test_preprocessing_of_robustbench(data_dir: Path) -> None:
    images = module._clean_images("cifar10", 3, data_dir, "Res224")
    assert not isinstance(images, str)
    (image,) = images.read([2])
    assert image.size == (224, 224)
    assert image.getpixel((100, 100)) == (LEVELS[3] + 6,) * 3
