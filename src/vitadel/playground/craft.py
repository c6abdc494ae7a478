"""One image, one model, one attack: what is seen before and after, what was changed, and whether it counts."""

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
from vitadel.backbones.model_checks import check_logits
from vitadel.errors import UserError
from vitadel.evaluation.audit.examples import in_8_bits
from vitadel.evaluation.engine.batch_cache import MemoryCache
from vitadel.evaluation.engine.calibration import BATCH, calibrate, needs_calibration
from vitadel.evaluation.engine.judge import judge
from vitadel.evaluation.engine.pass_counter import count_passes
from vitadel.evaluation.engine.stages import RunContext, rules_of
from vitadel.instrument.attention_rows import attention_over_patches
from vitadel.instrument.hooks import frozen
from vitadel.playground.models import Opened
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack

__all__ = [
    "MOST_PASSES",
    "AttackForm",
    "CraftedImage",
    "Seen",
    "Transferred",
    "craft",
    "look",
    "ready_attack",
    "shown",
    "transfer",
]

MOST_PASSES = 50_000
"""Of one attack on its image, and of all images of its study: a page in a browser is no place for what takes hours."""

Tell = Callable[[int, int | None], None]
"""(passes done, the most that there can be, if that is known)"""


@dataclass(frozen=True)
class AttackForm:
    """What to do to the image; `norm` and `eps` as on the command line."""

    attack: str = "pgd-20"
    eps: float = 8 / 255
    norm: str = "linf"
    seed: int = 0


@dataclass(frozen=True)
class Seen:
    """What a model makes of one image; `attention` is (rows, columns), or None, and `blind` then says why."""

    answer: int
    probabilities: Tensor
    attention: Tensor | None
    blind: str = ""


@dataclass(frozen=True)
class CraftedImage:
    """`x` and `z`: clean and adversarial pixels, (1, 3, height, width). `fooled`: the answer changed, and `z` keeps
    box and budget; `void`: it does not keep them, and counts for nothing. `picture` is `z` in 8 bits."""

    x: Tensor
    z: Tensor
    before: Seen
    after: Seen
    fooled: bool
    void: bool
    picture: Tensor
    picture_fools: bool
    gradients: int
    forwards: int
    seconds: float

    def size(self, norm: str) -> float:
        """How long the perturbation is."""
        return float(make_threat(norm, 0.0).size(self.z, self.x))

    def safetensors(self) -> bytes:
        """Both images as floats: 8 bits can undo an attack."""
        content: bytes = save({"clean": self.x.contiguous(), "adversarial": self.z.contiguous()})
        return content


@dataclass(frozen=True)
class Transferred:
    """What another model makes of the same two images; `resized` if it takes another size."""

    before: Seen
    after: Seen
    resized: bool

    @property
    def fooled(self) -> bool:
        return self.before.answer != self.after.answer


def look(model: nn.Module, x: Tensor) -> Seen:
    """Answer and probabilities of the untouched model, then its attention, where the family is known."""
    with frozen(model), torch.no_grad():
        logits = model(x)
    check_logits(logits)
    attention, blind = None, ""
    try:
        attention = attention_over_patches(model, x)[0].cpu()
    except UserError as mistake:
        blind = str(mistake)
    return Seen(int(logits.argmax(1)), logits[0].double().softmax(0).cpu(), attention, blind)


