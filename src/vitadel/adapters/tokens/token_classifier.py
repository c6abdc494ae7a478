"""Robustness Tokens (Pulfer et al., ECCV 2024): a few secret tokens beside those of a frozen, public backbone."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from vitadel.backbones.classifier import Classifier
from vitadel.backbones.record import ModelRecord
from vitadel.errors import UserError
from vitadel.instrument.tokens import check_layers, check_placement, extra_tokens, token_width
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.secrets import fingerprint

_SALT = 16  # bytes


def fresh_tokens(width: int, count: int, scale: float = 0.01, seed: int = 0) -> Tensor:
    """Initial tokens: `scale` times normal numbers, (count, width); a longer set begins with a shorter one.

    The released code starts at 0.01, the paper's text at 1. The first block normalizes its input, so the scale hardly
    changes the effect of the tokens, but it sets how far an optimizer step turns them. The seed is part of the secret.
    """
    _check_count(count)
    if width < 1:
        raise UserError(f"tokens need a width of at least 1, got {width}; use `token_width(model)`.")
    if not math.isfinite(scale) or scale < 0:
        raise UserError(f"the scale of fresh tokens must be finite and at least 0, got {scale}; try 0.01.")
    return scale * SampleRNG.of_samples(seed, range(count)).stream("robustness tokens").normal(width)


class _WithTokens(nn.Module):
    """A frozen classifier in eval mode, with a secret that has a salted fingerprint."""

    def __init__(self, classifier: Classifier, placement: str, layers: tuple[int, ...], salt: bytes | None) -> None:
        super().__init__()
        self.classifier = classifier.requires_grad_(False).eval()
        self.placement = placement
        self.layers = layers
        self.salt = secrets.token_bytes(_SALT) if salt is None else salt

    @property
    def secret(self) -> Tensor:
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """Identifies the current tokens in run folders and reports."""
        return fingerprint(token_bytes(self.secret), self.salt)

    @property
    def token_sets(self) -> int:
        """How many sets of tokens it has: one, or those of a bank."""
        return 1 if self.secret.dim() == 2 else len(self.secret)

    def _record(self, what: str) -> ModelRecord:
        where = self.placement if self.layers == (0,) else f"{self.placement}, blocks {list(self.layers)}"
        record, note = self.classifier.record, f"{what} ({where}), fingerprint {self.fingerprint}"
        return replace(record, notes=record.notes | {"tokens": note})

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.classifier.eval()
        return self


class TokenClassifier(_WithTokens):
    """A classifier that runs with `tokens`, (R, width), its only trainable parameters; as in the paper they join before
    the first block, or in equal shares before the blocks `layers`.

    The given classifier itself is used: its parameters are frozen and it stays in eval mode, so that dropout adds no
    noise to the training of the tokens; gradients still reach images and tokens. With `enabled` off, outputs are those
    of the classifier, bit for bit.

    The tokens are a secret: neither `repr` nor `state_dict` contains them. Read them as `tokens` and save them with
    `token_files`; a strict `load_state_dict` reports them as missing.
    """

    def __init__(
        self,
        classifier: Classifier,
        tokens: Tensor,
        *,
        placement: str = "prefix",
        layers: Sequence[int] = (0,),
        enabled: bool = True,
        salt: bytes | None = None,
    ) -> None:
        _check_tokens(classifier, tokens)
        check_placement(classifier, placement)
        super().__init__(classifier, placement, check_layers(classifier, layers, len(tokens)), salt)
        self.tokens = nn.Parameter(tokens.detach().clone())
        self.enabled = enabled
        register: Any = self.register_state_dict_post_hook  # untyped in torch
        register(_drop_tokens)

    @property
    def secret(self) -> Tensor:
        return self.tokens

    @property
    def record(self) -> ModelRecord:
        """The classifier's record, with a note on the tokens if they are enabled."""
        return self._record(f"{len(self.tokens)} robustness tokens") if self.enabled else self.classifier.record

    def forward(self, x: Tensor) -> Tensor:
        if self.enabled:
            return _run(self.classifier, self.tokens, self.placement, self.layers, x)
        logits: Tensor = self.classifier(x)
        return logits

    def extra_repr(self) -> str:
        return f"tokens={len(self.tokens)}, fingerprint={self.fingerprint}, enabled={self.enabled}"


