"""Robustness tokens on disk: alone, as safetensors, for their owner's eyes only, and tied to the backbone they fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from vitadel.adapters.tokens.token_classifier import TokenBank, TokenClassifier, token_bytes
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError
from vitadel.instrument.tokens import token_width
from vitadel.runtime.secrets import fingerprint, read_secret, write_secret

__all__ = [
    "TokenFile",
    "backbone_fingerprint",
    "fingerprint_of",
    "load_bank",
    "load_tokens",
    "read_tokens",
    "save_tokens",
]

_METADATA_KEY = "vitadel_tokens"
_TENSOR = "tokens"
_SCHEMA = 1
_SIZED = "pos_embed"  # resampled for other image sizes
_HEADS = ("head.", "head_dist.")  # tokens are gone before them, and downstream tasks bring their own


@dataclass(frozen=True)
class TokenFile:
    """What a token file holds. `settings` are those the tokens were trained with, as they were given."""

    tokens: Tensor = field(repr=False)
    salt: bytes = field(repr=False)
    fingerprint: str
    placement: str
    backbone: str
    backbone_fingerprint: str
    settings: Mapping[str, Any]


def save_tokens(tokened: TokenClassifier, path: str | Path, settings: Mapping[str, Any]) -> None:
    """Write the tokens, and nothing of the backbone, as a file of mode 0600; `settings` must be plain values."""
    tokens = tokened.tokens.detach().to("cpu", torch.float32).contiguous()
    if not bool(tokens.isfinite().all()):
        raise UserError("the tokens hold NaN or infinite values: their training diverged. Nothing was written.")
    about = {
        "schema": _SCHEMA,
        "backbone": tokened.classifier.record.name,
        "backbone_fingerprint": backbone_fingerprint(tokened.classifier),
        "count": tokens.shape[0],
        "width": tokens.shape[1],
        "placement": tokened.placement,
        "salt": tokened.salt.hex(),
        "fingerprint": fingerprint(token_bytes(tokens), tokened.salt),
        "settings": dict(settings),
    }
    try:
        text = json.dumps(about, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the settings of the tokens cannot be written: {error}. Use plain numbers and texts."
        ) from error
    write_secret(path, safetensors.torch.save({_TENSOR: tokens}, metadata={_METADATA_KEY: text}))


def load_tokens(path: str | Path, classifier: Classifier, *, allow_readable: bool = False) -> TokenClassifier:
    """The classifier with the tokens of a file, if they were trained for its backbone.

    The backbone may have another image size, and the classifier another head. `allow_readable` takes a file that
    others can read, too.
    """
    file = read_tokens(path, allow_readable=allow_readable)
    width = token_width(classifier)
    if file.tokens.shape[1] != width:
        name = classifier.record.name
        same = " (of the same name, built otherwise)" if name == file.backbone else ""
        raise UserError(
            f"'{path}' holds tokens {file.tokens.shape[1]} wide, made for '{file.backbone}'; those of '{name}' are "
            f"{width} wide{same}. Load the backbone they were made for."
        )
    if file.backbone_fingerprint != backbone_fingerprint(classifier):
        raise UserError(
            f"'{path}' holds tokens made for other weights, those of '{file.backbone}'; this is "
            f"'{classifier.record.name}'. Load that backbone with the same weights in the same precision (only image "
            "size and head may differ), or train tokens for this one."
        )
    return TokenClassifier(classifier, file.tokens, placement=file.placement, salt=file.salt)


def load_bank(paths: Sequence[str | Path], classifier: Classifier, *, allow_readable: bool = False) -> TokenBank:
    """The classifier with the tokens of several files, one of which is drawn for each image of each call.

    The same files in the same order have the same fingerprint every time.
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
    """A token file by itself, checked for damage; nothing in it is run."""
    content = read_secret(path, allow_readable)
    about = _about(path, content)
    try:
        tokens = safetensors.torch.load(content)[_TENSOR]
        file = TokenFile(
            tokens=tokens,
            salt=bytes.fromhex(about["salt"]),
            fingerprint=str(about["fingerprint"]),
            placement=str(about["placement"]),
            backbone=str(about["backbone"]),
            backbone_fingerprint=str(about["backbone_fingerprint"]),
            settings=dict(about["settings"]),
        )
        shape = (int(about["count"]), int(about["width"]))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if not file.salt or tokens.dtype != torch.float32 or tuple(tokens.shape) != shape:
        raise _damaged(path, "what it says of its tokens is not what it holds")
    if fingerprint(token_bytes(tokens), file.salt) != file.fingerprint:
        raise _damaged(path, "its tokens do not have the fingerprint that it names")
    return file


def fingerprint_of(tokens: TokenClassifier | TokenBank | str | Path, *, allow_readable: bool = False) -> str:
    """How run folders and reports name tokens, in memory or in a file: a salted hash, the same before and after."""
    if isinstance(tokens, TokenClassifier | TokenBank):
        return tokens.fingerprint
    return read_tokens(tokens, allow_readable=allow_readable).fingerprint


def backbone_fingerprint(classifier: Classifier) -> str:
    """Names the weights that tokens pass by: all but the head's, and but positions, which other sizes resample."""
    digest = hashlib.sha256()
    for name, tensor in sorted(classifier.backbone.state_dict().items()):
        if name.startswith(_HEADS) or name.rpartition(".")[2] == _SIZED:
            continue
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _about(path: str | Path, content: bytes) -> dict[str, Any]:
    """The file's own words. Read from the content at hand: a second look at the path might meet another file."""
    try:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        text = header.get("__metadata__", {}).get(_METADATA_KEY)
        about = None if text is None else json.loads(text)
        schema = None if about is None else about["schema"]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise _damaged(path, f"{type(error).__name__} in its header") from error
    if about is None:
        raise UserError(
            f"'{path}' is a safetensors file without robustness tokens. Give one that vitadel wrote for tokens."
        )
    if schema != _SCHEMA:
        raise UserError(f"'{path}' has token schema {schema}, this version reads {_SCHEMA}. Update vitadel.")
    assert isinstance(about, dict)
    return about


def _damaged(path: str | Path, reason: str) -> UserError:
    return UserError(
        f"'{path}' cannot be read as a file of robustness tokens: {reason}. It is damaged, cut short, or of another "
        "kind. Copy it again from where it was saved."
    )
