"""The page says what the run folders say, to everyone, and nothing on it can run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from run_folders import write_run
from vitadel.errors import UserError
from vitadel.evaluation.audit.audit import audit
from vitadel.quantities import can_diagnose
from vitadel.reporting.exports import export
from vitadel.reporting.kind import Trust, kind_of
from vitadel.reporting.page import write_report
from vitadel.reporting.read_runs import Run, read_run

ALL, NONE, HALF = [True] * 40, [False] * 40, [True, False] * 20


class Outline(HTMLParser):
    """What a browser would see: tags with attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def made(path: Path, **settings: Any) -> Path:
    return write_run(path, **{"correct": ALL, "attacks": {"fgsm": HALF}, **settings})


def verdict(run: Run) -> str:
    return kind_of(run).sentence(run)


def trust(run: Run) -> Trust | None:
    return kind_of(run).trust(run)


def page_of(tmp_path: Path, *runs: Path) -> str:
    write_report(runs, tmp_path / "page.html")
    return (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_importing_the_page_does_not_load_torch_or_pyplot() -> None:
    code = "import sys, vitadel.reporting.page; print([m for m in ('torch', 'matplotlib.pyplot') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_the_sentence_of_an_audit_names_everything_a_number_depends_on(tmp_path: Path) -> None:
    correct = [True] * 39 + [False]
    run = read_run(made(tmp_path / "a", correct=correct, attacks={"fgsm": HALF, "pgd-20": NONE}, seed=7))
    assert verdict(run) == (
        "97.5 % of 40 images are classified correctly (95 % interval 87.1 to 99.6 %); under fgsm and pgd-20 with "
        "Linf 8/255, seed 7, none of them is robust (95 % interval 0.0 to 8.8 %)."
    )
    some = read_run(made(tmp_path / "b", norm="l2", eps="0.5"))
    assert verdict(some).endswith("under fgsm with L2 0.5, seed 0, 50.0 % still are (95 % interval 35.2 to 64.8 %).")


def test_the_sentence_of_an_audit_claims_nothing_without_attacks_or_results(tmp_path: Path) -> None:
    assert "no attack was run" in verdict(read_run(made(tmp_path / "a", attacks={})))
    started = made(tmp_path / "b", attacks={}, pending=["fgsm"])
    assert verdict(read_run(started)).startswith("So far: 100.0 %")
    assert "no attack is finished" in verdict(read_run(started))
    (started / "results.json").unlink()
    assert verdict(read_run(started)) == "There are no results yet."


def test_one_run_one_page(tmp_path: Path) -> None:
    outline = Outline(page_of(tmp_path, made(tmp_path / "run", attacks={"fgsm": HALF, "pgd-20": HALF})))
    for title in ("Accuracy, clean and under attack", "Attacks", "Classes", "Examples", "Provenance"):
        assert title in outline.text
    for absent in ("Side by side", "one by one", "Findings", "Data left out", "not finished", "≠"):
        assert absent not in outline.text
    assert "zoo:shapes-robust on shapes" in outline.text
    assert "pgd-20 counts: after this and all earlier attacks 20 of 40 50.0 % 35.2 to 64.8 % 20 20.0 22.0 3.2 s" in (
        outline.text
    )
    assert "stepper.length 2/255" in outline.text
    assert "vitadel audit zoo:shapes-robust --data shapes" in outline.text
    assert "torch 2.15.0, timm 1.0.30" in outline.text


def test_page_needs_nothing_from_outside_and_runs_only_what_its_policy_names(tmp_path: Path) -> None:
    page = page_of(tmp_path, made(tmp_path / "run"))
    outline = Outline(page)
    assert not {"link", "iframe", "object", "embed", "base"} & {tag for tag, _ in outline.tags}
    for _, attributes in outline.tags:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href"):
                assert (value or "").startswith(("#", "data:image/png;base64,"))
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    policy = next(a["content"] for t, a in outline.tags if t == "meta" and "http-equiv" in a)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == (f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'")
    assert not re.search(r"\b(fetch|eval|innerHTML|XMLHttpRequest|localStorage)\b", script)


def test_everything_shown_is_escaped(tmp_path: Path) -> None:
    bad = '<script>alert("x")</script>'
    finding = {"check": bad, "verdict": bad, "evidence": {bad: bad}, "advice": bad}
    run = made(
        tmp_path / "<script>run",
        model=bad,
        data=bad,
        class_names=(bad, bad + "2"),
        attacks={f"pgd-20{bad}": HALF},
        findings=[finding],
        left_out=[bad],
        not_opened=[bad],
        argv=["audit", bad],
        eps="8/255",
        norm=bad,
    )
    results = json.loads((run / "results.json").read_text())
    results["attacks"][0]["settings"] = {bad: bad}
    results["attacks"][0]["counts"] = bad
    results["precision"] = bad
    (run / "results.json").write_text(json.dumps(results))
    (run / "environment.json").write_text(json.dumps({"device": bad, "packages": {bad: bad}, "platform": bad}))
    other = made(tmp_path / "other", model=bad + "3", data=bad, class_names=(bad, bad + "2"), pending=[bad])
    page = page_of(tmp_path, run, other)
    assert page.lower().count("<script") == 1  # ours
    assert page.count("&lt;script&gt;") > 30  # it is shown, in every place
    assert [tag for tag, _ in Outline(page).tags].count("script") == 1


def test_tables_and_figures_are_accessible(tmp_path: Path) -> None:
    outline = Outline(page_of(tmp_path, made(tmp_path / "a"), made(tmp_path / "b", model="deit")))
    assert all("scope" in attributes for tag, attributes in outline.tags if tag == "th")
    pictures = [attributes for tag, attributes in outline.tags if attributes.get("role") == "img"]
    assert len(pictures) == 5  # accuracies of both, classes and examples of each
    assert all(len(attributes["aria-label"] or "") > 40 for attributes in pictures)
    assert next(attributes for tag, attributes in outline.tags if tag == "html") == {"lang": "en"}
    ids = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_an_unfinished_run_says_so_and_how_to_go_on(tmp_path: Path) -> None:
    outline = Outline(page_of(tmp_path, made(tmp_path / "a", pending=["pgd-20", "square"])))
    assert "This run is not finished: 1 of 3 attacks are done" in outline.text
    assert "Still to do: pgd-20 and square." in outline.text
    assert "vitadel audit zoo:shapes-robust --data shapes --resume" in outline.text
    assert "Classes" not in outline.text


def test_a_run_that_has_only_started_still_gives_a_page(tmp_path: Path) -> None:
    path = made(tmp_path / "a", attacks={}, pending=["fgsm"])
    (path / "results.json").unlink()
    text = Outline(page_of(tmp_path, path, made(tmp_path / "b"))).text
    assert "This run is not finished: it has no results yet." in text
    assert "There are no results yet." in text
    assert "not measured" in text


def test_a_call_from_python_is_not_shown_as_a_command(tmp_path: Path) -> None:
    text = Outline(page_of(tmp_path, made(tmp_path / "a", argv=["my script.py"]))).text
    assert "called from 'my script.py'" in text
    assert "vitadel 'my script.py'" not in text


@pytest.mark.slow
def test_comparable_runs_are_compared_without_a_warning(tmp_path: Path) -> None:
    text = Outline(
        page_of(tmp_path, made(tmp_path / "a"), made(tmp_path / "b", model="deit", attacks={"fgsm": NONE}))
    ).text
    assert "2 runs compared" in text
    assert "Not directly comparable" not in text
    assert "≠" not in text
    assert re.search(r"zoo:shapes-robust deit clean \+0\.0 -\d\.\d to \+\d\.\d 1\.0000 1\.0000 40 0 0 0", text)
    assert re.search(r"deit worst case \+50\.0 \+3\d\.\d to \+6\d\.\d < 0\.0001 < 0\.0001 0 20 0 20", text)  # 2 / 2**20


@pytest.mark.slow
def test_runs_that_differ_are_marked(tmp_path: Path) -> None:
    other = made(tmp_path / "b", model="deit", data="cifar10", eps="4/255", attacks={"pgd-20": HALF})
    outline = Outline(page_of(tmp_path, made(tmp_path / "a"), other))
    assert "Not directly comparable. These runs differ in data, eps and attacks" in outline.text
    assert all(f"{value} ≠" in outline.text for value in ("cifar10", "4/255", "pgd-20"))
    assert "shapes ≠" not in outline.text  # the first run is what the others are held against
    assert "deit: Not compared: they saw different data (shapes, cifar10)." in outline.text


def test_another_selection_of_the_same_data_is_marked(tmp_path: Path) -> None:
    text = Outline(page_of(tmp_path, made(tmp_path / "a"), made(tmp_path / "b", model="deit", first_index=4))).text
    assert "These runs differ in selection of images;" in text
    assert text.count("shapes ≠") == 1


def test_different_attacks_weaken_a_paired_comparison(tmp_path: Path) -> None:
    text = Outline(page_of(tmp_path, made(tmp_path / "a"), made(tmp_path / "b", attacks={"pgd-20": HALF}))).text
    assert "Worst cases not compared: the attacks differ" in text


def test_findings_and_missing_data_are_shown(tmp_path: Path) -> None:
    findings = [
        {"check": "logits", "verdict": "broken", "evidence": "they add up to 1", "advice": "return logits"},
        {"check": "steps", "verdict": "ok", "evidence": {"1 step": 0.5, "20 steps": 0.25}, "advice": ""},
    ]
    run = made(
        tmp_path / "a", findings=findings, left_out=[f"{n}.png" for n in range(23)], not_opened=["a torn archive"]
    )
    text = Outline(page_of(tmp_path, run)).text
    assert "✗ logits broken they add up to 1 Advice: return logits" in text
    assert "✓ steps ok 1 step: 0.5, 20 steps: 0.25" in text
    assert "23 samples could not be used" in text
    assert "19.png and 3 more a torn archive" in text


def test_void_proposals_are_reported(tmp_path: Path) -> None:
    path = made(tmp_path / "a")
    results = json.loads((path / "results.json").read_text())
    results["attacks"][0]["void"] = 1234
    (path / "results.json").write_text(json.dumps(results))
    assert "1,234 proposals broke box or budget" in Outline(page_of(tmp_path, path)).text


def test_figures_go_into_the_folder_that_holds_the_page(tmp_path: Path) -> None:
    first, second = made(tmp_path / "a"), made(tmp_path / "b")
    write_report([first, second], first / "report.html")
    assert sorted(file.name for file in (first / "figures").iterdir()) == [
        "accuracy.png",
        "classes.png",
        "examples.png",
    ]
    assert not (second / "figures").exists()
    assert sorted(file.name for file in first.iterdir() if file.name.startswith(".")) == []


def test_a_page_elsewhere_leaves_run_folders_alone(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    before = sorted(run.iterdir())
    first = page_of(tmp_path, run)
    assert sorted(run.iterdir()) == before
    assert page_of(tmp_path, run) == first  # and the same folder gives the same page


def test_a_run_named_twice_is_shown_once(tmp_path: Path) -> None:
    run, other = made(tmp_path / "a"), made(tmp_path / "b", model="deit")
    text = Outline(page_of(tmp_path, run, other, tmp_path / "b" / ".." / "a")).text
    assert "2 runs compared" in text
    assert text.index("zoo:shapes-robust") < text.index("deit")


def test_user_errors_are_reported_and_nothing_is_overwritten(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    with pytest.raises(UserError, match="at least one run folder"):
        write_report([], tmp_path / "page.html")
    before = (run / "results.json").read_bytes()
    with pytest.raises(UserError, match=r"must end in \.html"):
        write_report([run], run / "results.json")
    assert (run / "results.json").read_bytes() == before
    with pytest.raises(UserError, match="is not a run folder"):
        write_report([run, tmp_path], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_members_and_the_papers_way_of_counting_are_reported(tmp_path):
    folder = made(tmp_path / "run")
    results = json.loads((folder / "results.json").read_text())
    entry = results["attacks"][0]
    entry["members"] = [
        {"name": "apgd-ce", "attacked": 90, "broken": 12},
        {"name": "square", "attacked": 78, "broken": 0},
    ]
    style = {"held": 9, "n": 90, "accuracy": 0.1, "clean_scaled": 0.87, "ci95": [0.05, 0.18], "remark": "no <estimate>"}
    entry["paper_style"] = style
    (folder / "results.json").write_text(json.dumps(results))
    reported = " ".join(page_of(tmp_path, folder).split())
    assert "apgd-ce broke 12 of 90, square broke 0 of 78." in reported
    assert "Counted as in the paper: 10.0 % (5.0 to 18.0 %) at 87.0 % clean" in reported
    assert "no &lt;estimate&gt;" in reported


def with_own_rules(path: Path, name: str) -> Path:
    """The run, with one of its attacks outside the worst case, as patches are."""
    attacks = json.loads((path / "results.json").read_text())["attacks"]
    for entry in attacks:
        entry["own_rules"] = entry["name"] == name
    inside = [entry for entry in attacks if not entry["own_rules"]]
    worst = {key: inside[-1][key] for key in ("held", "n", "robust_accuracy", "ci95")} if inside else None
    rewrite(path, attacks=attacks, worst_case=worst)
    return path


@pytest.mark.slow
def test_what_is_no_part_of_the_worst_case_is_not_said_to_be_withstood(tmp_path: Path) -> None:
    both = with_own_rules(made(tmp_path / "a", attacks={"fgsm": ALL, "patch-fool": HALF}), "patch-fool")
    reported = verdict(read_run(both))
    assert "under fgsm with Linf 8/255, seed 0, 100.0 % still are" in reported
    assert reported.endswith("Different threat model, not part of the worst case: patch-fool 50.0 % (35.2 to 64.8 %).")
    text = Outline(page_of(tmp_path, both)).text
    assert "classified correctly after every attack within the budget" in text
    assert "Different threat model, not part of the worst case: patch-fool." in text
    only = verdict(read_run(with_own_rules(made(tmp_path / "b", attacks={"patch-fool": HALF}), "patch-fool")))
    assert "no attack within the budget was run, so robustness is not known." in only
    assert only.endswith("patch-fool 50.0 % (35.2 to 64.8 %).")


def test_a_run_without_attacks_needs_no_chart_of_one_bar(tmp_path: Path) -> None:
    clean, attacked = made(tmp_path / "a", attacks={}), made(tmp_path / "b")
    assert "Accuracy, clean and under attack" not in page_of(tmp_path, clean)
    assert "Accuracy, clean and under attack" in page_of(tmp_path, attacked)
    assert "Accuracy, clean and under attack" in page_of(tmp_path, clean, attacked)


def test_what_all_attacks_cost_together_is_reported(tmp_path: Path) -> None:
    text = Outline(page_of(tmp_path, made(tmp_path / "a", attacks={"fgsm": HALF, "pgd-20": ALL}))).text
    # 40 images, then the 20 that still stand, at 20 gradients, 22 forwards and 3.25 seconds a stage.
    assert "All together: 1,200 gradients and 1,320 forwards of single images, 6.5 s on cpu." in text


def test_trust_is_reported_before_the_numbers(tmp_path: Path) -> None:
    looked = {"check": "the doctor's glance", "verdict": "ok", "evidence": "", "advice": ""}
    calm = trust(read_run(made(tmp_path / "a", model="my model", data="folder:my photos", findings=[looked])))
    assert calm is not None
    assert calm.verdict == "ok"
    assert calm.command == "vitadel diagnose 'my model' --data 'folder:my photos' --norm linf --eps 8/255"
    words = ["audit", "my model", "--attacks", "fgsm", "--weights", "my weights.pt", "--std=0.5", "--resume"]
    again = trust(read_run(made(tmp_path / "d", model="my model", norm="l2", eps="0.5", argv=words)))
    assert again is not None
    opened = "--weights 'my weights.pt' --std 0.5,0.5,0.5"
    assert again.command == f"vitadel diagnose 'my model' --data shapes {opened} --norm l2 --eps 0.5"
    fine = {"check": "steps", "verdict": "ok", "evidence": "", "advice": ""}
    odd = {"check": "logits", "verdict": "suspicious", "evidence": "", "advice": ""}
    bad = {"check": "gradients", "verdict": "broken", "evidence": "", "advice": ""}
    worst = trust(read_run(made(tmp_path / "b", findings=[fine, odd, bad])))
    assert worst is not None
    assert (worst.verdict, worst.sign) == ("broken", "✗")
    assert worst.sentence == "Do not rely on these numbers yet. Broken: gradients; see the findings."
    assert trust(read_run(made(tmp_path / "c", pending=["pgd-20"]))) is None
    failed = read_run(made(tmp_path / "e", findings=[fine], verb="diagnose"))
    failed.results["diagnosis"] = {"verdict": "suspicious", "sentence": "It cannot be told.", "next": None}
    reported = trust(failed)
    assert reported is not None
    assert (reported.verdict, reported.sign) == ("suspicious", "!")
    page = Outline(page_of(tmp_path, tmp_path / "b")).text
    assert page.index("Do not rely") < page.index("Accuracy, clean and under attack")


def test_the_next_command_of_an_audit_attacks_through_the_modules_that_a_finding_names(tmp_path: Path) -> None:
    found = {"check": "gain-ratio", "verdict": "suspicious", "evidence": {"modules": ["stem.0"]}, "advice": ""}
    reported = trust(read_run(made(tmp_path / "a", findings=[found])))
    assert reported is not None
    attacks = "--attacks 'bpda(modules=stem.0)+pgd-100,square'"
    assert reported.command == f"vitadel audit zoo:shapes-robust --data shapes --norm linf --eps 8/255 {attacks}"
    cleared = trust(read_run(made(tmp_path / "b", findings=[found | {"evidence": {"n": 40}}])))
    assert cleared is not None
    assert cleared.command == ""


@pytest.mark.parametrize("checks", [(), ("autoattack-fast: its own evidence",)])
def test_a_model_that_was_not_checked_is_not_called_fine(tmp_path: Path, checks: tuple[str, ...]) -> None:
    fine = [{"check": name, "verdict": "ok", "evidence": "", "advice": ""} for name in checks]
    path = made(tmp_path / "a", findings=fine)
    reported = trust(read_run(path))
    assert reported is not None
    assert (reported.verdict, reported.sign) == ("unexamined", "?")
    assert reported.sentence.startswith("Not examined: this model was not checked")
    assert reported.command == "vitadel diagnose zoo:shapes-robust --data shapes --norm linf --eps 8/255"
    assert "nothing suspicious" not in page_of(tmp_path, path)


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.0), ("linf", 0.4), ("linf", 0.5), ("l2", 0.0), ("l2", 0.5)])
def test_no_command_is_given_that_diagnose_would_refuse(tmp_path: Path, norm: str, eps: float) -> None:
    reported = trust(read_run(made(tmp_path / "a", norm=norm, eps=f"{eps:g}")))
    assert reported is not None
    assert bool(reported.command) == can_diagnose(norm, eps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attacks", "strongest", "budget"),
    [
        (("fgsm", "pgd-3"), "pgd-3", "Linf 2/255"),
        (("pgd-3", "fgsm"), "pgd-3", "Linf 2/255"),
        (("fgsm", "patches-random(share=0.3,masks=2)"), "fgsm", "Linf 2/255"),
        (
            ("patches-random(share=0.3,masks=2)",),
            "patches-random(share=0.3,masks=2)",
            "different threat model",
        ),
    ],
)
def test_examples_bear_the_name_of_the_attack_that_made_them(
    tmp_path: Path, attacks: tuple[str, ...], strongest: str, budget: str
) -> None:
    audit("zoo:shapes-robust", "shapes", attacks=attacks, limit=8, eps="2/255", out=tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert run.examples is not None
    assert str(run.examples["attack"]) == strongest
    assert run.results["data"]["pixels"] == list(run.examples["x"].shape[2:])
    assert f"and what {strongest} ({budget}) alone makes of them." in Outline(page_of(tmp_path, run.path)).text


def test_examples_without_a_name_or_by_own_rules_claim_nothing_else(tmp_path: Path) -> None:
    both = {"fgsm": ALL, "pgd-20": HALF}
    old = Outline(page_of(tmp_path, made(tmp_path / "old", attacks=both, older=True))).text
    assert "what one of the attacks alone makes of them" in old
    path = made(tmp_path / "new", attacks=both)
    with np.load(path / "examples.npz") as file:
        arrays = dict(file)
    np.savez(path / "examples.npz", **{**arrays, "own_rules": np.asarray(True)})
    assert "what fgsm (different threat model) alone makes of them" in Outline(page_of(tmp_path, path)).text


@pytest.mark.slow
def test_another_size_or_precision_is_marked(tmp_path: Path) -> None:
    base = made(tmp_path / "a")
    alike = Outline(page_of(tmp_path, base, made(tmp_path / "b", model="deit"))).text
    assert "8 x 8" not in alike
    larger = made(tmp_path / "c", model="deit", size=16)
    text = Outline(page_of(tmp_path, base, larger, made(tmp_path / "d", model="half", precision="fp16"))).text
    assert "These runs differ in size of attacked images and precision;" in text
    assert "16 x 16 ≠" in text
    assert "fp16 ≠" in text
    assert "8 x 8 ≠" not in text
    assert "deit: Worst cases not compared: images of a different size are a different threat (8 x 8, 16 x 16)." in text


@pytest.mark.slow
def test_the_order_of_attacks_is_no_difference_anywhere_on_the_page(tmp_path: Path) -> None:
    first = made(tmp_path / "a", attacks={"fgsm": ALL, "pgd-20": HALF})
    second = made(tmp_path / "b", model="deit", attacks={"pgd-20": HALF, "fgsm": HALF})
    text = Outline(page_of(tmp_path, first, second)).text
    assert "Not directly comparable" not in text
    assert "≠" not in text
    assert "deit worst case" in text


def test_an_unfinished_run_beside_another_is_reported_in_the_pairs(tmp_path: Path) -> None:
    text = Outline(page_of(tmp_path, made(tmp_path / "a"), made(tmp_path / "b", model="deit", pending=["square"]))).text
    assert "zoo:shapes-robust and deit: Not compared: one of them has no verdicts of single images yet." in text


def test_a_diagnosis_states_its_conclusion_cost_and_gaps(tmp_path: Path) -> None:
    path = made(tmp_path / "a", attacks={}, verb="diagnose")
    reported = {
        "sentence": "Trust it: <nothing> raised.",
        "next": "vitadel audit x",
        "not_examined": {"transfer": "no images"},
    }
    rewrite(path, diagnosis=reported)
    text = Outline(page_of(tmp_path, path)).text
    assert "Trust it: <nothing> raised. Next: vitadel audit x" in text
    assert "Not examined: transfer, no images." in text
    cost = {"images": 48, "gradients": 1234.0, "forwards": 99.0, "seconds_at_most": 50.0, "seconds": 12.34}
    rewrite(path, diagnosis=reported | {"cost": cost})
    text = Outline(page_of(tmp_path, path)).text
    assert "Cost: 48 images, at most 1,234 gradients and 99 forwards each; it took 12.3 s." in text


@pytest.mark.parametrize(
    "part",
    [
        {"study": {"name": "curves"}},
        {"study": {"name": "saturation", "conditions": []}},
        {"verb": "inspect", "activations": {"conditions": [{"name": "clean"}]}},
        {"verb": "diagnose", "diagnosis": {"sentence": "fine", "next": None, "cost": {"images": 3}}},
        {"suite": "ladder", "ladder": {"levels": ["T0"], "rows": [{}], "budgets": [{"eps_text": "8/255"}]}},
        {"suite": "stability", "stability": {"blocks": 3}},
        {"suite": "corruptions", "corruptions": {"severities": None, "rows": 3, "errors": []}},
    ],
    ids=lambda part: next(iter(part["study"].values())) if "study" in part else next(reversed(part)),
)
def test_a_suite_that_lacks_what_it_should_show_is_damage_and_nothing_is_written(
    tmp_path: Path, part: dict[str, Any]
) -> None:
    path, fine = made(tmp_path / "a", verb=part.get("verb", "audit")), made(tmp_path / "b")
    rewrite(path, **part)
    for write in (lambda: page_of(tmp_path, fine, path), lambda: export([fine, path], tmp_path / "files")):
        with pytest.raises(UserError, match="should have written is not as expected") as reported:
            write()
        assert str(path / "results.json") in str(reported.value)
        assert str(fine) not in str(reported.value)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "b"]
    assert not (path / "figures").exists()


def test_a_fault_of_ours_is_not_called_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(run: Run) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("vitadel.reporting.page._provenance", faulty)
    with pytest.raises(KeyError, match="ours"):
        page_of(tmp_path, made(tmp_path / "a"))


def rewrite(path: Path, **fields: Any) -> None:
    results = json.loads((path / "results.json").read_text())
    (path / "results.json").write_text(json.dumps(results | fields))


PROTOCOL = {
    "name": "robustbench-cifar10",
    "comparable_with": "RobustBench, CIFAR-10, Linf 8/255",
    "nearest": "robustbench-cifar10",
    "nearest_is": "RobustBench, CIFAR-10, Linf 8/255",
    "differences": {},
    "remark": "No random answers.",
}


def test_what_a_run_may_be_compared_with_is_said(tmp_path: Path) -> None:
    odd = {"check": "same answer twice", "verdict": "suspicious", "evidence": "", "advice": ""}
    path = made(tmp_path / "a", findings=[odd])
    rewrite(path, protocol=PROTOCOL)
    text = Outline(page_of(tmp_path, path)).text
    assert "By the protocol robustbench-cifar10: comparable with RobustBench, CIFAR-10, Linf 8/255." in text
    assert "Resolve these findings before comparing: same answer twice." in text
    off = {"name": None, "comparable_with": None, "differences": {"eps": "4/255 instead of <8/255>"}}
    rewrite(path, protocol=PROTOCOL | off)
    text = Outline(page_of(tmp_path, path)).text
    assert "Not comparable with RobustBench, CIFAR-10, Linf 8/255: differs from the protocol robustbench-c" in text
    assert "eps 4/255 instead of <8/255>" in text
    rewrite(path, protocol={"name": None, "nearest": None, "differences": {}, "remark": ""})
    assert (
        "No protocol is known for these data, so this is not comparable with RobustBench"
        in Outline(page_of(tmp_path, path)).text
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "rvt"])
def test_robustbench_is_spoken_of_where_another_protocol_is_nearer(tmp_path: Path, name: str | None) -> None:
    path = made(tmp_path / "a")
    reported = {"name": name, "comparable_with": name and "RVT", "nearest": "rvt", "nearest_is": "RVT", "remark": ""}
    rewrite(path, protocol={**reported, "differences": {} if name else {"eps": "4/255 instead of 1/255"}})
    text = Outline(page_of(tmp_path, path)).text
    assert "omparable with RVT" in text
    assert text.count("Not comparable with RobustBench: only a run of one of its protocols is.") == 1
    rewrite(path, protocol=PROTOCOL)
    assert "Not comparable with RobustBench" not in Outline(page_of(tmp_path, path)).text


def test_classes_are_a_heat_map_in_numbers(tmp_path: Path) -> None:
    path = made(tmp_path / "a", class_names=("disc", "star"), attacks={"fgsm": ALL, "pgd-20": HALF})
    page = page_of(tmp_path, path)
    assert "disc 20 100.0 % 100.0 % 100.0 % 100.0 %" in Outline(page).text  # even images are discs, and hold
    assert "star 20 100.0 % 100.0 % 0.0 % 0.0 %" in Outline(page).text
    assert page.count('heat" style="--share: 0.000"') == 2
    assert page.count('heat" style="--share: 1.000"') == 6
    assert "up to pgd-20" in Outline(page).text  # which was shown what fgsm had left
    alone = made(tmp_path / "b", class_names=("disc", "star"), attacks={"fgsm": ALL, "pgd-20": HALF}, independent=True)
    assert "up to" not in Outline(page_of(tmp_path, alone)).text


def as_photographs(path: Path, rng: np.random.Generator) -> None:
    """Examples with the grain of a camera, which compress badly, and maps over them."""
    with np.load(path / "examples.npz") as file:
        arrays = dict(file)
    grain = rng.normal(0, 0.04, arrays["x"].shape).astype(np.float32)
    maps = {name: rng.random((len(grain), 24, 24)) for name in ("attention_x", "attention_z")}
    np.savez(path / "examples.npz", **{**arrays, **maps, "x": arrays["x"] + grain, "z": arrays["z"] + grain})


@pytest.mark.slow
def test_pages_that_would_be_too_large_have_lighter_figures_and_then_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [made(tmp_path / name, size=224) for name in "ab"]
    for run in runs:
        as_photographs(run, np.random.default_rng(0))
    whole = page_of(tmp_path, *runs)
    assert "data:image/jpeg" not in whole
    reported = "Left out, to keep the page below 10 MB"
    for share, left_out in ((0.8, False), (0.1, True)):
        monkeypatch.setattr("vitadel.reporting.page.MOST_BYTES", int(share * len(whole)))
        small = page_of(tmp_path, *runs)
        assert len(small.encode()) <= share * len(whole)
        assert "data:image/jpeg" in small or left_out
        assert (reported in Outline(small).text) == left_out
        assert "Accuracy, clean and under attack" in small


@pytest.mark.slow
def test_five_runs_of_a_thousand_images_render_in_seconds_without_torch(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = [f"class {number}" for number in range(100)]
    for place in range(5):
        correct = rng.random(1000) < 0.9
        attacks = {name: rng.random(1000) < 0.8 for name in ("fgsm", "pgd-20", "autoattack")}
        write_run(
            tmp_path / f"run{place}", correct=correct, attacks=attacks, class_names=names, model=f"m{place}",
            pictures=8, size=224,
        )  # fmt: skip
        as_photographs(tmp_path / f"run{place}", rng)
    code = (
        "import sys, time\nbegun = time.process_time()\nfrom vitadel.cli import main\n"
        "sys.argv = ['vitadel', 'report', *(f'run{place}' for place in range(5)), '--out', 'page.html']\n"
        "try:\n    main.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(time.process_time() - begun)\nprint('torch' in sys.modules)"
    )
    reported = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.split()
    assert reported[0] == "page.html"
    assert float(reported[1]) < 10
    assert reported[2] == "False"
    assert (tmp_path / "page.html").stat().st_size < 10_000_000
