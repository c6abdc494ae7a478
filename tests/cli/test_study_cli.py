"""`vitadel study`: the settings of an audit are used again, flags take precedence, and changes since are refused."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

import vitadel
from run_folders import write_run
from vitadel.cli import main
from vitadel.cli.study import STUDIES
from vitadel.errors import UserError
from vitadel.evaluation.engine.reopen import Reopened, reopen
from vitadel.quantities import read_quantity
from vitadel.runtime.opening import Opening
from vitadel.studies import find_study

DEFAULTS = {"data": "shapes", "limit": 200, "eps": "8/255", "norm": "linf"}


def audited(path: Path, *words: str) -> Path:
    argv = ["audit", "zoo:shapes-standard", "--data", "shapes", *words]
    return write_run(path, correct=[True] * 4, attacks={"fgsm": [True] * 4}, eps="4/255", seed=3, argv=argv)


def record(folder: Path, **fields: object) -> None:
    command = json.loads((folder / "command.json").read_text())
    (folder / "command.json").write_text(json.dumps({**command, **fields}))


def reopened(model: Path | str, **given: object) -> Reopened:
    return reopen(model, {**DEFAULTS, **given}, {*given})


@pytest.mark.parametrize("recorded", [True, False], ids=["opening recorded", "folder of an older version"])
def test_the_settings_of_the_audit_are_used_again(tmp_path: Path, recorded: bool) -> None:
    words = ["--mean=0.5", "--small-images", "--data-root", "somewhere", "--device=cuda"]
    folder = audited(tmp_path / "run", *([] if recorded else words))
    if recorded:
        opening = Opening.read(mean="0.5", small_images=True, data_root=Path("somewhere"), device="cuda")
        record(folder, opening=opening.to_json())
    found = reopened(folder)
    assert found.opening == Opening(  # the settings of `write_run` take precedence over its argv
        model="zoo:shapes-robust", data="shapes", mean=(0.5,) * 3, small_images=True, data_root="somewhere", seed=3
    )
    assert found.request == {
        "eps": read_quantity("4/255"),
        "norm": "linf",
        "limit": 200,
        "batch_size": 64,
        "seed": 3,
        "skip_bad": False,
    }


def test_flags_take_precedence(tmp_path: Path) -> None:
    folder = audited(tmp_path / "run", "--mean=0.5")
    found = reopened(folder, data="cifar10", limit=5, eps="1/255", mean="0.1")
    assert (found.opening.data, found.request["limit"], found.request["seed"]) == ("cifar10", 5, 3)
    assert found.request["eps"] == read_quantity("1/255")
    assert found.opening.mean == (0.1,) * 3


def test_an_audit_from_python_has_no_flags(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", correct=[True], attacks={}, argv=["notebook.py", "--seed", "7"])
    found = reopened(folder)
    assert found.opening == Opening(model="zoo:shapes-robust", data="shapes")
    assert found.request["limit"] == 200


def test_models_are_opened_as_they_are_and_other_runs_refused(tmp_path: Path) -> None:
    assert reopened("zoo:shapes-robust").recorded is None
    for verb, is_model in (("harden", True), ("diagnose", False)):
        folder = tmp_path / verb
        folder.mkdir()
        (folder / "command.json").write_text(json.dumps({"verb": verb, "settings": {}}))
        if is_model:
            found = reopened(folder)
            assert (found.opening.model, found.recorded) == (str(folder), None)
        else:
            with pytest.raises(UserError, match="a run of 'vitadel diagnose'"):
                reopened(folder)


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    out = tmp_path_factory.mktemp("audit") / "run"
    return out, vitadel.audit("zoo:shapes-standard", attacks="pgd-2", eps="2/255", limit=6, seed=1, out=out)


def test_curves_of_an_audit_agree_with_it(audit: tuple[Path, dict[str, object]], tmp_path: Path) -> None:
    folder, before = audit
    opening = json.loads((folder / "command.json").read_text())["opening"]
    assert (opening["model"], opening["data"], opening["seed"]) == ("zoo:shapes-standard", "shapes", 1)
    results = vitadel.study(
        "curves", folder, attack="pgd-2", budgets=(2 / 255,), steps=(), restarts=(), out=tmp_path / "study"
    )
    assert results["threat"] == before["threat"]
    assert results["seed"] == 1
    assert results["model"]["fingerprint"] == before["model"]["fingerprint"]
    ((point,),) = [curve["points"] for curve in results["study"]["curves"]]
    held = {name: before["attacks"][0][name] for name in ("held", "n", "robust_accuracy", "ci95")}
    assert {name: point[name] for name in held} == held
    assert results["study"]["clean"] == before["clean"]


@pytest.mark.parametrize("what", ["model", "data"])
def test_a_change_since_the_audit_is_refused(audit: tuple[Path, dict[str, object]], tmp_path: Path, what: str) -> None:
    command = json.loads((audit[0] / "command.json").read_text())
    command["settings"][f"{what}_fingerprint"] = "another"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "command.json").write_text(json.dumps(command))
    with pytest.raises(UserError, match=f"the {what} .* has changed since the audit.* in the audit it was another"):
        vitadel.study("curves", tmp_path / "run", out=tmp_path / "study")
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("name", STUDIES)
def test_defaults_of_the_flags_are_those_of_the_request(name: str) -> None:
    request, _ = find_study(name)
    defaults = {field.name: field.default for field in dataclasses.fields(request)}
    for flag in dataclasses.fields(STUDIES[name]):
        field = {"patch_side": "side"}.get(flag.name, flag.name)
        assert field in defaults
        if isinstance(flag.default, str) and isinstance(defaults[field], float):  # typed, because fractions are allowed
            assert read_quantity(flag.default) == pytest.approx(defaults[field])
        elif isinstance(flag.default, str) and isinstance(defaults[field], tuple):
            assert flag.default == ",".join(map(str, defaults[field]))
        elif field not in ("others", "classes"):
            assert flag.default == defaults[field], field


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["curves", "--steps=1,x"], "--steps takes whole numbers"),
        (["curves", "--budgets=0,0"], "--budgets must rise"),
        (["saturation", "--attack=aas+pgd-2"], "use a plain attack"),
        (["scaled-blocks", "--ways=frist"], "did you mean first"),
        (["accumulation", "--classes=cat,dog"], "--classes takes whole numbers"),
    ],
)
def test_user_errors_end_with_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["vitadel", "study", *words, "--device=cpu"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_an_unknown_study() -> None:
    with pytest.raises(UserError, match=r"unknown study 'curve'.*did you mean curves"):
        vitadel.study("curve")
