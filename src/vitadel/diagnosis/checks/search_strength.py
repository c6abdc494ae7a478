"""Checks of whether the attack has found what there is: more steps, more starts, more budget, other losses."""

from __future__ import annotations

from vitadel.attacks.steppers import usual_length
from vitadel.diagnosis.examination import Examination, probing_threat
from vitadel.diagnosis.finding import BROKEN, OK, SUSPICIOUS, Outcome
from vitadel.evaluation.chance import beaten, surprising
from vitadel.quantities import quantity_text

__all__ = ["loss_choice", "more_restarts", "more_steps", "unbounded_eps"]

_FLOOR = 0.05  # of all images: smaller gains are what more work always brings
_MISLED = 0.12  # of all images that other losses may break beyond the cross-entropy


def more_steps(e: Examination) -> Outcome:
    """Raised if twice the steps, or twice as many of half the length, break clearly more images, or clearly fewer.

    Why it matters: an attack that still gains has not converged, and its number is too high. One that loses by going
    on, or by treading more carefully, is thrown about by gradients that describe the model only next to where they
    are taken.

    What to do: double the steps and halve their length until the number stays: pgd-100(step=1/255),
    pgd-200(step=0.5/255), or apgd-ce, which sets its own step size.
    """
    # Below some eps the usual length does not shrink with the number of steps, and longer would not be finer.
    half = usual_length(e.threat, e.level.steps) / 2
    names = (e.level.plain, e.level.longer, f"{e.level.longer}(step={quantity_text(half)})")
    few, *others = (e.held(name) for name in names)
    moved = any(beaten(few, many, _FLOOR) or beaten(many, few, _FLOOR) for many in others)
    return (SUSPICIOUS if moved else OK), {name: e.share(e.held(name)) for name in names}


def more_restarts(e: Examination) -> Outcome:
    """Raised if further random starts break clearly more images.

    Why it matters: then where an attack ends depends on where it begins: the loss has many peaks, or plateaus that a
    single start rarely leaves, and one restart reports luck.

    What to do: add restarts until the number stays, e.g. pgd-100(restarts=10), or run autoattack.
    """
    once, again = e.held(e.level.plain), e.held(e.level.restarted)
    evidence = {e.level.plain: e.share(once), e.level.restarted: e.share(again)}
    return (SUSPICIOUS if beaten(once, again, _FLOOR) else OK), evidence


def unbounded_eps(e: Examination) -> Outcome:
    """Raised if images withstand an attack whose budget spans half of all pixel values, with steps to match.

    Why it matters: with such a budget every image can be made grey, so nothing can be robust. What still stands shows
    that the attack fails, not that the model holds (Carlini et al. 2019, arXiv:1902.06705).

    What to do: do not report this attack's number. Find out which check on gradients or losses is raised beside this
    one, and attack accordingly; without one, run square and a transfer attack.
    """
    huge = probing_threat(e.norm, e.x).eps
    held = e.held(e.level.plain, eps=huge)
    evidence = {"eps": huge, e.level.plain: e.share(held), "n": len(held)}
    return (BROKEN if surprising(int(held.sum()), len(held), 0.01) else OK), evidence


def loss_choice(e: Examination) -> Outcome:
    """Raised if the same search on another loss (margin, DLR, MIFPE) breaks clearly more images than on cross-entropy.

    Why it matters: the cross-entropy of large logits rounds to zero, and so does its gradient; scaling the last layer
    is enough to look robust. Losses that do not mind the scale of the logits are not taken in.

    What to do: report cw-100, dlr-100 or mifpe-100, or apgd-t, instead of pgd with cross-entropy.
    """
    plain = e.held(e.level.plain)
    others = {name: e.held(name) for name in e.level.other_losses}
    best = min(others.values(), key=lambda held: int(held.sum()))
    top = e.logits.topk(2, dim=1).values
    gap = (top[:, 0] - top[:, 1]).median()
    evidence = {e.level.plain: e.share(plain)} | {name: e.share(held) for name, held in others.items()}
    evidence["median gap of the two best logits"] = float(gap)
    return (SUSPICIOUS if beaten(plain, best, _MISLED) else OK), evidence
