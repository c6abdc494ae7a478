"""Compare the cost of attacks with other libraries, as multiples of the model's bare forward and backward passes.

    python benchmarks/attacks.py                                              # everything, hours on a small machine
    python benchmarks/attacks.py --models zoo:shapes-robust --jobs pgd,apgd --steps 10 --images 32 --rounds 3

All candidates of a job get the same images, settings and threads and take turns: every round runs each of them once, in
a rotating order, and compares it with the bare passes of the same round, so that a slow machine affects all of them.
The result is the median of these ratios; absolute times mean nothing on another machine.

`x own passes` is a candidate's time over that of as many bare passes as it took itself: everything above 1 is overhead.

In `pgd`, `apgd`, `square`, `fab-t` and `autoattack-standing` the budget is so small that no sample is fooled: all
candidates do the same work, and the ratio is overhead. So the ratio of another library is also the largest possible
gain over it without fewer passes. In the jobs called `-dropping` and in `autoattack` samples are fooled, and a library
that stops working on them is faster; `held` shows whether it is also as strong. Only correctly classified images are
used. With one thread, processor time is measured, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from vitadel.attacks import PGD, Linf
from vitadel.attacks.apgd import apgd_ce
from vitadel.attacks.autoattack.standard import autoattack
from vitadel.attacks.fab import fab_t
from vitadel.attacks.square import square
from vitadel.attacks.steppers import Steepest
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.load import load_model
from vitadel.data.sources.shapes import Shapes
from vitadel.errors import UserError, nearest_names
from vitadel.evaluation.engine.run import environment
from vitadel.evaluation.engine.stages import Cost, count_passes, judge
from vitadel.quantities import quantity_text, read_quantity
from vitadel.runtime.run_folder import write_json
from vitadel.types import Attack

STANDING_EPS = 1e-6  # no sample is fooled within this budget
LEAST_PASSES = 5


@dataclass(frozen=True)
class Work:
    """The settings of a job, the same for all candidates."""

    eps: float
    steps: int
    targets: int
    queries: int
    batch_size: int

    @property
    def length(self) -> float:
        return self.eps / 4  # 2/255 at 8/255


Run = Callable[[Tensor, Tensor], Tensor]
Build = Callable[[Classifier, Work], Run]
"""Binds a library's attack to a model; what this takes is not part of the measured time."""


# --- ours ------------------------------------------------------------------------------------------------------------


def ours(make: Callable[[Work], Attack]) -> Build:
    def build(model: Classifier, work: Work) -> Run:
        attack = make(work)
        return lambda x, y: attack(model, x, y)

    return build


def our_pgd(work: Work) -> Attack:
    return PGD(Linf(work.eps), stepper=Steepest(work.length), steps=work.steps)


# --- theirs ----------------------------------------------------------------------------------------------------------


def torchattacks_attack(name: str, model: Classifier, work: Work) -> Any:
    library = import_module("torchattacks")
    settings: dict[str, dict[str, Any]] = {
        "PGD": {"alpha": work.length, "steps": work.steps},
        "APGD": {"steps": work.steps, "loss": "ce"},
        "APGDT": {"steps": work.steps, "n_classes": work.targets + 1},
        "FAB": {"steps": work.steps, "n_classes": work.targets + 1, "multi_targeted": True},
        "Square": {"n_queries": work.queries, "p_init": 0.8, "resc_schedule": False},
    }
    return getattr(library, name)(model, eps=work.eps, **settings[name])


def of_torchattacks(name: str) -> Build:
    return lambda model, work: torchattacks_attack(name, model, work)


def torchattacks_autoattack(model: Classifier, work: Work) -> Run:
    """From its parts, because its own `AutoAttack` takes 10 steps instead of 100 and rescales Square's schedule."""
    parts = [torchattacks_attack(name, model, work) for name in ("APGD", "APGDT", "FAB", "Square")]
    attack: Run = import_module("torchattacks").MultiAttack(parts)
    return attack