class TokenBank(_WithTokens):
    """A classifier with several sets of tokens, one of which is drawn for each image of each call.

    The draw cannot be predicted from any public seed: a key from the operating system (or from `generator`, to repeat
    a test) and a number of torch's global generator determine it. The latter makes gradient checkpointing, which runs
    a pass twice, use the same tokens in both runs.
    """

    sets: Tensor

    def __init__(
        self,
        classifier: Classifier,
        sets: Sequence[Tensor],
        *,
        placement: str = "prefix",
        layers: Sequence[int] = (0,),
        generator: torch.Generator | None = None,
        salt: bytes | None = None,
    ) -> None:
        if len(sets) < 2:
            raise UserError(
                f"a bank draws from at least 2 sets of tokens, got {len(sets)}; use TokenClassifier for one."
            )
        for tokens in sets:
            _check_tokens(classifier, tokens)
        counts = sorted({len(tokens) for tokens in sets})
        if len(counts) > 1:
            raise UserError(
                f"the sets of a bank must have the same number of tokens, got {', '.join(map(str, counts))}."
            )
        check_placement(classifier, placement)
        super().__init__(classifier, placement, check_layers(classifier, layers, counts[0]), salt)
        self.register_buffer("sets", torch.stack([tokens.detach() for tokens in sets]), persistent=False)
        self._key = secrets.token_bytes(_SALT) if generator is None else _bytes_of(generator)

    @property
    def secret(self) -> Tensor:
        return self.sets

    @property
    def record(self) -> ModelRecord:
        """The classifier's record, with a note on the bank."""
        sets, count, _ = self.sets.shape
        return self._record(f"bank of {sets} sets of {count} robustness tokens")

    def forward(self, x: Tensor) -> Tensor:
        chosen = _draw(self._key, len(self.sets), len(x)).to(self.sets.device)
        return _run(self.classifier, self.sets[chosen], self.placement, self.layers, x)

    def extra_repr(self) -> str:
        return f"sets={len(self.sets)}, tokens={self.sets.shape[1]}, fingerprint={self.fingerprint}"


def with_one_set(model: nn.Module, refusal: str) -> TokenClassifier | None:
    """The model itself if it has one set of tokens, None if it has none; of several, refuse them with this message."""
    sets = getattr(model, "token_sets", 0)
    if sets > 1:
        raise UserError(refusal)
    return cast(TokenClassifier, model) if sets else None


def token_bytes(tokens: Tensor) -> bytes:
    """The input of a fingerprint: shape and float32 values, independent of device and precision."""
    values = tokens.detach().to("cpu", torch.float32).contiguous()
    return repr(tuple(values.shape)).encode() + values.numpy().tobytes()


def _run_with_tokens(
    classifier: Classifier, tokens: Tensor, placement: str, layers: tuple[int, ...], x: Tensor
) -> Tensor:
    with extra_tokens(classifier, tokens, placement=placement, layers=layers):
        logits: Tensor = classifier(x)
    return logits


def _draw_sets(key: bytes, below: int, count: int) -> Tensor:
    """`count` numbers below `below`, determined by the key and the state of torch's global generator."""
    turn = int(torch.randint(2**62, (), device="cpu"))
    seed = hashlib.blake2b(turn.to_bytes(8, "little"), key=key, digest_size=7).digest()
    source = torch.Generator().manual_seed(int.from_bytes(seed, "little"))
    return torch.randint(below, (count,), generator=source, device="cpu")


# Never compiled: hooks change at run time, and a draw must not become a constant.
_run: Callable[[Classifier, Tensor, str, tuple[int, ...], Tensor], Tensor] = torch.compiler.disable(_run_with_tokens)
_draw: Callable[[bytes, int, int], Tensor] = torch.compiler.disable(_draw_sets)


def _drop_tokens(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    state.pop(f"{prefix}tokens", None)


def _bytes_of(generator: torch.Generator) -> bytes:
    return bytes(torch.randint(256, (_SALT,), generator=generator, device=generator.device).tolist())


def _check_count(count: int) -> None:
    if count < 1:
        raise UserError(
            f"robustness tokens need a count of at least 1, got {count}; the paper uses 10. For none, use the "
            "plain classifier, or TokenClassifier with enabled=False."
        )


def _check_tokens(classifier: Classifier, tokens: Tensor) -> None:
    if not isinstance(classifier, Classifier):
        raise UserError(
            f"robustness tokens need a Classifier, got {type(classifier).__name__}. Load the model with `load_model`, "
            "or convert it with `wrap`."
        )
    width = token_width(classifier)
    if tokens.dim() != 2 or tokens.shape[1] != width:
        raise UserError(
            f"robustness tokens of shape {tuple(tokens.shape)} do not fit '{classifier.record.name}', whose tokens "
            f"are {width} wide: give (R, {width}), such as fresh_tokens({width}, 10)."
        )
    _check_count(len(tokens))
    if not tokens.is_floating_point() or not bool(tokens.isfinite().all()):
        raise UserError(
            "robustness tokens must be finite floating-point numbers; the training that made these diverged, or they "
            "are damaged. Train them again, with a smaller learning rate."
        )
