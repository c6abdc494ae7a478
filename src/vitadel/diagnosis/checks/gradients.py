"""Checks of the gradients themselves: do they exist, are they correct, do they lead anywhere?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitadel.attacks.apgd import APGD
from vitadel.attacks.gain_ratio import (
    FEW,
    GAINS,
    SCALES,
    STEP,
    WILD,
    are_broken,
    kept_promises,
    mean_over_steps,
    measure_gains,
)
from vitadel.attacks.goals import OnLogits
from vitadel.attacks.losses import cross_entropy, margin
from vitadel.attacks.threats import make_threat
from vitadel.diagnosis.checks import BROKEN, MODULES, OK, SUSPICIOUS, NotExamined, Outcome, check
from vitadel.diagnosis.examination import Examination, probing_threat
from vitadel.statistics import wilson
from vitadel.types import Loss

# Images are moved inward from 0 and 1, where a model that clips has a kink, to values where no rounding scheme has a
# tie.
_LOW, _WIDTH = 0.0213, 0.9571
_REACH = 0.1  # of the distance to the decision boundary
_STAY = 0.1  # of the images, whose output may be constant nearby
_SEARCH = 10  # steps towards the border of the budget and along it
_SHORT, _EXACT = 1 / 1024, 0.1  # so short a step, in units of eps, delivers what is promised up to this share
_FINE = 0.35  # the slope error of moves by eps, up to which a staircase is fine and its replaced gradient right


def _gradients(
    e: Examination, images: Tensor, loss: Loss, *, model: nn.Module | None = None, y: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Losses and raw gradients, batch by batch. NaN and infinity are kept; no graph counts as zero.

    `y` may be any tensor with a row per image that the loss takes.
    """
    asked, rows = e.model if model is None else model, e.y if y is None else y
    values, gradients = [], []
    for x, row in zip(images.split(e.batch_size), rows.split(e.batch_size), strict=True):
        with torch.enable_grad():
            z = x.detach().clone().requires_grad_()
            value = loss(asked(z), row)
            found = torch.autograd.grad(value.sum(), z, allow_unused=True)[0] if value.requires_grad else None
        values.append(value.detach())
        gradients.append(torch.zeros_like(z) if found is None else found)
    return torch.cat(values), torch.cat(gradients)


@check("zero-gradients", "Gradients vanish on correctly classified images", cost=(2, 0), next="cw-100,square")
def zero_gradients(e: Examination) -> Outcome:
    """Raised if gradients of the cross-entropy or of the margin are NaN or infinite, or zero in every pixel, for some
    images, clean or noisy.

    Why it matters: without a gradient, a gradient attack does not move and every image looks robust. If only those of
    the cross-entropy are zero, logits are so large that float32 rounds the loss to zero.

    What to do: look for detach, no_grad, rounding, argmax or integer steps between pixels and logits; for the
    cross-entropy alone, use losses that do not depend on the scale of the logits: cw-100, dlr-100, mifpe-100.
    """
    shares: dict[str, Any] = {}
    start = e.threat.random(e.x, e.rng.stream("start"), surface=True)
    for name, loss in (("cross-entropy", cross_entropy), ("margin", margin)):
        flat = _gradients(e, torch.where(_odd(e.x), start, e.x), loss)[1].flatten(1)
        shares[f"not finite, {name}"] = e.share(~flat.isfinite().all(1))
        shares[f"zero, {name}"] = e.share((flat == 0).all(1))
    if any(share for name, share in shares.items() if name.startswith("not finite")) or shares["zero, margin"] > 0.02:
        return BROKEN, shares | _modules(e)
    return (SUSPICIOUS if shares["zero, cross-entropy"] > 0.02 else OK), shares


