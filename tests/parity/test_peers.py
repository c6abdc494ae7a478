"""The same attack in other libraries: where they do the same thing the images are the same, else what they break is.

The peers are no dependencies; what is not installed is skipped. They work on a copy of the model, because some leave
gradients in its parameters. More comparisons with torchattacks stand beside each attack in tests/attacks.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from vitadel.attacks import L1, L2, PGD, Linf, make
from vitadel.attacks.losses import dlr, targeted_dlr
from vitadel.attacks.steppers import Momentum, Steepest
from vitadel.attacks.threats import make_threat
from vitadel.attacks.wrappers import Averaged
from vitadel.backbones.load import load_model
from vitadel.data.sources.shapes import Shapes
from vitadel.evaluation.engine.stages import judge
from vitadel.runtime.rng import SampleRNG
from vits import make_vit

EPS = 8 / 255
BALL = Linf(EPS)
BATCH = 8  # a power of two: losses averaged over the batch then have the same gradients, but for an exact factor


@dataclass(frozen=True)
class Walk:
    """A PGD that every library supports."""

    norm: str
    eps: float
    length: float
    steps: int
    random_start: bool = False

    def ours(self, steps: int | None = None) -> PGD:
        """Without stopping at the first success, because theirs go on."""
        ball, count = make_threat(self.norm, self.eps), self.steps if steps is None else steps
        ball = dataclasses.replace(ball, sparsity=0.0) if isinstance(ball, L1) else ball
        return PGD(ball, stepper=Steepest(self.length), steps=count, random_start=False, stop_when_fooled=False)


LINF = Walk("linf", EPS, 2 / 255, 6)
L2_WALK = Walk("l2", 1.0, 0.3, 6)


@pytest.fixture(autouse=True)
def _own_random_numbers() -> Iterator[None]:
    """The peers draw from the global generators, and some seed them."""
    kept = np.random.get_state()
    np.random.seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    np.random.set_state(kept)


def batch(dtype: torch.dtype, low: float = -0.05, high: float = 1.05) -> tuple[nn.Module, Tensor, Tensor]:
    """A tiny ViT with lively weights, images of which some pixels are at 0 and 1, and labels right and wrong."""
    model, source = make_vit("vit").to(dtype), torch.Generator().manual_seed(1)
    x = torch.rand(BATCH, 3, 32, 32, generator=source, dtype=torch.float64).to(dtype) * (high - low) + low
    return model, x.clamp(0, 1), torch.arange(BATCH) % 5


# --- how each library is called --------------------------------------------------------------------------------------


def torchattacks_pgd(model: nn.Module, x: Tensor, y: Tensor, walk: Walk) -> Tensor:
    library = pytest.importorskip("torchattacks")
    kind = {"linf": library.PGD, "l2": library.PGDL2}[walk.norm]
    attack = kind(model, eps=walk.eps, alpha=walk.length, steps=walk.steps, random_start=walk.random_start)
    found: Tensor = attack(x, y)
    return found


def foolbox_pgd(model: nn.Module, x: Tensor, y: Tensor, walk: Walk) -> Tensor:
    library = pytest.importorskip("foolbox")
    kind = {"linf": library.attacks.LinfPGD, "l2": library.attacks.L2PGD}[walk.norm]
    attack = kind(abs_stepsize=walk.length, steps=walk.steps, random_start=walk.random_start)
    found: Tensor = attack(library.PyTorchModel(model, bounds=(0, 1), device="cpu"), x, y, epsilons=walk.eps)[1]
    return found


def art_classifier(model: nn.Module, x: Tensor) -> Any:
    estimators = pytest.importorskip("art.estimators.classification")
    with torch.no_grad():
        classes = model(x[:1]).shape[1]
    shape = tuple(x.shape[1:])
    return estimators.PyTorchClassifier(
        model, nn.CrossEntropyLoss(), shape, classes, clip_values=(0, 1), device_type="cpu"
    )


def art_images(name: str, model: nn.Module, x: Tensor, y: Tensor, **settings: Any) -> Tensor:
    kind = getattr(pytest.importorskip("art.attacks.evasion"), name)
    found: Tensor = torch.from_numpy(kind(art_classifier(model, x), **settings).generate(x.numpy(), y.numpy()))
    return found


def art_order(norm: str) -> float:
    return {"linf": np.inf, "l2": 2}[norm]


def art_pgd(model: nn.Module, x: Tensor, y: Tensor, walk: Walk) -> Tensor:
    ball = {"norm": art_order(walk.norm), "eps": walk.eps, "eps_step": walk.length}
    starts = {"num_random_init": int(walk.random_start), "batch_size": len(x), "verbose": False}
    return art_images("ProjectedGradientDescent", model, x, y, **ball, max_iter=walk.steps, **starts)


def secml_pgd(model: nn.Module, x: Tensor, y: Tensor, walk: Walk) -> Tensor:
    attacks = pytest.importorskip("secmlt.adv.evasion.pgd")
    models = pytest.importorskip("secmlt.models.pytorch.base_pytorch_nn")
    # It never looks at the point after its last step, so that one step more gives it the same points to choose from.
    attack = attacks.PGD(walk.norm, walk.eps, walk.steps + 1, walk.length, walk.random_start, backend="native")
    # In L1 it moves the one pixel with the largest gradient in the whole batch, so that all other samples stay.
    loader = DataLoader(TensorDataset(x, y), batch_size=1 if walk.norm == "l1" else len(x))
    return torch.cat([images for images, _ in attack(models.BasePyTorchClassifier(model), loader)]).detach()


PGDS = {"torchattacks": torchattacks_pgd, "foolbox": foolbox_pgd, "art": art_pgd}


def precision(peer: str) -> torch.dtype:
    return torch.float32 if peer == "art" else torch.float64  # ART computes in single precision only


# --- the same images -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("peer", PGDS)
def test_pgd_gives_the_same_images(peer: str) -> None:
    model, x, y = batch(precision(peer))
    theirs, ours = PGDS[peer](copy.deepcopy(model), x, y, LINF), LINF.ours()(model, x, y)
    assert Linf(EPS).size(ours, x).min() > 0.99 * EPS
    assert (ours - theirs).abs().max() < 1e-7


@pytest.mark.parametrize("peer", PGDS)
def test_l2_pgd_gives_the_same_images(peer: str) -> None:
    inner = (0.2, 0.8) if peer == "art" else (-0.05, 1.05)  # ART cuts with the box first and then with the ball
    model, x, y = batch(precision(peer), *inner)
    theirs, ours = PGDS[peer](copy.deepcopy(model), x, y, L2_WALK), L2_WALK.ours()(model, x, y)
    assert L2(1.0).size(ours, x).min() > 0.9
    assert L2(1.0).size(ours, theirs).max() < 1e-5  # against rounding, ours shrinks by a millionth


@pytest.mark.parametrize("walk", [LINF, L2_WALK, Walk("l1", 0.25, 0.1, 6)], ids=lambda walk: walk.norm)
def test_pgd_of_secml_torch_is_the_best_of_our_iterates(walk: Walk) -> None:
    """In L1 away from black and white: there it cuts ball and box one after the other, which wastes budget."""
    model, x, y = batch(torch.float64, *((0.3, 0.7) if walk.norm == "l1" else (-0.05, 1.05)))
    theirs = secml_pgd(copy.deepcopy(model), x, y, walk)
    path = torch.stack([x, *(walk.ours(steps)(model, x, y) for steps in range(1, walk.steps + 1))])
    with torch.no_grad():
        losses = torch.stack([F.cross_entropy(model(z), y, reduction="none") for z in path])
    best = losses.argmax(0)
    assert best.max() == walk.steps
    assert (path[best, torch.arange(BATCH)] - theirs).abs().max() < 1e-6  # it keeps its radius in single precision


def torchattacks_fgsm(model: nn.Module, x: Tensor, y: Tensor, norm: str, eps: float) -> Tensor:
    if norm != "linf":
        pytest.skip("torchattacks has no L2 version")
    found: Tensor = pytest.importorskip("torchattacks").FGSM(model, eps=eps)(x, y)
    return found


def foolbox_fgsm(model: nn.Module, x: Tensor, y: Tensor, norm: str, eps: float) -> Tensor:
    library = pytest.importorskip("foolbox")
    attack = {"linf": library.attacks.LinfFastGradientAttack, "l2": library.attacks.L2FastGradientAttack}[norm]()
    found: Tensor = attack(library.PyTorchModel(model, bounds=(0, 1), device="cpu"), x, y, epsilons=eps)[1]
    return found


def art_fgsm(model: nn.Module, x: Tensor, y: Tensor, norm: str, eps: float) -> Tensor:
    return art_images("FastGradientMethod", model, x, y, norm=art_order(norm), eps=eps, batch_size=len(x))


FGSMS = {"torchattacks": torchattacks_fgsm, "foolbox": foolbox_fgsm, "art": art_fgsm}


@pytest.mark.parametrize("peer", FGSMS)
@pytest.mark.parametrize(("norm", "eps"), [("linf", EPS), ("l2", 1.0)])
def test_fgsm_gives_the_same_images(peer: str, norm: str, eps: float) -> None:
    model, x, y = batch(precision(peer))
    theirs = FGSMS[peer](copy.deepcopy(model), x, y, norm, eps)
    attack = make("fgsm", eps=eps, norm=norm)
    assert isinstance(attack, PGD)
    ours = dataclasses.replace(attack, stop_when_fooled=False)(model, x, y)
    assert (ours - theirs).abs().max() < (1e-7 if norm == "linf" else 1e-6)


@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("peer", ["torchattacks", "art"])  # foolbox gathers signs, not gradients
def test_mi_fgsm_gives_the_same_images(peer: str, decay: float) -> None:
    model, x, y = batch(precision(peer))
    other, length, steps = copy.deepcopy(model), 2 / 255, 6
    if peer == "art":
        ball = {"norm": np.inf, "eps": EPS, "eps_step": length, "batch_size": BATCH, "verbose": False}
        theirs = art_images("MomentumIterativeMethod", other, x, y, **ball, decay=decay, max_iter=steps)
    else:
        library = pytest.importorskip("torchattacks")
        theirs = library.MIFGSM(other, eps=EPS, alpha=length, steps=steps, decay=decay)(x, y)
    stepper = Momentum(decay, length)
    attack = PGD(Linf(EPS), stepper=stepper, steps=steps, random_start=False, stop_when_fooled=False)
    assert (LINF.ours()(model, x, y) - theirs).abs().max() > 1 / 255  # momentum matters here
    assert ((attack(model, x, y) - theirs).abs() > 1e-7).double().mean() < 1e-4  # sums near zero may round either way


@dataclass(frozen=True, eq=False)
class FromTheirStart:
    """An Linf ball whose random start is the one that the other library drew."""

    start: Tensor
    ball: Linf = BALL

    @property
    def eps(self) -> float:
        return self.ball.eps

    def project(self, z: Tensor, x: Tensor) -> Tensor:
        return self.ball.project(z, x)

    def random(self, x: Tensor, rng: SampleRNG, surface: bool = False) -> Tensor:
        return self.project(self.start, x)

    def ascent(self, grad: Tensor, z: Tensor) -> Tensor:
        return self.ball.ascent(grad, z)

    def size(self, z: Tensor, x: Tensor) -> Tensor:
        return self.ball.size(z, x)


def test_fgsm_from_a_random_start_gives_the_same_images() -> None:
    library = pytest.importorskip("torchattacks")
    model, x, y = batch(torch.float64)
    torch.manual_seed(5)
    start = x + torch.randn_like(x).uniform_(-EPS, EPS)
    torch.manual_seed(5)
    theirs = library.FFGSM(copy.deepcopy(model), eps=EPS, alpha=1.25 * EPS)(x, y)
    attack = make("fgsm-rs", eps=EPS)
    assert isinstance(attack, PGD)
    ours = dataclasses.replace(attack, threat=FromTheirStart(start), stop_when_fooled=False)(model, x, y)
    assert (ours - theirs).abs().max() < 1e-7


def test_the_attack_inside_trades_gives_the_same_images() -> None:
    library = pytest.importorskip("torchattacks")
    model, x, y = batch(torch.float64)
    torch.manual_seed(6)
    start = x + 0.001 * torch.randn_like(x)
    torch.manual_seed(6)
    theirs = library.TPGD(copy.deepcopy(model), eps=EPS, alpha=2 / 255, steps=6)(x, y)
    attack = make("kl-6(step=2/255,noise=0)", eps=EPS)
    assert isinstance(attack, PGD)
    ours = dataclasses.replace(attack, threat=FromTheirStart(start), stop_when_fooled=False)(model, x, y)
    assert (ours - theirs).abs().max() < 1e-7


def test_expectation_over_several_passes_gives_the_same_images() -> None:
    """Of a model that is not random: theirs averages gradients, ours logits."""
    library = pytest.importorskip("torchattacks")
    model, x, y = batch(torch.float64)
    settings = {"eps": EPS, "alpha": 2 / 255, "steps": 6, "random_start": False}
    theirs = library.EOTPGD(copy.deepcopy(model), **settings, eot_iter=3)(x, y)
    assert (Averaged(LINF.ours(), 3)(model, x, y) - theirs).abs().max() < 1e-7


# --- the same losses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", ["torchattacks", "art"])
@pytest.mark.parametrize("classes", [3, 4, 10])
def test_dlr_has_the_same_values(peer: str, classes: int) -> None:
    logits, y = torch.randn(64, classes, dtype=torch.float64), torch.arange(64) % classes
    model, x, _ = batch(torch.float32)
    assert 0 < (logits.argmax(1) == y).sum() < 64  # right and wrong ones
    if peer == "art":
        kind = pytest.importorskip("art.attacks.evasion").AutoProjectedGradientDescent
        loss = kind(art_classifier(model, x), loss_type="difference_logits_ratio", verbose=False).estimator._loss
        loss.reduction = "none"
        theirs = loss(logits, F.one_hot(y, classes))
    else:
        theirs = pytest.importorskip("torchattacks").APGD(model).dlr_loss(logits, y)
    assert torch.allclose(dlr(logits, y), theirs.double(), rtol=1e-6, atol=1e-6)


def test_targeted_dlr_has_the_same_values() -> None:
    library = pytest.importorskip("torchattacks")
    logits, y = torch.randn(64, 10, dtype=torch.float64), torch.arange(64) % 10
    target = (y + 1 + torch.arange(64) % 9) % 10
    theirs = library.APGDT(make_vit("vit")).dlr_loss_targeted(logits, y, target)
    assert torch.allclose(targeted_dlr(logits, y, target), theirs, rtol=1e-9)


# --- the same robust accuracy ----------------------------------------------------------------------------------------

STEPS, FAB_STEPS, TARGETS, QUERIES = 10, 5, 2, 20


@dataclass(frozen=True)
class Pair:
    """The same attack twice; `apart` is how many of 60 images only one of them may break, by the luck of its draws."""

    ours: str
    theirs: Callable[[nn.Module, Tensor, Tensor], Tensor]
    eps: float = EPS
    apart: int = 2


@cache
def robust_model() -> tuple[nn.Module, Tensor, Tensor]:
    """The shipped robust model and 60 images that it gets right."""
    model = load_model("zoo:shapes-robust")
    pixels, y, _ = Shapes().render(range(80))
    x = pixels.float() / 255
    with torch.no_grad():
        right = model(x).argmax(1) == y
    return model, x[right][:60], y[right][:60]


@cache
def what_ours_breaks(name: str, eps: float) -> Tensor:
    model, x, y = robust_model()
    z = make(name, eps=eps)(model, x, y, SampleRNG.of_samples(0, range(60)))
    return ~judge(model, Linf(eps), x, z, y).held


def with_pgd(run: Callable[[nn.Module, Tensor, Tensor, Walk], Tensor]) -> Pair:
    walk = Walk("linf", EPS, 2 / 255, STEPS, random_start=True)
    return Pair(f"pgd-{STEPS}(step=2/255)", lambda model, x, y: run(model, x, y, walk))


def with_torchattacks(ours: str, name: str, eps: float = EPS, apart: int = 2, **settings: Any) -> Pair:
    def theirs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = getattr(pytest.importorskip("torchattacks"), name)(model, eps=eps, **settings)(x, y)
        return found

    return Pair(ours, theirs, eps, apart)


def with_art(ours: str, name: str, eps: float = EPS, apart: int = 2, **settings: Any) -> Pair:
    def theirs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return art_images(name, model, x, y, norm=np.inf, eps=eps, batch_size=len(x), verbose=False, **settings)

    return Pair(ours, theirs, eps, apart)


def torchattacks_autoattack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Its parts put together as in the paper: its own AutoAttack has another schedule and no number of steps."""
    library = pytest.importorskip("torchattacks")
    targets = {"eps": EPS, "steps": FAB_STEPS, "n_classes": TARGETS + 1}
    parts = [
        library.APGD(model, eps=EPS, steps=FAB_STEPS, loss="ce"),
        library.APGDT(model, **targets),
        library.FAB(model, **targets, multi_targeted=True),
        library.Square(model, eps=EPS, n_queries=QUERIES, resc_schedule=False),
    ]
    found: Tensor = library.MultiAttack(parts)(x, y)
    return found


