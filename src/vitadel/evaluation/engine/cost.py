"""What a run costs on this machine: times of passes, the gain of torch.compile, and the likely time of attacks.

The upper bound of attacks takes every image for robust to the last step of every attack. Most are not: the cost of an
image is small if it is misclassified early, and nearly the bound if it never is. So a short PGD first sorts a few
images into these two groups, and the attacks themselves then run on some images of each, as far as that takes little
time. The trial uses the random streams of the run, keeps none of its results, and so changes no verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitadel.attacks.autoattack.fast import giving_up_nothing, sentinel_passes
from vitadel.attacks.goals import OnLogits, gradient
from vitadel.attacks.parse import make
from vitadel.attacks.per_sample import run_attack
from vitadel.attacks.threats import make_threat
from vitadel.data.batches import Batch, read_batches
from vitadel.evaluation.engine.attack_preparation import needs_calibration
from vitadel.evaluation.engine.stages import RunContext, Stream, count_passes, is_staged, judge, members_of, rules_of
from vitadel.instrument.hooks import frozen
from vitadel.quantities import duration
from vitadel.runtime.distributed import generators_kept, wait_for
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Threat

WORTH = 1.1
"""The least speedup of a gradient for which the compiled model is used."""

SHORT = 30.0
"""Seconds: attacks whose upper bound is shorter are not tried before they run."""
_PROBES = 3
_ENOUGH = 3.0  # seconds
_FIRST, _MOMENT = 4, 0.25  # images and seconds
_SCREEN = "pgd-10"
_AT_ONCE = 8  # images screened together
_MOST_SCREENED, _MOST_TRIED = 64, 16
_BUDGET = 0.03  # share of the likely cost that the screening may take, and the trial of each group
_SECONDS = 2.0, 90.0  # the least and the most time for the trial of a group
_FEW = 4
_FEW_IMAGES = 200  # of so few, most that `autoattack-fast` gives up are audited, and so searched to the end
_EARLY = 3.0  # gradients that a misclassified image costs, as long as nothing is known


class PassTimes(NamedTuple):
    """Seconds per image of a gradient (forward and backward pass) and of a forward pass."""

    gradient: float
    forward: float

    @classmethod
    def measure(cls, model: nn.Module, x: Tensor) -> PassTimes:
        """On as many of the images as take a moment: a whole batch of a large model would take minutes."""

        def forward() -> Tensor:
            with torch.no_grad():
                logits: Tensor = model(x)
            return logits

        with frozen(model):
            x = _quick_part(model, x)
            works = (_gradient_probe(model, x), forward)
            return cls(*(seconds_of(work, x.device) / len(x) for work in works))

    def seconds(self, gradients: float, forwards: float) -> float:
        """The time of so many passes of one image."""
        return gradients * self.gradient + forwards * self.forward


def _quick_part(model: nn.Module, x: Tensor) -> Tensor:
    """The first images: all of them, or so many that a gradient takes between one and four times `_MOMENT`."""
    count = _FIRST
    while count < len(x):
        start = time.perf_counter()
        _gradient_probe(model, x[:count])()
        if time.perf_counter() - start > _MOMENT:
            break
        count *= 4
    return x[:count]


def seconds_of(work: Callable[[], Tensor], device: torch.device) -> float:
    """The fastest of a few calls, after one to warm up; of fewer, if one takes seconds."""
    best, until = float("inf"), time.perf_counter() + _ENOUGH
    for turn in range(_PROBES + 1):
        if turn > 1 and time.perf_counter() > until:
            break
        start = time.perf_counter()
        work()
        wait_for(device)
        if turn:
            best = min(best, time.perf_counter() - start)
    return best


def _gradient_probe(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """A function that takes one gradient of the cross-entropy, as attacks do."""
    aim = OnLogits()(model, x, torch.zeros(len(x), dtype=torch.int64, device=x.device))

    def take() -> Tensor:
        z = x.clone().requires_grad_()
        return gradient(aim.evaluate(z, 0.0)[0], z)

    return take


@dataclass(frozen=True)
class Compilation:
    """`speedup` of a gradient after `seconds` of compiling; 0 if compiling failed, for the `reason` given."""

    speedup: float
    seconds: float
    reason: str = ""

    @property
    def pays(self) -> bool:
        return self.speedup >= WORTH

    def summary(self) -> str:
        if self.reason:
            return f"torch.compile failed here ({self.reason}); continuing without"
        does = "pays" if self.pays else "does not pay"
        use = "" if self.pays else "; continuing without"
        return f"torch.compile {does}: {self.speedup:.2f} times as fast after {self.seconds:.0f} s of compiling{use}"


def compile_if_faster(
    model: nn.Module, x: Tensor, agree: Callable[[bool], bool] = lambda pays: pays
) -> tuple[nn.Module, Compilation]:
    """The model to take gradients of: compiled (for any batch size) if that is faster on `x`, else unchanged.

    `agree` makes all processes use the decision of one.
    """
    with frozen(model):
        try:
            start = time.perf_counter()
            _keep_buffers()
            fast: nn.Module = torch.compile(model, dynamic=True)  # type: ignore[assignment]
            for part in (x, x[: max(1, len(x) // 2)]):  # a second size, so that none has to be compiled later
                _gradient_probe(fast, part)()
            _two_gradients_of_one_pass(fast, x)
            spent = time.perf_counter() - start
            slow, quick = (seconds_of(_gradient_probe(each, x), x.device) for each in (model, fast))
        except Exception as problem:  # compilers raise anything; everything works without
            agree(False)
            return model, Compilation(0.0, 0.0, type(problem).__name__)
    verdict = Compilation(slow / quick, spent)
    return (fast if agree(verdict.pays) else model), verdict


def _keep_buffers() -> None:
    """Keep the buffers of a compiled backward pass: FAB and MALT take a second one of the same forward pass."""
    settings = getattr(getattr(torch, "_functorch", None), "config", None)
    if hasattr(settings, "donated_buffer"):
        settings.donated_buffer = False  # type: ignore[union-attr]


def _two_gradients_of_one_pass(model: nn.Module, x: Tensor) -> None:
    with torch.enable_grad():
        z = x.clone().requires_grad_()
        logits = model(z)
        gradient(logits[:, 0], z, again=True)
        gradient(logits[:, -1], z)


def gray_batch(context: RunContext, samples: int) -> Tensor:
    """A batch of gray images, to time passes on."""
    size = min(context.batch_size, max(samples, 1))
    return torch.full((size, 3, *context.preprocess.shape), 0.5, device=context.processes.device)


class Passes(NamedTuple):
    gradients: float
    forwards: float

    def __add__(self, other: object) -> Passes:
        assert isinstance(other, tuple)
        return Passes(self.gradients + other[0], self.forwards + other[1])

    def scaled(self, factor: float) -> Passes:
        return Passes(factor * self.gradients, factor * self.forwards)


@dataclass(frozen=True)
class Stage:
    """An attack, or one member of an ensemble, as a stage of the run; `alone`: on all correctly classified images."""

    name: str
    attack: Attack
    stream: Stream
    alone: bool
    own_rules: bool
    first: bool

    @property
    def at_most(self) -> Passes:
        """Of one image, with the forward pass that judges it."""
        gradients, forwards = self.attack.passes()
        return Passes(gradients, forwards + 1)

    @property
    def usual(self) -> Passes:
        """Of one robust image; the most, unless the attack knows better."""
        gradients, forwards = getattr(self.attack, "usual_passes", self.attack.passes)()
        return Passes(gradients, forwards + 1)


def stages_of(attacks: Sequence[tuple[str, Attack]], independent: bool) -> list[Stage]:
    """The stages of these attacks, named as the audit names them."""
    stages = []
    for number, (name, attack) in enumerate(attacks):
        own_rules = rules_of(attack) is not None
        for place, (stage, _, member, stream) in enumerate(members_of(f"{number:02d} {name}", attack)):
            stages.append(Stage(stage, member, stream, independent or own_rules, own_rules, place == 0))
    return stages


@dataclass(frozen=True)
class Estimate:
    """Seconds of each stage: likely ones and the most it can take; `images` were tried, none if the most is short."""

    times: PassTimes
    likely: Mapping[str, float]
    at_most: Mapping[str, float]
    images: int = 0

    @property
    def seconds(self) -> float:
        return sum(self.likely.values())

    @property
    def seconds_at_most(self) -> float:
        return sum(self.at_most.values())

    def summary(self) -> str:
        if not self.images:
            return f"at most {duration(self.seconds_at_most)}"
        tried = f"by a trial on {self.images} images"
        return f"likely {duration(self.seconds)}, at most {duration(self.seconds_at_most)} ({tried})"


def estimate(
    context: RunContext,
    attacks: Sequence[tuple[str, Attack]],
    indices: Tensor,
    *,
    eps: float,
    norm: str,
    independent: bool = False,
    times: PassTimes | None = None,
) -> Estimate:
    """How long these attacks will take on these images, correctly classified or not, with all processes."""
    model = context.model if context.compiled is None else context.compiled
    if times is None:
        with context.arithmetic():
            times = PassTimes.measure(model, gray_batch(context, len(indices)))
    if len(indices) < _FEW_IMAGES:
        attacks = [(name, giving_up_nothing(attack) if is_staged(attack) else attack) for name, attack in attacks]
    stages = stages_of(attacks, independent)

    def seconds(passes: Passes) -> float:
        return times.seconds(*passes) / context.processes.count

    at_most = {stage.name: seconds(stage.at_most.scaled(len(indices))) for stage in stages}
    if sum(at_most.values()) < SHORT:
        return Estimate(times, at_most, at_most)
    trial = _Trial(context, model, make_threat(norm, eps), stages, seconds)
    with generators_kept(context.processes.device), frozen(context.model):  # a random model draws from them
        likely, images, robust = trial.run(indices, make(_SCREEN, eps=eps, norm=norm))
    for number, (name, attack) in enumerate(attacks):
        if is_staged(attack):
            stage, counts = f"{number:02d} {name} sentinels", (round(robust * len(indices)), len(indices))
            likely[stage], at_most[stage] = (seconds(Passes(*sentinel_passes(attack, count))) for count in counts)
    # Images that are tried may cost more passes than the bound of ten classes.
    return Estimate(times, {name: min(likely[name], at_most[name]) for name in at_most}, at_most, images)


class _OutOfTime(BaseException):
    """Ends an attack in the middle; no Exception, which other libraries' attacks may catch."""


