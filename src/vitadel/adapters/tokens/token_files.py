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
from vitadel.backbones.torch_files import read_torch_file
from vitadel.errors import UserError
from vitadel.instrument.tokens import token_width
from vitadel.runtime.safe_reading import check_regular_file
from vitadel.runtime.secrets import fingerprint, read_secret, write_secret

_RELEASED = (".pt", ".pth")  # files of the paper's authors
_RELEASED_TENSOR = "rtokens"
_FILE = AdapterFile("a file of robustness tokens", "vitadel_tokens")
_TENSOR = "tokens"


@dataclass(frozen=True)
class TokenFile:
    """The content of a token file. `settings` are those of the training, as they were given."""

    tokens: Tensor = field(repr=False)
    salt: bytes = field(repr=False)
    fingerprint: str
    placement: str
    layers: tuple[int, ...]
    settings: Mapping[str, Any]
    about: Mapping[str, Any] = field(repr=False)


def save_tokens(tokened: TokenClassifier, path: str | Path, settings: Mapping[str, Any]) -> None:
    """Write the tokens, without the backbone, to a file of mode 0600; `settings` must be plain values."""
    tokens = tokened.tokens.detach().to("cpu", torch.float32).contiguous()
    about = {
        "count": tokens.shape[0],
        "placement": tokened.placement,
        "layers": list(tokened.layers),
        "salt": tokened.salt.hex(),
        "fingerprint": fingerprint(token_bytes(tokens), tokened.salt),
        "settings": dict(settings),
    }
    write_secret(path, _FILE.pack({_TENSOR: tokens}, tokened.classifier, tokens.shape[1], about))


def load_tokens(path: str | Path, classifier: Classifier, *, allow_readable: bool = False) -> TokenClassifier:
    """Add the tokens of a file to the classifier; they must have been trained for its backbone.

    Image size and head may differ. `allow_readable` also accepts a file that other users can read. Files that the
    authors of the paper released (.pt) are read, too.
    """
    if Path(path).suffix in _RELEASED:
        return _load_released(Path(path), classifier)
    file = read_tokens(path, allow_readable=allow_readable)
    _FILE.check_backbone(path, file.about, classifier, token_width(classifier))
    return TokenClassifier(classifier, file.tokens, placement=file.placement, layers=file.layers, salt=file.salt)


def _load_released(path: Path, classifier: Classifier) -> TokenClassifier:
    """Tokens of the released code: a dict of torch.save with `rtokens`, (1, R, width), at the end of the sequence.

    They are public, so anyone may read the file. It names no backbone: only the width can be checked.
    """
    check_regular_file(path, "token file")
    found = read_torch_file(path)[0].get(_RELEASED_TENSOR)
    if found is None or found.dim() != 3 or len(found) != 1:
        shape = "has none" if found is None else f"has {tuple(found.shape)}"
        raise UserError(
            f"'{path}' is no token file of the released code: it needs a tensor '{_RELEASED_TENSOR}' of shape (1, "
            f"tokens, width), and {shape}. Give weights/FAMILY/SIZE.pt of that code, or a file that vitadel wrote."
        )
    # Public tokens have no secret to salt: the same file has the same fingerprint everywhere.
    tokens, salt = found[0].float(), hashlib.sha256(_RELEASED_TENSOR.encode()).digest()
    placement = "prefix" if getattr(classifier.backbone, "rope", None) is not None else "append"
    return TokenClassifier(classifier, tokens, placement=placement, salt=salt)


def load_bank(paths: Sequence[str | Path], classifier: Classifier, *, allow_readable: bool = False) -> TokenBank:
    """Add the tokens of several files to the classifier; one set is drawn for each image of each call.

    The same files in the same order have the same fingerprint.
    """
    sets = [load_tokens(path, classifier, allow_readable=allow_readable) for path in paths]
    for number, each in enumerate(sets):
        if (each.placement, each.layers) != (sets[0].placement, sets[0].layers):
            here, there = (f"{one.placement}, layers {list(one.layers)}" for one in (sets[0], each))
            raise UserError(
                f"the sets of a bank must have one placement, but '{paths[0]}' has {here} and '{paths[number]}' "
                f"{there}. Train them by one recipe."
            )
        for before in range(number):
            if torch.equal(each.tokens, sets[before].tokens):
                raise UserError(
                    f"'{paths[before]}' and '{paths[number]}' hold the same tokens: a bank needs different sets. Train "
                    "one of them again, with another seed or none."
                )
    salt = hashlib.sha256(b"".join(each.salt for each in sets)).digest()
    tokens, place = [each.tokens for each in sets], sets[0]
    return TokenBank(classifier, tokens, placement=place.placement, layers=place.layers, salt=salt)


def read_tokens(path: str | Path, *, allow_readable: bool = False) -> TokenFile:
    """Read a token file and check it for damage, without running code."""
    about, weights = _FILE.unpack(path, read_secret(path, allow_readable))
    with _FILE.reading(path):
        file = TokenFile(
            tokens=weights[_TENSOR],
            salt=bytes.fromhex(about["salt"]),
            fingerprint=str(about["fingerprint"]),
            placement=str(about["placement"]),
            layers=tuple(map(int, about.get("layers", (0,)))),  # earlier versions had no other layers
            settings=dict(about["settings"]),
            about=about,
        )
        shape = (int(about["count"]), int(about["width"]))
    if not file.salt or file.tokens.dtype != torch.float32 or tuple(file.tokens.shape) != shape:
        raise _FILE.damaged(path, "its tokens do not match its description")
    if fingerprint(token_bytes(file.tokens), file.salt) != file.fingerprint:
        raise _FILE.damaged(path, "its tokens do not match its fingerprint")
    return file
