"""Attack one image: predictions before and after, the perturbation, and whether it stays within the budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.attacks.parse import make
from vitadel.attacks.threats import make_threat
from vitadel.backbones.classifier import check_logits
from vitadel.errors import UserError
from vitadel.evaluation.audit.saved_examples import in_8_bits
from vitadel.evaluation.engine.attack_preparation import calibrate, needs_calibration
from vitadel.evaluation.engine.stages import MemoryCache, RunContext, count_passes, judge, rules_of
from vitadel.evaluation.engine.target import CALIBRATION_BATCH
from vitadel.instrument.attention_rows import attention_over_patches
from vitadel.instrument.hooks import frozen
from vitadel.playground.models import OpenedModel
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.trusted_code import check_code_trusted, names_code
from vitadel.types import Attack

MOST_PASSES = 50_000
"""Limit for one attack on its image, and for its calibration over all images: a page should answer within minutes."""

ReportProgress = Callable[[int, int | None], None]
"""Called with the passes done, and the most that there can be, if that is known."""


@dataclass(frozen=True)
class AttackForm:
    """The attack to run; `norm` and `eps` as on the command line."""

    attack: str = "pgd-20"
    eps: float = 8 / 255
    norm: str = "linf"
    seed: int = 0


@dataclass(frozen=True)
class Prediction:
    """What a model answers to one image; `attention` is (rows, columns), or None, and `no_attention` then says why."""

    answer: int
    probabilities: Tensor
    attention: Tensor | None
    no_attention: str = ""


@dataclass(frozen=True)
class CraftedImage:
    """`x` and `z`: clean and adversarial pixels, (1, 3, height, width). `fooled`: the answer changed, and `z` keeps
    box and budget; `void`: it does not keep them, so it does not count. `picture` is `z` in 8 bits."""

    x: Tensor
    z: Tensor
    before: Prediction
    after: Prediction
    fooled: bool
    void: bool
    picture: Tensor
    picture_fools: bool
    gradients: int
    forwards: int
    seconds: float

    def size(self, norm: str) -> float:
        """The norm of the perturbation."""
        return float(make_threat(norm, 0.0).size(self.z, self.x))

    def safetensors(self) -> bytes:
        """Both images as floats: 8 bits can undo an attack."""
        content: bytes = save({"clean": self.x.contiguous(), "adversarial": self.z.contiguous()})
        return content


@dataclass(frozen=True)
class TransferResult:
    """What another model answers to the same two images; `resized` if it takes another size."""

    before: Prediction
    after: Prediction
    resized: bool

    @property
    def fooled(self) -> bool:
        return self.before.answer != self.after.answer


def predict(model: nn.Module, x: Tensor) -> Prediction:
    """Answer and probabilities of the unmodified model, and its attention where the family is known."""
    with frozen(model), torch.no_grad():
        logits = model(x)
    check_logits(logits)
    attention, reason = None, ""
    try:
        attention = attention_over_patches(model, x)[0].cpu()
    except UserError as error:
        reason = str(error)
    return Prediction(int(logits.argmax(1)), logits[0].double().softmax(0).cpu(), attention, reason)


def prepare_attack(
    opened: OpenedModel, form: AttackForm, index: int | None = None, report: ReportProgress | None = None
) -> Attack:
    """Make the attack of a form; if it calibrates on the model first, then on training images, never on `index`."""
    check_code_trusted(form.attack if names_code(form.attack) else None, "the page")
    attack = make(form.attack, eps=form.eps, norm=form.norm)
    passes = sum(attack.passes())
    if passes > MOST_PASSES:
        raise UserError(
            f"{form.attack} may take {passes:,} passes, and the playground allows {MOST_PASSES:,}. "
            "Use fewer steps, or run it with `vitadel attack`."
        )
    if not needs_calibration(attack):
        return attack
    if not opened.knows_data:
        at_hand = "the data given" if opened.target.given_as_object else opened.target.data_spec
        raise UserError(
            f"{form.attack} calibrates on images of the model's own data first, but {at_hand} is not that data. "
            "Start the playground with --data SPEC, or choose an attack without calibration."
        )
    target, here = opened.target, Processes(0, 1, opened.device)
    context = RunContext(
        target.model, target.source, target.preprocess, MemoryCache(), here, CALIBRATION_BATCH, form.seed
    )
    attacked = torch.tensor([] if index is None else [index], dtype=torch.int64)
    with _report_passes(target.model, None, report, calibration_of=form.attack):
        return calibrate(attack, context, target, attacked, None)


def craft(
    model: nn.Module, x: Tensor, attack: Attack, form: AttackForm, report: ReportProgress | None = None
) -> CraftedImage:
    """Try to change the model's answer on one image; judge it on the unmodified model, and again in 8 bits.

    The attack targets the model's own answer to the clean image, so images need no label.
    """
    before = predict(model, x)
    y = torch.tensor([before.answer], device=x.device)
    start = time.perf_counter()
    with count_passes(model) as cost, _report_passes(model, sum(attack.passes()), report):
        z = attack(model, x, y, SampleRNG.of_pixels(x, form.seed))
    seconds = time.perf_counter() - start
    rules = rules_of(attack)
    verdict = judge(model, rules(model, x) if rules else make_threat(form.norm, form.eps), x, z, y)
    picture = in_8_bits(z, x)
    with frozen(model), torch.no_grad():
        picture_fools = int(model(picture.to(x.dtype) / 255).argmax(1)) != before.answer
    return CraftedImage(
        x=x.cpu(),
        z=z.cpu(),
        before=before,
        after=predict(model, z),
        fooled=not bool(verdict.held),
        void=bool(verdict.void),
        picture=picture[0].cpu(),
        picture_fools=picture_fools,
        gradients=cost.gradients,
        forwards=cost.forwards,
        seconds=seconds,
    )


@contextmanager
def _report_passes(
    model: nn.Module, most: int | None, report: ReportProgress | None, calibration_of: str = ""
) -> Iterator[None]:
    """Report every forward pass, which all attacks have in common.

    Calibration does not say beforehand how long it takes, so it is stopped where it takes too long.
    """
    done = images = 0

    def passed(_model: nn.Module, _inputs: object, logits: Tensor) -> None:
        nonlocal done, images
        done, images = done + 1, images + len(logits)
        if calibration_of and images > MOST_PASSES:
            raise UserError(
                f"{calibration_of} calibrates with more than {MOST_PASSES:,} passes, counted by images, and the "
                "playground allows no more. Use fewer images or steps, as in aas(images=64,steps=5)+pgd-20, or run it "
                "with `vitadel attack`."
            )
        if report is not None:
            report(done if most is None else min(done, most), most)

    handle = model.register_forward_hook(passed)
    try:
        yield
    finally:
        handle.remove()


def transfer(crafted: CraftedImage, other: nn.Module, size: tuple[int, int], device: torch.device) -> TransferResult:
    """Show both images to another model, which takes pixels of `size`; both are resampled if the size differs."""
    resized = tuple(crafted.x.shape[2:]) != size

    def fit(image: Tensor) -> Tensor:
        if resized:
            image = F.interpolate(image, size, mode="bilinear", align_corners=False, antialias=True).clamp(0, 1)
        return image.to(device)

    return TransferResult(predict(other, fit(crafted.x)), predict(other, fit(crafted.z)), resized)


def perturbation_image(crafted: CraftedImage) -> tuple[Tensor, float]:
    """The perturbation as an image (3, height, width), gray where nothing changed, and the factor that scales its
    largest change to black or white."""
    change = (crafted.z - crafted.x)[0].double()
    largest = float(change.abs().max())
    factor = 0.5 / largest if largest > 0 else 1.0
    return (0.5 + factor * change).clamp(0, 1).float(), factor