def ready_attack(opened: Opened, wish: AttackForm, index: int | None = None, tell: Tell | None = None) -> Attack:
    """The attack of a wish; one that studies the model first does so on training images, never on image `index`."""
    attack = make(wish.attack, eps=wish.eps, norm=wish.norm)
    passes = sum(attack.passes())
    if passes > MOST_PASSES:
        raise UserError(
            f"{wish.attack} may take {passes:,} passes, and the playground allows {MOST_PASSES:,}. "
            "Take fewer steps here, or run it with `vitadel attack`."
        )
    if not needs_calibration(attack):
        return attack
    if not opened.knows_data:
        at_hand = "what is at hand" if opened.target.given_as_object else opened.target.data_spec
        raise UserError(
            f"{wish.attack} studies the model on images of its own data first, and {at_hand} is not that. "
            "Start the playground with --data SPEC, or take an attack without such a study."
        )
    target, here = opened.target, Processes(0, 1, opened.device)
    context = RunContext(target.model, target.source, target.preprocess, MemoryCache(), here, BATCH, wish.seed)
    attacked = torch.tensor([] if index is None else [index], dtype=torch.int64)
    with _followed(target.model, None, tell, study_of=wish.attack):
        return calibrate(attack, context, target, attacked, None)


def craft(model: nn.Module, x: Tensor, attack: Attack, wish: AttackForm, tell: Tell | None = None) -> CraftedImage:
    """Try to change the model's answer on one image; judged on the untouched model, and once more in 8 bits.

    The answer to change is the model's own on the clean image, so that any picture will do, labelled or not.
    """
    before = look(model, x)
    y = torch.tensor([before.answer], device=x.device)
    begun = time.perf_counter()
    with count_passes(model) as cost, _followed(model, sum(attack.passes()), tell):
        z = attack(model, x, y, SampleRNG.of_pixels(x, wish.seed))
    seconds = time.perf_counter() - begun
    rules = rules_of(attack)
    verdict = judge(model, rules(model, x) if rules else make_threat(wish.norm, wish.eps), x, z, y)
    picture = in_8_bits(z, x)
    with frozen(model), torch.no_grad():
        picture_fools = int(model(picture.to(x.dtype) / 255).argmax(1)) != before.answer
    return CraftedImage(
        x=x.cpu(),
        z=z.cpu(),
        before=before,
        after=look(model, z),
        fooled=not bool(verdict.held),
        void=bool(verdict.void),
        picture=picture[0].cpu(),
        picture_fools=picture_fools,
        gradients=cost.gradients,
        forwards=cost.forwards,
        seconds=seconds,
    )


@contextmanager
def _followed(model: nn.Module, most: int | None, tell: Tell | None, study_of: str = "") -> Iterator[None]:
    """Tell of every pass: attacks have loops of their own, and passes through the model are what they share.

    The study of an attack, which does not say beforehand how long it is, ends where it takes too long.
    """
    done = images = 0

    def passed(_model: nn.Module, _inputs: object, logits: Tensor) -> None:
        nonlocal done, images
        done, images = done + 1, images + len(logits)
        if study_of and images > MOST_PASSES:
            raise UserError(
                f"{study_of} studies the model with more than {MOST_PASSES:,} passes, counted by images, and the "
                "playground allows no more. Take fewer images or steps, as in aas(images=64,steps=5)+pgd-20, or run it "
                "with `vitadel attack`."
            )
        if tell is not None:
            tell(done if most is None else min(done, most), most)

    handle = model.register_forward_hook(passed)
    try:
        yield
    finally:
        handle.remove()


def transfer(crafted: CraftedImage, other: nn.Module, size: tuple[int, int], device: torch.device) -> Transferred:
    """Show both images to another model, which takes pixels of `size`; where it differs both are resampled alike."""
    resized = tuple(crafted.x.shape[2:]) != size

    def fit(image: Tensor) -> Tensor:
        if resized:
            image = F.interpolate(image, size, mode="bilinear", align_corners=False, antialias=True).clamp(0, 1)
        return image.to(device)

    return Transferred(look(other, fit(crafted.x)), look(other, fit(crafted.z)), resized)


def shown(crafted: CraftedImage) -> tuple[Tensor, float]:
    """The perturbation as a picture, (3, height, width): grey where nothing changed, with the factor it was scaled by
    so that its largest change just reaches black or white."""
    change = (crafted.z - crafted.x)[0].double()
    largest = float(change.abs().max())
    factor = 0.5 / largest if largest > 0 else 1.0
    return (0.5 + factor * change).clamp(0, 1).float(), factor
