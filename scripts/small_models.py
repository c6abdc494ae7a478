"""Small models that are trained in seconds, to develop and validate `autoattack-fast` on.

A name is DATA-NETWORK-TRAINING, such as patterns100-vit-adversarial: images of 16 x 16 pixels of `shapes`, of CIFAR-10
or of random patterns of 100 or 1,000 classes; a ViT of two blocks or a CNN of three layers; trained on clean images or
against PGD in Linf. They serve as models with rough and smooth losses and with many classes, not as good classifiers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.attacks import make
from vitadel.attacks.threats import make_threat
from vitadel.data.batches import Preprocess, read_batches
from vitadel.data.spec import open_dataset
from vitadel.instrument.hooks import frozen

SIZE = 16
_BATCH, _EPOCHS = 64, 12
_IMAGES, _PER_CLASS = 2000, 20  # of the training, at least
_EPS = {"shapes": 8 / 255, "cifar": 4 / 255, "patterns": 8 / 255}  # of the adversarial training


@dataclass(frozen=True)
class SmallModel:
    """A trained model and the images to attack it on."""

    model: nn.Module
    x: Tensor
    y: Tensor


@cache
def small_model(name: str, images: int, cifar10: str = "cifar10") -> SmallModel:
    """Train the model of this name; `images` are the test images, `cifar10` the data spec of CIFAR-10."""
    data, network, training = name.split("-")
    adversarial = {"adversarial": True, "standard": False}[training]
    classes = int(data.removeprefix("patterns")) if data.startswith("patterns") else 10
    counts = (("train", max(_IMAGES, _PER_CLASS * classes)), ("test", images))
    (x, y), (test, labels) = (_images(data, split, count, cifar10) for split, count in counts)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = {"vit": _vit, "cnn": _cnn}[network](int(y.max()) + 1)
        _train(model, x, y, next(eps for kind, eps in _EPS.items() if data.startswith(kind)) if adversarial else 0.0)
    return SmallModel(model.eval().requires_grad_(False), test, labels)


def balanced_eps(small: SmallModel, norm: str, share: float = 0.5) -> float:
    """The budget, to two digits, at which PGD-10 leaves this share of the correctly classified images; by bisection."""
    with torch.no_grad():
        right = small.model(small.x).argmax(1) == small.y
    x, y = small.x[right][:100], small.y[right][:100]
    low, high = 0.0, {"linf": 0.25, "l2": 4.0, "l1": 60.0}[norm]
    for _ in range(8):
        middle = (low + high) / 2
        z = make("pgd-10", eps=middle, norm=norm)(small.model, x, y)
        with torch.no_grad():
            left = float((small.model(z).argmax(1) == y).double().mean())
        low, high = (middle, high) if left > share else (low, middle)
    return float(f"{high:.2g}")


def _images(data: str, split: str, count: int, cifar10: str) -> tuple[Tensor, Tensor]:
    if data.startswith("patterns"):
        return _patterns(int(data.removeprefix("patterns")), split, count)
    source = open_dataset(f"shapes@{split}" if data == "shapes" else cifar10.replace("SPLIT", split))
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))[:count]
    rows = [part.tolist() for part in order.sort().values.split(250)]
    batches = list(read_batches(source, rows, Preprocess(32)))
    x = torch.cat([batch.x for batch in batches])
    return F.avg_pool2d(x, 2), torch.cat([batch.y for batch in batches])


def _patterns(classes: int, split: str, count: int) -> tuple[Tensor, Tensor]:
    """Each class is a random smooth pattern of colors; its images are mixed with others and with noise."""
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randn(classes, 3, 6, 6, generator=generator)
    smooth = F.interpolate(coarse, size=SIZE, mode="bicubic")
    generator = torch.Generator().manual_seed({"train": 2, "test": 3}[split])
    y = torch.randint(classes, (count,), generator=generator)
    other = torch.randint(classes, (count,), generator=generator)
    noise = torch.randn(count, 3, SIZE, SIZE, generator=generator)
    x = 0.5 + 0.1 * smooth[y] + 0.06 * smooth[other] + 0.06 * noise
    return x.clamp(0, 1), y


def _vit(classes: int) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(SIZE, patch_size=4, embed_dim=64, depth=2, num_heads=2, num_classes=classes)


def _cnn(classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, width in ((3, 16), (16, 32), (32, 48)):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.SiLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(48 * 4, classes))


def _batches(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(_EPOCHS):
        for rows in torch.randperm(len(x)).split(_BATCH):
            yield x[rows], y[rows]


def _train(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
    batches = list(_batches(x, y))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, len(batches))
    threat = make_threat("linf", eps)
    for images, labels in batches:
        if eps:
            model.eval()
            z = images + eps * (2 * torch.rand_like(images) - 1)
            for _ in range(3):
                z = z.clamp(0, 1).requires_grad_()
                with frozen(model):
                    (slope,) = torch.autograd.grad(F.cross_entropy(model(z), labels), z)
                z = threat.project(z.detach() + eps / 2 * slope.sign(), images)
            images = z
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()