@check("small-gradients", "Gradients are too small to reach another class", cost=(1, 0), next="square,aas+pgd-100")
def small_gradients(e: Examination) -> Outcome:
    """Raised if for most images the margin's gradient predicts less than a tenth of the way to another class, even with
    a budget of half the pixel range.

    Why it matters: for an honest model it predicts many times that way. Gradients that exist but are thousands of times
    too small come from saturated activations, or from a flat region around every image.

    What to do: run attacks that need no gradients of the images themselves: square, transfer from another model, and
    for saturated attention aas+.
    """
    values, grad = _gradients(e, e.x, margin)
    grad = grad.nan_to_num(0.0)
    budget = probing_threat(e.norm, e.x).eps  # not e.eps, so that the verdict does not depend on it
    predicted = budget * (grad * e.threat.ascent(grad, e.x)).flatten(1).sum(1)
    share = predicted / values.abs().clamp(min=1e-12)
    middle = float(share[e.correct].median()) if bool(e.correct.any()) else 1.0
    return (SUSPICIOUS if middle < _REACH else OK), {"median promised share of the way": middle, "within": budget}


def _clean_and_noisy(e: Examination) -> Tensor:
    """A few images, every other one with noise of size eps, because a defense may be inactive on clean ones."""
    x = e.first(16)
    x = torch.where(_odd(x), e.threat.random(x, e.rng_of(len(x)).stream("around"), surface=True), x)
    return (_LOW + _WIDTH * x).to(e.double_dtype)


def _odd(x: Tensor) -> Tensor:
    places = torch.arange(len(x), device=x.device)
    return (places % 2 == 1).view(-1, *[1] * (x.ndim - 1))


@check(
    "wrong-gradients",
    "Gradients disagree with finite differences",
    cost=lambda level: (0.25, 0.85 + 0.5 * level.directions),
    next="square",
)
def wrong_gradients(e: Examination) -> Outcome:
    """Raised if the slope that autograd gives along random directions is not the one that small moves of the images
    show, neither before nor behind nor between the two.

    Why it matters: the gradients are those of another function: something is detached, rounded with a replaced
    gradient, or noise is added in the backward pass. Attacks follow directions that the model does not have. Kinks
    (max pooling, medians, ReLU) are no such thing: on one side of them or the other the slope is right.

    What to do: find the part whose backward does not match its forward, and attack through a differentiable
    replacement of it (bpda+, Athalye et al. 2018), or run square, which uses logits only.
    """
    in_double = e.has_double_logits
    step, allowed = (1e-6, 0.05) if in_double else (1e-3, 0.2)  # short, because saturated attention bends sharply
    x = _off_ties(e, _clean_and_noisy(e), (100 if in_double else 10) * step)
    here = _seeded_logits(e, x)
    if not torch.equal(here, _seeded_logits(e, x)):
        raise NotExamined("the model's outputs are random even with a fixed seed of torch's generator")
    error = _slope_error_of_moves(e, x, here, step)
    evidence = {"relative error": error, "allowed": allowed, "in float64": in_double}
    if error > allowed and _constant_share(e)[0] > _STAY:
        evidence["of moves by eps"] = _slope_error_of_moves(e, x, here, e.eps)
        if evidence["of moves by eps"] < _FINE:
            return OK, evidence
    return (BROKEN, evidence | _modules(e)) if error > allowed else (OK, evidence)


def _slope_error_of_moves(e: Examination, x: Tensor, here: Tensor, step: float) -> float:
    """The error of autograd's slopes, of random projections of the logits, against moves along random signs."""
    signs = e.rng_of(len(x)).stream("projection").signs(here.shape[1]).to(x)

    def projected(logits: Tensor, weights: Tensor) -> Tensor:
        return (logits * weights).sum(1)

    with torch.random.fork_rng():
        torch.manual_seed(e.seed)
        grad = _gradients(e, x, projected, model=e.double_model, y=signs)[1].nan_to_num(0.0)
    analytic, ahead, behind = [], [], []
    for turn in range(e.level.directions):
        along = e.rng_of(len(x)).stream("direction", turn).signs(*x.shape[1:]).to(x)
        analytic.append((grad * along).flatten(1).sum(1))
        ahead.append(projected(_seeded_logits(e, x + step * along) - here, signs) / step)
        behind.append(projected(here - _seeded_logits(e, x - step * along), signs) / step)
    return slope_error(*(torch.cat(slopes) for slopes in (analytic, ahead, behind)))


