"""`vitadel study`: what an audit was asked for is asked again, flags win, and what has changed since is told."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import vitadel
from run_folders import write_run
from vitadel.cli import main
from vitadel.cli.options import Choice, Sampling, Threat
from vitadel.cli.run_or_model import IMAGES, Opening, revisited
from vitadel.errors import UserError

PLAIN = Opening("", IMAGES, Threat(), Choice())


def audited(path: Path, *words: str) -> Path:
    argv = ["audit", "zoo:shapes-standard", "--data", "shapes", *words]
    return write_run(path, correct=[True] * 4, attacks={"fgsm": [True] * 4}, eps="4/255", seed=3, argv=argv)


def test_what_the_audit_was_asked_for_comes_back(tmp_path: Path) -> None:
    folder = audited(tmp_path / "run", "--mean=0.5", "--small-images", "--data-root", "somewhere", "--limit=9")
    found = revisited(replace(PLAIN, model=str(folder)), set())
    assert found.model == "zoo:shapes-robust"  # the settings of `write_run` know better than its argv
    assert found.threat == Threat("4/255", "linf")
    assert found.choice == Choice(mean="0.5", small_images=True)
    assert Path(found.sampling.data_root or "") == Path("somewhere")
    assert replace(found.sampling, data_root=None) == replace(IMAGES, limit=9, seed=3)


def test_flags_win(tmp_path: Path) -> None:
    folder = audited(tmp_path / "run", "--mean=0.5")
    asked = Opening(str(folder), Sampling("cifar10", limit=5), Threat(eps="1/255"), Choice(mean="0.1"))
    found = revisited(asked, {"data", "eps", "mean", "limit"})
    assert (found.sampling.data, found.sampling.limit, found.sampling.seed) == ("cifar10", 5, 3)
    assert found.threat.eps == "1/255"
    assert found.choice.mean == "0.1"


def test_an_audit_from_python_has_no_flags(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", correct=[True], attacks={}, argv=["notebook.py", "--limit", "7"])
    found = revisited(replace(PLAIN, model=str(folder)), set())
    assert (found.choice, found.sampling.limit) == (Choice(), IMAGES.limit)


def test_models_are_left_as_they_are_and_other_runs_refused(tmp_path: Path) -> None:
    assert revisited(replace(PLAIN, model="zoo:shapes-robust"), set()) == replace(PLAIN, model="zoo:shapes-robust")
    for verb, model in (("harden", True), ("diagnose", False)):
        folder = tmp_path / verb
        folder.mkdir()
        (folder / "command.json").write_text(json.dumps({"verb": verb, "settings": {}}))
        asked = replace(PLAIN, model=str(folder))
        if model:
            assert revisited(asked, set()) == asked
        else:
            with pytest.raises(UserError, match="a run of 'vitadel diagnose'"):
                revisited(asked, set())


def test_a_command_that_is_not_known_any_more(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--strange"):
        revisited(replace(PLAIN, model=str(audited(tmp_path / "run", "--strange=1"))), set())


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    out = tmp_path_factory.mktemp("audit") / "run"
    return out, vitadel.audit("zoo:shapes-standard", attacks="pgd-2", eps="2/255", limit=6, seed=1, out=out)


def test_curves_of_an_audit_agree_with_it(audit: tuple[Path, dict[str, object]], tmp_path: Path) -> None:
    folder, before = audit
    told = vitadel.study(
        "curves", folder, attack="pgd-2", budgets=(2 / 255,), steps=(), restarts=(), out=tmp_path / "study"
    )
    assert told["threat"] == before["threat"]
    assert told["seed"] == 1
    assert told["model"]["fingerprint"] == before["model"]["fingerprint"]
    ((point,),) = [curve["points"] for curve in told["study"]["curves"]]
    held = {name: before["attacks"][0][name] for name in ("held", "n", "robust_accuracy", "ci95")}
    assert {name: point[name] for name in held} == held
    assert told["study"]["clean"] == before["clean"]


@pytest.mark.parametrize("what", ["model", "data"])
def test_what_has_changed_since_is_told(audit: tuple[Path, dict[str, object]], tmp_path: Path, what: str) -> None:
    command = json.loads((audit[0] / "command.json").read_text())
    command["settings"][f"{what}_fingerprint"] = "another"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "command.json").write_text(json.dumps(command))
    with pytest.raises(UserError, match=f"the {what} .* is no more what it was .*then it was another"):
        vitadel.study("curves", tmp_path / "run", out=tmp_path / "study")
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["curves", "--steps=1,x"], "--steps takes whole numbers"),
        (["curves", "--budgets=0,0"], "--budgets must rise"),
        (["saturation", "--attack=aas+pgd-2"], "take a plain one"),
        (["scaled-blocks", "--ways=frist"], "did you mean first"),
    ],
)
def test_mistakes_end_with_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["vitadel", "study", *words, "--device=cpu"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_an_unknown_study() -> None:
    with pytest.raises(UserError, match=r"unknown study 'curve'.*did you mean curves"):
        vitadel.study("curve")
