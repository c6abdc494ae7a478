"""Checks that compare attacks: stronger searches must not find much more, weaker attackers nothing new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import Surrogate
from vitadel.attacks.losses import kl_divergence
from vitadel.attacks.parse import make
from vitadel.attacks.registry import fgsm
from vitadel.attacks.steppers import usual_length
from vitadel.attacks.threats import make_threat
from vitadel.diagnosis.checks import BROKEN, OK, SUSPICIOUS, NotExamined, Outcome, check
from vitadel.diagnosis.examination import Examination, Level, attack_cost, probing_threat
from vitadel.instrument.hooks import frozen
from vitadel.quantities import quantity_text
from vitadel.runtime.rng import SampleRNG
from vitadel.statistics import exceeds_share, significantly_fewer
from vitadel.types import Attack

_STUDENT_IMAGES = 256

# All as shares of all images.
_GAIN = 0.05  # that more steps or restarts may break beyond the plain attack
_LOSS_GAIN = 0.12  # that other losses may break beyond the cross-entropy
_SURPRISE = 0.01  # that noise may break alone
_RARE = 0.003  # that a weaker attacker may break of those that all gradient attacks left
_GROUPS = 3  # in which Square attacks, the images nearest to another class first, until the verdict is clear
_MOST_QUERIES = 4  # times the usual number, where few images are left
_LEAKING = 0.03  # that one step may make correct
_FAR = 0.4  # that one step may leave where many succeed
_HARDLY = 0.05  # that one step may break of a model that hides from it


@check(
    "single-step",
    "A single step fails where many steps succeed",
    cost=(2, 2),
    attacks=lambda level: (level.plain,),
    next="pgd-100(restarts=5)",
)
def single_step(e: Examination) -> Outcome:
    """Raised if one large step fails on most images that many small ones break, although it breaks hardly any or half
    of it breaks more; or if it makes misclassified images correct.

    Why it matters: training against single steps can overfit to them: the model bends its loss surface exactly where
    that step lands (catastrophic overfitting, Wong et al. 2020), or reads the label off the perturbation (label
    leaking, Kurakin et al. 2017). The single-step number is then meaningless.

    What to do: never report fgsm alone; use pgd-50 or more, and train with several steps or random starts.
    """
    if e.norm == "l1":
        raise NotExamined("in L1 one step changes a single pixel or two, which says nothing about many steps")
    right, many = _correct_after_one_step(e, e.eps), e.robust(e.level.plain)
    evidence = {"clean": e.share(e.correct), "fgsm": e.share(right), e.level.plain: e.share(many)}
    if significantly_fewer(right, e.correct, _LEAKING):
        return SUSPICIOUS, evidence
    if not significantly_fewer(right, many, _FAR):
        return OK, evidence
    # A large undefended model may be far from linear as well; only a surface bent on purpose hides the whole step.
    halfway = _correct_after_one_step(e, e.eps / 2)
    evidence["fgsm, half of eps"] = e.share(halfway)
    bent = e.share(right) >= e.share(e.correct) - _HARDLY or significantly_fewer(right, halfway, _LEAKING)
    return (SUSPICIOUS if bent else OK), evidence


def _correct_after_one_step(e: Examination, eps: float) -> Tensor:
    step = replace(fgsm(make_threat(e.norm, eps)), stop_when_fooled=False)  # misclassified images move, too
    return e.logits_of(e.craft(step)).argmax(1) == e.y


@check(
    "step-sensitivity",
    "More or smaller steps change the result",
    cost=lambda level: attack_cost(level.longer),  # with steps of half the length
    attacks=lambda level: (level.plain, level.longer),
    next="apgd-ce",
)
def step_sensitivity(e: Examination) -> Outcome:
    """Raised if twice the steps, or twice as many of half the length, break clearly more images, or clearly fewer.

    Why it matters: an attack that still gains has not converged, and its number is too high. One that loses with more
    or smaller steps follows gradients that describe the model only next to where they are computed.

    What to do: double the steps and halve their length until the number is stable: pgd-100(step=1/255),
    pgd-200(step=0.5/255), or apgd-ce, which sets its own step size.
    """
    # Below some eps the usual length does not shrink with the number of steps, and longer would not be finer.
    half = usual_length(e.threat, e.level.steps) / 2
    names = (e.level.plain, e.level.longer, f"{e.level.longer}(step={quantity_text(half)})")
    plain, *others = (e.robust(name) for name in names)
    moved = any(
        significantly_fewer(plain, other, _GAIN) or significantly_fewer(other, plain, _GAIN) for other in others
    )
    return (SUSPICIOUS if moved else OK), {name: e.share(e.robust(name)) for name in names}


@check(
    "restart-sensitivity",
    "More restarts find more",
    attacks=lambda level: (level.plain, level.restarted),
    next="autoattack",
)
def restart_sensitivity(e: Examination) -> Outcome:
    """Raised if further random starts break clearly more images.

    Why it matters: the result depends on the starting point: the loss has many local maxima, or plateaus that a single
    start rarely leaves, and one restart reports luck.

    What to do: add restarts until the number is stable, e.g. pgd-100(restarts=10), or run autoattack.
    """
    once, again = e.robust(e.level.plain), e.robust(e.level.restarted)
    evidence = {e.level.plain: e.share(once), e.level.restarted: e.share(again)}
    return (SUSPICIOUS if significantly_fewer(once, again, _GAIN) else OK), evidence


@check(
    "unbounded-attack",
    "Images withstand an attack without a real bound",
    cost=lambda level: attack_cost(level.plain),
    next="square,apgd-t",
)
def unbounded_attack(e: Examination) -> Outcome:
    """Raised if images withstand an attack whose budget is half of the pixel range, with steps to match.

    Why it matters: with such a budget every image can be made gray, so nothing can be robust. What is still correct
    shows that the attack fails, not that the model is robust (Carlini et al. 2019, arXiv:1902.06705).

    What to do: do not report this attack's number. Find out which check on gradients or losses is raised beside this
    one, and attack accordingly; without one, run square and a transfer attack.
    """
    huge = probing_threat(e.norm, e.x).eps
    robust = e.robust(e.level.plain, eps=huge)
    evidence = {"eps": huge, e.level.plain: e.share(robust), "n": len(robust)}
    return (BROKEN if exceeds_share(int(robust.sum()), len(robust), 0.01) else OK), evidence


@check(
    "loss-sensitivity",
    "A different loss finds more",
    attacks=lambda level: (level.plain, *level.other_losses),
    next="apgd-t,mifpe-100",
)
def loss_sensitivity(e: Examination) -> Outcome:
    """Raised if the same search on another loss (margin, DLR, MIFPE) breaks clearly more images than on cross-entropy.

    Why it matters: the cross-entropy of large logits rounds to zero, and so does its gradient; scaling the last layer
    is enough to look robust. Losses that do not depend on the scale of the logits are not misled.

    What to do: report cw-100, dlr-100 or mifpe-100, or apgd-t, instead of pgd with cross-entropy.
    """
    plain = e.robust(e.level.plain)
    others = {name: e.robust(name) for name in e.level.other_losses}
    best = min(others.values(), key=lambda robust: int(robust.sum()))
    top = e.logits.topk(2, dim=1).values
    gap = (top[:, 0] - top[:, 1]).median()
    evidence = {name: e.share(robust) for name, robust in {e.level.plain: plain, **others}.items()}
    evidence["median gap of the two best logits"] = float(gap)
    return (SUSPICIOUS if significantly_fewer(plain, best, _LOSS_GAIN) else OK), evidence


@dataclass(frozen=True, eq=False)
class Transferred:
    """An attack that follows the gradients of `shown` until the model it is given is fooled."""

    attack: Attack
    shown: nn.Module

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        return self.attack(Surrogate(self.shown, model), x, y, rng)

    def passes(self) -> tuple[int, int]:
        gradients, forwards = self.attack.passes()
        return 0, gradients + forwards


def _white_box(level: Level) -> tuple[str, ...]:
    return level.plain, level.longer, level.restarted, *level.other_losses


def _robust_to_white_box(e: Examination) -> Tensor:
    return torch.stack([e.robust(name) for name in _white_box(e.level)]).all(0)


def _weaker_attacker(
    e: Examination, strong: str, left: Tensor, weak: str, broken: int, expected: float = _RARE
) -> Outcome:
    """The verdict on how many images a weaker attacker breaks of those that a stronger one left."""
    evidence = {f"{strong} leaves": e.share(left), f"{weak} breaks of these": broken, "n": len(left)}
    return (SUSPICIOUS if exceeds_share(broken, len(left), expected) else OK), evidence


@check(
    "random-noise",
    "Random noise breaks images that gradients do not",
    attacks=lambda level: (level.plain, level.noise),
    next="square",
)
def random_noise(e: Examination) -> Outcome:
    """Raised if random noise of the same size breaks images that the gradient attack does not.

    Why it matters: noise uses no information about the model. If it finds what gradients do not, gradients lead away
    from adversarial examples, and the gradient attack's number bounds nothing.

    What to do: run square and autoattack-rand, and look at the checks on gradients.
    """
    left = e.robust(e.level.plain)
    return _weaker_attacker(e, e.level.plain, left, "noise", e.broken_among(left, e.level.noise), _SURPRISE)


@check(
    "black-box",
    "A black-box attack breaks images that gradients do not",
    cost=lambda level: (0, level.queries + 2),
    attacks=_white_box,
    next="autoattack",
)
def black_box(e: Examination) -> Outcome:
    """Raised if Square, which uses logits only, breaks images that all gradient attacks of this diagnosis left.

    Why it matters: gradients contain more information than logits, so a white-box attack that loses is misled:
    gradients are masked (Athalye et al. 2018, arXiv:1802.00420).

    What to do: report the worst case with square among the attacks (autoattack has it), with 5000 queries.
    """
    left = _robust_to_white_box(e)
    standing = left.nonzero()[:, 0]
    top = e.logits.topk(2, dim=1).values
    nearest_first = standing[(top[:, 0] - top[:, 1])[standing].argsort()]
    # What is not spent on images that gradient attacks broke is spent on the others.
    queries = min(_MOST_QUERIES * e.level.queries, e.level.queries * len(left) // max(len(standing), 1))
    broken = 0
    for rows in nearest_first.chunk(_GROUPS):
        exposed = torch.zeros_like(left).index_fill(0, rows, True)
        broken += e.broken_among(exposed, e.level.square(queries))
        if exceeds_share(broken, len(left), _RARE):
            break
    return _weaker_attacker(e, "white-box", left, f"Square, {queries} queries,", broken)


@check(
    "transfer",
    "A transfer attack breaks images that gradients do not",
    cost=lambda level: (0, level.steps + _STUDENT_IMAGES / level.images),
    attacks=_white_box,
    next="autoattack",
)
def transfer(e: Examination) -> Outcome:
    """Raised if adversarial examples of another model break images that gradient attacks on this one do not.

    Why it matters: an attack on a surrogate uses less information than one on the model itself. If it wins,
    adversarial examples exist and the model's own gradients hide them. Without another model, a small student of this
    one's outputs is trained on images that are not examined.

    What to do: report the worst case together with a transfer attack from an undefended model of the same task.
    """
    left, surrogate = _robust_to_white_box(e), e.surrogate
    if surrogate is None and bool(left.any()):
        images = e.other_images(_STUDENT_IMAGES)
        if not images:
            raise NotExamined("there is no other model to transfer from and no further images to train a student on")
        surrogate = train_student(e.model, images, e.level.student_epochs, e.seed, batch_size=e.batch_size)
    attack = make(e.level.plain, eps=e.eps, norm=e.norm)
    broken = 0 if surrogate is None else e.broken_among(left, "transfer", Transferred(attack, surrogate))
    return _weaker_attacker(e, "white-box", left, "transfer", broken)


_RATE = 3e-3


def train_student(
    teacher: nn.Module, data: Sequence[tuple[Tensor, Tensor]], epochs: int, seed: int = 0, *, batch_size: int = 64
) -> nn.Module:
    """Train on batches of images to give the teacher's probabilities (Hinton et al. 2015); labels are not used.

    `batch_size` is that of the teacher.
    """
    with frozen(teacher), torch.no_grad():
        targets = [torch.cat([teacher(part) for part in x.split(batch_size)]) for x, _ in data]
    first = data[0][0]
    student = _network(targets[0].shape[1], first.shape[1], first.shape[-1], seed).to(first.device)
    optimizer = torch.optim.AdamW(student.parameters(), _RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(data))
    with torch.enable_grad():
        for _ in range(epochs):
            for (x, _), target in zip(data, targets, strict=True):
                optimizer.zero_grad()
                kl_divergence(target, student(x)).mean().backward()
                optimizer.step()
                schedule.step()
    return student.eval().requires_grad_(False)


def _network(classes: int, channels: int, side: int, seed: int) -> nn.Module:
    stride = max(1, side // 32)  # large images are processed coarsely
    with torch.random.fork_rng():  # layers draw initial weights, which are replaced below
        student = nn.Sequential(
            nn.Conv2d(channels, 32, 4 * stride, 2 * stride, stride),
            nn.GELU(),
            nn.Conv2d(32, 64, 3, 2, 1),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(8),
            nn.Flatten(),
            nn.Linear(64 * 64, classes),
        )
    for number, weight in enumerate(student.parameters()):
        fan = max(1, weight[0].numel())
        noise = SampleRNG.of_samples(seed, range(len(weight))).stream("student", number).normal(*weight.shape[1:])
        weight.data = noise * (2 / fan) ** 0.5 if weight.ndim > 1 else torch.zeros_like(weight)
    return student