@dataclass(frozen=True)
class _Trial:
    context: RunContext
    model: nn.Module
    threat: Threat
    stages: Sequence[Stage]
    seconds: Callable[[Passes], float]

    def run(self, indices: Tensor, screen: Attack) -> tuple[dict[str, float], int, float]:
        """The likely seconds of each stage on all of the images, how many were screened, and the share left by that."""
        screened, robust, broken = self._screened(indices, screen)
        likely = {stage.name: Passes(0, 0) for stage in self.stages}
        for group in (robust, broken):
            if group:
                count = len(indices) * len(group) / screened
                for name, each in self._tried(group, count).items():
                    likely[name] += each.scaled(count)
        return {name: self.seconds(passes) for name, passes in likely.items()}, screened, len(robust) / screened

    @property
    def _usual(self) -> float:
        """Seconds of one robust image."""
        return self.seconds(sum((stage.usual for stage in self.stages), Passes(0, 0)))

    def _screened(self, indices: Tensor, screen: Attack) -> tuple[int, list[Batch], list[Batch]]:
        """How many images were screened, and those that PGD leaves correct and those it does not, one by one.

        More images if the attacks are expensive, so that the screening is a small part of the cost.
        """
        context, spent, screened, robust, broken = self.context, 0.0, 0, list[Batch](), list[Batch]()
        order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(context.seed))
        chunks = [indices[part].tolist() for part in order[:_MOST_SCREENED].split(_AT_ONCE)]
        early = self.seconds(Passes(_EARLY, 0))
        how: dict[str, Any] = {"skip_bad": context.skip_bad, "device": context.processes.device}
        for batch in read_batches(context.source, chunks, context.preprocess, **how):
            if len(batch.y) == 0:
                continue
            screened += len(batch.y)
            with count_passes(self.model) as cost:
                held, right = self._screen(batch, screen)
            robust += [_rows(batch, row) for row in held.nonzero()]
            broken += [_rows(batch, row) for row in (right & ~held).nonzero()]
            spent += self.seconds(Passes(cost.gradients, cost.forwards))
            likely = len(indices) / screened * (len(robust) * self._usual + len(broken) * early)
            if spent > _BUDGET * likely and screened >= 4 * _AT_ONCE:  # of few images a share says little
                break
        return max(screened, 1), robust, broken

    def _screen(self, batch: Batch, screen: Attack) -> tuple[Tensor, Tensor]:
        """Which images are correctly classified after the attack, and before."""
        with self.context.arithmetic(), torch.no_grad():
            right: Tensor = self.model(batch.x).argmax(1) == batch.y
        held, exposed = right.clone(), right.nonzero().squeeze(1)
        if len(exposed):
            held[exposed] = self._attacked(_rows(batch, exposed), screen, lambda rng: rng, own_rules=False)
        return held, right

    def _attacked(self, batch: Batch, attack: Attack, stream: Stream, own_rules: bool) -> Tensor:
        rng = stream(SampleRNG.of_samples(self.context.seed, batch.indices, batch.x.device))
        rules = rules_of(attack) if own_rules else None
        with self.context.arithmetic():
            z, _ = run_attack(attack, self.model, batch.x, batch.y, rng)
            threat = self.threat if rules is None else rules(self.context.model, batch.x)
            return judge(self.context.model, threat, batch.x, z, batch.y).held

    def _tried(self, group: Sequence[Batch], count: float) -> dict[str, Passes]:
        """The mean passes of each stage per image, on as many images as there is time for.

        `count` is the number of such images in the run. As long as few are tried, images with the usual passes of a
        robust one are counted among them.
        """
        allowed = min(max(_BUDGET * self._usual * count, _SECONDS[0]), _SECONDS[1])
        until = time.perf_counter() + allowed
        at_once = max(1, min(_AT_ONCE, int(allowed / self._usual)))
        total = {stage.name: Passes(0, 0) for stage in self.stages}
        done = 0
        for start in range(0, min(len(group), _MOST_TRIED), at_once):
            images = _joined(group[start : start + at_once])
            passes = self._passes_of(images, until)
            if passes is None:
                break
            total = {name: total[name] + each for name, each in passes.items()}
            done += len(images.y)
        usual = max(0, _FEW - done) if done < len(group) else 0
        return {
            stage.name: (total[stage.name] + stage.usual.scaled(usual)).scaled(1 / (done + usual))
            for stage in self.stages
        }

    def _passes_of(self, images: Batch, until: float) -> dict[str, Passes] | None:
        """The passes of each stage on these images; None if they do not end in time."""
        everything = torch.ones(len(images.y), dtype=torch.bool, device=images.y.device)
        robust, left, passes = everything, everything, {}
        for stage in self.stages:
            if stage.first:
                left = everything if stage.alone else robust
            exposed = left.nonzero().squeeze(1)
            passes[stage.name] = stage.usual.scaled(len(exposed))
            if needs_calibration(stage.attack) or len(exposed) == 0:
                continue
            try:
                with _deadline(self.model, until), count_passes(self.model) as cost:
                    held = self._attacked(_rows(images, exposed), stage.attack, stage.stream, stage.own_rules)
            except _OutOfTime:
                return None
            judging = len(exposed) if self.model is not self.context.model else 0
            passes[stage.name] = Passes(cost.gradients, cost.forwards + judging)
            left = left.clone()
            left[exposed] = held
            if not stage.own_rules:
                robust = robust & left
        return passes


def _rows(batch: Batch, rows: Tensor) -> Batch:
    return replace(batch, indices=batch.indices[rows.cpu()], x=batch.x[rows], y=batch.y[rows])


def _joined(batches: Sequence[Batch]) -> Batch:
    def column(name: str) -> Tensor:
        return torch.cat([getattr(batch, name) for batch in batches])

    return Batch(column("indices"), column("x"), column("y"))


@contextmanager
def _deadline(model: nn.Module, until: float) -> Iterator[None]:
    def check(module: nn.Module, given: object) -> None:
        if time.perf_counter() > until:
            raise _OutOfTime

    watch = model.register_forward_pre_hook(check)
    try:
        yield
    finally:
        watch.remove()
