"""The command to type after a run: another verb about the same model, opened in the same way."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

__all__ = ["next_command"]

# How model and images are opened is the same for every verb. Which images and budget there were, the results know
# better than the flags, which a protocol or a default may stand for.
_FLAGS = {"--small-images", "--allow-readable", "--skip-bad"}
_WITH_VALUE = {
    *("--weights", "--num-classes", "--mean", "--std", "--input-size", "--crop-pct", "--interpolation"),
    *("--head-classes", "--tokens"),
    *("--data-root", "--batch-size", "--seed", "--device"),
}


def next_command(
    argv: Sequence[str], verb: str, model: str, data: str, norm: str, eps: str, *more: str, after: str
) -> str:
    """`vitadel verb`, safe to paste; `argv` are the words of the run of `after`, if it came from the command line."""
    kept = _kept(argv[1:]) if argv and argv[0] == after else []
    return shlex.join(["vitadel", verb, model, "--data", data, *kept, "--norm", norm, "--eps", eps, *more])


def _kept(words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for place, word in enumerate(words):
        name, joined, _ = word.partition("=")
        if word in _FLAGS or (joined and name in _WITH_VALUE):
            kept.append(word)
        elif word in _WITH_VALUE:
            kept += words[place : place + 2]
    return kept
