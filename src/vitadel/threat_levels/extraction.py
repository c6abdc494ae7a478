"""Token extraction (T7): an attacker who sees the victim's features or scores fits its own tokens to them.

The backbone is public, so only the R x width numbers of the tokens are unknown, and every query reveals much of them.
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
from vitadel.instrument.tokens import token_width
from vitadel.threat_levels.levels import GUESSED, Head

EXPOSED = ("features", "scores")
"""What a victim may expose: class and patch tokens, or logits."""


@dataclass(frozen=True, eq=False)
class Extracted:
    """The fitted tokens on the public backbone, and the cosine of both models' features on other images."""

    model: TokenClassifier
    queries: int
    cosine: float
    cosine_before: float  # of the initial tokens

    def numbers(self) -> dict[str, float]:
        return {"queries": self.queries, "cosine": self.cosine, "cosine_before": self.cosine_before}


def save_extracted(found: Extracted, path: Path) -> None:
    """Write a secret file: well extracted tokens are as good as the secret."""
    save_tokens(found.model, path, found.numbers())


def read_extracted(path: Path, classifier: Classifier) -> Extracted:
    """Read what `save_extracted` wrote; a `UserError` if it is damaged or readable by others."""
    model, saved = load_tokens(path, classifier).eval(), read_tokens(path).settings
    try:
        return Extracted(model, int(saved["queries"]), float(saved["cosine"]), float(saved["cosine_before"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"'{path}' does not say how its tokens were fitted ({error!r}); delete it, or its run"
        ) from error


def extract_tokens(
    victim: TokenClassifier,
    images: Iterable[Tensor],
    exposed: str = "features",
    *,
    count: int = GUESSED,
    steps: int = 300,
    rate: float = 3e-3,
    seed: int = 0,
    head: Head | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> Extracted:
    """Fit `count` tokens, a guess, before the first block of the public backbone to the victim's outputs, by Adam with
    a cosine schedule.

    `images` are batches of the attacker's own; the last one is not queried and measures the fit, for the report. The
    fit sees the public backbone and the outputs that `exposed` names, nothing else of the victim: not how many tokens
    it has, nor where. Scores are those of `head` on the victim, if it is not the backbone's own.
    """
    if exposed not in EXPOSED:
        raise UserError(f"exposed must be {' or '.join(EXPOSED)}, got {exposed!r}")
    *queried, unseen = list(images)
    if not queried:
        raise UserError("token extraction needs at least two batches of images: to query, and to measure the fit")
    classifier = victim.classifier
    start = fresh_tokens(token_width(classifier), count, seed=seed).to(unseen)
    model = TokenClassifier(classifier, start)
    with_head = {each: each if head is None else head(each) for each in (victim, model)}

    def outputs(of: TokenClassifier, x: Tensor) -> Tensor:
        if exposed == "features":
            return final_features(of, x)
        scores: Tensor = with_head[of](x)
        return scores

    with frozen(victim), torch.no_grad():
        targets = [outputs(victim, x) for x in queried]
    before = _mean_cosine(model, victim, unseen)
    optimizer = torch.optim.Adam([model.tokens], lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        x, target = queried[step % len(queried)], targets[step % len(queried)]
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = (outputs(model, x) - target).square().mean() / target.square().mean()
            loss.backward()
        optimizer.step()
        schedule.step()
        on_step(step)
    model.tokens.requires_grad_(False)
    return Extracted(model, sum(map(len, queried)), _mean_cosine(model, victim, unseen), before)


def _mean_cosine(model: nn.Module, victim: nn.Module, x: Tensor) -> float:
    with frozen(model), frozen(victim), torch.no_grad():
        return float(feature_cosine(final_features(model, x), final_features(victim, x)).mean())
