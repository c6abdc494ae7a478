"""Robustness tokens on disk: safetensors readable by the owner only, tied to the backbone they were trained for."""

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
from vitadel.backbones.checkpoints import metadata_in, tensor_hash
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
_HEADS = ("head.", "head_dist.")  # tokens are dropped before them, and downstream tasks replace them


@dataclass(frozen=True)
class TokenFile:
    """The content of a token file. `settings` are those of the training, as they were given."""

    tokens: Tensor = field(repr=False)
    salt: bytes = field(repr=False)
    fingerprint: str
    placement: str
    backbone: str
    backbone_fingerprint: str
    settings: Mapping[str, Any]


def save_tokens(tokened: TokenClassifier, path: str | Path, settings: Mapping[str, Any]) -> None:
    """Write the tokens, without the backbone, to a file of mode 0600; `settings` must be plain values."""
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
            f"the settings of the tokens cannot be written: {error}. Use plain numbers and strings."
        ) from error
    write_secret(path, safetensors.torch.save({_TENSOR: tokens}, metadata={_METADATA_KEY: text}))


def load_tokens(path: str | Path, classifier: Classifier, *, allow_readable: bool = False) -> TokenClassifier:
    """Add the tokens of a file to the classifier; they must have been trained for its backbone.

    Image size and head may differ. `allow_readable` also accepts a file that other users can read.
    """
    file = read_tokens(path, allow_readable=allow_readable)
    width = token_width(classifier)
    if file.tokens.shape[1] != width:
        name = classifier.record.name
        same = " (same name, other arguments)" if name == file.backbone else ""
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
        raise _damaged(path, "its tokens do not match its description")
    if fingerprint(token_bytes(tokens), file.salt) != file.fingerprint:
        raise _damaged(path, "its tokens do not match its fingerprint")
    return file


def fingerprint_of(tokens: TokenClassifier | TokenBank | str | Path, *, allow_readable: bool = False) -> str:
    """The salted hash that identifies tokens, in memory or in a file, in run folders and reports."""
    if isinstance(tokens, TokenClassifier | TokenBank):
        return tokens.fingerprint
    return read_tokens(tokens, allow_readable=allow_readable).fingerprint


def backbone_fingerprint(classifier: Classifier) -> str:
    """A hash of the weights that tokens interact with: all except the head and position embeddings."""
    weights = classifier.backbone.state_dict().items()
    return tensor_hash({k: v for k, v in weights if not k.startswith(_HEADS) and k.rpartition(".")[2] != _SIZED})


def _about(path: str | Path, content: bytes) -> dict[str, Any]:
    """The file's description. Parsed from the bytes at hand, as the file may change between two reads."""
    try:
        text = metadata_in(content).get(_METADATA_KEY)
        about: dict[str, Any] | None = None if text is None else dict(json.loads(text))
        schema = None if about is None else about["schema"]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise _damaged(path, f"{type(error).__name__} in its header") from error
    if about is None:
        raise UserError(
            f"'{path}' is a safetensors file without robustness tokens. Give one that vitadel wrote for tokens."
        )
    if schema != _SCHEMA:
        raise UserError(f"'{path}' has token schema {schema}, this version reads {_SCHEMA}. Update vitadel.")
    return about


def _damaged(path: str | Path, reason: str) -> UserError:
    return UserError(
        f"'{path}' cannot be read as a file of robustness tokens: {reason}. It is damaged, cut short, or of another "
        "kind. Copy it again from where it was saved."
    )
