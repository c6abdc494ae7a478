"""The union of several threats as one audit: against audits of each threat alone, and its bad inputs."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

import vitadel
from command_line import vitadel as command
from vitadel.errors import UserError
from vitadel.evaluation.audit.protocols import protocol_named, settings
from vitadel.reporting.read_runs import read_run, threat_text

MODEL, DATA = "zoo:shapes-robust", "shapes"
THREATS = {"linf": "8/255", "l2": "1", "l1": "12"}
LISTS = {"norm": ",".join(THREATS), "eps": ",".join(THREATS.values())}
FAST = {"attacks": "fgsm,pgd-3", "limit": 20}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Each threat by an audit of its own: the results and which images are robust."""
    found = {}
    for norm, eps in THREATS.items():
        out = tmp_path_factory.mktemp("alone") / norm
        results = vitadel.audit(MODEL, DATA, norm=norm, eps=eps, out=out, **FAST)
        found[norm] = results, read_run(out).held()
    return found


@pytest.mark.slow
def test_union_counts_images_that_are_robust_under_every_threat(alone, tmp_path):
    out = tmp_path / "union"
    results = vitadel.audit(MODEL, DATA, out=out, **LISTS, **FAST)
    robust = np.logical_and.reduce([held for _, held in alone.values()])
    counts = [int(held.sum()) for _, held in alone.values()]
    assert results["worst_case"]["held"] == int(robust.sum()) <= min(counts)
    assert len(set(counts)) > 1  # the threats differ, or this test would see too little
    assert [entry["held"] for entry in results["attacks"]] == counts
    assert [entry["robust_accuracy"] for entry in results["attacks"]] == [count / 20 for count in counts]
    assert [entry["gradient_calls"] for entry in results["attacks"]] == [
        sum(entry["gradient_calls"] for entry in each["attacks"]) for each, _ in alone.values()
    ]
    assert results["clean"] == alone["linf"][0]["clean"]
    run = read_run(out)
    assert threat_text(run) == "union linf 8/255, l2 1, l1 12"
    assert run.held().tolist() == robust.tolist()
    for norm, (_, held) in alone.items():
        assert read_run(out / norm).held().tolist() == held.tolist()
    assert pq.read_table(out / "samples.parquet").num_rows == 20


@pytest.mark.slow
def test_union_in_memory_gives_the_same_numbers(alone):
    results = vitadel.audit(MODEL, DATA, **LISTS, **FAST)
    robust = np.logical_and.reduce([held for _, held in alone.values()])
    assert results["worst_case"]["held"] == int(robust.sum())


@pytest.mark.slow
def test_command_resumes_and_reports(alone, tmp_path):
    flags = ["--norm", LISTS["norm"], "--eps", LISTS["eps"], "--attacks", "fgsm,pgd-3", "--limit", "20"]
    out = tmp_path / "run"
    said = command("audit", MODEL, "--data", DATA, *flags, "--no-precheck", "--out", str(out))
    assert "l1 12: fgsm, pgd-3" in said.stdout
    page = (out / "report.html").read_text()
    assert "union linf 8/255, l2 1, l1 12" in page
    first = json.loads((out / "results.json").read_text())
    (out / "results.json").unlink()
    (out / "l1" / "results.json").unlink()
    command("audit", MODEL, "--data", DATA, *flags, "--no-precheck", "--out", str(out), "--resume")
    second = json.loads((out / "results.json").read_text())
    assert second["worst_case"] == first["worst_case"]
    assert [entry["held"] for entry in second["attacks"]] == [entry["held"] for entry in first["attacks"]]


@pytest.mark.parametrize(
    ("norm", "eps", "message"),
    [
        ("linf,l2", "8/255", "needs a budget for each"),
        ("linf,linf", "8/255,4/255", "names a norm twice"),
        ("linf,l3", "8/255,1", "unknown norm 'l3'"),
        ("linf,l2", "8/255,-1", "eps must not be negative"),
    ],
)
def test_refuses_lists_that_do_not_fit(norm, eps, message):
    with pytest.raises(UserError, match=message):
        vitadel.audit(MODEL, DATA, norm=norm, eps=eps, **FAST)


def test_protocol_is_one_name_and_refuses_other_images():
    given = settings("unseen-union")
    assert (given["norm"], given["eps"], given["attacks"]) == ("linf,l2,l1", "4/255,2,75", "autoattack")
    part = protocol_named("unseen-union").under("l2")
    assert (part.norm, part.eps) == ("l2", "2")
    with pytest.raises(UserError, match=r"does not follow the protocol unseen-union(.|\n)*images"):
        vitadel.audit(MODEL, DATA, limit=4, **given)
