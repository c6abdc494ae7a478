"""What one step of adversarial training costs here and elsewhere, as a multiple of the bare passes that it needs.

    python benchmarks/training.py                          # PGD-AT and TRADES on the tiny ViT of the zoo, 3 minutes
    python benchmarks/training.py --batch 64 --steps 3 --rounds 9 --out runs/benchmark-training

Prints a table for docs/hardening.md, and whether we keep what we promise: a step costs at most 1.05 times the floor
(by the median), and no more than it does elsewhere (in at least a quarter of the rounds, so not beyond their scatter).

The floor is `steps` gradients with respect to the images of a frozen model, one forward and backward pass of the loss,
and the optimizer's step; for TRADES also one forward pass for the clean answers, and a loss over twice the images.
The floor and the contenders take turns, in an order that rotates, and each is compared with the floor of its round. All
of them get the same images, attack steps, loss and optimizer; reading and augmenting images is not part of it. Time is
that of this process on the processor, so that other jobs on the machine count little.

The row of AAS-AT is our step on a model that has attention factors: every pass then goes through the lenses that scale
attention scores. Finding new factors, once in so many epochs, is not part of it.

MAIR (Harry24k/MAIR) is on no package index. It trains with the attacks that became torchattacks, so its way is
measured as that: torchattacks' PGD or TPGD, then loss, backward and step. timm has no adversarial training; its way is
an attack written by hand inside timm's training step, with parameters left requiring gradients and timm's own scaler,
clipping and meters.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median, quantiles

import torch
import torchattacks
from stepping import Step, our_step, ratios_to, take_turns
from timm.utils import AverageMeter, dispatch_clip_grad
from torch import Tensor
from torch.nn import functional as F

from vitadel.backbones.anatomy import attentions_of
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.load import load_model
from vitadel.evaluation.engine.run import environment
from vitadel.instrument.hooks import frozen
from vitadel.runtime.run_folder import write_json
from vitadel.training.recipes.build import build_recipe
from vitadel.training.recipes.compose import compose

EPS, LENGTH, BETA, CLIP = 8 / 255, 2 / 255, 6.0, 1.0


def fresh(model: str) -> tuple[Classifier, torch.optim.Optimizer]:
    classifier = load_model(model).train()
    return classifier, torch.optim.AdamW(classifier.parameters(), lr=1e-6)


def loss_of(model: torch.nn.Module, x: Tensor, z: Tensor, y: Tensor, trades: bool) -> Tensor:
    if not trades:
        return F.cross_entropy(model(z), y)
    clean, perturbed = model(torch.cat([x, z])).chunk(2)
    kl = F.kl_div(perturbed.log_softmax(1), clean.log_softmax(1), reduction="batchmean", log_target=True)
    return F.cross_entropy(clean, y) + BETA * kl


def floor(name: str, x: Tensor, y: Tensor, steps: int, trades: bool) -> Step:
    model, optimizer = fresh(name)

    def step() -> None:
        with frozen(model):
            if trades:
                with torch.no_grad():
                    model(x)
            z = x.clone()
            for _ in range(steps):
                z.requires_grad_()
                torch.autograd.grad(F.cross_entropy(model(z), y, reduction="sum"), z)
                z = z.detach()
        loss_of(model, x, z, y, trades).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(name: str, x: Tensor, y: Tensor, steps: int, trades: bool, factor: float | None = None) -> Step:
    attack = f"kl-{steps}(step={LENGTH})" if trades else f"pgd-{steps}(step={LENGTH})"
    objective = {"use": "trades" if trades else "adversarial", "attack": attack}
    document = compose("shapes/pgd-at", None, {"train.tracker": "none", "train.batch_size": len(y), "plugins": None})
    recipe = build_recipe(
        {**document, "objective": objective, "optimizer": {"lr": 1e-6, "clip_grad_norm": CLIP}}, "benchmark"
    )
    model = load_model(name)
    if factor is not None:
        model.set_attention_factors([factor] * len(attentions_of(model)))
    return our_step(recipe, model, x, y)


def ours_scaled(name: str, x: Tensor, y: Tensor, steps: int, trades: bool) -> Step:
    return ours(name, x, y, steps, trades, factor=0.9)


def mairs_way(name: str, x: Tensor, y: Tensor, steps: int, trades: bool) -> Step:
    model, optimizer = fresh(name)
    kind = torchattacks.TPGD if trades else torchattacks.PGD
    attack = kind(model, eps=EPS, alpha=LENGTH, steps=steps)

    def step() -> None:
        z = attack(x, y)
        if trades:
            clean, perturbed = model(x), model(z)
            kl = F.kl_div(perturbed.log_softmax(1), clean.softmax(1), reduction="batchmean")
            loss = F.cross_entropy(clean, y) + BETA * kl
        else:
            loss = F.cross_entropy(model(z), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        loss.item()

    return step


def timms_way(name: str, x: Tensor, y: Tensor, steps: int, trades: bool) -> Step:
    model, optimizer = fresh(name)
    meter = AverageMeter()

    def step() -> None:
        model.eval()
        z = x + 0.001 * torch.randn_like(x)
        for _ in range(steps):
            z.requires_grad_()
            if trades:
                with torch.no_grad():
                    clean = model(x).softmax(1)
                value = F.kl_div(model(z).log_softmax(1), clean, reduction="sum")
            else:
                value = F.cross_entropy(model(z), y)
            (grad,) = torch.autograd.grad(value, z)
            z = torch.min(torch.max(z.detach() + LENGTH * grad.sign(), x - EPS), x + EPS).clamp(0, 1)
        model.train()
        loss = loss_of(model, x, z, y, trades)
        optimizer.zero_grad()
        loss.backward()
        dispatch_clip_grad(model.parameters(), CLIP)
        optimizer.step()
        meter.update(loss.item(), len(y))

    return step


FLOOR, OURS, SCALED, AT_MOST = "the bare passes", "vitadel", "vitadel, AAS-AT", 1.05
CONTENDERS = {
    FLOOR: floor,
    OURS: ours,
    SCALED: ours_scaled,
    "torchattacks, as MAIR does it": mairs_way,
    "by hand in timm's training step": timms_way,
}
OTHERS = list(CONTENDERS)[3:]


def measure(name: str, x: Tensor, y: Tensor, steps: int, trades: bool, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round."""
    crew = {who: build(name, x, y, steps, trades) for who, build in CONTENDERS.items()}
    return take_turns(crew, rounds, time.process_time)


