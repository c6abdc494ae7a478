"""`vitadel report --robustbench`: the model_info file and the issue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import vitadel
from run_folders import write_run
from vitadel.errors import UserError
from vitadel.reporting.robustbench import write_robustbench

FIELDS = (
    *("link", "name", "authors", "additional_data", "number_forward_passes", "dataset", "venue", "architecture"),
    *("eps", "clean_acc", "reported", "autoattack_acc", "unreliable", "footnote"),
)


def audit(path: Path, **more: Any) -> Path:
    shared = {"data": "cifar10@test", "model": "published:cifar10/Some2026Robust_ViT", **more}
    robust = [number % 8 < 3 for number in range(40)]
    attacks = shared.pop("attacks", {"autoattack": robust})
    return write_run(path, correct=[number % 8 < 7 for number in range(40)], attacks=attacks, **shared)


def test_files_hold_the_numbers_of_the_run(tmp_path: Path) -> None:
    run = audit(tmp_path / "run")
    results = json.loads((run / "results.json").read_text())
    published = {"model": "m", "robust": 0.3666, "source": "Some et al., arXiv:2601.01234 (2026)", "sentences": []}
    differences = {"images": "40 instead of 10,000"}
    protocol = {"name": None, "nearest": "robustbench-cifar10", "nearest_is": "RobustBench", "remark": ""}
    added = {"published": {**published, "consistent": True}, "protocol": {**protocol, "differences": differences}}
    (run / "results.json").write_text(json.dumps(results | added))
    info_file, issue_file = write_robustbench(run)
    assert info_file == run / "robustbench" / "model_info" / "cifar10" / "Linf" / "Some2026Robust_ViT.json"
    info = json.loads(info_file.read_text())
    assert tuple(info) == FIELDS
    assert (info["clean_acc"], info["autoattack_acc"], info["reported"]) == ("87.50", "37.50", "36.66")
    assert (info["dataset"], info["eps"], info["unreliable"]) == ("cifar10", "8/255", False)
    assert info["link"] == "https://arxiv.org/abs/2601.01234"
    issue = issue_file.read_text()
    assert issue.startswith("[New Model] Some2026Robust_ViT\n")
    assert "- **Robust accuracy**: 37.50\n" in issue
    assert "Differs from the protocol robustbench-cifar10: images: 40 instead of 10,000" in issue
    assert "The leaderboard counts 10,000 images: this run cannot be listed\n" in issue
    assert "`vitadel audit published:cifar10/Some2026Robust_ViT --data cifar10@test`" in issue


def test_a_title_filled_in_by_hand_stays(tmp_path: Path) -> None:
    run = audit(tmp_path / "run")
    info_file, _ = write_robustbench(run)
    info_file.write_text(json.dumps(json.loads(info_file.read_text()) | {"name": "A title", "clean_acc": "1.00"}))
    write_robustbench(run)
    info = json.loads(info_file.read_text())
    assert (info["name"], info["clean_acc"]) == ("A title", "87.50")


def test_findings_make_an_evaluation_unreliable(tmp_path: Path) -> None:
    finding = {
        "check": "zero-gradients",
        "verdict": "broken",
        "evidence": "",
        "advice": "",
        "title": "Gradients vanish",
    }
    info_file, issue_file = write_robustbench(audit(tmp_path / "run", findings=[finding]))
    assert json.loads(info_file.read_text())["unreliable"] is True
    assert "**Findings of the diagnosis**: Gradients vanish" in issue_file.read_text()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data": "shapes"}, "is about shapes; RobustBench has leaderboards for cifar10, cifar100 and imagenet"),
        ({"norm": "l1"}, "leaderboards for linf and l2"),
        ({"attacks": {"pgd-20": [True] * 40}}, "ran pgd-20; RobustBench lists accuracy under AutoAttack"),
        ({"pending": ["square"]}, "is not a finished audit"),
    ],
)
def test_other_runs_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    run = audit(tmp_path / "run", **changed)
    with pytest.raises(UserError, match=message):
        write_robustbench(run)
    assert not (run / "robustbench").exists()


def test_on_the_command_line(tmp_path: Path) -> None:
    run = audit(tmp_path / "run")
    said = vitadel("report", str(run), "--robustbench")
    assert "for RobustBench: " in said.stderr
    assert (run / "robustbench" / "new-model-issue.md").is_file()
