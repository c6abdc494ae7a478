"""A classifier maps pixels in [0, 1] to logits, with normalization as its first layer; and checks of both ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from typing import Any, cast

import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn

from vitadel.backbones.anatomy import attentions_of
from vitadel.backbones.attention_hooks import scaled_scores
from vitadel.backbones.record import ModelRecord, three_numbers
from vitadel.errors import UserError


class Classifier(nn.Module):
    """A backbone behind its normalization, so that attacks, budgets and clipping live in [0, 1].

    `mean` and `std` stay in float32 in any precision of the backbone; images are cast to that precision after
    normalization. Half-precision logits are returned as float32, float64 logits as they are. `attention_factors`, if
    the model has any, are part of its state: pre-softmax scores are multiplied by them.
    """

    mean: Tensor
    std: Tensor
    attention_factors: Tensor | None

    def __init__(self, backbone: nn.Module, record: ModelRecord) -> None:
        super().__init__()
        self.backbone = backbone
        self._record = record
        self.training = backbone.training  # .train() would also reset the modes of the backbone's modules
        self.register_buffer("mean", torch.tensor(record.mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(record.std).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("attention_factors", None)
        if record.attention_factors is not None:
            self.set_attention_factors(record.attention_factors)

    @property
    def record(self) -> ModelRecord:
        """How to rebuild this model, with its current attention factors."""
        factors = self.attention_factors
        return self._record if factors is None else replace(self._record, attention_factors=tuple(factors.tolist()))

    def record_training(self, measured: dict[str, Any] | None) -> None:
        """Keep what a training measured on held-out images in the record, which is saved with the weights."""
        self._record = replace(self._record, training=measured)

    def set_attention_factors(self, factors: Sequence[float]) -> None:
        """Set the factors on pre-softmax scores, one per softmax attention in the order of `attentions_of`.

        Existing factors are overwritten in place, so that references to the tensor stay valid.
        """
        count = len(attentions_of(self.backbone))
        values = torch.as_tensor(factors, dtype=torch.float32)
        if values.shape != (count,) or not bool((values.isfinite() & (values > 0)).all()):
            raise UserError(
                f"attention factors must be {count} finite numbers above 0, one per softmax attention of the model, "
                f"got {values.tolist()}."
            )
        if self.attention_factors is None:
            self.attention_factors = values.clone().to(self.mean.device)
        else:
            self.attention_factors.copy_(values)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 4 and len(x) == 0:  # models of transformers cannot take an empty batch
            return self._logits(x.new_zeros(1, *x.shape[1:]))[:0]
        return self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        if x.ndim == 4:
            check_image_size(self.backbone, (x.shape[2], x.shape[3]), self._record.name)
        z = (x - self.mean) / self.std if self._record.normalizes else x
        precision = next((p.dtype for p in self.backbone.parameters() if p.is_floating_point()), z.dtype)
        z, factors = z.to(precision), self.attention_factors
        with self._redirect_prints():
            logits = logits_of(self.backbone(z) if factors is None else _run_scaled(self.backbone, z, factors))
        return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits

    def _redirect_prints(self) -> AbstractContextManager[object]:
        """Send what the user's code prints to stderr, away from our results."""
        theirs = not self._record.can_be_rebuilt and not torch.compiler.is_compiling()
        return redirect_stdout(sys.stderr) if theirs else nullcontext()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Classifier:
        """Move as any module does, but never round the normalization: .bfloat16() would shift every pixel."""
        move: Any = super()._apply  # untyped in torch
        factors = self.attention_factors
        move(fn, recurse)
        for name, numbers in (("mean", self._record.mean), ("std", self._record.std)):
            moved: Tensor = getattr(self, name)
            setattr(self, name, torch.tensor(numbers, device=moved.device).view(1, 3, 1, 1))
        if factors is not None:
            self.attention_factors = factors.to(self.mean.device)
        return self


def _scaled(backbone: nn.Module, z: Tensor, factors: Tensor) -> object:
    with scaled_scores(backbone, factors):
        return backbone(z)


# Never compiled: the hooks intercept torch's calls at run time.
_run_scaled: Callable[[nn.Module, Tensor, Tensor], object] = torch.compiler.disable(_scaled)


