"""Make the zoo of `shapes` models again: the same tiny ViT, trained with and without an adversary.

    python scripts/make_zoo.py standard            # about 15 minutes on one core
    python scripts/make_zoo.py robust              # about 75 minutes on one core
    python scripts/make_zoo.py standard --card     # measure the shipped weights anew and write the model card

Weights and cards go to src/vitadel/zoo. A training writes a checkpoint every 100 steps and goes on from it.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import timm
import torch
from torch.nn import functional as F

from vitadel.amounts import amount_text
from vitadel.attacks import PGD, Linf
from vitadel.attacks.steppers import Steepest
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.record import ModelRecord, load_classifier, save_classifier
from vitadel.data.shapes import CLASSES, Shapes
from vitadel.runtime.draws import Draws

ZOO = Path(__file__).parents[1] / "src" / "vitadel" / "zoo"
EPS = 8 / 255
ARCHITECTURE = {
    "img_size": 32,
    "patch_size": 4,
    "embed_dim": 96,
    "depth": 6,
    "num_heads": 3,
    "mlp_ratio": 2,
}


@dataclass(frozen=True)
class Plan:
    """One row of the zoo. `attack_steps` 0 means standard training."""

    about: str
    steps: int
    attack_steps: int
    batch_size: int = 128
    peak_rate: float = 1.5e-3
    weight_decay: float = 0.05
    warm_up: float = 0.05  # share of the steps in which the learning rate rises
    # Eps starts where the texture is already worthless and rises to its full value: with less the model first learns
    # the texture and loses everything when eps reaches it; with more it does not learn at all.
    first_eps: float = 2 / 255
    eps_warm_up: float = 0.5  # share of the steps in which eps rises
    clear_steps: int = 0  # steps on clear shapes only, before the faint ones come in
    seed: int = 0


PLANS = {
    "standard": Plan("standard training on clean images", steps=600, attack_steps=0),
    "robust": Plan(
        "adversarial training (PGD-2, Linf 8/255, epsilon warm-up)", steps=2600, attack_steps=2, clear_steps=1400
    ),
}


def fresh_model(plan: Plan) -> Classifier:
    torch.manual_seed(plan.seed)
    name = "vit_tiny_patch16_224"
    backbone = timm.create_model(name, pretrained=False, num_classes=len(CLASSES), **ARCHITECTURE)
    half = (0.5, 0.5, 0.5)
    record = ModelRecord(
        name=name,
        kwargs=ARCHITECTURE,
        num_classes=len(CLASSES),
        mean=half,
        std=half,
        input_size=(32, 32),
        notes={"about": f"tiny ViT on shapes: {plan.about}"},
    )
    return Classifier(backbone, record)


def train(name: str, plan: Plan, scratch: Path) -> Classifier:
    """AdamW with a cosine schedule; each step draws its samples and its noise from (seed, step)."""
    model = fresh_model(plan)
    fast = torch.compile(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=plan.peak_rate, weight_decay=plan.weight_decay)
    first = 0
    if scratch.exists():
        saved = torch.load(scratch, weights_only=True)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        first = saved["step"]
    # One texture in fifty lies, so that the standard model does not rest on it alone.
    faint = Shapes("train", agreement=0.98)
    clear = replace(faint, faintest=1.0)
    begun = time.monotonic()
    for step in range(first, plan.steps):
        done = step / plan.steps
        rise, fall = done / plan.warm_up, 0.5 * (1 + math.cos(math.pi * (done - plan.warm_up) / (1 - plan.warm_up)))
        for group in optimiser.param_groups:
            group["lr"] = plan.peak_rate * (rise if done < plan.warm_up else fall)
        chosen = Draws.of_samples(plan.seed, [step]).stream("batch").integers(len(faint), plan.batch_size)[0]
        pixels, y, _ = (clear if step < plan.clear_steps else faint).render(chosen)
        x = pixels.float() / 255
        if plan.attack_steps:
            eps = plan.first_eps + (EPS - plan.first_eps) * min(1.0, done / plan.eps_warm_up)
            stepper = Steepest(2 * eps / plan.attack_steps)
            attack = PGD(Linf(eps), stepper=stepper, steps=plan.attack_steps, stop_when_fooled=False)
            x = attack(fast, x, y, Draws.of_samples(plan.seed, chosen).stream("step", step))
        model.train()
        loss = F.cross_entropy(fast(x), y)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if (step + 1) % 100 == 0:
            state = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step + 1}
            torch.save(state, scratch.with_suffix(".part"))
            os.replace(scratch.with_suffix(".part"), scratch)
            clean, robust = quick_look(model)
            spent = time.monotonic() - begun
            seen = f"loss {loss.item():.3f} clean {clean:.3f} pgd-10 {robust:.3f}"
            print(f"{name} {step + 1}/{plan.steps} {seen} {spent:.0f}s", flush=True)
    return model.eval()


def quick_look(model: Classifier) -> tuple[float, float]:
    """Clean and PGD-10 accuracy on 200 validation images, to watch a training by."""
    pixels, y, _ = Shapes("val").render(range(200))
    x = pixels.float() / 255
    model.eval()
    z = PGD(Linf(EPS), steps=10)(model, x, y)
    with torch.no_grad():
        clean, robust = ((model(images).argmax(1) == y).float().mean().item() for images in (x, z))
    return clean, robust


def card(name: str, plan: Plan, model: Classifier) -> str:
    """The model card, with numbers measured on the test split by the package's own audit."""
    import vitadel

    results = vitadel.audit(model, "shapes", attacks=["fgsm", "pgd-20", "pgd-50(restarts=2)"], eps=EPS, limit=1000)
    clean, attacks, worst = results["clean"], results["attacks"], results["worst_case"]

    def row(label: str, entry: dict[str, object]) -> str:
        low, high = entry["ci95"]  # type: ignore[misc]
        key = "accuracy" if "accuracy" in entry else "robust_accuracy"
        return f"| {label} | {100 * entry[key]:.1f} % | {100 * low:.1f} to {100 * high:.1f} % |"  # type: ignore[operator]

    table = "\n".join(
        [row("clean", clean)] + [row(f"after {a['name']}", a) for a in attacks] + [row("worst case", worst)]
    )
    parameters = sum(p.numel() for p in model.parameters())
    rise = f"eps rising from {amount_text(plan.first_eps)} over {plan.eps_warm_up:.0%} of the steps"
    inner = f"; inner attack PGD-{plan.attack_steps}, {rise}; clear shapes only in the first {plan.clear_steps} steps"
    return f"""# zoo:shapes-{name}

A tiny Vision Transformer on the built-in `shapes` set: {plan.about}.

| | accuracy | 95 % interval |
|---|---|---|
{table}

Measured on {results["data"]["n"]} class-balanced test images, Linf, eps {amount_text(EPS)}, seed {results["seed"]};
each attack ran on what the ones before it left standing.

- Architecture: ViT, 32 px, patch 4, width 96, depth 6, 3 heads, MLP ratio 2; {parameters:,} parameters.
- Pixels in [0, 1]; normalisation (mean = std = 0.5) inside the model.
- Training: {plan.steps} steps of {plan.batch_size} images, AdamW, peak rate {plan.peak_rate:g},
  weight decay {plan.weight_decay:g}, cosine schedule, gradient norm clipped to 1, seed {plan.seed}\
{inner if plan.attack_steps else ""}.
- Made by `python scripts/make_zoo.py {name}`.
- Meant for demonstrations and tests; generated images, no other use.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PLANS)
    parser.add_argument("--card", action="store_true", help="only measure the shipped weights and write the card")
    parser.add_argument("--scratch", type=Path, default=Path("runs"), help="where the training checkpoint goes")
    options = parser.parse_args()
    plan, weights = PLANS[options.name], ZOO / f"shapes-{options.name}.safetensors"
    if not options.card:
        options.scratch.mkdir(parents=True, exist_ok=True)
        save_classifier(train(options.name, plan, options.scratch / f"zoo-{options.name}.pt"), weights)
    text = card(options.name, plan, load_classifier(weights))
    weights.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
