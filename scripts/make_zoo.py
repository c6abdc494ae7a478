"""Train a model of the zoo by its recipe, audit it, and write its weights and card.

    python scripts/make_zoo.py shapes-trades                     # data and time: vitadel recipes show
    python scripts/make_zoo.py cifar10-fast-at --data-root DIR   # CIFAR-10 as torchvision stores it, or
    python scripts/make_zoo.py cifar10-fast-at data.train=parquet:train.parquet@train data.test=parquet:test.parquet
    python scripts/make_zoo.py shapes-trades --card              # only audit the shipped weights again
    python scripts/make_zoo.py shapes-trades --short             # the card from the audit at the end of training
    python scripts/make_zoo.py cifar10-trades --light            # the card without the slow attacks

Weights and cards go to src/vitadel/zoo. Runs are in runs/zoo; an interrupted one is resumed.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

import vitadel
from vitadel.adapters.tora.tora_files import save_tora
from vitadel.adapters.tora.tora_vit import Tora
from vitadel.backbones.checkpoints import save_classifier, write_checksums
from vitadel.statistics import wilson
from vitadel.training.recipes.compose import compose, texts

ALONE = """each attack ran alone on all correctly classified images; the worst case counts an image only if every attack
fails on it."""
ZOO = Path(__file__).parents[1] / "src" / "vitadel" / "zoo"
RUNS = Path("runs") / "zoo"


@dataclass(frozen=True)
class Entry:
    """A recipe with its overrides, and what its card measures: each attack alone, on all correctly classified images.

    `rows` of the recipe are trained in order, each from the one before: the phases of TORA. On shapes many images stay
    robust, and each of them costs `autoattack` 17 core-seconds: hence the fast ensemble, on fewer images.
    """

    recipe: str
    rows: tuple[str, ...] = ()
    settings: tuple[str, ...] = ("train.precision=bf16",)  # twice as fast where the processor supports it
    test: str = "shapes"
    attacks: tuple[str, ...] = ("pgd-100", "aas+pgd-100", "autoattack-fast")
    slow: tuple[str, ...] = ()  # audited after them, on the same images
    images: int = 200
    half: bool = False  # store the weights in half precision: a package should stay small

    def document(self) -> dict[str, Any]:
        """The recipe, or its last row."""
        return compose(self.recipe, self.rows[-1] if self.rows else None)


def on_cifar10(recipe: str) -> Entry:
    attacks = ("pgd-100", "aas+pgd-100", "aas-paper+pgd-100", "autoattack-fast")
    return Entry(recipe, test="cifar10@test", attacks=attacks, slow=("autoattack",), images=500)


# `shapes-standard` and `shapes-robust` come from an earlier script and are kept: recipes, token files and measurements
# depend on their weights. `shapes-ordinary` and `shapes-pgd-at` are the same trainings by today's loop.
ENTRIES = {
    "shapes-ordinary": Entry("shapes/standard", slow=("autoattack",), images=500),  # no image stays robust for long
    "shapes-pgd-at": Entry("shapes/pgd-at"),
    "shapes-trades": Entry("shapes/trades"),
    "shapes-trades-awp": Entry("shapes/trades-awp"),
    "shapes-mart": Entry("shapes/mart"),
    "shapes-tora": Entry("tora/shapes", ("tora", "lambda-0.5")),
    "cifar10-standard": on_cifar10("cifar10-tiny/standard"),
    "cifar10-fast-at": on_cifar10("cifar10-tiny/fast-at"),
    "cifar10-trades": on_cifar10("cifar10-tiny/trades"),
    "cifar10-aas-at": on_cifar10("cifar10-tiny/aas-at"),
    "cifar10-robust": replace(
        on_cifar10("cifar10-tiny/pretrained"), settings=(), attacks=("pgd-20", "autoattack-fast"), half=True
    ),
}


def train(name: str, entry: Entry, overrides: list[str], data_root: str | None) -> dict[str, Any]:
    """Train, or resume, and copy the best epoch's weights into the zoo; return the summary of the last training."""
    results: dict[str, Any] = {}
    before, out = None, RUNS / name
    overrides = [*entry.settings, *overrides]
    for row in entry.rows or (None,):
        out = RUNS / (name if row is None or row == entry.rows[-1] else f"{name}-{row}")
        start: list[str] = [] if before is None else [f"adapter.start={before}"]
        results = vitadel.harden(entry.recipe, [*overrides, *start], row=row, out=out, resume=True, data_root=data_root)
        before = out
    model = vitadel.open_model(str(out))
    if isinstance(model, Tora):
        save_tora(model, ZOO / f"{name}.safetensors", {"model": entry.document()["model"]["name"]})
    elif entry.half:
        save_classifier(model, ZOO / f"{name}.safetensors", torch.float16)
    else:
        shutil.copyfile(out / "weights" / "best.safetensors", ZOO / f"{name}.safetensors")
    write_checksums(ZOO)
    return dict(results["training"])


@dataclass(frozen=True)
class Audits:
    """Audits of the same images, each attack alone; `robust` is the number of images that no attack misclassifies."""

    results: dict[str, Any]
    attacks: list[dict[str, Any]]
    robust: int


