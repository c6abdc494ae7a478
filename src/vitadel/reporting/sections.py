"""The parts of a report: each a function of one run or of several that makes a `Section`, or None if it has nothing.

To add one: write the function, put it into `OVERVIEW` or `OF_A_RUN`, and give its kind a block in
`templates/report.html`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitadel.evaluation.intervals import wilson
from vitadel.findings import title_of
from vitadel.reporting.figures import draw_accuracies, draw_classes, draw_examples, shows_attention
from vitadel.reporting.headline import ASPECTS
from vitadel.reporting.kinds.activations import draw_activations, where_rows
from vitadel.reporting.kinds.adapter_maps import MAPS_REMARK, check_table, draw_maps
from vitadel.reporting.kinds.corruptions import corruption_content
from vitadel.reporting.kinds.stability import draw_stability, stability_remarks, stability_tables
from vitadel.reporting.kinds.threat_levels import (
    compare_ladders,
    control_rows,
    draw_ladder,
    ladder_remarks,
    ladder_rows,
)
from vitadel.reporting.kinds.trade_off import draw_trade_off, trade_off_remarks, trade_off_tables
from vitadel.reporting.kinds.training import draw_training, draw_trainings, training_rows
from vitadel.reporting.pairs import pairings
from vitadel.reporting.read_runs import (
    ClassScore,
    Run,
    aspects,
    class_scores,
    comparability,
    differing_aspects,
    run_labels,
    threat_text,
)
from vitadel.reporting.studies import study_content

__all__ = ["OF_A_RUN", "OVERVIEW", "Section", "command_line", "from_command_line"]


@dataclass(frozen=True)
class Section:
    """A part of the page; `kind` names the template block that shows its content."""

    kind: str
    title: str
    content: Mapping[str, Any]


def from_command_line(run: Run) -> bool:
    argv = run.command.get("argv") or []
    return bool(argv) and argv[0] == run.command["verb"]


def command_line(run: Run) -> str:
    argv = [str(part) for part in run.command.get("argv") or []]
    return shlex.join(["vitadel", *argv] if from_command_line(run) else argv)


def comparison(runs: Sequence[Run]) -> Section | None:
    """The runs in one table, with a warning where they may not be compared."""
    if len(runs) < 2:
        return None
    known = [aspects(run) for run in runs]
    rows = [
        {
            "label": label,
            "place": place,
            "aspects": entry,
            "odd": differing_aspects([runs[0], run]),
            "eps": run.results.get("threat", {}).get("eps", ""),
            "seed": run.results.get("seed", ""),
            "complete": run.complete,
            "clean": run.results.get("clean"),
            "worst": run.results.get("worst_case"),
        }
        for place, (run, label, entry) in enumerate(zip(runs, run_labels(runs), known, strict=True), start=1)
    ]
    differing = differing_aspects(runs)
    # Size and precision are mostly the same, and the table is wide without them.
    rare = {"size", "precision"} - set(differing)
    columns = {name: title for name, title in _COMPARED.items() if name not in rare}
    content = {"rows": rows, "differing": [ASPECTS[name] for name in differing], "columns": columns}
    return Section("comparison", "Side by side", content)


_COMPARED = {
    "data": "Data",
    "n": "n",
    "size": "Size",
    "precision": "Precision",
    "norm": "Norm",
    "eps": "eps",
    "attacks": "Attacks",
}


def accuracies(runs: Sequence[Run]) -> Section | None:
    shown = [run for run in runs if run.one_budget]
    # Of one run without attacks the gauge above says it all.
    picture = draw_accuracies(shown) if len(runs) > 1 or any(run.attacks for run in shown) else None
    if picture is None:
        return None
    outside = sorted({entry["name"] for run in shown for entry in run.attacks if entry.get("own_rules")})
    apart = f" By rules of their own, and no part of it: {', '.join(outside)}." if outside else ""
    return Section("figure", "Accuracy, clean and under attack", {"picture": picture, "caption": _ACCURACIES + apart})


_ACCURACIES = (
    "Bars are shares of all images, lines their 95 % intervals (Wilson 1927). The worst case counts an image only if "
    "it is classified correctly when clean and after every attack."
)


def pairs(runs: Sequence[Run]) -> Section | None:
    """Runs on the same images, sample by sample, and a word where they were not."""
    found = pairings(runs)
    return Section("pairs", "The same images, one by one", {"pairs": found}) if found else None


def trainings(runs: Sequence[Run]) -> Section | None:
    """How several trainings went, such as the rows of one recipe."""
    rows = training_rows(runs)
    if len(rows) < 2:
        return None
    return Section("trainings", "Trainings side by side", {"rows": rows, "picture": draw_trainings(runs)})


def ladders(runs: Sequence[Run]) -> Section | None:
    """Several climbs of the threat ladder, level by level."""
    content = compare_ladders(runs, run_labels(runs))
    return None if content is None else Section("measured", "Threat ladders side by side", content)


def findings(run: Run) -> Section | None:
    found = run.results.get("findings") or []
    told = run.results.get("diagnosis") or {}
    skipped, cost = told.get("not_examined", {}), cost_sentence(told["cost"]) if told.get("cost") else ""
    content = {"findings": found, "not_examined": skipped, "cost": cost}
    return Section("findings", "Findings", content) if any(content.values()) else None


def cost_sentence(cost: Mapping[str, Any]) -> str:
    """What a visit to the doctor took, and what it could have taken."""
    most = f"Cost: {cost['images']:,} images, at most {cost['gradients']:,.0f} gradients and "
    most += f"{cost['forwards']:,.0f} forwards each"
    return f"{most}; it took {cost['seconds']:,.1f} s." if "seconds" in cost else f"{most}."


def protocol(run: Run) -> Section | None:
    """What the numbers may be compared with, and if not with a leaderboard, why not."""
    told = run.results.get("protocol")
    if not told:
        return None
    remarks = [told["remark"]] if told["remark"] else []
    raised = [title_of(each) for each in run.results.get("findings") or [] if each["verdict"] != "ok"]
    if told["name"] and raised:
        remarks.append(f"Clear this up before comparing: {', '.join(raised)}.")
    content = {"sentence": comparability(told), "differences": told["differences"], "remarks": remarks}
    return Section("protocol", "Protocol", content)


def attacks(run: Run) -> Section | None:
    """What each attack did, and what it cost per sample that it attacked."""
    rows = [
        {
            "members": [],
            "paper_style": None,
            **entry,
            "gradients": entry["gradient_calls"] / max(entry["attacked"], 1),
            "forwards": entry["forward_calls"] / max(entry["attacked"], 1),
            "details": {**entry.get("settings", {}), **_about_judging(entry)},
        }
        for entry in (run.attacks if run.one_budget else ())
    ]
    if not rows:
        return None
    return Section("attacks", "Attacks", {"rows": rows, "threat": threat_text(run), "total": _total(run)})


def _total(run: Run) -> dict[str, Any]:
    """What all attacks cost together, and on what."""
    spent = {name: sum(entry[name] for entry in run.attacks) for name in ("gradient_calls", "forward_calls", "seconds")}
    device = run.environment.get("device_name") or run.environment.get("device") or ""
    return {**spent, "device": str(device)}


def _about_judging(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"judged on": entry["judged_on"]} if entry.get("judged_on") else {}


def classes(run: Run) -> Section | None:
    picture = draw_classes(run) if run.one_budget else None
    if picture is None:
        return None
    scores = sorted(class_scores(run), key=lambda score: score.name)
    # Of a single attack the column would be the worst case once more.
    attacks = [name for name, _ in scores[0].attacked] if len(scores[0].attacked) > 1 else []
    rows = [_class_row(score, with_attacks=bool(attacks)) for score in scores]
    return Section("classes", "Classes", {"picture": picture, "rows": rows, "attacks": attacks})


def _class_row(score: ClassScore, *, with_attacks: bool) -> dict[str, Any]:
    counts = [score.correct, *(count for _, count in score.attacked if with_attacks)]
    held = None if score.held is None else {"share": score.held / score.n, "ci95": wilson(score.held, score.n)}
    return {"name": score.name, "n": score.n, "shares": [count / score.n for count in counts], "worst": held}


def examples(run: Run) -> Section | None:
    picture = draw_examples(run)
    if picture is None:
        return None
    caption = f"The first correctly classified images, and what {_pictured(run)} alone makes of them. "
    caption += "Above each column the true class, below it what the model sees in the perturbed image."
    if shows_attention(run):
        caption += " The last two rows: the last layer's attention over the patches, both on one scale."
    return Section("figure", "Examples", {"picture": picture, "caption": caption})


def _pictured(run: Run) -> str:
    """The attack of the examples with its budget; older runs do not tell which of theirs it was."""
    told = run.examples or {}
    if "attack" not in told:
        return "one of the attacks"
    own_rules = bool(told.get("own_rules", False))
    return f"{told['attack']} ({'by its own rules' if own_rules else threat_text(run)})"


def training(run: Run) -> Section | None:
    """How a training went: the loss of every step, and what held-out images said after an epoch."""
    picture = draw_training(run)
    if picture is None:
        return None
    told = run.results.get("training") or {}
    cosines = (told.get("held_out") or {}).get("measure") == "cosine"
    caption = "Above, the loss of every step and its mean over the epoch. Below, "
    if cosines:
        caption += (
            "the cosine of features with the token-free clean ones, on held-out training images, clean and as the "
        )
        caption += "mean with attacked ones: the epoch that is best by it is the one kept and audited."
    else:
        caption += "accuracy on held-out training images, clean and attacked at full eps: the epoch that is best by it "
        caption += "is the one kept and audited."
    if told.get("stopped"):
        caption += f" Stopped early: {told['stopped']}."
    return Section("figure", "Training", {"picture": picture, "caption": caption})


def activations(run: Run) -> Section | None:
    """The largest activations layer by layer, and where they are."""
    picture = draw_activations(run)
    if picture is None:
        return None
    told = run.results["activations"]
    content = {
        "picture": picture,
        "caption": _ACTIVATIONS,
        "conditions": [entry["name"] for entry in told["conditions"]],
        "rows": where_rows(told),
        "warning": told["warning"],
    }
    return Section("activations", "Massive activations", content)


_ACTIVATIONS = (
    "Lines are medians over images, bands reach from the lower to the upper quartile. Attacks are crafted on the model "
    "without tokens, as in the paper, unless they go through the tokens. Registers and robustness tokens do not count."
)


def ladder(run: Run) -> Section | None:
    """What secret tokens are worth against attackers who know more and more."""
    picture = draw_ladder(run)
    if picture is None:
        return None
    told = run.results["ladder"]
    content = {
        "picture": picture,
        "budgets": [entry["eps_text"] for entry in told["budgets"]],
        "rows": ladder_rows(told),
        "controls": control_rows(told),
        "remarks": ladder_remarks(told),
    }
    return Section("ladder", "Threat ladder", content)


def trade_off(run: Run) -> Section | None:
    """Accuracy against robustness, model beside model."""
    picture = draw_trade_off(run)
    if picture is None:
        return None
    content = {
        "picture": picture,
        "caption": "Numbers are lambdas, bars 95 % intervals either way. What lies up and to the right is better.",
        "tables": trade_off_tables(run.results["trade_off"]),
        "remarks": trade_off_remarks(run),
    }
    return Section("measured", "Trade-off of accuracy and robustness", content)


def adapter_maps(run: Run) -> Section | None:
    """Where TORA's adapters are looked at."""
    picture, told = draw_maps(run), (run.results.get("trade_off") or {}).get("maps")
    if picture is None or not told:
        return None
    content = {
        "picture": picture,
        "caption": "The accuracy adapter's share of what each patch gives to the fusion, the mean over all queries.",
        "tables": [check_table(told)],
        "remarks": [MAPS_REMARK],
    }
    return Section("measured", "Maps of the adapters", content)


