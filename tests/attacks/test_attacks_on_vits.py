"""What is asked of every attack, asked of those that look inside a ViT, on families with different insides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from toys import TinyNet, images
from vitadel.attacks.features import features
from vitadel.attacks.goals import Changed, Surrogate
from vitadel.attacks.pgd import PGD
from vitadel.attacks.settings import settings_of
from vitadel.attacks.steppers import Steepest
from vitadel.attacks.threats import L1, L2, Linf
from vitadel.attacks.transfer.pna_patchout import PnaPatchOut
from vitadel.attacks.transfer.self_ensemble import SelfEnsemble
from vitadel.attacks.wrappers import Averaged, Targeted
from vitadel.backbones.classifier import wrap
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes
from vitadel.instrument import scaled_attention
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Threat
from vits import VITS, make_vit, pixels

EPS = 8 / 255
BALL = Linf(EPS)
BUILDERS: dict[str, Any] = {
    "pna-patchout": (PnaPatchOut, {}),
    "pna-patchout momentum": (PnaPatchOut, {"decay": 1.0, "stop_when_fooled": True}),
    "self-ensemble": (SelfEnsemble, {}),
    "self-ensemble stopping": (SelfEnsemble, {"stop_when_fooled": True}),
    "features": (features, {}),
    "features quantized": (features, {"quantize": True, "psnr": 34.0}),
    "features channel": (features, {"axis": "channel", "normed": True, "stop_when_fooled": False}),
}
EVERY = pytest.mark.parametrize("name", BUILDERS)


def build(name: str, threat: Threat = BALL, steps: int = 4) -> Attack:
    builder, settings = BUILDERS[name]
    attack: Attack = builder(threat, steps=steps, **settings)
    return attack


def labelled(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).argmax(1)


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize("threat", [Linf(EPS), L2(0.5), L1(3.0)], ids=["linf", "l2", "l1"])
def test_stays_in_shape_box_and_budget(name: str, threat: Threat) -> None:
    for dtype in (torch.float32, torch.float64):
        model, x = make_vit("vit", classes=3).to(dtype), pixels("vit", 3, dtype=dtype)
        x[0, :, :9] = 0.0
        x[1, :, :9] = 1.0
        y = labelled(model, x)
        z = build(name, threat)(model, x, y)
        assert z.shape == x.shape
        assert z.dtype == dtype
        assert not z.requires_grad
        assert z.min() >= 0
        assert z.max() <= 1
        assert threat.size(z, x).max() <= threat.eps + 1e-6
        assert not torch.equal(z, x)


@EVERY
def test_fools_more_than_noise_of_the_same_size(name: str) -> None:
    model, x = make_vit("vit"), pixels("vit", 24)
    y, ball = labelled(model, x), Linf(EPS)
    noise = ball.random(x, SampleRNG.of_samples(1, range(24)))
    held = labelled(model, build(name, steps=8)(model, x, y)) == y
    assert held.float().mean() + 0.05 < (labelled(model, noise) == y).float().mean()


@EVERY
def test_leaves_no_trace(name: str) -> None:
    model, x = make_vit("vit", drop_rate=0.3, attn_drop_rate=0.3, patch_drop_rate=0.3), pixels("vit")
    y = labelled(model, x)
    model.train()
    model.blocks[1].eval()  # type: ignore[index, union-attr]
    next(model.parameters()).requires_grad_(False)

    def state() -> list[Any]:
        modules = list(model.modules())
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in modules]
        inside = [(m.training, list(vars(m)), getattr(m, "fused_attn", None)) for m in modules]
        return [hooks, inside, [(p.requires_grad, p.grad, p.sum().item()) for p in model.parameters()]]

    before, rng, x_before = state(), torch.get_rng_state(), x.clone()
    build(name)(model, x, y)
    assert state() == before
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.equal(x, x_before)


@EVERY
@pytest.mark.parametrize("given", [True, False], ids=["indices", "pixels"])
def test_a_sample_does_not_see_its_batch(name: str, given: bool) -> None:
    model, x = make_vit("vit").double(), pixels("vit", 5, dtype=torch.float64)
    y = labelled(model, x)
    y[0] = (y[0] + 1) % 5
    rng = SampleRNG.of_samples(3, range(5)) if given else SampleRNG.of_pixels(x)
    whole = build(name)(model, x, y, rng if given else None)
    for part in (torch.tensor([2]), torch.tensor([4, 1, 0])):
        alone = build(name)(model, x[part], y[part], rng[part] if given else None)
        torch.testing.assert_close(alone, whole[part], rtol=0, atol=1e-9)


@EVERY
def test_no_budget_means_no_change(name: str) -> None:
    model, x = make_vit("vit"), pixels("vit")
    for threat in (Linf(0.0), L2(0.0), L1(0.0)):
        assert torch.equal(build(name, threat)(model, x, labelled(model, x)), x)


@EVERY
def test_constant_logits_give_no_nan(name: str) -> None:
    model, x = make_vit("vit"), pixels("vit")
    model.head.weight.data.zero_()  # type: ignore[union-attr, operator]
    assert build(name)(model, x, torch.tensor([0, 3])).isfinite().all()


@EVERY
def test_memory_layout_does_not_matter(name: str) -> None:
    model, x = make_vit("vit").double(), pixels("vit", dtype=torch.float64)
    y = labelled(model, x)
    plain, odd = build(name)(model, x, y), build(name)(model, x.contiguous(memory_format=torch.channels_last), y)
    torch.testing.assert_close(odd, plain, rtol=0, atol=1e-9)


@EVERY
@pytest.mark.parametrize("vit", ["vit", "swin"])
def test_works_under_autocast(name: str, vit: str) -> None:
    model, x = make_vit(vit), pixels(vit)
    y = labelled(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = build(name)(model, x, y)
    assert z.dtype == x.dtype
    assert Linf(EPS).size(z, x).max() <= EPS + 1e-6


@EVERY
@pytest.mark.parametrize("classes", [2, 3, 4])
def test_few_classes_work(name: str, classes: int) -> None:
    model, x = make_vit("vit", classes=classes), pixels("vit")
    assert build(name)(model, x, labelled(model, x)).isfinite().all()


@EVERY
def test_other_pixels_and_other_models_are_refused(name: str) -> None:
    model, x = make_vit("vit"), pixels("vit")
    with pytest.raises(UserError, match=r"pixels in \[0, 1\]"):
        build(name)(model, x * 255, labelled(model, x))
    with pytest.raises(UserError, match=r"no anatomy known for toys\.TinyNet.*Known families"):
        build(name)(TinyNet().eval(), images(2), torch.tensor([0, 1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pna-patchout momentum", "self-ensemble", "features quantized"])
@pytest.mark.parametrize("vit", {tiny.family: name for name, tiny in VITS.items()}.values())
def test_costs_exactly_what_it_says_on_every_family(name: str, vit: str) -> None:
    model, x = make_vit(vit), pixels(vit)
    y, attack = labelled(model, x), build(name, Linf(1e-6), steps=2)
    gradients, forwards = attack.passes()
    with count_passes(model) as cost:
        attack(model, x, y)
    assert (cost.gradients, cost.forwards) == (2 * gradients, 2 * forwards)


@EVERY
def test_fooled_samples_stop_only_if_asked_to(name: str) -> None:
    """The label is wrong from the start: an attack that stops has nothing to do, another goes all the way."""
    model, x = make_vit("vit"), pixels("vit")
    y = (labelled(model, x) + 1) % 5
    stops = settings_of(build(name))["stop_when_fooled"]
    with count_passes(model) as cost:
        build(name)(model, x, y)
    assert cost.gradients == (0 if stops else 8)


@pytest.mark.slow
@EVERY
def test_works_scaled_and_averaged(name: str) -> None:
    """Scaling seen by the attacker only changes what is found; averaging a model that is not random changes nothing."""
    model, x = wrap(make_vit("vit").double(), (0.5,) * 3, (0.5,) * 3), pixels("vit", 3, dtype=torch.float64)
    y = labelled(model, x)
    plain = build(name)(model, x, y)
    shown = Changed(model, lambda inner: scaled_attention(inner, 0.5))
    assert not torch.equal(build(name)(Surrogate(shown, model), x, y), plain)
    torch.testing.assert_close(Averaged(build(name), 2)(model, x, y), plain, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["pna-patchout", "self-ensemble"])
def test_goes_towards_a_class(name: str) -> None:
    model, x = make_vit("vit"), pixels("vit", 8)
    with torch.no_grad():
        order = model(x).argsort(dim=1, descending=True)
        aimed = Targeted(build(name, Linf(2 * EPS)), "next")(model, x, order[:, 0])
        before, after = (model(each).log_softmax(1).gather(1, order[:, 1:2]).squeeze(1) for each in (x, aimed))
    assert (after > before).all()


def test_crafted_on_one_model_they_harm_another_more_than_plain_steps_that_stop() -> None:
    """The reason not to stop: an image that barely fools its own model seldom fools the next one."""
    crafted, victim, x = make_vit("vit", seed=0), make_vit("vit", seed=0), pixels("vit", 32)
    generator = torch.Generator().manual_seed(1)
    for parameter in victim.parameters():
        parameter.data += 0.03 * torch.randn(parameter.shape, generator=generator)
    y = labelled(crafted, x)
    plain = PGD(Linf(EPS), stepper=Steepest(EPS / 10), steps=10, random_start=False)

    def harm(attack: Attack) -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(victim(attack(crafted, x, y)), y))

    for name in ("pna-patchout", "self-ensemble"):
        assert harm(build(name, steps=10)) > harm(plain) + 0.1