def slope_error(analytic: Tensor, ahead: Tensor, behind: Tensor) -> float:
    """The relative error of slopes against those on both sides of a point; any slope between the two is correct."""
    nearest = analytic.clamp(torch.minimum(ahead, behind), torch.maximum(ahead, behind))
    size = float(torch.maximum(analytic.norm(), nearest.norm()))
    return float((analytic - nearest).norm()) / max(size, 1e-12)


def _off_ties(e: Examination, x: Tensor, reach: float) -> Tensor:
    """Move pixels by a little, each by another amount: equal pixels are where maxima and medians have kinks."""
    return x + reach * (2 * e.rng_of(len(x)).stream("ties").uniform(*x.shape[1:]).to(x) - 1)


def _modules(e: Examination) -> dict[str, list[str]]:
    """The modules whose gradient does not match what their output does, as evidence; nothing if there are none."""
    return {MODULES: list(e.masking_modules)} if e.masking_modules else {}


def _seeded_logits(e: Examination, x: Tensor) -> Tensor:
    """Logits with torch's generator reset, so that a model that draws from it draws the same numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(e.seed)
        return e.logits_of(x, e.double_model)


@check("random-gradients", "Gradients differ between two identical calls", cost=(0.5, 0), next="eot:20+pgd-100,square")
def random_gradients(e: Examination) -> Outcome:
    """Raised if the model gives the same output twice but two different gradients.

    Why it matters: a fixed function has only one gradient. Noise in the backward pass is no defense: averaging removes
    it, and square never sees it.

    What to do: take the noise out of the backward pass, or average it away: eot:20+ before an attack.
    """
    if e.is_random:
        raise NotExamined("the model's outputs are random, and so are its gradients")
    images = e.first(16)
    first, second = (
        _gradients(e, images, margin, y=e.y[: len(images)])[1].flatten(1).nan_to_num(0.0) for _ in range(2)
    )
    change = float((first - second).norm() / first.norm().clamp(min=1e-12))
    return (BROKEN if change > 0.01 else OK), {"relative change": change}


@check("staircase", "Output is piecewise constant", cost=(0, 0.75), next="square")
def staircase(e: Examination) -> Outcome:
    """Raised if outputs do not change at all when images move a little, but do when they move a lot; not if the steps
    are so fine that gradients predict moves by eps, as after quantization-aware training.

    Why it matters: the output is piecewise constant: bytes, fewer bits, JPEG or rounded activations. Its true gradient
    is zero almost everywhere, so gradients are missing or replaced, and both mislead attacks.

    What to do: attack through a smooth replacement of the rounding (bpda+), judge on the real model, and run square.
    """
    constant, little = _constant_share(e)
    evidence: dict[str, Any] = {"images that stay": constant, "when every pixel moves by": little}
    if constant <= _STAY:
        return OK, evidence
    x = _clean_and_noisy(e)
    evidence["slope error of moves by eps"] = _slope_error_of_moves(e, x, _seeded_logits(e, x), e.eps)
    if evidence["slope error of moves by eps"] < _FINE:
        return OK, evidence
    return BROKEN, evidence | _modules(e)


def _constant_share(e: Examination) -> tuple[float, float]:
    """The share of images whose output does not change when every pixel moves by a little, but does by a lot."""
    x = _clean_and_noisy(e)
    along = e.rng_of(len(x)).stream("staircase").signs(*x.shape[1:]).to(x)
    little = 1e-7 if e.has_double_logits else 1e-5
    here, near, far = (_seeded_logits(e, x + move * along) for move in (0.0, little, 0.02))
    return float(((here == near).all(1) & (here != far).any(1)).double().mean()), little


@check("uninformative-gradients", "Gradient steps raise the loss no more than random steps", cost=(1, 2), next="square")
def uninformative_gradients(e: Examination) -> Outcome:
    """Raised if a short step along the gradient does not raise the margin more than one along random signs.

    Why it matters: raising the loss is what gradients are for. If a random step does as well, they are noise,
    shattered, or point the wrong way, and what gradient attacks cannot break says nothing.

    What to do: run attacks that do not follow single gradients: square, transfer from another model, eot:20+.
    """
    threat = make_threat(e.norm, e.eps / 16)
    grad = _gradients(e, e.x, margin)[1].nan_to_num(0.0)
    z = threat.project(e.x + threat.eps * threat.ascent(grad, e.x), e.x)
    random = threat.random(e.x, e.rng.stream("uphill"), surface=True)
    better = margin(e.logits_of(z), e.y) > margin(e.logits_of(random), e.y)
    hits, n = int(better[e.correct].sum()), int(e.correct.sum())
    if n == 0:
        raise NotExamined("no image is classified correctly")
    return (SUSPICIOUS if wilson(hits, n)[1] < 0.9 else OK), {"gradient beats random": hits / n, "n": n}


@check("gain-ratio", "Steps do not deliver what gradients promise", cost=(3 + _SEARCH, 10), next="square")
def gain_ratio(e: Examination) -> Outcome:
    """Raised if steps along the gradient, of a quarter, one and four times an attack's length, deliver on most images
    clearly less of the way to another class than the gradient promises, or far more; or if for many images they
    deliver nothing at all. Clean images and noisy ones are judged apart. Also raised if more than 15 % of the steps
    that a short search makes in a corner of the budget change the margin by more than twice the promise, although
    gradients are right for the shortest steps: the output jumps.

    Why it matters: gradients may be correct at a point and say nothing about moves of an attack's size: ripples, steep
    staircases and sparse activations hide between the scale of rounding and that of the budget. The median share of
    the promise that honest models keep, counted up to the boundary, is between 0.6 and 1.5 at all three lengths.

    What to do: attack through the part that bends (bpda+), and run square and transfer attacks, which need no
    gradients of this model.
    """
    noisy = e.threat.random(e.x, e.rng.stream("promise"))
    evidence: dict[str, Any] = {}
    raised = False
    for name, start in (("clean", e.x), ("noisy", noisy)):
        parts = zip(start.split(e.batch_size), e.y.split(e.batch_size), strict=True)
        kept = torch.cat([kept_promises(e.model, x, y, e.threat) for x, y in parts])
        kept = kept[~kept.isnan().any(1)]
        if len(kept) < FEW:
            continue
        evidence[f"median share of the promise kept, {name}"] = [round(float(each.median()), 3) for each in kept.T]
        evidence[f"images where steps deliver nothing, {name}"] = (kept <= 0).sum(0).tolist()
        evidence[f"n, {name}"] = len(kept)
        raised |= are_broken(kept)
    wild = _wild_steps(e)
    if len(wild) >= FEW:
        evidence["median share of wild steps at the border"] = round(float(wild.median()), 3)
        evidence["n, border"] = len(wild)
        raised |= float(wild.median()) > WILD
    if not evidence:
        raise NotExamined(f"fewer than {FEW} images are classified correctly, with and without noise")
    evidence["lengths, in units of eps"] = [round(STEP * scale, 4) for scale in SCALES]
    return (SUSPICIOUS, evidence | _modules(e)) if raised else (OK, evidence)


def _wild_steps(e: Examination) -> Tensor:
    """The share of wild steps among those of a search in a corner of ball and box, for each correct image that has any.

    Empty if not even the shortest steps deliver what is promised: values are rounded on the way, as in half precision
    or after quantization-aware training, and `staircase` and `wrong-gradients` judge whether that hides anything.
    """
    search = APGD(e.threat, OnLogits(margin), _SEARCH, stop_when_fooled=False)
    errors, shares = [e.x.new_zeros(0).double()], [e.x.new_zeros(0).double()]
    for rows in e.correct.nonzero()[:, 0].split(e.batch_size):
        x, y, rng = e.x[rows], e.y[rows], e.rng[rows].stream("wild")
        start = e.threat.random(x, rng, surface=True)
        errors.append((measure_gains(e.model, start, y, e.threat, (_SHORT * e.eps,)).ratio[0] - 1).abs())
        _, info = search.run_with_info(e.model, x, y, rng)
        shares.append(mean_over_steps(info[GAINS], "wild", "cornered"))
    exact = torch.cat(errors) <= _EXACT  # not where nothing is promised
    wild = torch.cat(shares)
    return wild[~wild.isnan()] if int(exact.sum()) > len(exact) / 2 else wild[:0]