def logits_of(output: object) -> Tensor:
    """The logits in what a model returned: a tensor, `.logits`, a dict with 'logits', or the first of a tuple."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor):
        return torch.as_tensor(output["logits"])
    found: Any = getattr(output, "logits", None)
    if isinstance(found, Tensor):
        return found
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        return output[0]
    if isinstance(output, Mapping):
        found_text = f"a dict with keys {', '.join(map(repr, list(output)[:5])) or 'none'}"
    elif isinstance(output, list | tuple):
        found_text = (
            f"a {type(output).__name__} of {', '.join(type(part).__name__ for part in output[:5]) or 'nothing'}"
        )
    else:
        found_text = type(output).__name__
    raise UserError(
        f"the model returned {found_text}; logits are expected: a tensor, an object with `.logits`, "
        "a dict with 'logits', or a tuple whose first entry is a tensor. Wrap the model in a module that returns them."
    )


def wrap(
    module: nn.Module,
    mean: Sequence[float] = (0.0, 0.0, 0.0),
    std: Sequence[float] = (1.0, 1.0, 1.0),
    input_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    crop_pct: float = 1.0,
    interpolation: str = "bicubic",
) -> Classifier:
    """Make any module a classifier on pixels in [0, 1]. Without mean and std the module gets the pixels as they are.

    Images of another size than `input_size` are resized to `input_size / crop_pct`, then cropped at the center.
    """
    if not isinstance(module, nn.Module):
        raise UserError(
            f"wrap takes an nn.Module, got {type(module).__name__}. Put a plain function into a module first."
        )
    if type(module).__module__.partition(".")[0] == "open_clip":
        raise UserError(
            f"{type(module).__name__} of open_clip gives features of images, not logits. Wrap a module that compares "
            "them with the features of your class prompts: scale * image_features @ text_features.T."
        )
    normalization = (three_numbers(mean, "mean"), three_numbers(std, "std"))
    if isinstance(module, Classifier):
        if normalization != ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)):
            raise UserError("the model is a Classifier already and normalizes itself; wrap its `.backbone` instead.")
        return module
    record = ModelRecord(
        name="wrapped",
        num_classes=num_classes if num_classes is not None else _announced_classes(module),
        mean=normalization[0],
        std=normalization[1],
        input_size=(input_size, input_size) if isinstance(input_size, int) else input_size,
        crop_pct=crop_pct,
        interpolation=interpolation,
        notes=_normalization_note(module, *normalization),
    )
    return Classifier(module, with_class_names(module, record))


_FEWEST_OF_IMAGENET = 1000


def with_class_names(backbone: nn.Module, record: ModelRecord) -> ModelRecord:
    """The record with the names of the outputs, where the module or its size says them."""
    may_know = hasattr(backbone, "config") or (record.num_classes or 0) >= _FEWEST_OF_IMAGENET
    if record.classes is not None or not may_know:
        return record
    from vitadel.backbones.class_names import names_in_model  # most models are not ImageNet's

    found = names_in_model(backbone, record.num_classes)
    return record if found is None else replace(record, classes=found[0], classes_from=found[1])


def _announced_classes(module: nn.Module) -> int | None:
    for count in (getattr(module, "num_classes", None), getattr(getattr(module, "config", None), "num_labels", None)):
        if isinstance(count, int) and count > 0:
            return count
    return None


def _normalization_note(module: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> dict[str, str]:
    """A note if the module normalizes too, or if its library normalizes images outside of it and otherwise than here;
    both cost accuracy."""
    given = (mean, std) != ((0.0,) * 3, (1.0,) * 3)
    inside = next((name for name, part in module.named_modules() if name and _normalizes(part)), None)
    if inside is not None:
        twice = f"pixels are normalized twice: by mean={mean}, std={std}, then by the model's own part '{inside}'"
        return {"normalization": twice} if given else {}
    config: Any = getattr(module, "pretrained_cfg", None)
    if isinstance(config, Mapping) and "mean" in config and "std" in config:
        own = (tuple(config["mean"]), tuple(config["std"]))
        about = f"timm's own for this model is mean={own[0]}, std={own[1]}"
        return {} if own == (mean, std) else {"normalisation": about}
    outside = None if given else _OUTSIDE.get(type(module).__module__.partition(".")[0])
    return {} if outside is None else {"normalization": f"models of its library do not normalize pixels: {outside}"}


_OUTSIDE = {
    "torchvision": "give vitadel.wrap(model, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)) if it was trained "
    "with ImageNet's",
    "transformers": "give vitadel.wrap(model, mean=processor.image_mean, std=processor.image_std), or load hf:NAME",
}


def _normalizes(part: nn.Module) -> bool:
    """Whether a module has a mean and a standard deviation of three colors, and is not the identity."""
    numbers = [getattr(part, name, None) for name in ("mean", "std")]
    if not all(isinstance(each, Tensor) and each.numel() == 3 for each in numbers):
        return False
    mean, std = (each.detach().flatten().tolist() for each in cast("list[Tensor]", numbers))
    return (mean, std) != ([0.0] * 3, [1.0] * 3)


@contextmanager
def fastest_attention(model: nn.Module, device: torch.device, kind: torch.dtype | None) -> Iterator[None]:
    """Compute attention with the fastest kernel for this device and half precision (or None) inside the block.

    On a CPU the backward pass of the fused kernel takes nearly three times as long in bf16 as the separate operations,
    which makes bf16 slower than float32 instead of twice as fast (65 tokens, three heads of 32).
    """
    slow = kind is not None and device.type == "cpu"
    fused = [module for module in model.modules() if slow and getattr(module, "fused_attn", False)]
    try:
        for module in fused:
            module.fused_attn = False  # type: ignore[assignment]
        yield
    finally:
        for module in fused:
            module.fused_attn = True  # type: ignore[assignment]


_BOX_SLACK = 1e-6  # rounding errors of float32 around 1

Size = tuple[int, int]


def check_pixels(x: Tensor) -> None:
    """Refuse a batch whose values are not pixels in [0, 1], or whose channels come last.

    Any other shape passes: attacks also run on toy models that take vectors.
    """
    if not isinstance(x, Tensor):
        raise UserError(
            f"attacks take tensors of pixels in [0, 1], got {type(x).__name__}. Convert it: torch.as_tensor(x)."
        )
    if x.ndim == 4 and x.shape[3] == 3 and x.shape[1] not in (1, 3):
        raise UserError(
            f"model expects images of shape (batch, 3, height, width), got {tuple(x.shape)}. "
            "Move the channels to the front: x.permute(0, 3, 1, 2)."
        )
    if not x.is_floating_point():
        kind = str(x.dtype).removeprefix("torch.")
        raise UserError(f"model expects floating-point pixels in [0, 1], got {kind}. Convert them: x.float() / 255.")
    if x.numel() == 0:
        return
    broken = int((~x.isfinite()).sum())
    if broken:
        raise UserError(
            f"model expects pixels in [0, 1], got {broken} values that are NaN or infinite. Check the images."
        )
    low, high = x.amin().item(), x.amax().item()
    if low < -_BOX_SLACK or high > 1 + _BOX_SLACK:
        advice = (
            "Divide by 255." if low >= 0 else "Drop Normalize from the transform; the classifier normalizes itself."
        )
        raise UserError(f"model expects pixels in [0, 1], got range [{low:.4g}, {high:.4g}]. {advice}")


def check_logits(logits: Tensor, num_classes: int | None = None) -> None:
    """Refuse outputs that no attack or accuracy can be computed from."""
    if logits.ndim != 2:
        raise UserError(
            f"model must return logits of shape (batch, classes), got {tuple(logits.shape)}. "
            "Give a classifier, not a backbone that returns features."
        )
    if logits.shape[1] < 2:
        raise UserError(
            f"model returns {logits.shape[1]} class; at least 2 are needed. "
            "Turn a single score z of a yes/no model into the two logits (0, z)."
        )
    if num_classes is not None and logits.shape[1] != num_classes:
        raise UserError(f"model returns {logits.shape[1]} classes, {num_classes} were announced. Check --num-classes.")
    broken = int((~logits.isfinite()).any(1).sum())
    if broken:
        raise UserError(
            f"model returns NaN or infinite logits for {broken} of {len(logits)} images. "
            "Check its weights and precision (fp16 overflows where bf16 and fp32 do not)."
        )


def looks_like_probabilities(logits: Tensor) -> bool:
    """Whether a softmax was applied already: all values in [0, 1] and each row sums to 1 within 1e-4.

    Losses on logits then have almost no gradient, and an attack fails for the wrong reason.
    """
    if logits.ndim != 2 or logits.numel() == 0:
        return False
    values = logits.detach().double()
    inside = bool(((values >= 0) & (values <= 1)).all())
    return inside and bool(((values.sum(1) - 1).abs() <= 1e-4).all())


def looks_like_log_probabilities(logits: Tensor) -> bool:
    """Whether a log-softmax was applied already: no value above 0, and exponentials of each row sum to 1."""
    if logits.ndim != 2 or logits.numel() == 0:
        return False
    values = logits.detach().double()
    return bool((values <= 1e-6).all()) and bool((values.logsumexp(1).abs() <= 1e-4).all())


def modules_in_train_mode(model: nn.Module) -> list[str]:
    """Names of all modules with `training` set; the model itself is called '(model)'."""
    return [name or "(model)" for name, module in model.named_modules() if module.training]


def check_image_size(backbone: nn.Module, size: Size, name: str) -> None:
    """Refuse a size, (height, width), that the backbone's patch embedding cannot take."""
    error = _size_error(getattr(backbone, "patch_embed", None), size, name)
    if error is not None:
        raise error


