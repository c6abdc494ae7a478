"""Measure one device in one run: bare passes, attacks, a training step, the input pipeline and memory.

    python benchmarks/gpu.py                                             # on the GPU, or the CPU if there is none
    python benchmarks/gpu.py --device cpu --model zoo:shapes-robust --batch 16 --steps 2 --images 32 --rounds 1
    python benchmarks/gpu.py --device cpu --batch 32 --images 96 --parts input      # reading only
    python benchmarks/gpu.py --device cpu --images 2000 --parts input --jpeg 32 32 --size 32

Prints a table in Markdown for docs/results.md. The images are made here: noise for the attacks, and JPEG files of
500 x 375 pixels with structure for the input pipeline, which also times torchvision's ImageFolder with a DataLoader and
timm's loader on the same files, and our own reading without simplejpeg if that is installed. torchattacks and the
reference AutoAttack are measured if they are installed. All attacks get a budget so small that no image is fooled, so
that everyone does the same work. A training step of ours is one of `vitadel harden`; that of timm is the one of its
train.py, with the same optimizer, and for adversarial training with PGD written into it by hand. Memory is what a step
has at its peak beyond weights, gradients and the optimizer's state: by the allocator of a GPU, and elsewhere by the
tensors that torch's operations return.

Each number is the median of `--rounds` after one that is not counted. On a CPU it is processor time, of reading
processes too, so use one thread (OMP_NUM_THREADS=1): other work on the machine then changes little. Only the time that
reading adds to a model of 10 ms per image is by the wall clock: the model is a pause there.
"""

from __future__ import annotations

import argparse
import io
import pickle
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from unittest import mock

import numpy as np
import torch
from PIL import Image
from stepping import Step, our_step, take_turns
from torch import Tensor
from torch.nn import functional as F

from vitadel.attacks import PGD, Linf
from vitadel.attacks.apgd import apgd_ce
from vitadel.attacks.autoattack.standard import autoattack
from vitadel.attacks.steppers import Steepest
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.load import load_model
from vitadel.data import Preprocess, jpeg, open_dataset, read_batches
from vitadel.data.batches import PixelReader
from vitadel.data.worker_processes import Chunked
from vitadel.runtime.distributed import join_processes
from vitadel.training.recipes.build import build_recipe
from vitadel.training.recipes.compose import compose
from vitadel.training.training_memory import peak_bytes
from vitadel.types import Source

EPS = 1e-6  # no image is fooled within this budget
CLIP, TARGETS = 1.0, 2
_MODEL = 0.01  # seconds per image
OURS, BY_PILLOW = "vitadel", "vitadel without simplejpeg"


def seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    found = []
    for _ in range(rounds + 1):
        start = now(device)
        work()
        found.append(now(device) - start)
    return middle_of(found[1:])


def middle_of(rounds: Sequence[float]) -> float:
    """The median, above 0: some clocks of processor time move by 10 ms at once, and may not have moved."""
    return max(median(rounds), 1e-6)


def now(device: torch.device) -> float:
    wait(device)
    if device.type != "cpu":
        return time.perf_counter()
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def bare(model: Classifier, x: Tensor, y: Tensor, gradients: int, forwards: int) -> None:
    for _ in range(gradients):
        z = x.clone().requires_grad_()
        torch.autograd.grad(F.cross_entropy(model(z), y, reduction="sum"), z)
    with torch.no_grad():
        for _ in range(forwards):
            model(x)


