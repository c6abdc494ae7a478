"""Files for RobustBench from a run: the `model_info` JSON, and the text of the issue that asks for a new model.

Title, authors and venue of the paper, and further training data, are not part of a run: they are left to fill in.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from vitadel.errors import UserError
from vitadel.evaluation.model_info import IMAGES, THREATS, model_info, model_info_path, update_model_info
from vitadel.findings import title_of
from vitadel.quantities import listed, share_text
from vitadel.reporting.read_runs import Run, aspects, read_run
from vitadel.runtime.opening import typed_words
from vitadel.runtime.run_folder import write_atomically

__all__ = ["ISSUE", "write_robustbench"]

ISSUE = "new-model-issue.md"


def write_robustbench(path: Path) -> list[Path]:
    """Write both files into RUN/robustbench; returns their paths."""
    run = read_run(path)
    dataset, threat = _benchmark_of(run)
    name = _model_name(run)
    clean, robust = run.results["clean"], _robust(run)
    info = model_info(
        dataset,
        threat,
        clean["accuracy"],
        robust["robust_accuracy"],
        aspects(run)["eps"],
        number_forward_passes=1,
        architecture=str(run.results.get("model", {}).get("family") or "") or None,
        reported=_reported(run),
        unreliable=bool(_raised(run)),
        link=_link(run),
    )
    folder = path / "robustbench"
    json_file, issue = folder / model_info_path(dataset, threat, name), folder / ISSUE
    update_model_info(json_file, info)
    write_atomically(issue, _issue(run, name, threat, info).encode("utf-8", errors="replace"))
    return [json_file, issue]


def _benchmark_of(run: Run) -> tuple[str, str]:
    """The data set and the threat model by RobustBench's names, or why it would not list the run."""
    known, results = aspects(run), run.results
    dataset = known["data"].partition(":")[0].partition("@")[0].partition(",")[0]
    norm = str(results.get("threat", {}).get("norm") or "")
    if not run.complete or results.get("suite") or not results.get("clean"):
        raise UserError(f"{run.path} is not a finished audit; RobustBench lists finished evaluations under AutoAttack")
    if dataset not in IMAGES:
        raise UserError(f"{run.path} is about {known['data']}; RobustBench has leaderboards for {listed(list(IMAGES))}")
    if norm not in ("linf", "l2"):
        raise UserError(f"{run.path} has the norm {norm!r}; RobustBench has leaderboards for linf and l2")
    _robust(run)
    return dataset, THREATS[norm]


def _robust(run: Run) -> dict[str, Any]:
    entry = next((entry for entry in run.attacks if entry["name"] in ("autoattack", "autoattack-plus")), None)
    if entry is None:
        names = listed([entry["name"] for entry in run.attacks]) or "no attack"
        raise UserError(
            f"{run.path} ran {names}; RobustBench lists accuracy under AutoAttack: run `vitadel audit` with --attacks "
            "autoattack, or with one of its protocols (`vitadel list protocols`)"
        )
    return entry


def _model_name(run: Run) -> str:
    """RobustBench's name of a published model, else the model's own, without what a file name cannot hold."""
    name = run.model.removeprefix("published:").rpartition("/")[2]
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name).strip(".-") or "model"


def _reported(run: Run) -> str | None:
    robust = (run.results.get("published") or {}).get("robust")
    return None if robust is None else f"{100 * robust:.2f}"


def _link(run: Run) -> str | None:
    _, found, number = str((run.results.get("published") or {}).get("source") or "").partition("arXiv:")
    return f"https://arxiv.org/abs/{number.split()[0].strip('().,;')}" if found and number.strip() else None


def _raised(run: Run) -> list[str]:
    return [title_of(each) for each in run.results.get("findings") or [] if each["verdict"] != "ok"]


def _issue(run: Run, name: str, threat: str, info: dict[str, Any]) -> str:
    """The headings of RobustBench's issue template, filled in as far as a run knows them."""
    results, protocol = run.results, run.results.get("protocol") or {}
    method = f"AutoAttack, standard version, by Vitadel {results.get('version')}: n = {results['clean']['n']:,}, "
    method += f"seed {results.get('seed')}, 95 % interval {share_text(_robust(run), 'robust_accuracy')}"
    if protocol.get("name"):
        method += f"; protocol {protocol['name']}"
    elif protocol.get("differences"):
        differing = "; ".join(f"{what}: {how}" for what, how in protocol["differences"].items())
        method += f". Differs from the protocol {protocol['nearest']}: {differing}"
    if results["clean"]["n"] != IMAGES[info["dataset"]]:
        method += f". The leaderboard counts {IMAGES[info['dataset']]:,} images: this run cannot be listed"
    raised = _raised(run)
    doubts = f"\n- **Findings of the diagnosis**: {listed(raised)}" if raised else ""
    words = typed_words(run.command)
    command = f"`{shlex.join(['vitadel', *words])}`" if words else "called from Python"
    return f"""[New Model] {name}

# Paper Information

- **Paper Title**: FILL IN
- **Paper URL**: {info["link"] or "FILL IN"}
- **Paper authors**: FILL IN

# Leaderboard Claim(s)

## Model 1

- **Architecture**: {info["architecture"] or "FILL IN"}
- **Threat Model**: {threat}
- **eps**: {info["eps"]}
- **Clean accuracy**: {info["clean_acc"]}
- **Robust accuracy**: {info["autoattack_acc"]}
- **Additional data**: FILL IN (true/false)
- **Evaluation method**: {method}{doubts}
- **Command**: {command}
- **Checkpoint and code**: FILL IN

# Model Zoo:

- [ ] I want to add my models to the Model Zoo (check if true)
- [ ] I use an architecture of RobustBench's model zoo or of `timm`; if not, the link to its implementation: FILL IN
- [ ] I agree to release my model(s) under MIT license (check if true) **OR** under a custom license: FILL IN
"""
