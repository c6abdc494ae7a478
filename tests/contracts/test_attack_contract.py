"""One contract over everything that claims to be an attack, and over what goes around attacks.

Each test meets all attacks on small models of our own, and models of every second family of transformers and
torchvision: one attack on each, others in the next test, so that together they meet all attacks and all families.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vitadel
from other_vits import OTHERS, last_layer, make_other, one_of_each_family
from toys import Constant, TinyNet, images
from vitadel.attacks import make
from vitadel.attacks.losses import margin
from vitadel.attacks.parse import needs_known_family, read_attack_name
from vitadel.attacks.registry import ATTACKS, PREFIXES
from vitadel.attacks.threats import make_threat
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes, rules_of
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Calibrated, Threat
from vits import VITS, make_vit

BUDGETS = {"linf": 8 / 255, "l2": 0.5, "l1": 3.0, "l0": 12.0}
SHORT = {
    "square": "square(queries=100)",
    "autoattack": "autoattack(steps=6,targets=2,queries=50)",
    "autoattack-plus": "autoattack-plus(steps=6,targets=2,queries=50,restarts=2)",
    "autoattack-rand": "autoattack-rand(steps=6,times=2)",
    "autoattack-fast": "autoattack-fast(entropy_steps=4,margin_steps=5,target_steps=3,best_steps=4,sentinel_queries=9)",
    "patches-random": "patches-random(masks=3)",
    "patches-learned": "patches-learned(masks=2,images=8,training_steps=10)",
}
AROUND = {"aas": "aas(images=8,steps=2)", "aas-bpda": "aas-bpda(images=8,steps=2)", "aas-paper": "aas-paper(images=8)"}
AROUND |= {
    "scale": "scale:0.1",
    "eot": "eot:2",
    "targeted": "targeted:next",
    "logits": "logits:10",
    "bpda": "bpda(modules=features.2)",
}
SHORTER = {  # on models of other libraries, which cost more
    SHORT["square"]: "square(queries=60)",
    SHORT["autoattack"]: "autoattack(steps=3,targets=1,queries=20)",
    SHORT["autoattack-plus"]: "autoattack-plus(steps=3,targets=1,queries=20,restarts=1)",
    SHORT["autoattack-rand"]: "autoattack-rand(steps=3,times=2)",
    SHORT["autoattack-fast"]: "autoattack-fast(entropy_steps=2,margin_steps=2,target_steps=1,best_steps=2,"
    "sentinel_queries=9,escalate=false)",
    SHORT["patches-learned"]: "patches-learned(masks=2,images=4,training_steps=2)",
    **{f"{AROUND[name]}+pgd-6": f"{name}(images=4,steps=1)+pgd-4" for name in ("aas", "aas-bpda")},
    f"{AROUND['aas-paper']}+pgd-6": "aas-paper(images=4)+pgd-4",
}
NAMES = [SHORT.get(name, f"{name}-6" if "steps" in entry.settings else name) for name, entry in ATTACKS.items()]
NAMES += ["pgd-6(restarts=3)", "gama-6(guide=init)", *(f"{AROUND[name]}+pgd-6" for name in PREFIXES)]

Case = Any  # what pytest.param gives


def norms_of(name: str) -> tuple[str, ...]:
    return ATTACKS[read_attack_name(name).base].norms


EVERYTHING = [pytest.param(name, norm, id=f"{name} {norm}") for name in NAMES for norm in norms_of(name)]
# Where no geometry is involved, one norm proves as much as three; where it is, attacks that only put another loss or
# wrapper around PGD's geometry prove nothing that PGD does not.
EVERY_NAME = [pytest.param(name, norms_of(name)[0], id=name) for name in NAMES]
OWN_GEOMETRY = (
    "fgsm",
    "pgd-6",
    "mi-fgsm-6",
    "mifpe-6",
    "apgd-ce",
    "apgd-t",
    "fab-6",
    "ddn",
    "fmn",
    "bisect",
    "superdeepfool",
    "square",
    "noise",
    "autoattack-fast",
)
EVERY_GEOMETRY = [each for each in EVERYTHING if each.values[1] == "linf" or each.values[0].startswith(OWN_GEOMETRY)]
QUERYING = [each for each in EVERY_NAME if each.values[0] != "noise"]  # which never calls the model
NOISE = ("noise", "patches-random")  # are noise themselves
LUCK = (*NOISE, "square", "features", "patches-learned")  # follow no gradient of the label: may miss a dozen images
CLASSES = 3
COPIES = 12  # of a batch, at once, besides what the model itself needs


_TURNS = count()
MET: list[tuple[str, str]] = []  # attack and model of the other libraries


def everywhere(own: Sequence[Case]) -> pytest.MarkDecorator:
    """Cases of name, norm and library: those of our own models, and one of their attacks on every second family."""
    turn, cases = next(_TURNS), [pytest.param(*each.values, "", id=each.id) for each in own]
    for library in one_of_each_family(turn // 2)[turn % 2 :: 2]:
        names = [name for name in dict.fromkeys(each.values[0] for each in own) if runs_on(name, library)]
        name = min(names, key=[met for met, _ in MET].count)  # the one that was met least
        cases.append(pytest.param(SHORTER.get(name, name), norms_of(name)[0], library, id=f"{name} {library}"))
        MET.append((name, library))
    return pytest.mark.parametrize(("name", "norm", "library"), cases)


def runs_on(name: str, library: str) -> bool:
    """Patch-Fool chooses patches by the attention between all of them, which windows do not have."""
    return not (name.startswith("patch-fool") and OTHERS[library].windows)


def model_for(name: str, library: str = "", classes: int = CLASSES, dropout: float = 0.0) -> nn.Module:
    if library:
        return vitadel.wrap(make_other(library, classes, dropout).float())
    if needs_known_family(name):
        return make_vit("vit", classes=classes, drop_path_rate=dropout, proj_drop_rate=dropout)
    return TinyNet(classes).eval()


def images_for(name: str, library: str, count: int, seed: int = 0) -> Tensor:
    return images(count, seed, VITS["vit"].size) if library or needs_known_family(name) else images(count, seed)


@pytest.fixture
def model(name: str, library: str) -> nn.Module:
    return model_for(name, library)


@pytest.fixture
def batch(name: str, library: str, model: nn.Module) -> tuple[Tensor, Tensor]:
    x = images_for(name, library, 7)
    with torch.no_grad():
        y = model(x).argmax(1)
    y[0] = (y[0] + 1) % CLASSES  # one label is wrong from the start
    return x, y


@pytest.fixture
def precise(model: nn.Module, batch) -> tuple[nn.Module, Tensor, Tensor]:
    """In float64, where rounding does not decide between two nearly equal gradients: what must agree, agrees."""
    x, y = batch
    return model.double(), x.double(), y


def ready(name: str, norm: str, model: nn.Module, like: Tensor, eps: float | None = None) -> Attack:
    if isinstance(model, Classifier):  # of another library: a layer that is there
        layers = [layer for layer, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
        name = name.replace("features.2", layers[-1])
    attack = make(name, eps=BUDGETS[norm] if eps is None else eps, norm=norm)
    if isinstance(attack, Calibrated):
        x = images(8, seed=9, side=like.shape[-1]).to(like.dtype)
        attack = attack.prepared(model, [(x, torch.arange(8) % 2)])
    return attack


def run(name, norm, model, x, y, eps=None, rng=None):
    return ready(name, norm, model, x, eps)(model, x, y, rng)


def escalating_once(name: str, norm: str) -> str:
    """One norm is enough for all of autoattack, which follows autoattack-fast where it notices masked gradients."""
    return name if norm == "linf" else name.replace("sentinel_queries=9)", "sentinel_queries=9,escalate=false)")


def excess(name: str, norm: str, model: nn.Module, z: Tensor, x: Tensor) -> float:
    """By how much the worst proposal is over its budget, in the units of its own rules."""
    rules = rules_for(name, norm, model, x)
    return float(rules.size(z, x).max() - rules.eps)


def rules_for(name: str, norm: str, model: nn.Module, x: Tensor) -> Threat:
    own = rules_of(make(name, eps=BUDGETS[norm], norm=norm))
    return make_threat(norm, BUDGETS[norm]) if own is None else own(model, x)


@pytest.mark.slow
@everywhere(EVERYTHING)
def test_stays_in_shape_box_and_budget(name, norm, model, batch):
    x, y = batch
    for dtype in (torch.float32, torch.float64):
        z = run(name, norm, model.to(dtype), x.to(dtype), y)
        assert z.shape == x.shape
        assert z.dtype == dtype
        assert not z.requires_grad
        assert z.min() >= -1e-6
        assert z.max() <= 1 + 1e-6
        assert excess(name, norm, model, z, x.to(dtype)) <= 1e-6


# A prefix goes around PGD, whatever the norm: one norm shows that it weakens nothing.
ONCE_AROUND = [each for each in EVERYTHING if each.values[1] == "linf" or "+" not in each.values[0]]


@pytest.mark.slow
@everywhere([each for each in ONCE_AROUND if not each.values[0].startswith(NOISE)])
def test_fools_more_than_noise_of_the_same_size(name, norm, library, model):
    name = name.replace(SHORT["square"], "square(queries=300)")
    x = images_for(name, library, 40, seed=5)
    with torch.no_grad():
        y = model(x).argmax(1)
    noise = rules_for(name, norm, model, x).random(x, SampleRNG.of_samples(1, range(40)))
    held = (model(run(name, norm, model, x, y)).argmax(1) == y).float().mean()
    assert held < (model(noise).argmax(1) == y).float().mean()


@pytest.mark.slow
@everywhere(EVERY_NAME)
def test_leaves_no_trace(name, norm, library, batch):
    x, y = batch
    model = model_for(name, library, dropout=0.2).train()
    list(model.modules())[-1].eval()  # mixed modes must survive
    parameters = [p.clone() for p in model.parameters()]
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 0.5) if number % 2 else None
    next(model.parameters()).requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    modes = [m.training for m in model.modules()]
    attributes = [(type(m), list(vars(m)), getattr(m, "fused_attn", None)) for m in model.modules()]
    x_before, rng = x.clone(), torch.get_rng_state()
    other_rngs = random.getstate(), np.random.get_state()[1].tolist()
    run(name, norm, model, x, y)
    assert torch.equal(x, x_before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == other_rngs
    assert [m.training for m in model.modules()] == modes
    assert [(type(m), list(vars(m)), getattr(m, "fused_attn", None)) for m in model.modules()] == attributes
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(a, b) for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    for number, parameter in enumerate(model.parameters()):
        assert parameter.grad is None if number % 2 == 0 else bool((parameter.grad == number + 0.5).all())
    for m in model.modules():
        hooks = (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        assert not any(hooks)


@pytest.mark.slow
@everywhere(EVERY_GEOMETRY)
def test_depends_on_seed_and_sample_only(name, norm, precise):
    model, x, y = precise
    rng = SampleRNG.of_samples(3, range(len(x)))
    attack = ready(name, norm, model, x)
    whole = attack(model, x, y, rng)
    assert torch.equal(whole, run(name, norm, model, x, y, rng=rng))  # calibrated again
    alone = torch.cat([attack(model, x[i : i + 1], y[i : i + 1], rng[torch.tensor([i])]) for i in range(len(x))])
    assert torch.allclose(whole, alone, atol=1e-5)
    backwards = torch.arange(len(x)).flip(0)
    turned = attack(model, x[backwards], y[backwards], rng[backwards])
    assert torch.allclose(whole, turned[backwards], atol=1e-5)


@pytest.mark.slow
@everywhere(EVERY_NAME)
def test_another_seed_is_another_attack(name, norm, precise):
    model, x, y = precise
    attack = ready(name, norm, model, x)
    first, second = (attack(model, x, y, SampleRNG.of_samples(seed, range(len(x)))) for seed in (3, 4))
    assert torch.equal(first, second) != ATTACKS[read_attack_name(name).base].random


@everywhere([each for each in EVERY_NAME if not each.values[0].startswith("noise")])
def test_labels_that_are_wrong_already_stay_wrong(name, norm, model, batch):
    x, _ = batch
    with torch.no_grad():
        wrong = (model(x).argmax(1) + 1) % CLASSES
        assert (model(run(name, norm, model, x, wrong)).argmax(1) != wrong).all()


@everywhere(EVERY_NAME)
def test_an_empty_batch_stays_empty(name, norm, model, batch):
    x, y = batch
    assert run(name, norm, model, x[:0], y[:0]).shape == (0, *x.shape[1:])


@pytest.mark.slow
@everywhere(EVERY_NAME)
def test_without_indices_draws_follow_the_pixels(name, norm, precise):
    model, x, y = precise
    attack = ready(name, norm, model, x)
    whole = attack(model, x, y)
    parts = torch.cat([attack(model, x[:3], y[:3]), attack(model, x[3:], y[3:])])
    assert torch.allclose(whole, parts, atol=1e-5)


@pytest.mark.slow
@everywhere(EVERY_GEOMETRY)
def test_no_budget_means_no_change(name, norm, model, batch):
    x, y = batch
    assert torch.equal(run(name, norm, model, x, y, eps=0.0), x)


@pytest.mark.slow
@everywhere(EVERY_GEOMETRY)
def test_constant_logits_give_no_nan(name, norm, library, batch):
    x, y = batch
    model = Constant()
    if library or needs_known_family(name):
        model = model_for(name, library)
        nn.init.zeros_(last_layer(model).weight)
        nn.init.zeros_(last_layer(model).bias)
    z = run(escalating_once(name, norm), norm, model, x, y)
    assert z.isfinite().all()


@pytest.mark.slow
@everywhere(EVERY_GEOMETRY)
def test_memory_layout_does_not_matter(name, norm, precise):
    model, x, y = precise
    attack = ready(name, norm, model, x)
    plain = attack(model, x, y)
    for odd in (x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3)):
        assert torch.allclose(attack(model, odd, y), plain, atol=1e-5)


@pytest.mark.slow
@everywhere(EVERY_GEOMETRY)
def test_works_under_autocast(name, norm, model, batch):
    x, y = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = run(escalating_once(name, norm), norm, model, x, y)
    assert z.dtype == x.dtype
    assert excess(name, norm, model, z, x) <= 1e-6


@pytest.mark.slow
@everywhere(EVERY_NAME)
def test_few_classes_work(name, norm, library):
    """Losses that rank classes (DLR, targets) find images inside the budget with two, three or four of them.

    Of random models of other libraries some decide for the same class by far: there they come closer to it, and
    ensembles, which give back what they do not break, break images of one of the three models.
    """
    broken = 0
    for classes in (2, 3, 4):
        model, x = model_for(name, library, classes), images_for(name, library, 5 if library else 12, seed=5)
        with torch.no_grad():
            y = model(x).argmax(1)
            z = run(name, norm, model, x, y)
            misclassified = (model(z).argmax(1) != y).sum()
            closer = margin(model(z), y).sum() > margin(model(x), y).sum()
            unbroken = name.startswith("autoattack") and torch.equal(z, x)  # given back as it was
        assert z.isfinite().all(), classes
        assert excess(name, norm, model, z, x) <= 1e-6, classes
        assert name.startswith(LUCK) or (closer or unbroken if library else misclassified > 0), classes
        broken += int(misclassified)
    assert broken > 0 or not name.startswith("autoattack")


@everywhere(EVERY_NAME)
def test_pixels_outside_the_box_are_refused(name, norm, model, batch):
    x, y = batch
    with pytest.raises(UserError, match=r"pixels in \[0, 1\]"):
        run(name, norm, model, x * 255, y)


@pytest.mark.slow
@everywhere([each for each in EVERY_GEOMETRY if each.values[1] != "l0"])  # where one value can be enough
def test_costs_no_more_than_it_says(name, norm, library):
    model, x = model_for(name, library, 10), images_for(name, library, 6)
    with torch.no_grad():
        y = model(x).argmax(1)
    # Too small to fool anything: every sample goes all the way.
    attack = ready(name, norm, model, x, eps=1e-6)
    if rules_of(attack) is not None:  # a patch may become anything, so the model must ignore it
        y = torch.zeros_like(y)
        with torch.no_grad():
            last_layer(model).bias[0] += 1e4
    gradients, forwards = attack.passes()
    with count_passes(model) as cost:
        attack(model, x, y)
    parsed = read_attack_name(name)
    if ATTACKS[parsed.base].adaptive or any(PREFIXES[prefix].needs_vit for prefix, _ in parsed.prefixes):
        assert cost.gradients <= 6 * gradients  # what the hardest sample costs, and these are not hard
        assert cost.forwards <= 6 * forwards
    else:
        assert (cost.gradients, cost.forwards) == (6 * gradients, 6 * forwards)


@pytest.mark.parametrize("name", [name for name in NAMES if needs_known_family(name)])
def test_a_model_without_attention_is_refused(name):
    x = images(3)
    with pytest.raises(UserError, match=r"anatomy|attention|patch"):
        run(name, "linf", TinyNet(CLASSES).eval(), x, torch.zeros(3, dtype=torch.int64))


@everywhere(QUERYING)
def test_a_model_with_one_class_is_refused(name, norm, library):
    with pytest.raises(UserError, match="at least 2 classes"):
        run(name, norm, model_for(name, library, 1), images_for(name, library, 3), torch.zeros(3, dtype=torch.int64))


def test_what_needs_calibration_says_so():
    model, x = make_vit("vit", classes=CLASSES), images(2, side=VITS["vit"].size)
    with pytest.raises(UserError, match="calibration"):
        make("aas+pgd-6")(model, x, torch.zeros(2, dtype=torch.int64))


def images_in_memory(like: Tensor) -> int:
    """How many tensors of at least the batch's size are alive, each block of memory counted once."""
    gc.collect()
    sizes = {}
    for each in gc.get_objects():
        if type(each) is Tensor and each.shape[:1] == like.shape[:1] and each.numel() >= like.numel():
            sizes[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return round(sum(sizes.values()) / like.untyped_storage().nbytes())


@pytest.mark.slow
@everywhere(QUERYING)
def test_holds_no_more_than_a_few_copies_of_a_batch(name, norm, library):
    """Counted inside the model's forward pass, in the middle of the search."""
    gc.collect()
    gc.freeze()  # only what is made from here on is looked through, at every count
    model, x = model_for(name, library), images_for(name, library, 5)
    with torch.no_grad():
        y = model(x).argmax(1)
    attack = ready(name, norm, model, x, eps=1e-4)
    seen: list[int] = []
    calls = 0

    def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal calls
        calls += 1
        if calls in ((2,) if library else (1, 2, 4, 9)) and len(inputs[0]) == len(x):
            seen.append(images_in_memory(x))

    handle = model.register_forward_pre_hook(look)
    attack(model, x, y)
    handle.remove()
    assert seen
    assert max(seen) <= COPIES


def test_every_attack_meets_another_library_and_every_model_of_one_an_attack():
    assert {name for name, _ in MET} == set(NAMES)
    assert {library for _, library in MET} == set(OTHERS)