APGD, FAB, SQUARE = f"apgd-ce-{STEPS}", f"fab-t-{FAB_STEPS}(targets={TARGETS})", f"square(queries={QUERIES})"
APGD_T = f"apgd-t-{STEPS}(targets={TARGETS})"
AUTOATTACK = f"autoattack(steps={FAB_STEPS},targets={TARGETS},queries={QUERIES})"
CHANCE: dict[str, Any] = {"eps": 24 / 255, "apart": 6}  # a random search of so few queries is mostly luck
ART_APGD: dict[str, Any] = {"eps_step": 2 * EPS, "max_iter": STEPS, "nb_random_init": 1, "loss_type": "cross_entropy"}
PAIRS = {  # torchattacks', foolbox's and ART's PGD give the same images, above
    "pgd-secml-torch": with_pgd(secml_pgd),
    "apgd-torchattacks": with_torchattacks(APGD, "APGD", steps=STEPS, loss="ce"),
    "apgd-t-torchattacks": with_torchattacks(APGD_T, "APGDT", steps=STEPS, n_classes=TARGETS + 1),
    "autoattack-torchattacks": Pair(AUTOATTACK, torchattacks_autoattack),
    "apgd-art": with_art(APGD, "AutoProjectedGradientDescent", **ART_APGD),
    "fab-t-torchattacks": with_torchattacks(FAB, "FAB", steps=FAB_STEPS, multi_targeted=True, n_classes=TARGETS + 1),
    "square-torchattacks": with_torchattacks(SQUARE, "Square", **CHANCE, n_queries=QUERIES, resc_schedule=False),
    "square-art": with_art(SQUARE, "SquareAttack", **CHANCE, max_iter=QUERIES),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_breaks_the_same_images_of_the_shipped_model(name: str) -> None:
    pair, (model, x, y) = PAIRS[name], robust_model()
    theirs = ~judge(model, Linf(pair.eps), x, pair.theirs(copy.deepcopy(model), x, y), y).held
    ours = what_ours_breaks(pair.ours, pair.eps)
    assert len(x) == 60
    assert 10 <= ours.sum() <= 30  # there is something to compare
    assert (ours & ~theirs).sum() <= pair.apart
    assert (theirs & ~ours).sum() <= pair.apart
