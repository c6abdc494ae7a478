"""Linear probes on frozen features as in DINOv2 (Oquab et al., 2023): train many heads at once and keep the best.

Heads differ in their inputs (class tokens of the last n blocks, with or without the mean of the last block's patch
tokens) and in their learning rate. They see the same batches. The best is chosen on held-out training images; choosing
on the test set, as the released code does, would bias the results.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.adapters.adapter_file import backbone_fingerprint
from vitadel.backbones.checkpoints import read_checkpoint, read_metadata
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.record import ModelRecord
from vitadel.data.batches import Preprocess, read_batches
from vitadel.errors import UserError
from vitadel.heads.frozen_features import BlockTokens, feature_width, token_features
from vitadel.instrument.hooks import frozen
from vitadel.runtime.progress import progress
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.run_folder import write_atomically
from vitadel.runtime.safe_reading import parse_json_object
from vitadel.training.recipes.probe_sections import HeadTraining, LinearHead
from vitadel.types import Source

_LR_REFERENCE_BATCH = 256
_MOMENTUM = 0.9
HEAD_FILE = Path("weights") / "head.safetensors"
"""Where the run folder of a probe has its head."""
_METADATA_KEY = "vitadel-probe"
_SCHEMA = 1


@dataclass(frozen=True)
class HeadSetting:
    """Inputs, class tokens of the last `blocks` blocks and with `average` the mean patch token, and learning rate."""

    blocks: int
    average: bool
    rate: float


@dataclass(frozen=True)
class HeadResult:
    """The result of a head on the held-out images; `loss` is infinite for one that diverged."""

    setting: HeadSetting
    correct: int
    n: int
    loss: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.n


@dataclass(frozen=True)
class ProbeReport:
    """The chosen setting and every head's held-out result; the chosen one's, the best of many, is optimistic."""

    chosen: HeadSetting
    heads: tuple[HeadResult, ...]
    trained_on: int
    cache_bytes: int


@dataclass(frozen=True, eq=False)
class Features:
    """Features of each image: class tokens of the last blocks in order, then the mean patch token."""

    tokens: Tensor  # (images, blocks + 1, dim)
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def width(self) -> int:
        return self.tokens.shape[2]

    def batch(self, chosen: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Tokens in float32 and labels of the images at these places; the same in every step."""
        return self.tokens[chosen].float(), self.labels[chosen]


class FeatureBatches(Protocol):
    """Where heads get features from: kept ones (`Features`), or those of random views (`random_views`)."""

    def __len__(self) -> int: ...

    @property
    def width(self) -> int: ...

    def batch(self, chosen: Tensor, step: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False)
class Heads:
    """Linear heads with the same inputs, one per rate, as one batched layer."""

    blocks: int
    average: bool
    rates: tuple[float, ...]
    weight: Tensor  # (heads, classes, inputs)
    bias: Tensor  # (heads, classes)

    def logits(self, tokens: Tensor) -> Tensor:
        """(images, heads, classes) from the tokens of `Features`."""
        return torch.einsum("bf,kcf->bkc", _inputs(tokens, self.blocks, self.average), self.weight) + self.bias


class Probe(nn.Module):
    """Pixels in [0, 1] to logits: a model and a linear head on its frozen features.

    Works with any attack, and with an audit if the model is a classifier; others need `vitadel.wrap`. Gradients reach
    the pixels through the model; its mode and parameters are left to the caller.
    """

    def __init__(
        self, model: nn.Module, head: nn.Linear, blocks: int, average: bool, classes: Sequence[str] = ()
    ) -> None:
        super().__init__()
        wanted = (blocks + average) * feature_width(model)
        if head.in_features != wanted:
            raise UserError(
                f"a head for {head.in_features} inputs does not fit this model: {_inputs_text(blocks, average)} are "
                f"{wanted}. Give the model it was trained on."
            )
        # The head first: pixels are passed in the precision of the first parameter, and the model may be in half.
        self.head = head.train(model.training)
        self.model = model
        self.blocks = blocks
        self.average = average
        self.classes = tuple(classes)
        self.num_classes = head.out_features
        self.training = model.training

    @property
    def record(self) -> ModelRecord | None:
        """The model's, with the classes of the head; None if the model has none."""
        record = _record_of(self.model)
        if record is None:
            return None
        notes = record.notes | {"head": f"linear, on {_inputs_text(self.blocks, self.average)}"}
        return replace(record, num_classes=self.num_classes, notes=notes, classes=None, classes_from=None)

    def forward(self, x: Tensor) -> Tensor:
        tokens = stacked(token_features(self.model, x, self.blocks))
        logits: Tensor = self.head(_inputs(tokens, self.blocks, self.average).to(self.head.weight.dtype))
        return logits


