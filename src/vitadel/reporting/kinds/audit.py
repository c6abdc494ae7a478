"""Audits, and runs of `attack`: accuracy on clean images, under each attack, and in the worst case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitadel.findings import OK, PRECHECK, attacks_through_modules, title_of
from vitadel.quantities import can_diagnose, interval_text, listed, percent, share_text
from vitadel.reporting.audit_figures import (
    GAINS_CAPTION,
    class_scores,
    draw_accuracies,
    draw_classes,
    draw_examples,
    draw_gains,
    enough_per_class,
    shows_attention,
)
from vitadel.reporting.kind import Kind, Section, Trust, doubts, kind_of
from vitadel.reporting.read_runs import Run, aspects, damaged, lacking, run_labels, threat_text
from vitadel.reporting.tables import Column as ReportColumn
from vitadel.reporting.tables import Table as ReportTable
from vitadel.reporting.terminal import VERDICT_COLORS, show_effective_eps, show_findings
from vitadel.runtime.opening import next_command, recorded_opening
from vitadel.statistics import wilson


def audit_sentence(run: Run) -> str:
    """Clean accuracy and the worst case with everything that they depend on."""
    clean, worst = run.results.get("clean"), run.results.get("worst_case")
    if not clean:
        return "There are no results yet."
    sentence = "" if run.complete else "So far: "
    sentence += f"{percent(clean['accuracy'])} of {clean['n']:,} images are classified correctly "
    sentence += f"(95 % interval {interval_text(clean['ci95'])}); "
    within = [entry for entry in run.attacks if not entry.get("own_rules")]
    if not worst or not within:
        what = "was run" if run.complete else "is finished"
        kind = "attack" if within == run.attacks else "attack within the budget"
        return f"{sentence}no {kind} {what}, so robustness is not known.{_other_threats(run)}"
    names = listed([entry["name"] for entry in within])
    missed = _missed(within[-1], "; {} by giving images up")
    share = "none of them is robust" if worst["held"] == 0 else f"{percent(worst['robust_accuracy'])} still are"
    return (
        f"{sentence}under {names} with {threat_text(run)}, seed {run.results.get('seed')}, "
        f"{share} (95 % interval {interval_text(worst['ci95'])}{missed}).{_looks(run)}{_other_threats(run)}"
    )


def _missed(entry: Mapping[str, Any], text: str = "{}") -> str:
    """What an attack missed at most by giving images up, as part of a text; empty if all were attacked to the end."""
    share = entry.get("given_up", {}).get("missed_share_at_most")
    return text.format(f"at most {100 * share:.1f} points missed") if share else ""


def _looks(run: Run) -> str:
    """How an audit went that looks at a growing sample, estimates, or measures distances."""
    return "".join(f" {found['sentence']}" for name in _COURSES if (found := run.results.get(name)))


_COURSES = ("sequential", "two_phase", "curve")


def _other_threats(run: Run) -> str:
    """Attacks with a different kind of budget, which the worst case does not count."""
    others = [
        f"{entry['name']} {share_text(entry, 'robust_accuracy')}" for entry in run.attacks if entry.get("own_rules")
    ]
    return f" Different threat model, not part of the worst case: {listed(others)}." if others else ""


def trust_audit(run: Run) -> Trust | None:
    """Whether to rely on the numbers, and what to run next; None for unfinished runs.

    Next is a diagnosis, or attacks through the modules that a finding names.
    """
    found = doubts(run)
    if not run.complete or not run.attacks or run.command["verb"] != "audit":
        return found
    threat, known = run.results.get("threat", {}), aspects(run)
    norm = str(threat.get("norm") or run.command["settings"].get("norm") or "")

    def command(verb: str, *more: str) -> str:
        if not norm or not known["eps"] or not can_diagnose(norm, threat.get("eps", 0)):
            return ""
        return next_command(recorded_opening(run.command), verb, run.model, known["data"], norm, known["eps"], *more)

    if found is not None:
        raised = {each["check"]: each["evidence"] for each in run.results["findings"] if each["verdict"] != OK}
        attacks = attacks_through_modules(raised)
        return replace(found, command=command("audit", "--attacks", attacks)) if attacks else found
    if any(each["check"] in _PRECHECK for each in run.results.get("findings") or []):
        sentence = "The audit's short check found nothing suspicious. Run a full diagnosis before you publish."
        return Trust("ok", sentence, command("diagnose"))
    sentence = "Not examined: this model was not checked for gradient masking, so these numbers may be too high."
    return Trust("unexamined", sentence, command("diagnose"))


_PRECHECK = (PRECHECK.identifier, "the doctor's glance")  # the latter in earlier versions


def accuracy_section(runs: Sequence[Run]) -> Section | None:
    """Clean accuracy and accuracy under attack of all runs whose attacks share one budget."""
    shown = [run for run in runs if kind_of(run).one_budget]
    # For one run without attacks the gauge above says it all.
    if not any(run.attacks if len(runs) == 1 else run.results.get("clean") or run.attacks for run in shown):
        return None
    others = sorted({entry["name"] for run in shown for entry in run.attacks if entry.get("own_rules")})
    caption = (
        "Bars are shares of all images, lines their 95 % intervals (Wilson 1927). The worst case counts an image only "
        "if it is classified correctly when clean and after every attack."
    )
    caption += f" Different threat model, not part of the worst case: {listed(others)}." if others else ""
    return Section("Accuracy, clean and under attack", lambda: draw_accuracies(shown), caption)


def audit_sections(run: Run) -> list[Section]:
    parts = (_published, _curve, _attacks, _gains, _classes, _examples, _class_mapping, _protocol)
    return [section for make in parts if (section := make(run)) is not None]


def _attacks(run: Run) -> Section | None:
    """What each attack did, and what it cost per image that it attacked."""
    if not run.attacks:
        return None
    rows = [
        {
            "members": [],
            "paper_style": None,
            **entry,
            "notes": [*scaling_sentences(entry), *_given_up(entry)],
            "gradients": entry["gradient_calls"] / max(entry["attacked"], 1),
            "forwards": entry["forward_calls"] / max(entry["attacked"], 1),
            "details": entry.get("settings", {})
            | ({"judged on": entry["judged_on"]} if entry.get("judged_on") else {})
            | _candidates(entry),
        }
        for entry in run.attacks
    ]
    total = {name: sum(entry[name] for entry in run.attacks) for name in ("gradient_calls", "forward_calls", "seconds")}
    device = run.environment.get("device_name") or run.environment.get("device") or ""
    content = {"rows": rows, "threat": threat_text(run), "total": total, "device": str(device)}
    return Section("Attacks", block="attacks", content=content)


def _given_up(entry: Mapping[str, Any]) -> list[str]:
    """What an attack gave up, and the bound on what it missed."""
    return [entry["given_up"]["sentence"]] if entry.get("given_up") else []


def _curve(run: Run) -> Section | None:
    """Robust accuracy against eps, of a run that measured distances."""
    if not run.results.get("curve"):
        return None
    from vitadel.reporting.distance_curve import curve_section

    return curve_section(run)


def _gains(run: Run) -> Section | None:
    """What the steps of each attack delivered against what gradients promised."""
    entries = [entry for entry in run.attacks if (entry.get("gains") or {}).get("points")]
    if not entries:
        return None
    return Section("Promised and delivered", lambda: draw_gains(entries), GAINS_CAPTION)


def _classes(run: Run) -> Section | None:
    scores = sorted(class_scores(run), key=lambda score: score.name)
    if not scores:
        return None
    # Of a single attack the column would repeat the worst case.
    attacks = [name for name, _ in scores[0].attacked] if len(scores[0].attacked) > 1 else []
    rows = [
        {
            "name": score.name,
            "n": score.n,
            "shares": [
                count / score.n for count in (score.correct, *(count for _, count in score.attacked if attacks))
            ],
            "worst": None
            if score.held is None
            else {"share": score.held / score.n, "ci95": wilson(score.held, score.n)},
        }
        for score in scores
    ]
    return Section(
        "Classes",
        lambda: draw_classes(run),
        _class_caption(run),
        block="classes",
        content={"rows": rows, "attacks": attacks},
    )


def _class_caption(run: Run) -> str:
    if not enough_per_class(run):
        return ""
    return (
        "The number beside a class is that of its images. Few images make a class's share uncertain: see the interval."
    )


def _examples(run: Run) -> Section | None:
    examples = run.examples
    if examples is None or len(examples["x"]) == 0:
        return None
    attack = "one of the attacks"  # older runs did not record which
    if "attack" in examples:
        own_rules = bool(examples.get("own_rules", False))
        attack = f"{examples['attack']} ({'different threat model' if own_rules else threat_text(run)})"
    caption = f"Correctly classified images, some misclassified and some robust under attack, and what {attack} alone "
    caption += "makes of them. Above each column the true class, below it the model's answer to the perturbed image."
    if shows_attention(run):
        caption += " The last two rows: the last layer's attention over the patches, both on one scale."
    return Section("Examples", lambda: draw_examples(run), caption)


def _published(run: Run) -> Section | None:
    """The numbers that were published for this model beside those of the run."""
    published = run.results.get("published")
    if not published:
        return None
    wrong = None if published["consistent"] is not False else "The published numbers were not reached; see below."
    sentences = [f"{published['model']}, published in {published['source']}.", *published["sentences"]]
    return Section("Beside the published numbers", sentences=sentences, warning=wrong)


_MOST_CLASSES = 200


def _class_mapping(run: Run) -> Section | None:
    """Which output each class of the data was judged by."""
    mapping = run.results.get("class_mapping")
    if not mapping or (mapping["in_order"] and mapping["outputs"] == len(mapping["classes"])):
        return None
    rows = tuple((row["data"], str(row["output"]), row["model"]) for row in mapping["classes"][:_MOST_CLASSES])
    columns = (ReportColumn("class of the data"), ReportColumn("output"), ReportColumn("class of the model"))
    table = ReportTable("Classes of the data and outputs of the model.", columns, rows, "class-mapping")
    return Section("Class mapping", sentences=[f"{_mapping_sentence(mapping)}."], tables=[table])


def _protocol(run: Run) -> Section | None:
    """What the numbers may be compared with, and if not with a leaderboard, why not."""
    protocol = run.results.get("protocol")
    if not protocol:
        return None
    remarks = [protocol["remark"]] if protocol["remark"] else []
    raised = [title_of(each) for each in run.results.get("findings") or [] if each["verdict"] != "ok"]
    if protocol["name"] and raised:
        remarks.append(f"Resolve these findings before comparing: {', '.join(raised)}.")
    content = {"sentence": _comparability(protocol), "differences": protocol["differences"], "remarks": remarks}
    return Section("Protocol", block="protocol", content=content)


def _comparability(protocol: Mapping[str, Any]) -> str:
    """What the field `protocol` of the results comes to, in one sentence."""
    if protocol["name"]:
        sentence = f"By the protocol {protocol['name']}: comparable with {protocol['comparable_with']}."
    elif protocol["nearest"]:
        differing = ", ".join(protocol["differences"])
        sentence = f"Not comparable with {protocol['nearest_is']}: "
        sentence += f"differs from the protocol {protocol['nearest']} in {differing}."
    else:
        return (
            "No protocol is known for these data, so this is not comparable with RobustBench or another leaderboard: "
            "compare only runs on the same images under the same attacks."
        )
    # The leaderboard that most readers have in mind, where another protocol is nearer.
    return sentence if "RobustBench" in sentence else f"{sentence} {_NOT_ROBUSTBENCH}"


_NOT_ROBUSTBENCH = "Not comparable with RobustBench: only a run of one of its protocols is."
_SMOKE_TEST = {"fgsm", "pgd-20"}  # the attacks that `--attacks quick` stands for
_BAR = 12


def _bar(value: float, console: Console) -> str:
    filled = round(_BAR * value)
    full, empty = "█·" if console.encoding.lower().startswith("utf") else "#."
    color = "green" if value >= 0.5 else "yellow" if value >= 0.2 else "red"
    return f"[{color}]{full * filled}[/][dim]{empty * (_BAR - filled)}[/]"


def _cost_texts(entry: Mapping[str, Any]) -> tuple[str, str]:
    seen = max(entry["attacked"], 1)
    return f"{entry['gradient_calls'] / seen:.1f}", f"{entry['forward_calls'] / seen:.1f}"


def _accuracy_table(run: Run, console: Console) -> Table:
    results = run.results
    threat, data, (label,) = results["threat"], results["data"], run_labels([run])
    table = Table(
        title=f"{escape(label)} on {escape(data['spec'])}: {threat['norm']}, eps {threat['eps_text']}, "
        f"n = {data['n']}, seed {results['seed']}",
        title_justify="left",
    )
    for heading in ("", "accuracy", "95 % interval", "", "grads", "fwds"):
        table.add_column(heading, justify="left" if heading in ("", "95 % interval") else "right")

    def add(name: str, value: float, interval: Sequence[float], cost: tuple[str, str] = ("", "")) -> None:
        bounds = interval_text(interval).removesuffix(" %")
        table.add_row(escape(name), percent(value), bounds, _bar(value, console), *cost)

    clean, worst = results["clean"], results["worst_case"]
    add("clean", clean["accuracy"], clean["ci95"])
    for entry in results["attacks"]:
        add(entry["name"], entry["robust_accuracy"], entry["ci95"], _cost_texts(entry))
        if missed := _missed(entry):
            table.add_row("", "", missed)
        for member in entry.get("members", ()):
            broke = f"broke {member['broken']} of {member['attacked']}"
            table.add_row(f"[dim]  {escape(member['name'])}[/]", "", f"[dim]{broke}[/]", "", *_cost_texts(member))
    if worst is not None:
        table.add_section()
        add("worst case", worst["robust_accuracy"], worst["ci95"])
    return table


def _mapping_sentence(mapping: Mapping[str, Any]) -> str:
    """How classes were matched, and which outputs the model chooses from."""
    known = f" ({mapping['model_classes_from']})" if mapping["model_classes_from"] else ""
    return (
        f"Classes: {len(mapping['classes'])} of the data, matched with the model's {mapping['outputs']}{known} by "
        f"{' and '.join(mapping['matched_by'])}; judged among {mapping['judged_among']}"
    )


_SHOWN = ("model", "data", "threat", "clean", "worst_case", "attacks", "findings")


def show_audit(run: Run) -> None:
    """The table of accuracies, what it counts, and what limits it."""
    console, results = Console(), run.results
    if fault := lacking(_SHOWN, list(results)):
        raise damaged(run.path / "results.json", fault)
    attacks, data = results["attacks"], results["data"]
    if (doubt := doubts(run)) is not None:
        color = VERDICT_COLORS.get(doubt.verdict, "yellow")
        console.print(f"[{color} bold]{escape(doubt.sentence.replace('; see the findings', '; see below'))}[/]")
    console.print(_accuracy_table(run, console))
    notes = []
    mapping = results.get("class_mapping")
    if mapping and mapping["outputs"] > len(mapping["classes"]):
        notes.append(f"{_mapping_sentence(mapping)}.")
    if beside := results.get("clean_among_all"):
        accuracy = percent(beside["accuracy"])
        notes.append(f"Clean, among all {beside['classes']} classes: {accuracy}, {beside['remark']}.")
    if attacks:
        counts = " or ".join(dict.fromkeys(entry["counts"] for entry in attacks))
        notes.append(f"Robust accuracy counts {counts}; passes are per attacked sample.")
    if attacks and {entry["name"] for entry in attacks} <= _SMOKE_TEST:
        notes.append("A smoke test: FGSM and PGD-20 measure no robustness. The default attack, autoattack-fast, does.")
    for entry in attacks:
        notes += [f"{entry['name']}: {sentence}" for sentence in (*scaling_sentences(entry), *_given_up(entry))]
        if style := entry.get("paper_style"):
            clean = f" at {percent(style['clean_scaled'])} clean" if "clean_scaled" in style else ""
            accuracy = percent(style["accuracy" if "accuracy" in style else "robust_accuracy"])
            notes.append(f"{entry['name']}, counted as in its paper: {accuracy}{clean}, {style['remark']}.")
    if results.get("compile"):
        notes.append(results["compile"])
    notes += [results[name]["sentence"] for name in _COURSES if results.get(name)]
    if (results.get("protocol") or {}).get("nearest"):  # else there is nothing that could be compared with
        notes.append(_comparability(results["protocol"]))
    for note in notes:
        console.print(f"[dim]{escape(note)}[/]")
    for entry in attacks:
        show_effective_eps(entry["name"], entry.get("settings", {}), console)
    if void := sum(entry["void"] for entry in attacks):
        console.print(f"[yellow]{void} proposals broke box or budget and were not counted as successes.[/]")
    if data.get("left_out"):
        names = ", ".join(map(escape, data.get("left_out_names", [])[:3]))
        console.print(f"[yellow]{data['left_out']} samples could not be read and were left out: {names}[/]")
    for sentence in (results.get("published") or {}).get("sentences", ()):
        color = "red" if "by more than chance" in sentence else "green" if "consistent" in sentence else "dim"
        console.print(f"[{color}]{escape(sentence)}[/]")
    show_findings(results["findings"])
    if kept := results.get("kept"):
        console.print(f"{kept['images']} adversarial images saved in {kept['folder']}/ (safetensors, floats in [0, 1])")
        if kept["pictures"]:
            still = kept["images"] - kept["undone_by_8_bits"]
            console.print(f"and as 8-bit pictures in {kept['pictures']}/: {still} of them still fool the model")
    trust = trust_audit(run)
    if trust is not None and trust.command:
        # As it stands, on one line: a wrapped command cannot be pasted.
        console.print(f"next: {trust.command}", soft_wrap=True, markup=False, highlight=False)


def _candidates(entry: Mapping[str, Any]) -> dict[str, str]:
    """Every candidate for the factors of attention scaling: what it was worth, and its factors."""
    shown = {}
    for each in (entry.get("calibration") or {}).get("candidates", []):
        worth = [
            text.format(each[key])
            for key, text in (("value", "objective {:.4g}"), ("broken", "{} broken"), ("loss", "loss {:.4g}"))
            if each.get(key) is not None
        ]
        factors = ", ".join(f"{factor:.3g}" for factor in each["factors"])
        shown[f"candidate {each['name']}"] = "; ".join([*worth, factors])
    return shown


def scaling_sentences(entry: Mapping[str, Any]) -> list[str]:
    """How the factors of attention scaling were found, and what attacks of the same cost did."""
    sentences = []
    if found := entry.get("calibration"):
        chosen = next(each for each in found["candidates"] if each["name"] == found["winner"])
        factors = ", ".join(f"{factor:.3g}" for factor in chosen["factors"])
        margin = ", ".join(f"{by:+.3g} {what}" for what, by in (found.get("margin") or {}).items())
        over = f" ({margin} over {found['runner_up']})" if margin else ""
        sentences.append(
            f"the factors of '{found['winner']}' won{over} on {found['images']:,} calibration images, at "
            f"{found['gradients']:,} gradients and {found['forwards']:,} forwards: {factors}."
        )
        if saturation := found.get("saturation"):
            sentences.append(_saturation_sentence(saturation))
    for control in entry.get("controls") or []:
        sentences.append(
            f"control, {control['name']}: {control['held']} of {control['n']} still correct; "
            f"{control['only_attack']} broken by the attack only, {control['only_control']} by the control only "
            f"(p = {control['p']:.2g})."
        )
    return sentences


def _saturation_sentence(found: Mapping[str, Any]) -> str:
    most = max(found["rows"], default=0.0)
    measured = (
        f"at most {100 * most:.0f} % of the rows of an attention have a score gap beyond {found['beyond']:g}, where "
        f"rounding makes the softmax one-hot; the largest gap is {found['largest_gap']:.3g}"
    )
    if found["is_saturated"]:
        return f"attention is saturated: {measured}."
    return f"attention is not saturated, so scaling has no lost gradients to restore: {measured}."


KIND = Kind(audit_sentence, audit_sections, trust=trust_audit, show=show_audit, partial=True)