def foolbox_pgd(model: Classifier, work: Work) -> Run:
    library = import_module("foolbox")
    target = library.PyTorchModel(model, bounds=(0, 1), device="cpu")
    attack = library.attacks.LinfPGD(abs_stepsize=work.length, steps=work.steps, random_start=True)

    def run(x: Tensor, y: Tensor) -> Tensor:
        clipped: Tensor = attack(target, x, y, epsilons=work.eps)[1]
        return clipped

    return run


def of_art(name: str) -> Build:
    def build(model: Classifier, work: Work) -> Run:
        settings: dict[str, dict[str, Any]] = {
            "ProjectedGradientDescent": {"eps_step": work.length, "max_iter": work.steps, "num_random_init": 1},
            "AutoProjectedGradientDescent": {
                "eps_step": 2 * work.eps,
                "max_iter": work.steps,
                "nb_random_init": 1,
                "loss_type": "cross_entropy",
            },
            "SquareAttack": {"max_iter": work.queries},
        }
        shape, loss = (3, input_size(model), input_size(model)), nn.CrossEntropyLoss()
        classifier = import_module("art.estimators.classification").PyTorchClassifier(
            model, loss, shape, model.record.num_classes, clip_values=(0, 1), device_type="cpu"
        )
        kind = getattr(import_module("art.attacks.evasion"), name)
        attack = kind(classifier, eps=work.eps, batch_size=work.batch_size, verbose=False, **settings[name])
        return lambda x, y: torch.from_numpy(attack.generate(x.numpy(), y.numpy()))

    return build


def secml_pgd(model: Classifier, work: Work) -> Run:
    kind = import_module("secmlt.adv.evasion.pgd").PGD
    target = import_module("secmlt.models.pytorch.base_pytorch_nn").BasePyTorchClassifier(model)
    attack = kind("linf", work.eps, work.steps, work.length, random_start=True, backend="native")

    def run(x: Tensor, y: Tensor) -> Tensor:
        loader = DataLoader(TensorDataset(x, y), batch_size=len(x))
        return torch.cat([images for images, _ in attack(target, loader)]).detach()

    return run


# --- the table of jobs -----------------------------------------------------------------------------------------------

PACKAGES = {
    "vitadel": "vitadel",
    "torchattacks": "torchattacks",
    "foolbox": "foolbox",
    "art": "adversarial-robustness-toolbox",
    "secml-torch": "secml-torch",
}


@dataclass(frozen=True)
class Job:
    """Who can do it, and what its floor is: (gradients, forwards) of the bare model on every image.

    `falling`: at the audit's budget, where samples fall; needs a model trained on our images.
    `brief`: short enough to be run on a large model without being asked for.
    """

    candidates: Mapping[str, Build]
    floor: Callable[[Work], tuple[int, int]]
    falling: bool = False
    brief: bool = False


PGDS: dict[str, Build] = {
    "vitadel": ours(our_pgd),
    "torchattacks": of_torchattacks("PGD"),
    "foolbox": foolbox_pgd,
    "art": of_art("ProjectedGradientDescent"),
    "secml-torch": secml_pgd,
}
APGDS: dict[str, Build] = {
    "vitadel": ours(lambda work: apgd_ce(Linf(work.eps), work.steps)),
    "torchattacks": of_torchattacks("APGD"),
    "art": of_art("AutoProjectedGradientDescent"),
}
SQUARES: dict[str, Build] = {
    "vitadel": ours(lambda work: square(Linf(work.eps), work.queries)),
    "torchattacks": of_torchattacks("Square"),
    "art": of_art("SquareAttack"),
}
FABS: dict[str, Build] = {
    "vitadel": ours(lambda work: fab_t(Linf(work.eps), work.steps, work.targets)),
    "torchattacks": of_torchattacks("FAB"),
}
# ART's AutoAttack has other members: no FAB.
AUTOATTACKS: dict[str, Build] = {
    "vitadel": ours(lambda work: autoattack(Linf(work.eps), work.steps, work.targets, work.queries)),
    "torchattacks": torchattacks_autoattack,
}

