"""Attacks on one branch of TORA-ViT (Li & Xu, CVPR 2023), judged by the joint prediction."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from vitadel.adapters.tora.tora_settings import BRANCHES
from vitadel.adapters.tora.tora_vit import Tora, find_tora
from vitadel.attacks.goals import Surrogate, deployed
from vitadel.attacks.per_sample import SampleInfo, images_and_info_of, images_of, run_attack
from vitadel.backbones.classifier import check_pixels
from vitadel.errors import UserError, check_known
from vitadel.instrument.hooks import Edge, hooked
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack


class _BranchLogits(nn.Module):
    """The whole model with the logits of one branch in place of the joint ones."""

    def __init__(self, model: nn.Module, tora: Tora, branch: str) -> None:
        super().__init__()
        self.model = model
        self.tora = tora
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []

        def replace_joint(joint: Tensor) -> Tensor:
            # Adding zero through the joint output lets the pass counter see this model's backward pass.
            return seen[0].to(joint.dtype) + (joint - joint)

        head: nn.Module = getattr(self.tora, self.branch).head
        with hooked(self.model, [Edge("head", head, seen.append), Edge("joint output", self.tora, replace_joint)]):
            logits: Tensor = self.model(x)
        return logits


@dataclass(frozen=True)
class BranchAttack:
    """An attack that follows the loss of one branch and stops where the joint prediction is fooled.

    The joint prediction is the mean of two: where its own loss is flat, that of one branch may not be.
    """

    attack: Attack
    branch: str = "rob"

    def __post_init__(self) -> None:
        check_known("branch", self.branch, BRANCHES, " to aim at")

    __call__ = images_of
    run_with_info = images_and_info_of

    def run(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, with_info: bool) -> tuple[Tensor, SampleInfo]:
        check_pixels(x)
        own = rng.stream("aimed", BRANCHES.index(self.branch))
        joint = deployed(model)
        shown = _BranchLogits(joint, _find_tora(joint, self.branch), self.branch)
        return run_attack(self.attack, Surrogate(shown, joint), x, y, own, with_info)

    def passes(self) -> tuple[int, int]:
        gradients, forwards = self.attack.passes()
        # Every pass of the branch may need one of the joint prediction.
        return gradients, 2 * forwards + gradients


def _find_tora(model: nn.Module, branch: str) -> Tora:
    tora = find_tora(model)
    if tora is None or branch not in tora.settings.branches:
        raise UserError(
            f"there is no branch '{branch}' to aim at: only TORA and its baselines with two heads have two. Attack the "
            "model itself."
        )
    return tora