def ratio_text(ratios: list[float]) -> str:
    low, middle, high = quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def promises(job: str, seconds: dict[str, list[float]]) -> list[str]:
    """What is kept and what is not."""
    kept = []
    for who in (OURS, SCALED):
        to_floor = ratios_to(FLOOR, seconds)[who]
        yes = _yes(median(to_floor) <= AT_MOST)
        kept.append(f"{job}, {who}: {ratio_text(to_floor)} of the bare passes, at most {AT_MOST}: {yes}")
    for other in OTHERS:
        ratios = ratios_to(other, seconds)[OURS]
        kept.append(f"{job}: {ratio_text(ratios)} of '{other}', not slower: {_yes(quantiles(ratios, n=4)[0] <= 1)}")
    return kept


def _yes(kept: bool) -> str:
    return "yes" if kept else "NO"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:shapes-standard")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="also write the seconds there as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    x, y = torch.rand(options.batch, 3, 32, 32), torch.randint(0, 10, (options.batch,))
    results = {
        job: measure(options.model, x, y, options.steps, job == "TRADES", options.rounds)
        for job in ("PGD-AT", "TRADES")
    }
    print(f"{options.model}, batch {options.batch}, {options.steps} attack steps, {options.threads} thread(s);")
    print(f"medians of {options.rounds} rounds (quartiles), the bare passes being 1\n")
    print("| | PGD-AT | TRADES |\n|---|---|---|")
    for who in (name for name in CONTENDERS if name != FLOOR):
        print(f"| {who} | {' | '.join(ratio_text(ratios_to(FLOOR, seconds)[who]) for seconds in results.values())} |")
    print()
    for job, seconds in results.items():
        print("\n".join(promises(job, seconds)))
    if options.out:
        settings = {key: str(value) for key, value in vars(options).items()}
        machine = environment(torch.device("cpu"), 1)
        write_json(options.out / "training.json", {"options": settings, "environment": machine, "seconds": results})


if __name__ == "__main__":
    main()