JOBS = {
    "pgd": Job(PGDS, lambda work: (work.steps, 0), brief=True),
    "pgd-dropping": Job(PGDS, lambda work: (work.steps, 0), falling=True),
    "apgd": Job(APGDS, lambda work: (work.steps, 1), brief=True),
    "apgd-dropping": Job(APGDS, lambda work: (work.steps, 1), falling=True),
    "square": Job(SQUARES, lambda work: (0, work.queries)),
    "fab-t": Job(FABS, lambda work: (work.steps * work.targets, work.steps * work.targets)),
    "autoattack": Job(AUTOATTACKS, lambda work: (work.steps, 0), falling=True),
    # APGD-CE and, towards each target, APGD-T and FAB-T; FAB-T looks where each step has led, Square once per query.
    "autoattack-standing": Job(
        AUTOATTACKS,
        lambda work: (work.steps * (1 + 2 * work.targets), work.steps * work.targets + work.queries),
    ),
}


# --- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """A model, and images that it gets right; `trained` on such images, or else labelled by its own predictions."""

    name: str
    model: Classifier
    x: Tensor
    y: Tensor
    trained: bool


@dataclass
class Measured:
    """One candidate in one job. `ratios` are its times over the floor's, one per round; counts are per image."""

    candidate: str
    ratios: list[float] = field(default_factory=list)
    own_ratios: list[float] = field(default_factory=list)  # over the time of the passes that it took itself
    gradients: float = 0.0
    forwards: float = 0.0
    held: int | None = None
    missing: str | None = None

    @property
    def ratio(self) -> float | None:
        return median(self.ratios) if self.ratios else None


def input_size(model: Classifier) -> int:
    assert model.record.input_size is not None, "models of the zoo and of timm know their size"
    return model.record.input_size[0]


def open_scene(name: str, weights: str | None, images: int) -> Scene:
    trained = name.startswith("zoo:")
    model = load_model(name) if trained else load_model(name, weights=weights or "random")
    chosen: list[tuple[Tensor, Tensor]] = []
    start = 0
    while sum(len(y) for _, y in chosen) < images:
        pixels, y, _ = Shapes(size=input_size(model)).render(range(start, start + images))
        x = pixels.float() / 255
        with torch.no_grad():
            seen = model(x).argmax(1)
        right = seen == y if trained else torch.ones_like(seen, dtype=torch.bool)
        chosen.append((x[right], seen[right]))
        start += images
    x, y = (torch.cat(parts)[:images] for parts in zip(*chosen, strict=True))
    return Scene(name, model, x, y, trained)


