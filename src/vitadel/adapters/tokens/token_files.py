"""Robustness tokens on disk: safetensors readable by the owner only, tied to the backbone they were trained for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitadel.adapters.adapter_file import AdapterFile
from vitadel.adapters.tokens.token_classifier import TokenBank, TokenClassifier, token_bytes
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError
from vitadel.instrument.tokens import token_width
from vitadel.runtime.secrets import fingerprint, read_secret, write_secret

_FILE = AdapterFile("a file of robustness tokens", "vitadel_tokens")
_TENSOR = "tokens"


@dataclass(frozen=True)
class TokenFile:
    """The content of a token file. `settings` are those of the training, as they were given."""

    tokens: Tensor = field(repr=False)
    salt: bytes = field(repr=False)
    fingerprint: str
    placement: str
    settings: Mapping[str, Any]
    about: Mapping[str, Any] = field(repr=False)


def save_tokens(tokened: TokenClassifier, path: str | Path, settings: Mapping[str, Any]) -> None:
    """Write the tokens, without the backbone, to a file of mode 0600; `settings` must be plain values."""
    tokens = tokened.tokens.detach().to("cpu", torch.float32).contiguous()
    about = {
        "count": tokens.shape[0],
        "placement": tokened.placement,
        "salt": tokened.salt.hex(),
        "fingerprint": fingerprint(token_bytes(tokens), tokened.salt),
        "settings": dict(settings),
    }
    write_secret(path, _FILE.pack({_TENSOR: tokens}, tokened.classifier, tokens.shape[1], about))


def load_tokens(path: str | Path, classifier: Classifier, *, allow_readable: bool = False) -> TokenClassifier:
    """Add the tokens of a file to the classifier; they must have been trained for its backbone.

    Image size and head may differ. `allow_readable` also accepts a file that other users can read.
    """
    file = read_tokens(path, allow_readable=allow_readable)
    _FILE.check_backbone(path, file.about, classifier, token_width(classifier))
    return TokenClassifier(classifier, file.tokens, placement=file.placement, salt=file.salt)


def load_bank(paths: Sequence[str | Path], classifier: Classifier, *, allow_readable: bool = False) -> TokenBank:
    """Add the tokens of several files to the classifier; one set is drawn for each image of each call.

    The same files in the same order have the same fingerprint.
    """
    sets = [load_tokens(path, classifier, allow_readable=allow_readable) for path in paths]
    for number, each in enumerate(sets):
        if each.placement != sets[0].placement:
            raise UserError(
                f"the sets of a bank must have one placement, but '{paths[0]}' has {sets[0].placement} and "
                f"'{paths[number]}' {each.placement}. Train them by one recipe."
            )
        for before in range(number):
            if torch.equal(each.tokens, sets[before].tokens):
                raise UserError(
                    f"'{paths[before]}' and '{paths[number]}' hold the same tokens: a bank needs different sets. Train "
                    "one of them again, with another seed or none."
                )
    salt = hashlib.sha256(b"".join(each.salt for each in sets)).digest()
    return TokenBank(classifier, [each.tokens for each in sets], placement=sets[0].placement, salt=salt)


def read_tokens(path: str | Path, *, allow_readable: bool = False) -> TokenFile:
    """Read a token file and check it for damage, without running code."""
    about, weights = _FILE.unpack(path, read_secret(path, allow_readable))
    with _FILE.reading(path):
        file = TokenFile(
            tokens=weights[_TENSOR],
            salt=bytes.fromhex(about["salt"]),
            fingerprint=str(about["fingerprint"]),
            placement=str(about["placement"]),
            settings=dict(about["settings"]),
            about=about,
        )
        shape = (int(about["count"]), int(about["width"]))
    if not file.salt or file.tokens.dtype != torch.float32 or tuple(file.tokens.shape) != shape:
        raise _FILE.damaged(path, "its tokens do not match its description")
    if fingerprint(token_bytes(file.tokens), file.salt) != file.fingerprint:
        raise _FILE.damaged(path, "its tokens do not match its fingerprint")
    return file