def train_probe(
    model: nn.Module,
    source: Source,
    rows: Tensor,
    held_out_rows: Tensor,
    preprocess: Preprocess,
    section: LinearHead,
    training: HeadTraining,
    *,
    device: torch.device | str = "cpu",
    shown: bool = False,
    views: FeatureBatches | None = None,
) -> tuple[Probe, ProbeReport]:
    """Train a head for every combination of `blocks`, `average` and `lrs` on `rows`; choose on `held_out_rows`.

    With `views`, features of random views of `rows`, these are used. Without, features are computed once per image and
    kept in main memory: images * (n + 1) * dim * 4
    bytes (2 with `half`) for n = max(blocks); 50,000 images on a ViT-B with n = 4 take 0.77 GB. Ties in accuracy go to
    the lower held-out loss. The model must be on `device` already. With `shown`, progress is printed on standard error.
    """
    rates, batch_size = section.lrs, training.batch_size
    settings = [(count, mean) for count in section.blocks for mean in section.average]

    def kept(each: Tensor) -> Features:
        blocks = max(section.blocks)
        return cached_features(model, source, each, preprocess, blocks, batch_size, device, section.half, shown)

    held_out = kept(held_out_rows)
    train = kept(rows) if views is None else views
    classes = len(source.classes)
    trained = train_heads(train, classes, settings, rates, **asdict(training), device=device, shown=shown)
    results = [result for heads in trained for result in _evaluate(heads, held_out, batch_size)]
    best = min(range(len(results)), key=lambda place: (-results[place].correct, results[place].loss))
    heads, number = trained[best // len(rates)], best % len(rates)
    head = linear_layer(heads.weight[number], heads.bias[number])
    probe = Probe(model, head, heads.blocks, heads.average, source.classes)
    cache_bytes = held_out.tokens.nbytes + (train.tokens.nbytes if isinstance(train, Features) else 0)
    return probe, ProbeReport(results[best].setting, tuple(results), len(train), cache_bytes)


def cached_features(
    model: nn.Module,
    source: Source,
    rows: Tensor,
    preprocess: Preprocess,
    blocks: int,
    batch_size: int = 128,
    device: torch.device | str = "cpu",
    half: bool = False,
    shown: bool = False,
) -> Features:
    """Features of the images at `rows`, in main memory; the model runs in eval mode and is restored."""
    dtype = torch.float16 if half else torch.float32
    tokens = torch.empty(len(rows), blocks + 1, feature_width(model), dtype=dtype)
    labels, first = torch.empty(len(rows), dtype=torch.int64), 0
    with frozen(model), torch.no_grad(), progress("features", len(rows), shown) as meter:
        for batch in read_batches(source, [part.tolist() for part in rows.split(batch_size)], preprocess):
            there = slice(first, first + len(batch.y))
            tokens[there] = stacked(token_features(model, batch.x.to(device), blocks)).cpu().to(dtype)
            labels[there] = batch.y
            first = there.stop
            meter.advance(len(batch.y))
    if not bool(tokens.isfinite().all()):
        advice = "Keep them with half=False." if half else "Check the model's weights and precision."
        raise UserError(f"some features are NaN or infinite. {advice}")
    return Features(tokens, labels)


def train_heads(
    features: FeatureBatches,
    classes: int,
    settings: Sequence[tuple[int, bool]],
    rates: Sequence[float],
    *,
    steps: int,
    batch_size: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
    shown: bool = False,
) -> list[Heads]:
    """One `Heads` per setting (blocks, average), trained by SGD with momentum 0.9, no decay and a cosine to 0.

    A head does not depend on which others are trained beside it: all rates of a setting start from the same weights,
    N(0, 0.01) with bias 0, and all heads see the same batches, permutation after permutation.
    """
    width, start = features.width, SampleRNG.of_samples(seed, range(classes)).stream("probe")
    trained = []
    for blocks, average in settings:
        weight = 0.01 * start.stream("head", blocks, int(average)).normal((blocks + average) * width)
        weight = weight.repeat(len(rates), 1, 1).to(device)
        trained.append(Heads(blocks, average, tuple(rates), weight, weight.new_zeros(len(rates), classes)))
    speeds = [(torch.zeros_like(heads.weight), torch.zeros_like(heads.bias)) for heads in trained]
    rate = torch.tensor(rates, device=device) * (batch_size / _LR_REFERENCE_BATCH)
    with progress("heads", steps, shown) as meter:
        for step, chosen in enumerate(_order(len(features), steps * batch_size, seed).split(batch_size)):
            tokens, labels = (part.to(device) for part in features.batch(chosen, step))
            now = rate * (0.5 * (1 + math.cos(math.pi * step / steps)))
            for heads, (speed, bias_speed) in zip(trained, speeds, strict=True):
                grad, bias_grad = _gradient(heads, tokens, labels)
                heads.weight.sub_(now[:, None, None] * speed.mul_(_MOMENTUM).add_(grad))
                heads.bias.sub_(now[:, None] * bias_speed.mul_(_MOMENTUM).add_(bias_grad))
            meter.advance(1)
    return trained


def stacked(tokens: Sequence[BlockTokens]) -> Tensor:
    """(batch, blocks + 1, dim), as `Features` keeps them."""
    return torch.stack([*(each.class_token for each in tokens), tokens[-1].patch_tokens.mean(1)], dim=1)


def _inputs(tokens: Tensor, blocks: int, average: bool) -> Tensor:
    """The last class tokens, followed by the mean patch token with `average`."""
    mean = tokens.shape[1] - 1
    return tokens[:, mean - blocks : mean + average].flatten(1)


def _inputs_text(blocks: int, average: bool) -> str:
    return f"{blocks} class tokens{' and the mean patch token' if average else ''}"


def _gradient(heads: Heads, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of every head's mean cross-entropy: softmax minus one-hot label, times inputs."""
    logits = heads.logits(tokens)
    error = logits.softmax(2) - F.one_hot(labels, logits.shape[2]).to(logits)[:, None]
    error = error / len(labels)
    return torch.einsum("bkc,bf->kcf", error, _inputs(tokens, heads.blocks, heads.average)), error.sum(0)


def _order(count: int, wanted: int, seed: int) -> Tensor:
    """Positions, one random permutation after another, so that all images occur equally often."""
    rounds = SampleRNG.of_samples(seed, range(-(-wanted // count))).stream("probe order")
    return rounds.permutation(count).flatten()[:wanted]


def _evaluate(heads: Heads, held_out: Features, batch_size: int) -> list[HeadResult]:
    correct = torch.zeros(len(heads.rates), dtype=torch.int64)
    loss = torch.zeros(len(heads.rates), dtype=torch.float64)
    for tokens, labels in zip(held_out.tokens.split(batch_size), held_out.labels.split(batch_size), strict=True):
        logits = heads.logits(tokens.to(heads.weight.device).float()).cpu()
        truth = labels[:, None].expand(-1, logits.shape[1])
        correct += ((logits.argmax(2) == truth) & logits.isfinite().all(2)).sum(0)
        loss += F.cross_entropy(logits.double().mT, truth, reduction="none").sum(0)
    loss = (loss / len(held_out)).nan_to_num(nan=math.inf, posinf=math.inf)
    return [
        HeadResult(HeadSetting(heads.blocks, heads.average, rate), int(hits), len(held_out), float(mean))
        for rate, hits, mean in zip(heads.rates, correct, loss, strict=True)
    ]


def linear_layer(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A layer with copies of these parameters."""
    head = nn.Linear(weight.shape[1], weight.shape[0], device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    return head


def _record_of(model: nn.Module) -> ModelRecord | None:
    """The record of the classifier inside, if there is one."""
    records = (getattr(module, "record", None) for module in model.modules())
    return next((record for record in records if isinstance(record, ModelRecord)), None)


# Files of heads


def save_head(probe: Probe, path: str | Path, more: Mapping[str, Any] | None = None) -> None:
    """Write the head as safetensors, with its model's name and `more` in the metadata; the model is not written."""
    about = {
        **(more or {}),
        "schema": _SCHEMA,
        "model": _record_name(probe.model),
        "blocks": probe.blocks,
        "average": probe.average,
        "classes": list(probe.classes),
    }
    weights = {key: value.detach().cpu().contiguous() for key, value in probe.head.state_dict().items()}
    write_atomically(Path(path), safetensors.torch.save(weights, metadata={_METADATA_KEY: json.dumps(about)}))


def head_metadata(path: str | Path) -> dict[str, Any]:
    """The metadata that `save_head` wrote."""
    text = read_metadata(path).get(_METADATA_KEY)
    if text is None:
        raise UserError(
            f"'{path}' is not the head of a probe. Give the weights/head.safetensors of a run of `vitadel probe` (in "
            "Python: a file written by save_head)."
        )
    return parse_json_object(text, f"'{path}', the head of a probe,")


def load_head(path: str | Path, model: nn.Module) -> Probe:
    """Load the head of `save_head` for `model`, on its device; refused if the model has another name or width.

    `path` is the file, or the run folder of `vitadel probe` that it is in. A model has the same name with and without
    extra tokens: an attacker may use the defender's head.
    """
    path = _head_file(Path(path))
    checkpoint, about = read_checkpoint(path), head_metadata(path)
    try:
        schema, trained_for = about["schema"], about["model"]
        blocks, average = int(about["blocks"]), bool(about["average"])
        head = linear_layer(checkpoint.weights["weight"], checkpoint.weights["bias"])
        classes = [str(name) for name in about["classes"]]
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise UserError(f"'{path}' is a damaged head of a probe ({error!r}). Train and save it again.") from error
    if schema != _SCHEMA:
        raise UserError(f"'{path}' is a head of schema {schema}, this version reads {_SCHEMA}. Update vitadel.")
    here = _record_name(model)
    trained_on, bare = about.get("backbone_fingerprint"), getattr(model, "classifier", model)
    if trained_on is not None and isinstance(bare, Classifier):  # names of the same weights may differ, e.g. by a tag
        if trained_on != backbone_fingerprint(bare):
            raise UserError(
                f"'{path}' is a head for other weights, of '{trained_for}'; the model is '{here}'. Give the model it "
                "was trained on."
            )
    elif trained_for is not None and here is not None and trained_for != here:
        raise UserError(
            f"'{path}' is a head for '{trained_for}', the model is '{here}'. Give the model it was trained on."
        )
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return Probe(model, head.to(device), blocks, average, classes)


def _head_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    if (path / HEAD_FILE).is_file():
        return path / HEAD_FILE
    raise UserError(
        f"the folder '{path}' has no {HEAD_FILE}: it is no run of `vitadel probe`, or the run has not trained its head "
        "yet. Give a finished run of a linear probe, or a head file."
    )


def _record_name(model: nn.Module) -> str | None:
    record = _record_of(model)
    return None if record is None else record.name
