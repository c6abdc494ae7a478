"""The registry: every attack and every prefix by name. One line here adds a name.

An attack's settings are the parameters of its builder after the threat, with their defaults; a prefix's are those of
its wrapper after the attack. Keyword-only parameters are no settings, and a `length` is written `step`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from vitadel.attacks import losses
from vitadel.attacks.apgd import apgd_ce, apgd_dlr, apgd_t
from vitadel.attacks.attention_scaling.aas import aas, aas_paper, scale
from vitadel.attacks.autoattack.fast import AutoAttackFast
from vitadel.attacks.autoattack.standard import autoattack, autoattack_plus, autoattack_rand
from vitadel.attacks.fab import fab, fab_t
from vitadel.attacks.features import features, released_attack
from vitadel.attacks.goals import FromClean, Gama, OnLogits
from vitadel.attacks.minimal_norm.bisection import bisect
from vitadel.attacks.minimal_norm.ddn import ddn
from vitadel.attacks.minimal_norm.deepfool import deepfool, superdeepfool
from vitadel.attacks.minimal_norm.fmn import fmn
from vitadel.attacks.patches.learned_patches import LearnedPatches
from vitadel.attacks.patches.patch_fool import patch_fool
from vitadel.attacks.patches.random_patches import RandomPatches
from vitadel.attacks.pgd import PGD
from vitadel.attacks.random_noise import noise
from vitadel.attacks.square import square
from vitadel.attacks.steppers import Dropping, Fading, Filling, Momentum, Steepest, usual_length
from vitadel.attacks.threats import ALL_NORMS, L1, NORMS
from vitadel.attacks.transfer.diverse_inputs import Diverse
from vitadel.attacks.transfer.pna_patchout import PnaPatchOut
from vitadel.attacks.transfer.self_ensemble import SelfEnsemble
from vitadel.attacks.wrappers import Averaged, ScaledLogits, Targeted, with_restarts
from vitadel.errors import UserError
from vitadel.types import Attack, Goal, Threat


def fgsm(threat: Threat) -> PGD:
    stepper = Filling() if isinstance(threat, L1) else Steepest(threat.eps)
    return PGD(threat, stepper=stepper, steps=1, random_start=False)


def fgsm_rs(threat: Threat, reach: float = 1.25, restarts: int = 1) -> Attack:
    return with_restarts(PGD(threat, stepper=Steepest(reach * threat.eps), steps=1), restarts)


def pgd(
    threat: Threat,
    steps: int = 20,
    step: float | None = None,
    restarts: int = 1,
    random_start: bool = True,
    noise: float | None = None,
    paper: bool = False,
) -> Attack:
    """With `paper` the label attack of Robustness Tokens' released code, of which only `steps` can be set."""
    if paper:
        if (step, restarts, random_start, noise) != (None, 1, True, None):
            raise UserError(
                "paper=true sets step, start and restarts itself; leave them out, or leave paper out and set them one "
                "by one"
            )
        return released_attack(threat, OnLogits(losses.cross_entropy), steps)
    if restarts > 1 and not random_start:
        raise UserError(f"from the clean image all {restarts} restarts of pgd would be the same; leave restarts out")
    length = usual_length(threat, max(steps, 1)) if step is None else step
    search = PGD(threat, stepper=Steepest(length), steps=steps, random_start=random_start, start_noise=noise or None)
    return with_restarts(search, restarts)


def cw(
    threat: Threat, steps: int = 100, step: float | None = None, restarts: int = 1, kappa: float | None = None
) -> Attack:
    loss = losses.margin if kappa is None else partial(losses.floored_margin, kappa=kappa)
    return _pgd_on(OnLogits(loss), threat, steps, step, restarts)


def dlr(threat: Threat, steps: int = 100, step: float | None = None, restarts: int = 1) -> Attack:
    return _pgd_on(OnLogits(losses.dlr), threat, steps, step, restarts)


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
    return with_restarts(PGD(threat, goal, Dropping(reach), steps, surface_start=True), restarts)


def mifpe(
    threat: Threat, steps: int = 100, gap: float = 10.0, reach: float = 2.0, keeping: float = 0.75, restarts: int = 1
) -> Attack:
    if gap > 80:
        raise UserError(f"gap={gap:g} makes gradients vanish in single precision; give at most 80, the default is 10")
    goal = OnLogits(partial(losses.rescaled_cross_entropy, gap=gap))
    return with_restarts(PGD(threat, goal, Fading(reach, keeping), steps, surface_start=True), restarts)


def mi_fgsm(
    threat: Threat, steps: int = 10, decay: float = 1.0, step: float | None = None, stop_when_fooled: bool = True
) -> Attack:
    stepper = Momentum(decay, step)
    return PGD(threat, stepper=stepper, steps=steps, random_start=False, stop_when_fooled=stop_when_fooled)