def attacks(model: Classifier, x: Tensor, y: Tensor, steps: int) -> Iterator[tuple[str, Callable[[], object]]]:
    threat = Linf(EPS)
    pgd = PGD(threat, stepper=Steepest(EPS / 4), steps=steps)
    yield f"PGD-{steps}, vitadel", lambda: pgd(model, x, y)
    apgd = apgd_ce(threat, steps=steps)
    yield f"APGD-CE-{steps}, vitadel", lambda: apgd(model, x, y)
    queries, named = 10 * steps, f"AutoAttack ({steps} steps, {TARGETS} targets)"
    whole = autoattack(threat, steps=steps, targets=TARGETS, queries=queries)
    yield f"{named}, vitadel", lambda: whole(model, x, y)
    if find_spec("torchattacks") is not None:
        library = import_module("torchattacks")
        theirs = library.PGD(model, eps=EPS, alpha=EPS / 4, steps=steps)
        yield f"PGD-{steps}, torchattacks", lambda: theirs(x, y)
        auto = library.APGD(model, eps=EPS, steps=steps, loss="ce")
        yield f"APGD-CE-{steps}, torchattacks", lambda: auto(x, y)
        how = {"eps": EPS, "steps": steps}
        several = {**how, "n_classes": TARGETS + 1}  # classes to aim at, and the true one
        members = [library.APGD(model, loss="ce", **how), library.APGDT(model, **several)]
        members += [
            library.FAB(model, multi_targeted=True, **several),
            library.Square(model, eps=EPS, n_queries=queries),
        ]
        everything = library.MultiAttack(members)
        yield f"{named}, torchattacks", lambda: everything(x, y)
    if find_spec("autoattack") is not None:
        settings = {"norm": "Linf", "eps": EPS, "version": "custom", "attacks_to_run": ["apgd-ce"]}
        reference = import_module("autoattack").AutoAttack(model, **settings, device=x.device, verbose=False)
        reference.apgd.n_iter = steps
        yield f"APGD-CE-{steps}, reference", lambda: reference.run_standard_evaluation(x, y, bs=len(x))
        standard = import_module("autoattack").AutoAttack(model, norm="Linf", eps=EPS, device=x.device, verbose=False)
        for part in (standard.apgd, standard.apgd_targeted, standard.fab):
            part.n_iter = steps
        standard.apgd_targeted.n_target_classes = standard.fab.n_target_classes = TARGETS
        standard.square.n_queries = queries
        yield f"{named}, reference", lambda: standard.run_standard_evaluation(x, y, bs=len(x))


def training_steps(
    make_model: Callable[[], Classifier], x: Tensor, y: Tensor, steps: int, amp_dtype: str
) -> Iterator[tuple[str, Step]]:
    """Steps of standard and of PGD adversarial training, ours and timm's."""
    for attack, kind in (("", "standard training"), (f"pgd-{steps}(step={EPS / 4})", f"training with PGD-{steps}")):
        objective = {"use": "adversarial", "attack": attack} if attack else {"use": "standard"}
        switches = {"train.tracker": "none", "train.batch_size": len(y), "train.amp_dtype": amp_dtype, "plugins": None}
        document = compose("shapes/pgd-at", None, {**switches, "threat.eps": EPS})
        optimizer = {"name": "adamw", "lr": 1e-6, "clip_grad_norm": CLIP}
        recipe = build_recipe({**document, "objective": objective, "optimizer": optimizer}, "benchmark")
        yield f"{kind}, {amp_dtype}, vitadel", our_step(recipe, make_model(), x, y)
        yield f"{kind}, {amp_dtype}, timm", timm_step(make_model(), x, y, steps if attack else 0, amp_dtype)


