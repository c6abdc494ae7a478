"""Self-test of the installation: attacks on models whose answer is known in closed form.

For two classes and logits (0, w.x + b) the nearest decision boundary lies at distance |w.x + b| / ||w||_dual, so an
attack must break the model just above that budget and must not break it just below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.adapters.adapted_model import open_model
from vitadel.attacks.parse import make
from vitadel.attacks.registry import ATTACKS
from vitadel.attacks.threats import NORMS, make_threat
from vitadel.backbones.anatomy import family_of
from vitadel.backbones.checkpoints import zoo_names
from vitadel.data.sources.shapes import Shapes
from vitadel.evaluation.engine.stages import judge
from vitadel.instrument.attention import scaled_attention
from vitadel.runtime.rng import SampleRNG

_SIDE = 8
_SAMPLES = 4
_SETTINGS = {
    "square": "square(queries=300)",
    "autoattack": "autoattack(steps=50,targets=1,queries=100)",
    "autoattack-plus": "autoattack-plus(steps=50,targets=1,queries=100,restarts=1)",
    "autoattack-rand": "autoattack-rand(steps=50,times=2)",
    "fmn": "fmn-100",  # its step has another meaning
}


class LinearToy(nn.Module):
    """Two classes, logits (0, w.x + b): every distance to the boundary is known."""

    def __init__(self, weight: Tensor, bias: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        score = (x.flatten(1) * self.weight).sum(1) + self.bias
        return torch.stack([torch.zeros_like(score), score], dim=1)

    def distance(self, x: Tensor, norm: str) -> Tensor:
        """The distance of each image to the boundary, if the box [0, 1] does not intervene."""
        dual = {"linf": 1.0, "l2": 2.0, "l1": float("inf")}[norm]
        steepness: Tensor = torch.linalg.vector_norm(self.weight.detach(), ord=dual)
        margin: Tensor = self(x)[:, 1].detach().abs()
        return margin / steepness


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    evidence: str


def selftest() -> Iterator[Check]:
    """Run all checks, one after another; each takes seconds at most."""
    for norm in NORMS:
        for name, preset in ATTACKS.items():
            if not preset.needs_vit and norm in preset.norms:
                yield _finds_the_boundary(name, norm)
    yield _draws_belong_to_samples()
    for name in zoo_names():
        yield _scale_of_one_changes_nothing(name)


def _toy(norm: str) -> tuple[LinearToy, Tensor, Tensor]:
    """Images around mid-gray, so that no budget used here reaches the box, none of them on the boundary."""
    rng = SampleRNG.of_samples(7, range(_SAMPLES))
    weight = SampleRNG.of_samples(8, [0]).stream("weight").normal(3 * _SIDE * _SIDE)[0]
    if norm == "l1":
        weight[11] = 8.0  # one clearly strongest pixel: the closed form lies along a single coordinate
    toy = LinearToy(weight, bias=-0.5 * float(weight.sum()))
    x = 0.5 + 0.1 * (rng.stream("pixels").uniform(3, _SIDE, _SIDE) - 0.5)
    far = toy.distance(x, norm) > 1e-3
    x = x[far]
    return toy, x, toy(x).argmax(1)


def _finds_the_boundary(name: str, norm: str) -> Check:
    toy, x, y = _toy(norm)
    distance = toy.distance(x, norm)
    answers = ((0.99, False), (1.01, True))[: 2 if ATTACKS[name].exact else 1]
    wrong = 0
    for row, (image, label) in enumerate(zip(x, y, strict=True)):
        for factor, broken in answers:
            eps = float(distance[row]) * factor
            # Long steps, because a random start may lie on the far side of the ball.
            long_steps = f"{name}-100(step={eps / 5})" if "step" in ATTACKS[name].settings else name
            title = _SETTINGS.get(name, long_steps)
            z = make(title, eps=eps, norm=norm)(toy, image[None], label[None])
            held = judge(toy, make_threat(norm, eps), image[None], z, label[None]).held
            wrong += bool(held) == broken
    count = len(answers) * len(x)
    evidence = f"{count - wrong} of {count} answers agree with the closed form"
    title = f"{name} finds the boundary, {norm}" if ATTACKS[name].exact else f"{name} claims nothing false, {norm}"
    return Check(title, wrong == 0, evidence)


def _draws_belong_to_samples() -> Check:
    whole = SampleRNG.of_samples(3, range(10)).uniform(5)
    alone = torch.cat([SampleRNG.of_samples(3, [sample]).uniform(5) for sample in range(10)])
    return Check("random numbers do not depend on the batch", torch.equal(whole, alone), "50 numbers compared")


def _scale_of_one_changes_nothing(name: str) -> Check:
    model = open_model(name)
    pixels, _, _ = Shapes("val").render(range(4))
    x = pixels.float() / 255
    with torch.no_grad():
        plain = model(x)
        with scaled_attention(model, 1.0):
            scaled = model(x)
    return Check(
        f"attention scale 1 is the identity on {name}", torch.equal(plain, scaled), f"family {family_of(model)}"
    )
