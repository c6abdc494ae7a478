"""Checks by attacks that need less than gradients: where they win, gradients are masked."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from vitadel.attacks.parse import make
from vitadel.attacks.transfer.surrogate import Surrogate
from vitadel.attacks.variants import training_form
from vitadel.diagnosis.examination import Examination
from vitadel.diagnosis.finding import OK, SUSPICIOUS, NotExamined, Outcome
from vitadel.diagnosis.surrogate_student import taught
from vitadel.evaluation.chance import beaten, surprising
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack

__all__ = ["LESSONS", "Transferred", "black_box", "random_noise", "single_step", "transfer"]

LESSONS = 256
"""Images that a student learns from."""
_SURPRISE = 0.01  # of all images that a weaker attacker may break alone
_LEAKING = 0.03
_FAR = 0.4  # of all images: how much one step may fail where many succeed
_HARDLY = 0.05  # of all images that one step may cost a model that hides from it


@dataclass(frozen=True, eq=False)
class Transferred:
    """An attack that follows the gradients of another model, until the one it is given is fooled."""

    attack: Attack
    shown: nn.Module

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        return self.attack(Surrogate(self.shown, model), x, y, rng)

    def passes(self) -> tuple[int, int]:
        gradients, forwards = self.attack.passes()
        return 0, gradients + forwards


def _white_box(e: Examination) -> Tensor:
    return e.held(e.level.plain) & e.held(e.level.margin)


def _left_for_others(e: Examination, first: str, standing: Tensor, second: str, broken: int) -> Outcome:
    """Raised by what a weaker attacker breaks of the images that a stronger one has left standing."""
    evidence = {f"{first} leaves": e.share(standing), f"{second} breaks of these": broken, "n": len(standing)}
    return (SUSPICIOUS if surprising(broken, len(standing), _SURPRISE) else OK), evidence


def random_noise(e: Examination) -> Outcome:
    """Raised if random noise of the same size breaks images that the gradient attack leaves standing.

    Why it matters: noise knows nothing of the model. Where it finds what gradients do not, gradients lead away from
    adversarial images, and the gradient attack's number is not a bound of anything.

    What to do: run square and autoattack-rand, and look at the checks on gradients.
    """
    guided = e.held(e.level.plain)
    return _left_for_others(e, e.level.plain, guided, "noise", e.broken_among(guided, e.level.noise))


def black_box(e: Examination) -> Outcome:
    """Raised if Square, which asks for logits only, breaks images that gradient attacks with two losses leave standing.

    Why it matters: who sees gradients sees more than who sees logits, so a white-box attack that loses is misled:
    gradients are masked (Athalye et al. 2018, arXiv:1802.00420).

    What to do: report the worst case with square among the attacks (autoattack has it), with 5000 queries.
    """
    white = _white_box(e)
    return _left_for_others(e, "white-box", white, "Square", e.broken_among(white, e.level.square))


def transfer(e: Examination) -> Outcome:
    """Raised if images made to fool another model break images that gradient attacks on this one leave standing.

    Why it matters: an attack on a stand-in knows less than one on the model itself. Where it wins, adversarial images
    are there and the model's own gradients hide them. Without another model, a small student of this one's answers is
    trained on images that are not examined.

    What to do: report the worst case together with a transfer attack from an undefended model of the same task.
    """
    white, shown = _white_box(e), e.surrogate
    if shown is None and bool(white.any()):
        lessons = e.others(LESSONS)
        if not lessons:
            raise NotExamined("there is no other model to transfer from and no further images to train a student on")
        shown = taught(e.model, lessons, e.level.lessons, e.seed, at_once=e.batch_size)
    attack = make(e.level.plain, eps=e.eps, norm=e.norm)
    broken = 0 if shown is None else e.broken_among(white, "transfer", Transferred(attack, shown))
    return _left_for_others(e, "white-box", white, "transfer", broken)


def single_step(e: Examination) -> Outcome:
    """Raised if one large step leaves most images standing that many small ones break, though it costs hardly any or
    half of it costs more; or if it even makes wrong images right.

    Why it matters: this is what training against single steps ends in when it overfits: the model bends its surface
    just where that step lands (catastrophic overfitting, Wong et al. 2020), or reads the label off the perturbation
    (label leaking, Kurakin et al. 2017). The single-step number is worthless then.

    What to do: never report fgsm alone; take pgd-50 and above, and train with several steps or random starts.
    """
    if e.norm == "l1":
        raise NotExamined("in L1 one step changes a single pixel or two, which says nothing about many")
    right, many = _right_after_one_step(e, e.eps), e.held(e.level.plain)
    evidence = {"clean": e.share(e.correct), "fgsm": e.share(right), e.level.plain: e.share(many)}
    if beaten(right, e.correct, _LEAKING):
        return SUSPICIOUS, evidence
    if not beaten(right, many, _FAR):
        return OK, evidence
    # A large undefended model may be far from linear as well; only what is bent on purpose hides the whole step.
    halfway = _right_after_one_step(e, e.eps / 2)
    evidence["fgsm, half of eps"] = e.share(halfway)
    bent = e.share(right) >= e.share(e.correct) - _HARDLY or beaten(right, halfway, _LEAKING)
    return (SUSPICIOUS if bent else OK), evidence


def _right_after_one_step(e: Examination, eps: float) -> Tensor:
    step = training_form(make("fgsm", eps=eps, norm=e.norm))
    return e.answers(e.crafted(step)).argmax(1) == e.y