def bare(model: Classifier, gradients: int, forwards: int) -> Run:
    """What no attack can do without."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(gradients):
            z = x.clone().requires_grad_()
            torch.autograd.grad(F.cross_entropy(model(z), y, reduction="none").sum(), z)
        with torch.no_grad():
            for _ in range(forwards):
                model(x)
        return x

    return run


@dataclass(frozen=True)
class Turn:
    """The result of one candidate in one round."""

    seconds: float
    cost: Cost
    held: int


@dataclass(frozen=True)
class Floor:
    """The bare passes of one round, and what one of each kind takes on all images."""

    gradient: float
    forward: float
    passes: tuple[int, int]

    @property
    def seconds(self) -> float:
        return self.passes[0] * self.gradient + self.passes[1] * self.forward

    def of(self, cost: Cost, images: int) -> float:
        """What the passes that somebody took would take bare."""
        return (cost.gradients * self.gradient + cost.forwards * self.forward) / images


def lay_floor(job: Job, scene: Scene, work: Work) -> Floor:
    """Each kind of pass by itself, and a few of it at least, so that its cost is known even where the job has none."""
    frozen = copy.deepcopy(scene.model).requires_grad_(False)  # or the floor would keep what weight gradients need
    passes = job.floor(work)
    gradients, forwards = (max(count, LEAST_PASSES) for count in passes)
    backward = take_turn(bare(frozen, gradients, 0), frozen, scene, work).seconds / gradients
    forward = take_turn(bare(frozen, 0, forwards), frozen, scene, work).seconds / forwards
    return Floor(backward, forward, passes)


def take_turn(run: Run, model: Classifier, scene: Scene, work: Work) -> Turn:
    batches = list(zip(scene.x.split(work.batch_size), scene.y.split(work.batch_size), strict=True))
    with count_passes(model) as cost:
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        found = [run(x, y) for x, y in batches]
        seconds = clock() - start
    held = judge(scene.model, Linf(work.eps), scene.x, torch.cat(found), scene.y).held
    return Turn(seconds, cost, int(held.sum()))


def bind(job: Job, scene: Scene, work: Work) -> tuple[dict[str, tuple[Run, Classifier]], list[Measured]]:
    """Every candidate with its own copy of the model, as some leave gradients in it; and those not available."""
    bound: dict[str, tuple[Run, Classifier]] = {}
    missing = []
    for name in PACKAGES:
        if name not in job.candidates:
            missing.append(Measured(name, missing="does not have this attack"))
            continue
        model = copy.deepcopy(scene.model)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecated imports inside the libraries
                bound[name] = (job.candidates[name](model, work), model)
        except ImportError:
            missing.append(Measured(name, missing="not installed"))
    return bound, missing


def measure(job: Job, scene: Scene, work: Work, rounds: int) -> list[Measured]:
    bound, missing = bind(job, scene, work)
    take_turn(bare(scene.model, 2, 0), scene.model, scene, work)  # the first passes of a process are slow
    rows, names = {name: Measured(name) for name in bound}, list(bound)
    n = len(scene.y)
    for number in range(rounds):
        first = number % len(names)
        floor = lay_floor(job, scene, work)
        for name in names[first:] + names[:first]:
            turn, row = take_turn(*bound[name], scene, work), rows[name]
            row.ratios.append(turn.seconds / floor.seconds)
            row.own_ratios.append(turn.seconds / floor.of(turn.cost, n))
            row.gradients, row.forwards, row.held = turn.cost.gradients / n, turn.cost.forwards / n, turn.held
    return [*rows.values(), *missing]


# --- output ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    model: str
    job: str
    work: Work
    floor: tuple[int, int]
    images: int
    rows: list[Measured]

    def title(self) -> str:
        passes = zip(self.floor, ("gradient", "forward"), strict=True)
        floor = " and ".join(f"{count} {what}{'s' * (count > 1)}" for count, what in passes if count)
        eps = "where no sample is fooled" if self.work.eps == STANDING_EPS else f"eps {quantity_text(self.work.eps)}"
        return f"{self.model}: {self.job}, {eps}, {self.images} images; floor = {floor} per image"

    def to_json(self) -> dict[str, Any]:
        rows = [asdict(row) | {"ratio": row.ratio} for row in self.rows]
        return asdict(self) | {"rows": rows}


def show(outcome: Outcome) -> None:
    table = Table("", title=outcome.title(), title_justify="left")
    for heading in ("x floor", "range", "x own passes", "x vitadel", "gradients", "forwards", "held"):
        table.add_column(heading, justify="right")
    ours_ratio = next((row.ratios for row in outcome.rows if row.candidate == "vitadel"), [])
    for row in outcome.rows:
        if row.ratio is None:
            table.add_row(row.candidate, *["–"] * 7)
            continue
        against = median(theirs / own for theirs, own in zip(row.ratios, ours_ratio, strict=True)) if ours_ratio else 0
        spread = f"{min(row.ratios):.2f} to {max(row.ratios):.2f}"
        own = f"{median(row.own_ratios):.2f}"
        passes = (f"{row.gradients:.1f}", f"{row.forwards:.1f}", str(row.held))
        table.add_row(row.candidate, f"{row.ratio:.2f}", spread, own, f"{against:.2f}", *passes)
    console = Console()
    console.print(table)
    for row in outcome.rows:
        if row.missing == "not installed":
            console.print(f"[dim]{row.candidate} is not installed: pip install {PACKAGES[row.candidate]}[/]")


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """One panel per job, because their ratios differ by more than one scale can show."""
    figure = Figure(figsize=(8, 0.6 + 1.9 * len(outcomes)), layout="constrained")
    for axes, outcome in zip(figure.subplots(len(outcomes), squeeze=False)[:, 0], outcomes, strict=True):
        rows = {row.candidate: row for row in outcome.rows if row.ratio is not None}
        for number, name in enumerate(PACKAGES):
            ratios = rows[name].ratios if name in rows else []
            middle = median(ratios) if ratios else 0.0
            if ratios:
                spread = [[middle - min(ratios)], [max(ratios) - middle]]
                axes.barh(number, middle, 0.7, color=f"C{number}", xerr=spread, ecolor="0.4")
            label = f" {middle:.2f}" if ratios else " –"
            axes.text(max(ratios, default=0.0), number, label, va="center", fontsize=8)
        axes.axvline(1, color="0.3", linestyle=":", linewidth=1)
        axes.set_yticks(range(len(PACKAGES)), list(PACKAGES), fontsize=8)
        axes.set_ylim(len(PACKAGES) - 0.5, -0.5)  # also where the last one has no bar
        axes.set_xlim(0, 1.12 * max((max(row.ratios) for row in rows.values()), default=1.0))
        axes.set_title(outcome.title(), fontsize=9, loc="left")
    figure.supxlabel("time over the floor's: median of paired rounds, whiskers from the least to the most", fontsize=8)
    figure.savefig(path, dpi=130)


def versions() -> dict[str, str]:
    found = {}
    for name, package in PACKAGES.items():
        try:
            found[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def write(outcomes: Sequence[Outcome], rounds: int, out: Path) -> None:
    results = {
        "rounds": rounds,
        "libraries": versions(),
        "environment": environment(torch.device("cpu"), 1),
        "outcomes": [outcome.to_json() for outcome in outcomes],
    }
    write_json(out / "attacks.json", results)
    draw(outcomes, out / "attacks.png")


# --- the command -----------------------------------------------------------------------------------------------------


def read_jobs(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in JOBS:
            raise UserError(f"unknown job {name!r}{nearest_names(name, JOBS) or '.'} Known: {', '.join(JOBS)}.")
    return names


def jobs_for(scene: Scene, asked: list[str] | None) -> list[str]:
    if scene.trained:
        return asked or list(JOBS)
    # Without labels nothing can be said about who falls: an untrained model is wrong everywhere else.
    return [name for name in asked or JOBS if not JOBS[name].falling and (asked or JOBS[name].brief)]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="zoo:shapes-robust,deit_tiny_patch16_224", help="comma-separated")
    parser.add_argument("--jobs", default=None, help=f"comma-separated, of {', '.join(JOBS)}")
    parser.add_argument("--weights", default=None, help="file for the models that are not in the zoo (default: random)")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eps", type=lambda text: read_quantity(text, "eps"), default=8 / 255)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--targets", type=int, default=9)
    parser.add_argument("--queries", type=int, default=5000)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-attacks"))
    return parser.parse_args()


def main() -> None:
    given = read_arguments()
    asked = None if given.jobs is None else read_jobs(given.jobs)
    torch.set_num_threads(given.threads)
    given.out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for name in given.models.split(","):
        scene = open_scene(name.strip(), given.weights, given.images)
        for title in jobs_for(scene, asked):
            job = JOBS[title]
            eps = given.eps if job.falling else STANDING_EPS
            work = Work(eps, given.steps, given.targets, given.queries, given.batch_size)
            rows = measure(job, scene, work, given.rounds)
            outcomes.append(Outcome(scene.name, title, work, job.floor(work), given.images, rows))
            show(outcomes[-1])
            write(outcomes, given.rounds, given.out)
    print(given.out / "attacks.json", given.out / "attacks.png", sep="\n")


if __name__ == "__main__":
    main()