def corruptions(run: Run) -> Section | None:
    """Errors by corruption and severity, and how often predictions flip along sequences."""
    content = corruption_content(run)
    return None if content is None else Section("corruptions", "Corruptions", content)


def stability(run: Run) -> Section | None:
    """What noise in a few patches does."""
    picture = draw_stability(run)
    if picture is None:
        return None
    told = run.results["stability"]
    content = {
        "picture": picture,
        "caption": _STABILITY,
        "tables": stability_tables(told),
        "remarks": stability_remarks(told),
    }
    return Section("measured", "Stability under noisy patches", content)


_STABILITY = (
    "Left, how near attention stays to that of the clean image. Middle, accuracy when each image's masks are put in "
    "order. Right, how far the features of each block go; bands reach from the lower to the upper quartile."
)


def study(run: Run) -> Section | None:
    """An analysis of a paper on the user's own model."""
    found = study_content(run)
    return None if found is None else Section("measured", *found)


def left_out(run: Run) -> Section | None:
    """Samples that no number on the page counts."""
    data = run.results.get("data", {})
    count, names, unopened = data.get("left_out", 0), data.get("left_out_names", []), data.get("not_opened", [])
    if not count and not unopened:
        return None
    content = {"count": count, "names": names, "more": max(count - len(names), 0), "unopened": unopened}
    return Section("left_out", "Data left out", content)