def timm_step(model: Classifier, x: Tensor, y: Tensor, steps: int, amp_dtype: str) -> Step:
    """As in timm's train.py; attacks by hand, through a model whose parameters keep requiring gradients."""
    from timm.optim import create_optimizer_v2
    from timm.utils import AverageMeter, dispatch_clip_grad

    fused = {"fused": True} if x.device.type == "cuda" else {}
    optimizer = create_optimizer_v2(model.backbone, opt="adamw", lr=1e-6, **fused)
    meter, amp = AverageMeter(), amp_dtype == "bf16"

    def step() -> None:
        z = x
        with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
            model.eval()
            for _ in range(steps):
                z = z.detach().requires_grad_()
                (grad,) = torch.autograd.grad(F.cross_entropy(model(z), y), z)
                z = torch.min(torch.max(z.detach() + EPS / 4 * grad.sign(), x - EPS), x + EPS).clamp(0, 1)
            model.train()
            loss = F.cross_entropy(model(z), y)
        loss.backward()
        dispatch_clip_grad(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        meter.update(loss.item(), len(y))

    return step


@dataclass(frozen=True)
class ByPillow:
    """A source whose JPEG files Pillow decodes, also in reading processes."""

    source: Source

    @property
    def classes(self) -> Sequence[str]:
        return self.source.classes

    def __len__(self) -> int:
        return len(self.source)

    def labels(self) -> Tensor:
        return self.source.labels()

    def name(self, index: int) -> str:
        return self.source.name(index)

    def read(self, indices: Sequence[int]) -> list[Image.Image | Exception]:
        with mock.patch.object(jpeg, "simplejpeg", None):
            return self.source.read(indices)


@contextmanager
def pictures(count: int, wide: int = 500, tall: int = 375) -> Iterator[Path]:
    """A folder of JPEG files with structure: sums of waves, as noise would take a decoder longer than photographs."""
    with tempfile.TemporaryDirectory() as name:
        source, folder = np.random.default_rng(0), Path(name)
        down, across = np.mgrid[0:tall, 0:wide]
        for number in range(count):
            waves = [
                np.sin(across * source.uniform(0, 0.2) + down * source.uniform(0, 0.2) + source.uniform(0, 6))
                for _ in range(9)
            ]
            pixels = np.stack([127 + 40 * sum(waves[part::3]) for part in range(3)], 2).clip(0, 255).astype(np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
            file = folder / f"class{number % 2}" / f"{number}.jpg"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(buffer.getvalue())
        yield folder


def pipelines(
    folder: Path, settings: argparse.Namespace, device: torch.device
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Everyone reads all files to batches of float pixels on the device, with the published preprocessing of ViTs."""
    from timm.data import create_dataset, create_loader, create_transform
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    batch, workers, size = settings.batch, settings.workers, (3, settings.size, settings.size)
    files, preprocess = open_dataset(f"folder:{folder}"), Preprocess(settings.size, 0.875)
    chunks = chunks_of(settings)

    def ours(source: Source = files) -> None:
        for read in read_batches(source, chunks, preprocess, workers=workers, threads=1, device=device):
            assert read.x.dtype == torch.float32

    def torchvision() -> None:
        data = ImageFolder(str(folder), create_transform(size, crop_pct=0.875, interpolation="bicubic"))
        for x, _ in DataLoader(data, batch, num_workers=workers, pin_memory=device.type == "cuda"):
            x.to(device, non_blocking=True)

    def timm() -> None:
        data, how = create_dataset("", str(folder)), {"interpolation": "bicubic", "crop_pct": 0.875}
        loader = create_loader(
            data, size, batch, num_workers=workers, device=device, persistent_workers=False, use_prefetcher=True, **how
        )
        for _ in loader:
            pass

    yield OURS, ours
    if jpeg.simplejpeg is not None:
        yield BY_PILLOW, lambda: ours(ByPillow(files))
    yield "torchvision ImageFolder + DataLoader", torchvision
    yield "timm create_loader", timm


def model_rows(settings: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, str]]:
    model = load_model(settings.model, **({} if settings.model.startswith("zoo:") else {"weights": "random"}))
    model = model.to(device).eval()
    height, width = model.record.input_size or (224, 224)
    source = torch.Generator().manual_seed(0)
    x = torch.rand(settings.batch, 3, height, width, generator=source).to(device)
    with torch.no_grad():
        y = model(x).argmax(1)
    work = {"forward pass": lambda: bare(model, x, y, 0, 1), "gradient": lambda: bare(model, x, y, 1, 0)}
    times = {name: seconds(each, device, settings.rounds) for name, each in work.items()}
    for name, time_taken in times.items():
        yield f"{name}, images per second", f"{settings.batch / time_taken:.1f}"
    yield "gradient, memory", megabytes(work["gradient"], device)
    for name, attack in attacks(model, x, y, settings.steps):
        taken = seconds(attack, device, settings.rounds)
        yield name, f"{taken:.3f} s, {taken / times['gradient']:.1f} gradients"
    for amp_dtype in ("fp32", "bf16"):
        candidates = dict(training_steps(lambda: deepcopy(model), x, y, settings.steps, amp_dtype))
        for name, rounds in take_turns(candidates, settings.rounds, lambda: now(device)).items():
            taken = middle_of(rounds)
            yield name, f"{taken:.3f} s, {settings.batch / taken:.1f} images/s, {megabytes(candidates[name], device)}"


def megabytes(work: Callable[[], object], device: torch.device) -> str:
    return f"{peak_bytes(work, device) / 2**20:.0f} MB"


def input_rows(settings: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, str]]:
    with pictures(settings.images, *settings.jpeg) as folder:
        cores = 1 if device.type == "cpu" else max(1, settings.workers)
        works = dict(pipelines(folder, settings, device))
        taken: dict[str, list[float]] = {name: [] for name in works}
        own = []
        for _ in range(settings.rounds + 1):  # in turns: what else the machine does then changes all of them alike
            for name, work in works.items():
                start, here = now(device), time.process_time()
                work()
                taken[name].append(now(device) - start)
                if name == OURS:
                    own.append(time.process_time() - here)
        sent = bytes_sent(folder, settings)
        whole = 4 * 3 * settings.size**2
        yield "input, vitadel, sent by a reading process", f"{sent} bytes per image, {sent / whole:.3f} of float pixels"
        # While reading processes are faster than the model, this is all that reading adds to an audit.
        yield "input, vitadel, in the model's process", f"{1000 * median(own[1:]) / settings.images:.3f} ms per image"
        yield (
            "input, added to a model of 10 ms per image",
            f"{100 * added_time(folder, settings, device):.1f} % of its time",
        )
        for name, rounds in taken.items():
            yield f"input, {name}", f"{settings.images / middle_of(rounds[1:]) / cores:.1f} images/s and core"
        for name, rounds in taken.items():
            if name != OURS and settings.rounds > 1:
                low, middle, high = quantiles((a / b for a, b in zip(taken[OURS][1:], rounds[1:], strict=True)), n=4)
                yield f"input, time of vitadel / {name}", f"{middle:.3f} (quartiles {low:.3f} to {high:.3f})"


def chunks_of(settings: argparse.Namespace) -> list[range]:
    count, size = settings.images, settings.batch
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def added_time(folder: Path, settings: argparse.Namespace, device: torch.device) -> float:
    """What reading adds to the time of a model that takes 10 ms per image, by the wall clock, as a share of it."""
    files, preprocess = open_dataset(f"folder:{folder}"), Preprocess(settings.size, 0.875)
    shares = []
    for _ in range(settings.rounds):
        start = time.perf_counter()
        for read in read_batches(files, chunks_of(settings), preprocess, workers=settings.workers, device=device):
            time.sleep(_MODEL * len(read.x))  # the processor is free while a GPU computes
        shares.append((time.perf_counter() - start) / (_MODEL * len(files)) - 1)
    return median(shares)


def bytes_sent(folder: Path, settings: argparse.Namespace) -> int:
    """What a reading process sends for each image of a batch: pixels, indices and faults."""
    files, part = open_dataset(f"folder:{folder}"), list(range(min(settings.batch, settings.images)))
    _, pixels, faults = Chunked(PixelReader(files, Preprocess(settings.size, 0.875)), 1).__getitems__(part)
    assert isinstance(pixels, Tensor)
    return (pixels.nbytes + len(pickle.dumps((part, faults)))) // len(part)


PARTS = {"model": model_rows, "input": input_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--images", type=int, default=512, help="JPEG files of the input pipeline")
    parser.add_argument("--jpeg", type=int, nargs=2, default=(500, 375), help="width and height of these files")
    parser.add_argument("--size", type=int, default=224, help="pixels that the files are read to")
    parser.add_argument("--workers", type=int, default=1, help="processes that read; 0: a thread")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    settings = parser.parse_args()
    device = join_processes(settings.device).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads, {settings.model}, batch of ", end="")
    print(f"{settings.batch}\n\n| what | result |\n|---|---|")
    for part in settings.parts:
        for what, result in PARTS[part](settings, device):
            print(f"| {what} | {result} |", flush=True)


if __name__ == "__main__":
    main()
