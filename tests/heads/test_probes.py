"""Linear probes: heads trained at once against heads trained alone, and toys whose answer is known."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel import attacks, audit, wrap
from vitadel.adapters.adapter_file import backbone_fingerprint
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.record import ModelRecord
from vitadel.data.batches import Preprocess, split_rows, usable_rows
from vitadel.errors import UserError
from vitadel.heads.frozen_features import token_features
from vitadel.heads.linear_probe import (
    Features,
    HeadSetting,
    Probe,
    ProbeReport,
    cached_features,
    load_head,
    save_head,
    train_heads,
    train_probe,
)
from vitadel.instrument import extra_tokens
from vitadel.runtime.rng import SampleRNG
from vitadel.training.recipes.probe_sections import LEARNING_RATES, HeadTraining, LinearHead
from vits import make_vit, pixels

PREPROCESS = Preprocess(32)
COLORS = ((200, 40, 40), (40, 200, 40), (40, 40, 200))


@dataclass(frozen=True)
class Colors:
    """Red, green and blue images with some noise; from `flipped_from` on, labels are wrong."""

    count: int = 90
    flipped_from: int = 90

    @property
    def classes(self) -> Sequence[str]:
        return "red", "green", "blue"

    def __len__(self) -> int:
        return self.count

    def labels(self) -> Tensor:
        index = torch.arange(self.count)
        return torch.where(index < self.flipped_from, index % 3, (index + 1) % 3)

    def read(self, indices: Sequence[int]) -> list[Image.Image | Exception]:
        noise = SampleRNG.of_samples(3, indices).stream("colours").integers(40, 32, 32, 3).numpy()
        colors = np.array([COLORS[index % 3] for index in indices])[:, None, None]
        return [Image.fromarray(picture) for picture in (colors + noise).astype(np.uint8)]

    def name(self, index: int) -> str:
        return f"colour {index}"


def some_features(count: int = 48, blocks: int = 2, width: int = 6, classes: int = 3) -> Features:
    rng = SampleRNG.of_samples(1, range(count))
    return Features(rng.normal(blocks + 1, width), rng.stream("labels").integers(classes))


def quick_probe(source: Colors | None = None, model: nn.Module | None = None, **more: Any) -> tuple[Probe, ProbeReport]:
    settings = {"blocks": (1, 2), "lrs": (1e-4, 0.1), "steps": 60, "batch_size": 32, **more}
    training = HeadTraining(**{key: settings.pop(key) for key in ("steps", "batch_size", "seed") if key in settings})
    head = LinearHead(**{key: settings.pop(key) for key in ("blocks", "average", "lrs", "half") if key in settings})
    model = classifier() if model is None else model
    rows = torch.arange(90).split([60, 30])
    return train_probe(model, source or Colors(), *rows, PREPROCESS, head, training, **settings)


def classifier(name: str = "vit") -> Classifier:
    return Classifier(make_vit(name), ModelRecord(name, 5, mean=(0.5,) * 3, std=(0.5,) * 3)).eval()


def by_hand(features: Features, inputs: Tensor, start: Tensor, rate: float, steps: int) -> nn.Linear:
    """One head by torch's own optimizer, on all images at once."""
    head = nn.Linear(inputs.shape[1], start.shape[0])
    with torch.no_grad():
        head.weight.copy_(start)
        head.bias.zero_()
    optimizer = torch.optim.SGD(head.parameters(), lr=1.0, momentum=0.9, weight_decay=0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * len(features) / 256 * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.zero_grad()
        F.cross_entropy(head(inputs), features.labels).backward()
        optimizer.step()
    return head


def test_heads_at_once_equal_heads_one_by_one() -> None:
    features, rates, steps = some_features(), (0.01, 0.3, 5.0), 12
    settings = [(1, False), (1, True), (2, False), (2, True)]
    tokens = features.tokens
    inputs = [tokens[:, 1], tokens[:, 1:].flatten(1), tokens[:, :2].flatten(1), tokens.flatten(1)]
    trained = train_heads(features, 3, settings, rates, steps=steps, batch_size=48, seed=4)
    untrained = train_heads(features, 3, settings, [1e-30], steps=1, batch_size=48, seed=4)
    for heads, start, given in zip(trained, untrained, inputs, strict=True):
        assert heads.weight.shape == (3, 3, given.shape[1])
        for number, rate in enumerate(rates):
            alone = by_hand(features, given, start.weight[0], rate, steps)
            torch.testing.assert_close(heads.weight[number], alone.weight.detach(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(heads.bias[number], alone.bias.detach(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(heads.logits(tokens)[:, number], alone(given).detach(), rtol=1e-4, atol=1e-4)


def test_a_head_does_not_depend_on_its_companions() -> None:
    features = some_features()
    together = train_heads(features, 3, [(1, True), (2, False)], (0.1, 1.0), steps=9, batch_size=10, seed=4)
    (alone,) = train_heads(features, 3, [(2, False)], (1.0,), steps=9, batch_size=10, seed=4)
    torch.testing.assert_close(together[1].weight[1], alone.weight[0], rtol=0, atol=1e-6)
    (other,) = train_heads(features, 3, [(2, False)], (1.0,), steps=9, batch_size=10, seed=5)
    assert not torch.allclose(other.weight, alone.weight, atol=1e-4)


def test_weights_start_small_and_biases_at_zero() -> None:
    (heads,) = train_heads(some_features(4, 1, 2000), 3, [(1, False)], [1e-30], steps=1, batch_size=2)
    assert heads.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert heads.bias.abs().max() < 1e-20


def test_every_image_comes_equally_often() -> None:
    """One random order after the other, cut into batches without regard to where one ends."""
    seen: list[int] = []

    class Watched(Tensor):
        def __getitem__(self, chosen: Any) -> Any:
            seen.extend(chosen.tolist())
            return self.as_subclass(Tensor)[chosen]

    features = some_features(10)
    watched = Features(features.tokens, features.labels.as_subclass(Watched))
    train_heads(watched, 3, [(1, False)], [0.1], steps=9, batch_size=4)
    rounds = [seen[first : first + 10] for first in range(0, 30, 10)]
    assert all(sorted(each) == list(range(10)) for each in rounds)
    assert rounds[0] != rounds[1]
    assert rounds[0] != list(range(10))
    assert len(seen) == 36


def test_separable_features_are_separated() -> None:
    """Class k lies along axis k: a linear head can do it, so one must."""
    labels = torch.arange(60) % 3
    tokens = 0.1 * SampleRNG.of_samples(2, range(60)).normal(2, 5)
    tokens[:, 0, :3] += F.one_hot(labels, 3)
    (heads,) = train_heads(Features(tokens, labels), 3, [(1, False)], LEARNING_RATES, steps=200, batch_size=30)
    right = (heads.logits(tokens).argmax(2) == labels[:, None]).float().mean(0)
    assert right[-1] == 1.0
    assert len(right) == 13


def test_a_probe_on_separable_images_is_perfect() -> None:
    probe, report = quick_probe()
    best = max(result.correct for result in report.heads)
    chosen = next(result for result in report.heads if result.setting == report.chosen)
    assert chosen.correct == chosen.n == best == 30
    assert chosen.accuracy == 1.0
    assert report.trained_on == 60
    assert len(report.heads) == 2 * 2 * 2
    assert report.cache_bytes == (60 + 30) * (2 + 1) * 24 * 4
    images, _ = pixels_and_labels(range(60, 90))
    assert (probe(images).argmax(1) == torch.arange(60, 90) % 3).all()
    assert (probe.blocks, probe.average) == (report.chosen.blocks, report.chosen.average)
    assert probe.classes == ("red", "green", "blue")


def pixels_and_labels(rows: Sequence[int], source: Colors | None = None) -> tuple[Tensor, Tensor]:
    source = source or Colors()
    images = [PREPROCESS(image) for image in source.read(rows) if isinstance(image, Image.Image)]
    return torch.stack(images).float() / 255, source.labels()[torch.tensor(list(rows))]


def test_the_choice_is_made_on_the_held_out_images() -> None:
    """Where their labels are all wrong, a head that learned nothing beats those that learned."""
    _, right = quick_probe(blocks=(1,), average=(True,), lrs=(1e-12, 0.1))
    _, wrong = quick_probe(Colors(flipped_from=60), blocks=(1,), average=(True,), lrs=(1e-12, 0.1))
    assert right.chosen == HeadSetting(1, True, 0.1)
    assert wrong.chosen == HeadSetting(1, True, 1e-12)
    assert wrong.heads[1].correct == 0


def test_reported_numbers_are_those_of_the_probe() -> None:
    """For every head, by a probe of its own and a plain pass."""
    model = classifier()
    _, report = quick_probe(model=model, lrs=(1e-3,), steps=3)
    images, labels = pixels_and_labels(range(60, 90))
    assert len({result.correct for result in report.heads}) > 1
    for result in report.heads:
        chosen = {"blocks": (result.setting.blocks,), "average": (result.setting.average,), "lrs": (1e-3,)}
        probe, alone = quick_probe(model=model, steps=3, **chosen)
        with torch.no_grad():
            logits = probe(images)
        assert int((logits.argmax(1) == labels).sum()) == alone.heads[0].correct == result.correct
        assert F.cross_entropy(logits, labels).item() == pytest.approx(result.loss, rel=1e-4)


def test_equal_accuracy_goes_to_the_lower_loss() -> None:
    _, report = quick_probe(blocks=(1,), average=(False,), lrs=(0.05, 0.2, 0.1))
    assert {result.correct for result in report.heads} == {30}
    assert report.chosen.rate == min(report.heads, key=lambda result: result.loss).setting.rate == 0.2


def test_a_head_that_diverges_is_not_chosen() -> None:
    _, report = quick_probe(blocks=(1,), average=(False,), lrs=(1e38, 0.1))
    assert report.heads[0].correct == 0
    assert report.heads[0].loss == math.inf
    assert report.chosen.rate == 0.1


def test_cached_features_are_those_of_the_model() -> None:
    model = classifier("dinov2_registers")
    features = cached_features(model, Colors(), torch.tensor([5, 0, 7]), PREPROCESS, blocks=2, batch_size=2)
    images, labels = pixels_and_labels([5, 0, 7])
    assert torch.equal(features.labels, labels)
    with torch.no_grad():
        first, second = token_features(model, images, 2)
    torch.testing.assert_close(features.tokens[:, 0], first.class_token, rtol=0, atol=1e-5)
    torch.testing.assert_close(features.tokens[:, 1], second.class_token, rtol=0, atol=1e-5)
    torch.testing.assert_close(features.tokens[:, 2], second.patch_tokens.mean(1), rtol=0, atol=1e-5)
    half = cached_features(model, Colors(), torch.tensor([5, 0, 7]), PREPROCESS, blocks=2, half=True)
    assert half.tokens.dtype == torch.float16
    assert half.tokens.nbytes == features.tokens.nbytes // 2
    torch.testing.assert_close(half.tokens.float(), features.tokens, rtol=1e-3, atol=1e-3)


def test_the_model_is_left_as_it_was_and_gets_no_gradients() -> None:
    model = classifier()
    model.train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    probe, _ = quick_probe(model=model, half=True)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert probe.training  # it follows the model
    assert probe.model is model


def test_attacks_go_through_a_probe() -> None:
    probe, _ = quick_probe()
    x, y = pixels_and_labels(range(60, 72))
    model = wrap(probe)
    assert model.record.num_classes == 3
    assert torch.equal(model(x), probe(x))
    for name in ("pgd-20", "scale:0.5+pgd-5", "features-5"):
        z = attacks.make(name, eps=0.4, norm="linf")(model, x, y)
        assert float((z - x).abs().max()) <= 0.4 + 1e-6
        assert float((z - x).abs().max()) > 0.01
        if name == "pgd-20":
            assert (model(z).argmax(1) != y).any()
    assert all(parameter.grad is None for parameter in probe.parameters())


def test_a_probe_can_be_audited(tmp_path: Path) -> None:
    probe, _ = quick_probe()
    folder = tmp_path / "data"
    for index, image in enumerate(Colors().read(range(60, 72))):
        assert isinstance(image, Image.Image)
        place = folder / f"{index % 3}" / f"{index}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        image.save(place)
    results = audit(wrap(probe, input_size=32), f"folder:{folder}", attacks=["fgsm"], eps=0, out=tmp_path / "run")
    assert results["clean"]["accuracy"] == results["worst_case"]["robust_accuracy"] == 1.0


def test_extra_tokens_change_a_probe_and_keep_its_shape() -> None:
    probe, _ = quick_probe()
    x, _ = pixels_and_labels(range(3))
    plain = probe(x)
    with extra_tokens(probe, torch.randn(2, 24, generator=torch.Generator().manual_seed(0))):
        other = probe(x)
    assert other.shape == plain.shape
    assert not torch.allclose(other, plain, atol=1e-3)
    assert torch.equal(probe(x), plain)


def test_pixels_keep_their_precision_on_a_model_in_half() -> None:
    """A classifier around casts pixels to the precision of the first parameter: it must be the head's."""
    model = classifier().bfloat16()
    probe = Probe(model, nn.Linear(24, 3), 1, False)
    x = pixels("vit")
    assert torch.equal(wrap(probe)(x), probe(x))
    assert probe(x).dtype == torch.float32


def test_saved_heads_come_back(tmp_path: Path) -> None:
    model = classifier()
    probe, report = quick_probe(model=model)
    save_head(probe, tmp_path / "head.safetensors")
    with pytest.raises(UserError, match=r"has no weights/head.safetensors: it is no run of `vitadel probe`"):
        load_head(tmp_path, model)
    (tmp_path / "weights").mkdir()
    save_head(probe, tmp_path / "weights" / "head.safetensors")
    assert torch.equal(load_head(tmp_path, model).head.weight, probe.head.weight)
    again = load_head(tmp_path / "head.safetensors", model)
    x, _ = pixels_and_labels(range(3))
    assert torch.equal(again(x), probe(x))
    assert again.classes == probe.classes
    assert HeadSetting(again.blocks, again.average, report.chosen.rate) == report.chosen
    with safetensors.safe_open(tmp_path / "head.safetensors", "pt") as file:
        assert set(file.keys()) == {"weight", "bias"}
        about = json.loads(file.metadata()["vitadel-probe"])
    assert about == {
        "schema": 1,
        "model": "vit",
        "blocks": probe.blocks,
        "average": probe.average,
        "classes": ["red", "green", "blue"],
    }
    assert torch.equal(load_head(tmp_path / "head.safetensors", model.backbone).head.weight, probe.head.weight)


def test_heads_that_do_not_belong_are_refused(tmp_path: Path) -> None:
    probe, _ = quick_probe()
    path = tmp_path / "head.safetensors"
    save_head(probe, path)
    with pytest.raises(UserError, match="head for 'vit', the model is 'deit3'"):
        load_head(path, classifier("deit3"))
    save_head(probe, path, {"backbone_fingerprint": backbone_fingerprint(cast(Classifier, probe.model))})
    with pytest.raises(UserError, match="head for other weights, of 'vit'; the model is 'deit3'"):
        load_head(path, classifier("deit3"))
    same = cast(Classifier, probe.model)
    load_head(
        path, Classifier(same.backbone, replace(same.record, name="vit.with_a_tag"))
    )  # the weights decide, not what they are called
    with pytest.raises(UserError, match="does not fit this model"):
        load_head(path, make_vit("vit", embed_dim=48))
    weights = dict(probe.head.state_dict())
    for text, message in (("{", "damaged"), ('{"schema": 1}', "damaged"), (None, "is not the head of a probe")):
        metadata = None if text is None else {"vitadel-probe": text}
        path.write_bytes(safetensors.torch.save(weights, metadata=metadata))
        with pytest.raises(UserError, match=message):
            load_head(path, classifier())
    about = {"schema": 2, "model": None, "blocks": 1, "average": False, "classes": []}
    path.write_bytes(safetensors.torch.save(weights, metadata={"vitadel-probe": json.dumps(about)}))
    with pytest.raises(UserError, match="schema 2"):
        load_head(path, classifier())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blocks": ()}, "at least one entry"),
        ({"lrs": (0.0,)}, "lrs must be a finite number above 0"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"blocks": (3,)}, "last 3 blocks.*has 2"),
    ],
)
def test_wrong_settings_are_reported(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        quick_probe(**settings)


def test_images_without_a_label_are_reported() -> None:
    @dataclass(frozen=True)
    class Unlabelled(Colors):
        def labels(self) -> Tensor:
            return torch.full((self.count,), -1)

    rows = usable_rows(Unlabelled(), 3)
    assert len(rows) == 0
    assert len(usable_rows(Colors(), 3)) == 90
    with pytest.raises(UserError, match=r"held_out is 1, but .* has only 0 images"):
        split_rows(Unlabelled().labels(), rows, held_out=1, limit=None, seed=0, limit_seed=0)


def test_features_that_are_not_finite_are_reported() -> None:
    model = classifier()
    with torch.no_grad():
        next(iter(model.backbone.norm.parameters())).fill_(1e6)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="half=False"):
        quick_probe(model=model, half=True)
