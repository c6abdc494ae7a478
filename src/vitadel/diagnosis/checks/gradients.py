"""Checks of gradients themselves: are they there, are they true, do they lead anywhere?"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitadel.attacks.losses import cross_entropy, margin
from vitadel.attacks.threats import threat as make_threat
from vitadel.diagnosis.examination import Examination, probing_threat
from vitadel.diagnosis.finding import BROKEN, OK, SUSPICIOUS, NotExamined, Outcome
from vitadel.evaluation.intervals import wilson
from vitadel.types import Loss

__all__ = ["finite_differences", "gradients_there", "same_gradient_twice", "staircase", "uphill", "vanishing"]

# Images are drawn in from 0 and 1, where a model that clips has a kink, to values that no rounding scheme has a tie at.
_LOW, _WIDTH = 0.0213, 0.9571
_REACH = 0.1  # of the way to the boundary


def _slopes(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Values and raw gradients: NaN and infinity are told as they are, and no graph counts as zero."""
    with torch.enable_grad():
        z = x.detach().clone().requires_grad_()
        values = loss(model(z), y)
        if not values.requires_grad:
            return values.detach(), torch.zeros_like(z)
        (grad,) = torch.autograd.grad(values.sum(), z, allow_unused=True)
    return values.detach(), torch.zeros_like(z) if grad is None else grad