def kl(threat: Threat, steps: int = 10, step: float | None = None, noise: float = 0.001, restarts: int = 1) -> Attack:
    # The divergence has no gradient at the clean image; with noise 0 the start is a random point of the ball.
    return _pgd_on(FromClean(), threat, steps, step, restarts, noise or None)


def _pgd_on(
    goal: Goal, threat: Threat, steps: int, step: float | None, restarts: int, start_noise: float | None = None
) -> Attack:
    length = usual_length(threat, max(steps, 1)) if step is None else step
    return with_restarts(PGD(threat, goal, Steepest(length), steps, start_noise=start_noise), restarts)


def bpda(attack: Attack, modules: str = "", backward: str = "identity") -> Attack:
    from vitadel.attacks.bpda import bpda as through_stand_ins  # few audits need it

    return through_stand_ins(attack, modules, backward)


def _settings(build: Callable[..., Attack]) -> dict[str, object]:
    """Names and defaults of the settings in brackets: all parameters but the first and the keyword-only ones."""
    parameters = list(inspect.signature(build).parameters.values())[1:]
    settings = [p for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    return {"step" if p.name == "length" else p.name: p.default for p in settings}


def _describe(about: str, names: list[str]) -> str:
    return f"{about} [{', '.join(names)}]" if names else about


@dataclass(frozen=True)
class AttackEntry:
    """A builder from a threat and settings, with the line that `vitadel list attacks` shows.

    `exact`: on a linear model it finds the boundary whenever the budget reaches it, which `vitadel selftest` checks.
    `needs_vit`: it refuses models whose attention or patches are not known. `adaptive`: most samples cost less than
    the maximum that `passes` gives. `minimal`: it looks for the smallest perturbation, also beyond a budget. `random`:
    by default another seed gives other images. `norms`: those of the threats that it can be built with.
    """

    build: Callable[..., Attack]
    about: str
    exact: bool = True
    needs_vit: bool = False
    adaptive: bool = False
    minimal: bool = False
    random: bool = True
    norms: tuple[str, ...] = (*NORMS,)

    @property
    def settings(self) -> dict[str, object]:
        return _settings(self.build)

    def create(self, threat: Threat, /, **settings: object) -> Attack:  # foreign settings may have any name
        if "length" in inspect.signature(self.build).parameters and "step" in settings:
            settings["length"] = settings.pop("step")
        return self.build(threat, **settings)

    def describe(self) -> str:
        """One line for a list, with the names of the settings."""
        return _describe(self.about, [name for name in self.settings if name != "steps"])


@dataclass(frozen=True)
class PrefixEntry:
    """A wrapper from an attack and settings; `value` names the setting that stands after the colon."""

    wrap: Callable[..., Attack]
    about: str
    value: str | None = None
    needs_vit: bool = False

    @property
    def settings(self) -> dict[str, object]:
        return _settings(self.wrap)

    def describe(self) -> str:
        """One line for a list, with the names of the settings."""
        return _describe(f"around an attack: {self.about}", [name for name in self.settings if name != self.value])

    def title(self, name: str) -> str:
        """How the prefix is written, e.g. 'eot:TIMES+'."""
        return f"{name}:{self.value.upper()}+" if self.value else f"{name}+"


_inexact = partial(AttackEntry, exact=False)
_minimal = partial(AttackEntry, minimal=True, random=False)
_on_vits = partial(AttackEntry, exact=False, needs_vit=True)

ATTACKS: dict[str, AttackEntry] = {
    "fgsm": AttackEntry(fgsm, "FGSM: one gradient step of length eps (Goodfellow et al. 2015)", random=False),
    "fgsm-rs": _inexact(fgsm_rs, "FGSM-RS: one gradient step from a random start (Wong et al. 2020)"),
    "pgd": AttackEntry(pgd, "PGD on the cross-entropy, K steps (Madry et al. 2018)"),
    "cw": AttackEntry(cw, "PGD on the logit margin of Carlini & Wagner (2017)"),
    "dlr": AttackEntry(dlr, "PGD on the difference of logits ratio (Croce & Hein 2020)"),
    "gama": AttackEntry(gama, "GAMA-PGD: guided adversarial margin attack (Sriramanan et al. 2020)"),
    "mifpe": AttackEntry(mifpe, "MIFPE: PGD on the cross-entropy of rescaled logits (Yu & Xu 2023)"),
    "kl": _inexact(kl, "PGD on the KL divergence from the clean output, as in TRADES (Zhang et al. 2019)"),
    "mi-fgsm": AttackEntry(mi_fgsm, "MI-FGSM: momentum iterative FGSM (Dong et al. 2018)", random=False),
    "apgd-ce": AttackEntry(apgd_ce, "APGD-CE: Auto-PGD on the cross-entropy (Croce & Hein 2020)"),
    "apgd-dlr": AttackEntry(apgd_dlr, "APGD-DLR: Auto-PGD on the difference of logits ratio (Croce & Hein 2020)"),
    "apgd-t": AttackEntry(apgd_t, "APGD-T: Auto-PGD towards the most likely wrong classes (Croce & Hein 2020)"),
    "fab": _minimal(fab, "FAB: smallest perturbation across the decision boundary (Croce & Hein 2020)"),
    "fab-t": _minimal(fab_t, "FAB-T: FAB towards one wrong class at a time, cheaper for many classes"),
    "ddn": _minimal(ddn, "DDN: smallest L2 perturbation, direction and norm apart (Rony et al. 2019)", norms=("l2",)),
    "fmn": _minimal(fmn, "FMN: fast minimum-norm attack, also in L0 (Pintor et al. 2021)", norms=(*ALL_NORMS,)),
    "bisect": _minimal(bisect, "FMN, then smaller and smaller budgets, each from the point found before"),
    "deepfool": _minimal(
        deepfool,
        "DeepFool: steps to the nearest linearized boundary (Moosavi-Dezfooli et al. 2016)",
        exact=False,
        adaptive=True,
    ),
    "superdeepfool": _minimal(
        superdeepfool,
        "SuperDeepFool: DeepFool with returns to the shortest way (arXiv:2303.12481)",
        adaptive=True,
        norms=("l2",),
    ),
    "square": _inexact(square, "Square: random search without gradients (Andriushchenko et al. 2020)"),
    "noise": _inexact(noise, "random noise of the size of the budget: a baseline, not an attack"),
    "diverse": _inexact(Diverse, "DI-MI-FGSM: MI-FGSM on resized and shifted inputs, for transfer (Xie et al. 2019)"),
    "features": _on_vits(features, "PGD away from the clean features, without labels (Pulfer et al. 2024)"),
    "pna-patchout": _on_vits(PnaPatchOut, "PNA and PatchOut, for transfer between ViTs (Wei et al. 2022)"),
    "self-ensemble": _on_vits(
        SelfEnsemble, "Self-Ensemble: sum of all blocks' losses, for transfer (Naseer et al. 2022)", random=False
    ),
    "patch-fool": _on_vits(patch_fool, "Patch-Fool: repaint the most attended patches (Fu et al. 2022)"),
    "patches-random": _on_vits(RandomPatches, "noise in random patches, worst of several masks (AFAT, CVPR 2023)"),
    "patches-learned": _on_vits(LearnedPatches, "noise in patches chosen by a trained selector (AFAT, CVPR 2023)"),
    "autoattack": AttackEntry(autoattack, "AutoAttack: apgd-ce, apgd-t, fab-t and square in turn (Croce & Hein 2020)"),
    "autoattack-plus": AttackEntry(autoattack_plus, "AutoAttack 'plus': six attacks, five restarts if untargeted"),
    "autoattack-fast": AttackEntry(
        AutoAttackFast, "AutoAttack's worst case with a fraction of its passes, and sentinels", adaptive=True
    ),
    "autoattack-rand": AttackEntry(autoattack_rand, "AutoAttack 'rand', for models with random outputs: APGD with EOT"),
}


def foreign_entry(title: str) -> AttackEntry:
    """An attack of another library, such as 'torchattacks:PGDRS'."""

    def build(threat: Threat, /, **settings: object) -> Attack:
        from vitadel.attacks.foreign import foreign  # few audits need it

        return foreign(threat, title, settings)

    return _inexact(build, "an attack of another library, judged here", norms=(*ALL_NORMS,))


PREFIXES: dict[str, PrefixEntry] = {
    "aas": PrefixEntry(aas, "adaptive attention scaling (Jain & Dutta 2024)", needs_vit=True),
    "aas-bpda": PrefixEntry(
        partial(aas, backward_only=True), "adaptive attention scaling of gradients only", needs_vit=True
    ),
    "aas-paper": PrefixEntry(
        aas_paper, "adaptive attention scaling exactly as in the paper, for comparison", needs_vit=True
    ),
    "scale": PrefixEntry(scale, "attention scores multiplied by one factor", "factor", needs_vit=True),
    "logits": PrefixEntry(ScaledLogits, "logits multiplied by a factor during the search", "factor"),
    "eot": PrefixEntry(Averaged, "EOT: mean logits of several passes (Athalye et al. 2018)", "times"),
    "bpda": PrefixEntry(bpda, "BPDA: another backward pass for some modules (Athalye et al. 2018)"),
    "targeted": PrefixEntry(Targeted, "towards a target class: its number, or next, least, random", "target"),
}
