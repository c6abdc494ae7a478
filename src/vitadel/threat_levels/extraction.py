"""Token extraction (T7): who sees a victim's features or scores fits tokens of its own to them, then attacks through.

The backbone is public, so what is unknown are R times width numbers, and every answer tells much about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.adapters.tokens.token_files import load_tokens, read_tokens, save_tokens
from vitadel.attacks.features import feature_cosine, final_features
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError
from vitadel.instrument.hooks import frozen
from vitadel.threat_levels.levels import Head

__all__ = ["EXPOSED", "Extracted", "extract_tokens", "read_extracted", "save_extracted"]

EXPOSED = ("features", "scores")
"""What a victim may tell of an image: class and patch tokens, or logits."""


@dataclass(frozen=True, eq=False)
class Extracted:
    """The fitted tokens on the public backbone, and how alike both models' features are on images not asked about."""

    model: TokenClassifier
    queries: int
    cosine: float
    cosine_before: float  # of the tokens that the fit started from

    def numbers(self) -> dict[str, float]:
        return {"queries": self.queries, "cosine": self.cosine, "cosine_before": self.cosine_before}


def save_extracted(found: Extracted, path: Path) -> None:
    """As a secret file: what was extracted well is as good as the secret."""
    save_tokens(found.model, path, found.numbers())


def read_extracted(path: Path, classifier: Classifier) -> Extracted:
    """What `save_extracted` wrote; a `UserError` if it is damaged or open to others."""
    model, told = load_tokens(path, classifier).eval(), read_tokens(path).settings
    try:
        return Extracted(model, int(told["queries"]), float(told["cosine"]), float(told["cosine_before"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"'{path}' does not say how its tokens were fitted ({error!r}); delete it, or its run"
        ) from error


def extract_tokens(
    victim: TokenClassifier,
    images: Iterable[Tensor],
    exposed: str = "features",
    *,
    steps: int = 300,
    rate: float = 3e-3,
    seed: int = 0,
    head: Head | None = None,
    told: Callable[[int], None] = lambda step: None,
) -> Extracted:
    """Fit as many tokens as the victim has, by Adam with a falling rate, to what it answers.

    `images` are batches of the attacker's own; the last one is not asked about and measures the fit. Only what
    `exposed` names is used of the victim; scores are those of `head` on it, if it is not the backbone's own.
    """
    if exposed not in EXPOSED:
        raise UserError(f"a victim tells {' or '.join(EXPOSED)}, not {exposed!r}")
    *asked, unseen = list(images)
    if not asked:
        raise UserError("token extraction needs at least two batches of images: to ask about, and to measure the fit")
    classifier, (count, width) = victim.classifier, victim.tokens.shape
    start = fresh_tokens(width, count, seed=seed).to(victim.tokens)
    model = TokenClassifier(classifier, start, placement=victim.placement)

    headed = {each: each if head is None else head(each) for each in (victim, model)}

    def see(seen: TokenClassifier, x: Tensor) -> Tensor:
        if exposed == "features":
            return final_features(seen, x)
        scores: Tensor = headed[seen](x)
        return scores

    with frozen(victim), torch.no_grad():
        answers = [see(victim, x) for x in asked]
    before = _alike(model, victim, unseen)
    optimizer = torch.optim.Adam([model.tokens], lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        number = step % len(asked)
        optimizer.zero_grad()
        answer = answers[number]
        with torch.enable_grad():
            miss = (see(model, asked[number]) - answer).square().mean() / answer.square().mean()
            miss.backward()
        optimizer.step()
        schedule.step()
        told(step)
    model.tokens.requires_grad_(False)
    return Extracted(model, sum(map(len, asked)), _alike(model, victim, unseen), before)


def _alike(model: nn.Module, victim: nn.Module, x: Tensor) -> float:
    with frozen(model), frozen(victim), torch.no_grad():
        return float(feature_cosine(final_features(model, x), final_features(victim, x)).mean())
