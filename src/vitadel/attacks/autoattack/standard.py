"""AutoAttack: a parameter-free ensemble (Croce & Hein 2020, arXiv:2003.01690; L1: arXiv:2103.01208).

Each member attacks the samples that the earlier ones did not fool. `steps`, `targets` and `queries` are for quick
estimates; results reported as AutoAttack must keep their defaults.
"""

from __future__ import annotations

from vitadel.attacks.apgd import apgd_ce, apgd_dlr, apgd_t
from vitadel.attacks.fab import fab, fab_t
from vitadel.attacks.square import square
from vitadel.attacks.threats import L1
from vitadel.attacks.wrappers import Averaged, WorstOf
from vitadel.types import Attack, Threat


def autoattack(threat: Threat, steps: int = 100, targets: int = 9, queries: int = 5000) -> WorstOf:
    """AutoAttack 'standard'. In L1, where starts matter more, APGD runs five times, and APGD-T towards five classes."""
    l1 = isinstance(threat, L1)
    restarts = 5 if l1 else 1
    return WorstOf.named(
        {
            "apgd-ce": apgd_ce(threat, steps, restarts),
            "apgd-t": apgd_t(threat, steps, min(targets, 5) if l1 else targets, restarts),
            "fab-t": fab_t(threat, steps, targets),
            "square": square(threat, queries),
        }
    )


def autoattack_plus(
    threat: Threat, steps: int = 100, targets: int = 9, queries: int = 5000, restarts: int = 5
) -> Attack:
    """AutoAttack 'plus': six members, the untargeted ones with restarts."""
    return WorstOf.named(
        {
            "apgd-ce": apgd_ce(threat, steps, restarts),
            "apgd-dlr": apgd_dlr(threat, steps, restarts),
            "fab": fab(threat, steps, restarts),
            "square": square(threat, queries),
            "apgd-t": apgd_t(threat, steps, targets),
            "fab-t": fab_t(threat, steps, targets),
        }
    )


def autoattack_rand(threat: Threat, steps: int = 100, times: int = 20) -> Attack:
    """AutoAttack 'rand', for models with random outputs: APGD on the mean of several passes."""
    return WorstOf.named(
        {"apgd-ce": Averaged(apgd_ce(threat, steps), times), "apgd-dlr": Averaged(apgd_dlr(threat, steps), times)}
    )
