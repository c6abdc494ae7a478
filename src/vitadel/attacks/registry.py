"""The catalogue: what each attack's name stands for; one line here adds a name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from vitadel.attacks import losses
from vitadel.attacks.apgd import apgd_ce, apgd_dlr, apgd_t
from vitadel.attacks.autoattack.fast import autoattack_fast
from vitadel.attacks.autoattack.standard import autoattack, autoattack_plus, autoattack_rand
from vitadel.attacks.fab import fab, fab_t
from vitadel.attacks.features import features
from vitadel.attacks.goals import FromClean, Gama, OnLogits
from vitadel.attacks.losses import margin
from vitadel.attacks.noise import noise
from vitadel.attacks.patches.learned_patches import patches_learned
from vitadel.attacks.patches.patch_fool import patch_fool
from vitadel.attacks.patches.random_patches import patches_random
from vitadel.attacks.pgd import PGD
from vitadel.attacks.square import square
from vitadel.attacks.steppers import Dropping, Fading, Filling, Momentum, Steepest, usual_length
from vitadel.attacks.threats import L1
from vitadel.attacks.transfer.diverse_inputs import diverse
from vitadel.attacks.transfer.pna_patchout import pna_patchout
from vitadel.attacks.transfer.self_ensemble import self_ensemble
from vitadel.attacks.wrappers import repeated
from vitadel.errors import UserError
from vitadel.types import Attack, Goal, Threat

__all__ = ["CATALOGUE", "Preset"]


def fgsm(threat: Threat) -> Attack:
    stepper = Filling() if isinstance(threat, L1) else Steepest(threat.eps)
    return PGD(threat, stepper=stepper, steps=1, random_start=False)


def fgsm_rs(threat: Threat, reach: float = 1.25, restarts: int = 1) -> Attack:
    return repeated(PGD(threat, stepper=Steepest(reach * threat.eps), steps=1), restarts)


def pgd(
    threat: Threat,
    steps: int = 20,
    step: float | None = None,
    restarts: int = 1,
    random_start: bool = True,
    noise: float | None = None,
) -> Attack:
    if restarts > 1 and not random_start:
        raise UserError(f"from the clean image all {restarts} restarts of pgd would be the same; leave restarts out")
    length = usual_length(threat, max(steps, 1)) if step is None else step
    search = PGD(threat, stepper=Steepest(length), steps=steps, random_start=random_start, start_noise=noise or None)
    return repeated(search, restarts)


def cw(
    threat: Threat, steps: int = 100, step: float | None = None, restarts: int = 1, kappa: float | None = None
) -> Attack:
    loss = margin if kappa is None else partial(losses.floored_margin, kappa=kappa)
    return _climbing(OnLogits(loss), threat, steps, step, restarts)


def dlr(threat: Threat, steps: int = 100, step: float | None = None, restarts: int = 1) -> Attack:
    return _climbing(OnLogits(losses.dlr), threat, steps, step, restarts)


def gama(
    threat: Threat,
    steps: int = 100,
    weight: float = 50.0,
    until: float = 0.25,
    reach: float = 2.0,
    guide: str = "clean",
    restarts: int = 1,
) -> Attack:
    goal = Gama(weight, until, guide)
    return repeated(PGD(threat, goal, Dropping(reach), steps, surface_start=True), restarts)


def mifpe(
    threat: Threat, steps: int = 100, gap: float = 10.0, reach: float = 2.0, keeping: float = 0.75, restarts: int = 1
) -> Attack:
    if gap > 80:
        raise UserError(f"gap={gap:g} leaves mifpe no slope in single precision; give at most 80, the usual one is 10")
    goal = OnLogits(partial(losses.rescaled_cross_entropy, gap=gap))
    return repeated(PGD(threat, goal, Fading(reach, keeping), steps, surface_start=True), restarts)


def mi_fgsm(
    threat: Threat, steps: int = 10, decay: float = 1.0, step: float | None = None, stop_when_fooled: bool = True
) -> Attack:
    stepper = Momentum(decay, step)
    return PGD(threat, stepper=stepper, steps=steps, random_start=False, stop_when_fooled=stop_when_fooled)


def kl(threat: Threat, steps: int = 10, step: float | None = None, noise: float = 0.001, restarts: int = 1) -> Attack:
    # At the clean image itself the divergence has no slope; without noise the start is anywhere in the ball.
    return _climbing(FromClean(), threat, steps, step, restarts, noise or None)


def _climbing(
    goal: Goal, threat: Threat, steps: int, step: float | None, restarts: int, start_noise: float | None = None
) -> Attack:
    length = usual_length(threat, max(steps, 1)) if step is None else step
    return repeated(PGD(threat, goal, Steepest(length), steps, start_noise=start_noise), restarts)


@dataclass(frozen=True)
class Preset:
    """A builder from a threat and settings, with the line that `vitadel list attacks` shows.

    `exact`: on a linear model it reaches the boundary whenever the budget does, which `vitadel selftest` checks.
    `needs_vit`: it looks inside and refuses a model whose attention or patches it does not know. `adaptive`: most
    samples cost less than the most that `passes` tells.
    """

    build: Callable[..., Attack]
    about: str
    exact: bool = True
    needs_vit: bool = False
    adaptive: bool = False

    @property
    def settings(self) -> dict[str, object]:
        """Names and defaults of what may stand in brackets."""
        parameters = list(inspect.signature(self.build).parameters.values())[1:]
        return {p.name: p.default for p in parameters}

    def describe(self) -> str:
        """The line for a list, with the settings that may stand in brackets."""
        names = ", ".join(name for name in self.settings if name != "steps")
        return f"{self.about}{f' [{names}]' if names else ''}"


CATALOGUE: dict[str, Preset] = {
    "fgsm": Preset(fgsm, "one step of size eps along the gradient (Goodfellow et al. 2015)"),
    "fgsm-rs": Preset(fgsm_rs, "one longer step from a random start (Wong et al. 2020)", exact=False),
    "pgd": Preset(pgd, "projected gradient ascent on the cross-entropy, K steps (Madry et al. 2018)"),
    "cw": Preset(cw, "PGD on the logit margin, without a floor (Carlini & Wagner 2017)"),
    "dlr": Preset(dlr, "PGD on the difference of logits ratio (Croce & Hein 2020)"),
    "gama": Preset(gama, "PGD on the probability margin and a pull from the clean one (Sriramanan et al. 2020)"),
    "mifpe": Preset(mifpe, "PGD on the cross-entropy of rescaled logits (Yu & Xu 2023)"),
    "kl": Preset(kl, "PGD away from the clean probabilities, as inside TRADES (Zhang et al. 2019)", exact=False),
    "mi-fgsm": Preset(mi_fgsm, "ascent along gathered gradients, for transfer (Dong et al. 2018)"),
    "apgd-ce": Preset(apgd_ce, "PGD that chooses its step sizes, on the cross-entropy (Croce & Hein 2020)"),
    "apgd-dlr": Preset(apgd_dlr, "the same on the difference of logits ratio"),
    "apgd-t": Preset(apgd_t, "the same towards one likely wrong class after the other"),
    "fab": Preset(fab, "along the decision boundary to its nearest point (Croce & Hein 2020)"),
    "fab-t": Preset(fab_t, "the same for one likely wrong class after the other, cheaper for many classes"),
    "square": Preset(square, "random search without gradients (Andriushchenko et al. 2020)", exact=False),
    "noise": Preset(noise, "random noise, no attack at all: what an attack must beat", exact=False),
    "diverse": Preset(diverse, "for transfer: momentum over shrunk and shifted images (Xie et al. 2019)", exact=False),
    "features": Preset(
        features, "features away from the clean ones, without labels (Pulfer et al. 2024)", exact=False, needs_vit=True
    ),
    "pna-patchout": Preset(
        pna_patchout,
        "for transfer: gradients past attention, random patches (Wei et al. 2022)",
        exact=False,
        needs_vit=True,
    ),
    "self-ensemble": Preset(
        self_ensemble,
        "for transfer: the summed loss of every block's logits (Naseer et al. 2022)",
        exact=False,
        needs_vit=True,
    ),
    "patch-fool": Preset(
        patch_fool, "repaint the patches attended to most (Fu et al. 2022)", exact=False, needs_vit=True
    ),
    "patches-random": Preset(
        patches_random, "noise in random patches, worst of several masks (AFAT)", exact=False, needs_vit=True
    ),
    "patches-learned": Preset(
        patches_learned, "noise in patches chosen by a trained selector (AFAT)", exact=False, needs_vit=True
    ),
    "autoattack": Preset(autoattack, "apgd-ce, apgd-t, fab-t and square, one after the other (Croce & Hein 2020)"),
    "autoattack-plus": Preset(autoattack_plus, "six attacks, five restarts of the untargeted ones"),
    "autoattack-fast": Preset(
        autoattack_fast, "AutoAttack's worst case at a seventh of its passes or less, with sentinels", adaptive=True
    ),
    "autoattack-rand": Preset(autoattack_rand, "for models that answer at random: apgd over the mean of 20 passes"),
}