def check_images_fit(model: nn.Module, size: Size, name: str) -> None:
    """The same for a model under any wrappers. These may resize images, so a doubtful size is tried with one image."""
    for module in model.modules():
        size_error = _size_error(module, size, name)
        if size_error is None:
            continue
        like = next(model.parameters())
        try:
            with torch.no_grad():
                model(torch.full((1, 3, *size), 0.5, device=like.device))
        except (AssertionError, UserError) as error:
            raise size_error from error


def check_multiple(size: Size, patch: Size, name: str) -> None:
    """Refuse a size that is not a whole number of patches."""
    if size[0] % patch[0] or size[1] % patch[1]:
        raise _not_a_multiple(size, patch, name)


def _not_a_multiple(size: Size, patch: Size, name: str) -> UserError:
    below: Size = (size[0] // patch[0] * patch[0], size[1] // patch[1] * patch[1])
    above: Size = (-(-size[0] // patch[0]) * patch[0], -(-size[1] // patch[1]) * patch[1])
    nearest = _text(above) if min(below) == 0 else f"{_text(below)} and {_text(above)}"
    return UserError(
        f"images of {_text(size)} pixels cannot be cut into patches of {_text(patch)} by '{name}': pixels would be "
        f"left over. The nearest sizes are {nearest}; resize images with --input-size (in recipes model.input_size, in "
        "Python load_model(..., input_size=...))."
    )


def _size_error(embed: object, size: Size, name: str) -> UserError | None:
    """`embed` is a patch embedding of timm, or of ours with `needs_whole_patches`; other modules take any size."""
    if isinstance(embed, nn.Module) and getattr(embed, "needs_whole_patches", False):
        patch = int(embed.patch_size)  # type: ignore[arg-type]
        return _not_a_multiple(size, (patch, patch), name) if size[0] % patch or size[1] % patch else None
    if not isinstance(embed, PatchEmbed):
        return None
    own, (tall, wide) = embed.img_size, embed.patch_size
    if own == size:
        return None  # even if pixels are left over: SigLIP at 384 pixels was trained with patches of 14
    if (size[0] % tall or size[1] % wide) and not embed.dynamic_img_pad:
        return _not_a_multiple(size, (tall, wide), name)
    if own is None or not embed.strict_img_size:
        return None
    return UserError(
        f"images of {_text(size)} pixels were given to '{name}', which is built for {_text(own)}. Resize the images, "
        f"or load the model for theirs: --input-size {size[0]} (in Python load_model(..., input_size={size[0]}))."
    )


def _text(size: Size) -> str:
    return f"{size[0]} x {size[1]}"
