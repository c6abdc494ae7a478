"""Robustness to the union of several threats: an audit under each of them, and the images that withstand them all.

`--norm linf,l2,l1 --eps 4/255,2,75` audits each threat in a folder of its own, inside that of the run. In the results
each threat stands where an audit has an attack, counted alone, and the worst case is the union.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from vitadel.errors import UserError
from vitadel.evaluation.audit.protocols import compare_with_protocols
from vitadel.evaluation.engine.run import Outcome, Run, RunOptions, execute, result_header, run_settings
from vitadel.evaluation.engine.target import Target, apply_class_subset
from vitadel.evaluation.engine.verdicts import parquet_bytes
from vitadel.quantities import quantity_text
from vitadel.runtime.distributed import Processes
from vitadel.statistics import share

if TYPE_CHECKING:
    from vitadel.evaluation.audit.audit import AuditRequest

UNION = "union"
"""The norm of such a run in its results."""


def split_threats(norm: str, eps: object) -> list[tuple[str, str]]:
    """Norms and budgets of lists such as 'linf,l2' and '4/255,2'."""
    norms, budgets = ([part.strip() for part in str(text).split(",")] for text in (norm, eps))
    if len(norms) != len(budgets):
        raise UserError(
            f"the union of {len(norms)} norms needs a budget for each: got --norm {norm} --eps {eps}. Write e.g. "
            "--norm linf,l2,l1 --eps 4/255,2,75."
        )
    if len(set(norms)) < len(norms):
        raise UserError(f"--norm {norm} names a norm twice: the larger of its budgets contains the smaller.")
    return list(zip(norms, budgets, strict=True))


def run_union(
    target: Target,
    requests: Sequence[AuditRequest],
    processes: Processes,
    check: Callable[[Target, AuditRequest, Tensor, torch.device], None],
    audit: Callable[..., Outcome],
    *,
    verb: str = "audit",
    examine: Callable[[Target], list[dict[str, Any]]] | None = None,
    **options: Unpack[RunOptions],
) -> Outcome:
    """Do the `audit` of each request, after a `check` of all; they differ in their threats only.

    `examine` gives findings about the model, once.
    """
    target = apply_class_subset(target)
    first = requests[0]
    indices, _ = target.selection(first.limit, first.seed, first.skip_bad)
    if not options.get("resume"):
        for request in requests:
            check(target, request, indices, processes.device)
    protocol = _protocol(requests, target, indices)
    names = {_name(request): request for request in requests}
    budgets = ", ".join(_threat(request) for request in requests)
    settings = run_settings(target, first, indices) | {"norm": UNION, "eps": budgets, "attacks": list(names)}

    def work(run: Run) -> dict[str, Any]:
        with _home(run) as home:
            audits = {}
            for number, (name, request) in enumerate(names.items()):
                inner = run.options_inside(home / request.norm)
                look = examine if examine and number == 0 else _nothing
                audits[name] = audit(target, request, processes, examine=look, **inner).results
            columns = _columns({name: home / request.norm for name, request in names.items()}, audits)
        run.write("samples.parquet", parquet_bytes(columns))
        return _results(audits, columns, budgets, {name: request.norm for name, request in names.items()}) | {
            "protocol": protocol
        }

    return execute(verb, target.model_spec, settings, processes, work, target=target, **options)


def _nothing(target: Target) -> list[dict[str, Any]]:
    """No findings: the model was examined under the first threat."""
    return []


@contextmanager
def _home(run: Run) -> Iterator[Path]:
    """Where the audits are written: the run folder, or for a moment elsewhere if the run happens in memory."""
    if run.folder is not None:
        yield run.path
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _threat(request: AuditRequest) -> str:
    return f"{request.norm} {quantity_text(request.eps)}"


def _name(request: AuditRequest) -> str:
    return f"{_threat(request)}: {', '.join(request.attacks)}"


def _protocol(requests: Sequence[AuditRequest], target: Target, indices: Tensor) -> dict[str, Any]:
    """The protocol that the requests name, which each of them must follow under its own threat; else none."""
    compared = [compare_with_protocols(request, target, indices) for request in requests]
    if requests[0].protocol is not None:
        return compared[0]
    return {"name": None, "comparable_with": None, "nearest": None, "differences": {}, "remark": ""}


def _columns(folders: Mapping[str, Path], audits: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`samples.parquet`: the columns about clean images, and one for each threat."""
    columns: dict[str, Any] = {}
    for name, folder in folders.items():
        table = pq.read_table(folder / "samples.parquet")
        held = table.column("clean_correct").to_numpy()
        for entry in audits[name]["attacks"]:
            if not entry["own_rules"]:
                held = held & table.column(f"held:{entry['name']}").to_numpy()
        own = {key: table.column(key).to_numpy() for key in ("index", "label", "clean_prediction", "clean_correct")}
        columns |= own | {f"held:{name}": held}
    return columns


def _results(
    audits: Mapping[str, Mapping[str, Any]], columns: Mapping[str, Any], budgets: str, folders: Mapping[str, str]
) -> dict[str, Any]:
    first = next(iter(audits.values()))
    robust = np.logical_and.reduce([columns[f"held:{name}"] for name in audits])
    kept = ("model", "assumptions", "data", "class_mapping", "batch_size", "precision", "clean", "clean_among_all")
    compared = [found["published"] for found in audits.values() if found.get("published")]
    published = [each for each in compared if each["consistent"] is not None] or compared
    findings: list[dict[str, Any]] = []
    for found in audits.values():
        findings += [each for each in found["findings"] if each not in findings]
    return {
        **result_header(first["seed"]),
        **{name: first[name] for name in kept if name in first},
        "threat": {"norm": UNION, "eps_text": budgets},
        "threats": [{**found["threat"], "folder": folders[name]} for name, found in audits.items()],
        "attacks": [_entry(name, found) for name, found in audits.items()],
        "worst_case": share(int(robust.sum()), len(robust), "held", "robust_accuracy"),
        "findings": findings,
        **({"published": published[0]} if published else {}),
    }


def _entry(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """The audit under one threat, as an attack of the union."""
    inside = [entry for entry in found["attacks"] if not entry["own_rules"]]
    worst = found["worst_case"] or share(found["clean"]["correct"], found["clean"]["n"], "held", "robust_accuracy")
    costs = ("void", "gradient_calls", "forward_calls", "seconds")
    return {
        "name": name,
        "settings": {"norm": found["threat"]["norm"], "eps": found["threat"]["eps_text"], "seed": found["seed"]},
        **worst,
        "counts": "this threat alone",
        "own_rules": False,
        "attacked": found["clean"]["correct"],
        **{cost: round(sum(entry[cost] for entry in inside), 3) for cost in costs},
        "judged_on": "deployed model",
        "paper_style": None,
        "members": []
        if len(inside) == 1
        else [
            {
                "name": entry["name"],
                "attacked": entry["attacked"],
                "broken": entry["attacked"] - entry["held"],
                **{cost: entry[cost] for cost in costs},
            }
            for entry in inside
        ],
    }