def provenance(run: Run) -> Section | None:
    """What it takes to get these numbers again."""
    results, made_with, settings = run.results, run.environment, run.command["settings"]
    packages = made_with.get("packages", {})
    device = [str(made_with[key]) for key in ("device", "device_name") if made_with.get(key)]
    rows = {
        "command" if from_command_line(run) else "called from": command_line(run),
        "folder": run.folder,
        "vitadel": made_with.get("vitadel") or run.command.get("version"),
        "python": made_with.get("python"),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "seed": results.get("seed", settings.get("seed")),
        "model fingerprint": results.get("model", {}).get("fingerprint") or settings.get("model_fingerprint"),
        "data fingerprint": settings.get("data_fingerprint"),
        "preprocessing": results.get("data", {}).get("preprocessing"),
        "precision": results.get("precision"),
        "batch size": results.get("batch_size"),
        "platform": made_with.get("platform"),
        "device": ", ".join(dict.fromkeys(device)),
        "threads": made_with.get("threads"),
        "cores": made_with.get("cores"),
        "processes": made_with.get("processes"),
    }
    kept = {name: value for name, value in rows.items() if value not in (None, "")}
    return Section("provenance", "Provenance", {"rows": kept})


OVERVIEW: tuple[Callable[[Sequence[Run]], Section | None], ...] = (comparison, accuracies, pairs, trainings, ladders)
"""Sections about all runs together."""

OF_A_RUN: tuple[Callable[[Run], Section | None], ...] = (
    findings,
    ladder,
    trade_off,
    adapter_maps,
    stability,
    corruptions,
    study,
    activations,
    attacks,
    classes,
    examples,
    training,
    left_out,
    protocol,
    provenance,
)
"""Sections about one run: what a suite was asked for stands before what every run has."""