def _all_slopes(
    e: Examination, images: Tensor, loss: Loss, *, model: nn.Module | None = None, y: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Batch by batch; what the loss is given as `y` may be any tensor with a row per image."""
    asked, rows = e.model if model is None else model, e.y if y is None else y
    cut = zip(images.split(e.batch_size), rows.split(e.batch_size), strict=True)
    parts = [_slopes(asked, x, row, loss) for x, row in cut]
    return torch.cat([values for values, _ in parts]), torch.cat([grad for _, grad in parts])


def gradients_there(e: Examination) -> Outcome:
    """Raised if gradients of the cross-entropy or of the margin are NaN or infinite, or zero in every pixel, for some
    images, clean or noisy.

    Why it matters: where there is no gradient, a gradient attack stays where it starts and every image looks robust.
    Zero for the cross-entropy alone tells of logits so large that float32 rounds the loss to nothing.

    What to do: look for detach, no_grad, rounding, argmax or integer steps between pixels and logits; for the
    cross-entropy alone, use losses that do not mind the scale: cw-100, dlr-100, mifpe-100.
    """
    shares = {}
    start = e.threat.random(e.x, e.rng.stream("start"), surface=True)
    for name, loss in (("cross-entropy", cross_entropy), ("margin", margin)):
        flat = _all_slopes(e, torch.where(_odd(e.x), start, e.x), loss)[1].flatten(1)
        shares[f"not finite, {name}"] = e.share(~flat.isfinite().all(1))
        shares[f"zero, {name}"] = e.share((flat == 0).all(1))
    if any(share for name, share in shares.items() if name.startswith("not finite")) or shares["zero, margin"] > 0.02:
        return BROKEN, shares
    return (SUSPICIOUS if shares["zero, cross-entropy"] > 0.02 else OK), shares


def vanishing(e: Examination) -> Outcome:
    """Raised if for most images the margin's gradient promises less than a tenth of the way to another class, even with
    half of the range of all pixels to go.

    Why it matters: of an honest model it promises many times the way. Gradients that are there but thousands of times
    too small come from saturated activations, or from a flat spot around every image.

    What to do: run attacks that need no gradients of the images themselves: square, transfer from another model, and
    for saturated attention aas+.
    """
    values, grad = _all_slopes(e, e.x, margin)
    grad = grad.nan_to_num(0.0)
    budget = probing_threat(e.norm, e.x).eps  # eps would make the verdict depend on it
    promised = budget * (grad * e.threat.ascent(grad, e.x)).flatten(1).sum(1)
    share = promised / values.abs().clamp(min=1e-12)
    middle = float(share[e.correct].median()) if bool(e.correct.any()) else 1.0
    return (SUSPICIOUS if middle < _REACH else OK), {"median promised share of the way": middle, "within": budget}


def _where_attacks_go(e: Examination) -> Tensor:
    """A few images, every other one with noise of the size of eps: a defence may be asleep on clean ones."""
    x = e.few(16)
    x = torch.where(_odd(x), e.threat.random(x, e.lots(len(x)).stream("around"), surface=True), x)
    return (_LOW + _WIDTH * x).to(e.exact_dtype)


def _odd(x: Tensor) -> Tensor:
    places = torch.arange(len(x), device=x.device)
    return (places % 2 == 1).view(-1, *[1] * (x.ndim - 1))


def finite_differences(e: Examination) -> Outcome:
    """Raised if what autograd calls the slope along random directions is not what small moves of the images show.

    Why it matters: then gradients are those of another function: something is detached, rounded with a made-up
    gradient, or noise is added on the way back. Attacks follow directions that the model does not have.

    What to do: find the part whose backward does not belong to its forward, and attack through a differentiable
    replacement of it (BPDA, Athalye et al. 2018), or run square, which asks for logits only.
    """
    x = _where_attacks_go(e)
    in_double = e.answers_exactly
    step, allowed = (1e-6, 0.05) if in_double else (1e-3, 0.2)  # short: saturated attention bends sharply
    weights = e.lots(len(x)).stream("projection").signs(_asked(e, x).shape[1]).to(x)
    if not torch.equal(_asked(e, x), _asked(e, x)):
        raise NotExamined("the model answers at random even when torch's generator is set back")

    def projected(logits: Tensor, signs: Tensor) -> Tensor:
        return (logits * signs).sum(1)

    with torch.random.fork_rng():
        torch.manual_seed(e.seed)
        grad = _all_slopes(e, x, projected, model=e.exact, y=weights)[1].nan_to_num(0.0)
    told, seen = [], []
    for turn in range(e.level.directions):
        along = e.lots(len(x)).stream("direction", turn).signs(*x.shape[1:]).to(x)
        told.append((grad * along).flatten(1).sum(1))
        seen.append(((_asked(e, x + step * along) - _asked(e, x - step * along)) * weights).sum(1) / (2 * step))
    by_autograd, by_moves = torch.cat(told), torch.cat(seen)
    size = float(torch.maximum(by_autograd.norm(), by_moves.norm()))
    error = float((by_autograd - by_moves).norm()) / max(size, 1e-12)
    return (BROKEN if error > allowed else OK), {"relative error": error, "allowed": allowed, "in float64": in_double}


def _asked(e: Examination, x: Tensor) -> Tensor:
    """Logits with torch's generator set back, so that a model that draws from it draws the same again."""
    with torch.random.fork_rng():
        torch.manual_seed(e.seed)
        return e.answers(x, e.exact)


def same_gradient_twice(e: Examination) -> Outcome:
    """Raised if the model gives the same answer twice but two different gradients.

    Why it matters: there is only one true gradient of a fixed function. Noise on the way back is no defence: averaging
    takes it away, and square never sees it.

    What to do: take the noise out of the backward pass, or average it away: eot:20+ before an attack.
    """
    if e.at_random:
        raise NotExamined("the model answers at random, and so do its gradients")
    few = e.few(16)
    first, second = (_all_slopes(e, few, margin, y=e.y[: len(few)])[1].flatten(1).nan_to_num(0.0) for _ in range(2))
    change = float((first - second).norm() / first.norm().clamp(min=1e-12))
    return (BROKEN if change > 0.01 else OK), {"relative change": change}


def staircase(e: Examination) -> Outcome:
    """Raised if the answers do not move at all while images move a little, but do when they move a lot.

    Why it matters: the model is a staircase: bytes, fewer bits, JPEG or rounded activations. Its true gradient is zero
    almost everywhere, so gradients are missing or made up, and both mislead attacks.

    What to do: attack through a smooth replacement of the rounding (BPDA), judge on the real thing, and run square.
    """
    x = _where_attacks_go(e)
    along = e.lots(len(x)).stream("staircase").signs(*x.shape[1:]).to(x)
    little = 1e-7 if e.answers_exactly else 1e-5
    here, near, far = (_asked(e, x + move * along) for move in (0.0, little, 0.02))
    stuck = ((here == near).all(1) & (here != far).any(1)).double().mean()
    evidence = {"images that stay": float(stuck), "when every pixel moves by": little}
    return (BROKEN if float(stuck) > 0.1 else OK), evidence


def uphill(e: Examination) -> Outcome:
    """Raised if a short move along the gradient does not raise the margin more than the same along random signs.

    Why it matters: it is all that gradients are good for. Where a random move does as well, they are noise, shattered,
    or point the wrong way, and what gradient attacks cannot break says nothing.

    What to do: run attacks that do not follow single gradients: square, transfer from another model, eot:20+.
    """
    threat = make_threat(e.norm, e.eps / 16)
    grad = _all_slopes(e, e.x, margin)[1].nan_to_num(0.0)
    unit = threat.ascent(grad, e.x)
    z = threat.project(e.x + threat.eps * unit, e.x)
    blind = threat.random(e.x, e.rng.stream("uphill"), surface=True)
    better = margin(e.answers(z), e.y) > margin(e.answers(blind), e.y)
    hits, n = int(better[e.correct].sum()), int(e.correct.sum())
    if n == 0:
        raise NotExamined("no image is classified correctly")
    return (SUSPICIOUS if wilson(hits, n)[1] < 0.9 else OK), {"gradient beats random": hits / n, "n": n}