def read_audits(folders: Sequence[Path]) -> Audits:
    results = [json.loads((folder / "results.json").read_text()) for folder in folders]
    samples = [pq.read_table(folder / "samples.parquet") for folder in folders]
    assert all(table["index"].equals(samples[0]["index"]) for table in samples)
    columns = [table[name].to_numpy() for table in samples for name in table.column_names if name.startswith("held:")]
    robust = np.logical_and.reduce(columns)
    return Audits(results[0], [entry for result in results for entry in result["attacks"]], int(robust.sum()))


def audit(name: str, entry: Entry, test: str, calibration: str | None, data_root: str | None, light: bool) -> Audits:
    folders = []
    parts = {"audit": entry.attacks} | ({} if light or not entry.slow else {"slow-audit": entry.slow})
    for part, attacks in parts.items():
        folders.append(RUNS / f"{name}-{part}")
        vitadel.audit(
            f"zoo:{name}",
            test,
            attacks=attacks,
            limit=entry.images,
            batch_size=32,  # fits the caches: a tenth faster than 128 on a CPU
            independent=True,
            calibration=calibration,
            data_root=data_root,
            out=folders[-1],
            resume=True,
        )
    return read_audits(folders)


def training_summary(name: str) -> dict[str, Any] | None:
    """Summary of the training that made the shipped weights, if its run folder exists."""
    results = RUNS / name / "results.json"
    return dict(json.loads(results.read_text())["training"]) if results.exists() else None


def row(label: str, share: float, interval: list[float]) -> str:
    return f"| {label} | {100 * share:.1f} % | {100 * interval[0]:.1f} to {100 * interval[1]:.1f} % |"


def table(audits: Audits) -> str:
    clean = audits.results["clean"]
    rows = [row("clean", clean["accuracy"], clean["ci95"])]
    for entry in audits.attacks:
        rows.append(row(entry["name"], entry["robust_accuracy"], entry["ci95"]))
        if style := entry["paper_style"]:
            own = f"{entry['name']}, on the scaled model as in its paper; not an estimate of robustness"
            rows.append(row(own, style["accuracy"], style["ci95"]))
            rows.append(
                row(f"clean, of that model of {entry['name']}", style["clean_scaled"], style["clean_scaled_ci95"])
            )
    rows.append(row("worst case", audits.robust / clean["n"], list(wilson(audits.robust, clean["n"]))))
    return "\n".join(["| | accuracy | 95 % interval |", "|---|---|---|", *rows])


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def card(name: str, entry: Entry, audits: Audits, training: dict[str, Any] | None, remark: str) -> str:
    document, results = entry.document(), audits.results
    model, threat = results["model"], results["threat"]
    about = texts(entry.recipe)
    alone = any(attack["counts"] == "this attack alone" for attack in audits.attacks)
    how = ALONE if alone else "each attack ran only on the images that earlier attacks did not misclassify."
    words = " ".join([entry.recipe, *entry.settings])
    commands = [f"`vitadel harden {words}{f' --row {each}' if each else ''}`" for each in entry.rows or ("",)]
    course = ""
    if training is not None:
        held_out = training["held_out"]
        robust = "" if held_out["robust"] is None else f", robust {100 * held_out['robust']:.1f} %"
        course = (
            f"\n- {training['steps']} steps of {training['images_per_step']} images; best epoch "
            f"{training['best_epoch'] + 1} of {training['epochs']}, selected on {held_out['n']} held-out "
            f"training images (clean {100 * held_out['clean']:.1f} %{robust})."
        )
    return f"""# zoo:{name}

{sentence(about["about"])} {sentence(about["paper"])}

{table(audits)}

{results["data"]["n"]} class-balanced test images, {threat["norm"]}, eps {threat["eps_text"]}, seed {results["seed"]};
{how}

- {model["parameters"]:,} parameters: `{document["model"]["name"]}` {json.dumps(document["model"].get("kwargs", {}))}.
- Pixels in [0, 1]; normalization inside the model.{course}
- Made by {" and ".join(commands)}, measured by `scripts/make_zoo.py {name}`.
- For demonstrations, tests and comparisons of methods at a small scale.{remark and f"{chr(10)}- {remark}"}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=ENTRIES)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for the recipe, e.g. the path of the data")
    parser.add_argument("--card", action="store_true", help="only audit the shipped weights and write the card")
    parser.add_argument("--short", action="store_true", help="only use the audit at the end of training")
    parser.add_argument("--light", action="store_true", help="without the slow attacks")
    parser.add_argument("--remark", default="", help="a sentence for the card, e.g. about the data")
    parser.add_argument("--data-root")
    options = parser.parse_intermixed_args()
    entry = ENTRIES[options.name]
    if options.card:
        training = training_summary(options.name)
    else:
        training = train(options.name, entry, options.overrides, options.data_root)
    given = dict(pair.split("=", 1) for pair in options.overrides)
    if options.short:
        audits = read_audits([RUNS / options.name])
    else:
        test, calibration = given.get("data.test", entry.test), given.get("data.train")
        audits = audit(options.name, entry, test, calibration, options.data_root, options.light)
    text = card(options.name, entry, audits, training, options.remark)
    (ZOO / f"{options.name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
