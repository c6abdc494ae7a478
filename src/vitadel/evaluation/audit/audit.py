"""The audit: clean accuracy, attacks and their worst case, a verdict for every sample, and saved examples."""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from vitadel.attacks.autoattack.fast import giving_up_nothing
from vitadel.attacks.parse import check_targets, make, needs_known_family, split_attack_list, without_escalation
from vitadel.attacks.settings import settings_of
from vitadel.attacks.threats import make_threat
from vitadel.data.batches import BadSample, read_batches
from vitadel.errors import UserError
from vitadel.evaluation.audit.evidence import (
    escalation_of,
    findings_about,
    findings_about_mode,
    findings_about_outputs,
    given_up_of,
    without_reassurance,
)
from vitadel.evaluation.audit.protocols import compare_with_protocols, protocol_named
from vitadel.evaluation.engine.attack_preparation import calibrate, check_calibration, needs_calibration, preflight
from vitadel.evaluation.engine.cost import SHORT, Compilation, compile_if_faster
from vitadel.evaluation.engine.run import (
    Outcome,
    Run,
    RunOptions,
    RunRequest,
    describe_target,
    execute,
    request_from,
    result_header,
    run_settings,
)
from vitadel.evaluation.engine.stages import (
    PRECISIONS,
    Blocks,
    MemberResult,
    RunContext,
    attack_stage,
    check_budget,
    is_staged,
    members_of,
    ordinary_form,
    rules_of,
)
from vitadel.evaluation.engine.target import Target, apply_class_subset, open_target
from vitadel.evaluation.engine.verdicts import Verdicts, accuracy_among_all, samples_table
from vitadel.instrument.attention_rows import attention_over_patches
from vitadel.instrument.hooks import frozen
from vitadel.quantities import read_quantity
from vitadel.runtime.distributed import Processes, join_processes
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Threat

if TYPE_CHECKING:
    from vitadel.evaluation.audit.procedure import Procedure
    from vitadel.evaluation.engine.class_mapping import Classes

__all__ = [
    "DEFAULT_ATTACKS",
    "DEFAULT_DATA",
    "DEFAULT_MODEL",
    "AuditRequest",
    "AuditWork",
    "audit",
    "check_request",
    "example_arrays",
    "run_audit",
    "run_audits",
]

DEFAULT_MODEL = "zoo:shapes-robust"
DEFAULT_DATA = "shapes"
DEFAULT_ATTACKS = ("autoattack-fast",)
KEEP = ("nothing", "images", "png")
_FEW, _MOST = 8, 0.9  # images, and the share of them that is right, from which on a clean accuracy is no chance
_EXAMPLES = 8  # samples with their perturbed versions, for the report
_EXAMPLE_SHARE = 0.05


@dataclass(frozen=True)
class AuditRequest(RunRequest):
    """What an audit is asked to do.

    Each attack works on the samples that are still correct after the earlier ones, so the last number is the worst
    case; with `independent` every attack gets all correctly classified samples. `keep` says whether images that fool
    the model are saved in the run folder, as floats or also as 8-bit pictures. `protocol` is the name of an evaluation
    protocol that the run must agree with. `calibration` is data for attacks that study the model first. `within`
    percentage points of the worst case either way, or a decided difference to the run `compare_with`, are reached with
    as few images as possible. `curve` measures the smallest known distance of each image. With `second_phase` the last
    attack runs on so many random images of those still correct, and the worst case is estimated.
    """

    attacks: tuple[str, ...] = DEFAULT_ATTACKS
    eps: float = 8 / 255
    norm: str = "linf"
    independent: bool = False
    precision: str = "fp32"
    calibration: str | None = None
    compile: bool = False
    keep: str = "nothing"
    protocol: str | None = None
    within: float | None = None
    compare_with: str | None = None
    curve: bool | None = None
    second_phase: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        twice = sorted({name for name in self.attacks if self.attacks.count(name) > 1})
        if twice:
            raise UserError(
                f"attack {twice[0]!r} is listed twice; to run it with different settings, write them in brackets: "
                f"{twice[0].partition('(')[0]}(restarts=2)"
            )
        for what, given, known in (("choice", self.keep, KEEP), ("precision", self.precision, PRECISIONS)):
            if given not in known:
                raise UserError(f"unknown {what} {given!r}; allowed: {', '.join(known)}")
        check_budget(self.norm, self.eps)
        if self.protocol is not None:
            protocol_named(self.protocol)
        self.make_attacks()  # reports a wrong name, norm or budget before anything is loaded
        self.procedure()  # refuses what does not go together, before data are looked for

    @property
    def threat(self) -> Threat:
        return make_threat(self.norm, self.eps)

    @property
    def is_sequential(self) -> bool:
        return self.within is not None or self.compare_with is not None

    def procedure(self) -> Procedure | None:
        """What the request asks for in place of one attack after another; a plain audit loads nothing of it."""
        if not (self.curve or self.second_phase is not None or self.is_sequential):
            return None
        from vitadel.evaluation.audit.procedure import procedure_of

        return procedure_of(self)

    def check_alone(self, flag: str, *others: str) -> None:
        """Refuse the named flags beside `flag`: each decides in its own way which attacks run on which images."""
        given = {"--within": self.within, "--compare-with": self.compare_with, "--protocol": self.protocol}
        given |= {"--second-phase": self.second_phase, "--independent": self.independent or None}
        for other in others:
            if given[other] is not None:
                raise UserError(f"{flag} and {other} cannot be combined; leave out one of them")

    def make_attacks(self) -> list[tuple[str, Attack]]:
        attacks = [(name, make(name, eps=self.eps, norm=self.norm)) for name in self.attacks]
        if not self.is_sequential:
            return attacks
        # What is given up would depend on the whole sample, and each look has another one.
        return [(name, giving_up_nothing(attack)) for name, attack in attacks]


def audit(
    model: str | nn.Module = DEFAULT_MODEL,
    data: Any = DEFAULT_DATA,
    *,
    attacks: str | Sequence[str] = DEFAULT_ATTACKS,
    eps: float | str = 8 / 255,
    device: str = "auto",
    data_root: str | Path | None = None,
    model_options: Mapping[str, Any] | None = None,
    tokens: str | Path | None = None,
    allow_readable: bool = False,
    escalate: bool = True,
    classes: Classes | None = None,
    among: str = "all",
    out: str | Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Audit a model from Python; returns the content of `results.json`. A run folder is written if `out` names one.

    `model` is a spec or any nn.Module on pixels in [0, 1]. `data` is a spec, a path, tensors or arrays `(x, y)`, a
    torch Dataset or DataLoader, a Hugging Face dataset, or a source. `classes` names the model's outputs (a file or a
    list), where they are not known otherwise; `among="data"` judges among the outputs of the data's classes only.
    `settings` are further fields of `AuditRequest`: norm, limit, batch_size, seed, independent, precision, skip_bad,
    calibration, compile, protocol; those of a protocol come from `evaluation.audit.protocols.settings`.
    `model_options` are arguments of `load_model`. `tokens` is a file of robustness tokens, which only its owner may
    read unless `allow_readable`. `norm` and `eps` may be lists, "linf,l2" and "4/255,2": the union of these threats.
    `workers` processes read images; by default none on the CPU, and on a GPU as many as there are cores.
    Without `escalate`, autoattack-fast only warns if gradients look masked. The precheck
    of `vitadel audit` is not included: see `vitadel.diagnose`.
    """
    given = [attacks] if isinstance(attacks, str) else attacks
    names = [name for text in given for name in split_attack_list(text)]
    names = names if escalate else without_escalation(names)
    threats: list[tuple[str, Any]] = [(str(settings.get("norm", "linf")), eps)]
    if "," in threats[0][0]:
        from vitadel.evaluation.audit.union import split_threats

        threats = list(split_threats(*threats[0]))
    requests = [
        request_from(
            AuditRequest,
            "audit",
            {**settings, "attacks": tuple(names), "norm": norm, "eps": read_quantity(budget, "eps")},
        )
        for norm, budget in threats
    ]
    processes = join_processes(device)
    target = open_target(
        model,
        data,
        data_root=data_root,
        model_options=model_options,
        skip_bad=bool(requests[0].skip_bad),
        tokens=tokens,
        allow_readable=allow_readable,
        classes=classes,
        among=among,
    )
    return run_audits(target, requests, processes, out=out, resume=resume, workers=workers, in_memory=True).results


def run_audits(target: Target, requests: Sequence[AuditRequest], processes: Processes, **more: Any) -> Outcome:
    """Audit by one request, or under the union of the threats of several; `more` as for `run_audit`."""
    if len(requests) == 1:
        return run_audit(target, requests[0], processes, **more)
    if requests[0].is_sequential:
        raise UserError("--within and --compare-with take one threat; name one norm and one eps")
    if requests[0].curve or requests[0].second_phase is not None:
        raise UserError("--curve and --second-phase take one threat; name one norm and one eps")
    from vitadel.evaluation.audit.union import run_union

    return run_union(target, requests, processes, check_request, run_audit, **more)


def run_audit(
    target: Target,
    request: AuditRequest,
    processes: Processes,
    *,
    verb: str = "audit",
    examine: Callable[[Target], list[dict[str, Any]]] = lambda target: [],
    **options: Unpack[RunOptions],
) -> Outcome:
    """Audit the target. `examine` gives findings about the model before anything is attacked."""
    procedure = request.procedure()
    if request.is_sequential:
        from vitadel.evaluation.audit.sequential_audit import run_sequential_audit

        return run_sequential_audit(
            target, request, processes, check_request, _work_of_a_look, verb=verb, examine=examine, **options
        )
    target = apply_class_subset(target)
    indices, mislabeled = target.selection(request.limit, request.seed, request.skip_bad)
    if not options.get("resume"):
        check_request(target, request, indices, processes.device)
    protocol = compare_with_protocols(request, target, indices)
    settings = run_settings(target, request, indices)

    def work(run: Run) -> dict[str, Any]:
        audit = AuditWork(run, target, request, settings, protocol, procedure=procedure)
        results, verdicts = audit.judged(indices, mislabeled, examine)
        return results if procedure is None else procedure.finish(run, results, verdicts)

    return execute(verb, target.model_spec, settings, processes, work, target=target, **options)


def _work_of_a_look(
    run: Run, target: Target, request: AuditRequest, settings: dict[str, Any], blocks: Blocks
) -> AuditWork:
    protocol = compare_with_protocols(request, target, blocks.index)
    return AuditWork(run, target, request, settings, protocol, blocks)


def check_request(target: Target, request: AuditRequest, indices: Tensor, device: torch.device) -> None:
    """Check that model, images and attacks go together, before anything long begins or is written."""
    pixels = 3 * math.prod(target.preprocess.shape)
    widest = {"l2": math.sqrt(pixels), "l1": float(pixels), "l0": float(pixels)}.get(request.norm, math.inf)
    if request.eps >= widest:
        raise UserError(
            f"eps {request.eps:g} in {request.norm} lets every pixel become anything: pixels are in [0, 1], so the box "
            f"of these images is {widest:g} wide. Did you mean {request.eps:g}/255?"
        )
    for name in request.attacks:
        check_targets(name, target.source.labels()[indices])
    attacks = request.make_attacks()
    if not any(needs_calibration(attack) for _, attack in attacks):
        if request.calibration is not None:
            raise UserError(
                f"--calibration {request.calibration} has no effect: none of {', '.join(request.attacks)} is "
                "calibrated. Leave it out, or add one such as aas+pgd-20."
            )
    else:
        check_calibration([attack for _, attack in attacks], target, indices, request.calibration, request.seed)
    preflight(target.model.to(device), attacks, target.preprocess.shape)


@dataclass(frozen=True)
class AuditWork:
    """The stages of an audit, for all images, for those of a shard, or for those of a look, which come in `blocks`."""

    run: Run
    target: Target
    request: AuditRequest
    settings: dict[str, Any]
    protocol: dict[str, Any]
    blocks: Blocks | None = None
    procedure: Procedure | None = None

    def judged(
        self,
        indices: Tensor,
        mislabeled: Sequence[BadSample],
        examine: Callable[[Target], list[dict[str, Any]]],
    ) -> tuple[dict[str, Any], Verdicts]:
        """The results, and the verdicts that they are made of."""
        run, request = self.run, self.request
        context, compilation = self.context(indices)
        findings = findings_about_mode(context.model) + (examine(self.target) if run.processes.is_main else [])
        with frozen(context.model):
            start = time.perf_counter()
            verdicts = Verdicts.from_clean_stage(context, indices, mislabeled)
            forward = (time.perf_counter() - start) / len(verdicts.index)
            findings = self._findings_about_clean(context, verdicts) + findings
            findings += findings_about_outputs(context, verdicts.index)
            if self.procedure is None:
                context = self._with_expected_times(context, verdicts, forward)
                attacks, members = self.attack(context, verdicts, indices, findings)
            else:
                run.write_unfinished(self._results(verdicts, findings))
                attacks, members = self.procedure.attack(self, context, verdicts, indices, findings)
            results = self._results(verdicts, findings) | accuracy_among_all(context, verdicts.index)
            if self.target.model_spec.startswith("published:"):
                from vitadel.evaluation.audit.published_numbers import compare_with_published

                results |= compare_with_published(self.target, request, results)
            if compilation is not None:
                results["compile"] = compilation.summary()
            if request.keep != "nothing":
                from vitadel.evaluation.audit.saved_examples import count_saved

                results["kept"] = count_saved(members, request.keep == "png")
            if run.folder is not None and run.processes.is_main and attacks:
                run.write(
                    "examples.npz",
                    example_arrays(context, verdicts, *_strongest(attacks, verdicts, request.independent)),
                )
            run.write("samples.parquet", samples_table(verdicts))
        return results, verdicts

    def context(self, indices: Tensor) -> tuple[RunContext, Compilation | None]:
        """What the stages share, and what came of compiling the model; `indices` are all images of the audit."""
        run, request, saver = self.run, self.request, None
        if run.folder is not None and request.keep != "nothing":
            from vitadel.evaluation.audit.saved_examples import ExampleSaver

            classes = tuple(self.target.source.classes)
            saver = ExampleSaver(run.path, self.target.model, request.keep == "png", classes).save
        blocks = Blocks.of(indices, request.batch_size) if self.blocks is None else self.blocks
        own: dict[str, Any] = {"precision": request.precision, "save_examples": saver, "blocks": blocks}
        context = run.context(self.target, request, **own)
        return _compile(context) if request.compile else (context, None)

    def _with_expected_times(self, context: RunContext, verdicts: Verdicts, forward: float) -> RunContext:
        """Say how long the attacks will take, if it is more than a moment; `forward` is the time of one pass."""
        request, attacks = self.request, self.request.make_attacks()
        exposed = verdicts.index[verdicts.correct]
        at_most = len(exposed) * forward * sum(map(_cost_of, attacks))
        if at_most < SHORT or not (self.run.show_progress and self.run.processes.is_main and len(exposed)):
            return context
        if context.cache.find(members_of(f"00 {attacks[0][0]}", attacks[0][1])[0][0], 0) is not None:
            return context  # resumed: the progress so far says more
        from vitadel.evaluation.engine.cost import estimate

        budget: dict[str, Any] = {"eps": request.eps, "norm": request.norm}
        trial = estimate(context, attacks, exposed, independent=request.independent, **budget)
        sys.stderr.write(f"attacks: {trial.summary()}\n")
        return replace(context, expected=trial.likely)

    def _findings_about_clean(self, context: RunContext, verdicts: Verdicts) -> list[dict[str, Any]]:
        """Whether the clean accuracy makes sense; nine right images in ten of a plain set-up need no second look."""
        target, right, n = self.target, int(verdicts.correct.sum()), len(verdicts.index)
        if n >= _FEW and right >= _MOST * n and target.is_plain:
            return []
        from vitadel.evaluation.audit.clean_accuracy import sense_of_clean

        return sense_of_clean(context, verdicts, target)

    def attack(
        self, context: RunContext, verdicts: Verdicts, indices: Tensor, findings: list[dict[str, Any]]
    ) -> tuple[list[tuple[str, Attack]], list[MemberResult]]:
        """Run all attacks; returns them as prepared, and the results of all their members.

        A shard stops after the first stage of a staged ensemble: what follows depends on the images of all shards.
        """
        request, prepared, members = self.request, [], []
        for number, (name, attack) in enumerate(request.make_attacks()):
            self.run.write_unfinished(self._results(verdicts, findings))
            # Settings from before and after the calibration: how it was prepared, and what it found.
            settings = settings_of(attack)
            attack = calibrate(attack, context, self.target, indices, request.calibration)
            settings |= {**settings_of(attack), "norm": request.norm, "eps": self.settings["eps"], "seed": request.seed}
            own_rules = rules_of(attack) is not None
            alone = request.independent or own_rules
            exposed = verdicts.index[verdicts.correct if alone else verdicts.robust]
            stage = f"{number:02d} {name}"
            results = attack_stage(context, stage, attack, request.threat, exposed, needs_known_family(name))
            verdicts.add(name, settings, results, alone=alone, own_rules=own_rules)
            verdicts.entries[-1] |= escalation_of(results) | given_up_of(results, len(verdicts.index))
            if needs_known_family(name):
                from vitadel.evaluation.audit.scaled_attention import describe_scaling

                described = describe_scaling(context, stage, attack, request.threat, verdicts.index, results)
                verdicts.entries[-1] |= described
            findings += findings_about(name, results, len(verdicts.index))
            prepared.append((name, attack))
            members += results
            if context.of_shard and is_staged(attack) and not request.independent:
                break
        return prepared, members

    def _results(self, verdicts: Verdicts, findings: list[dict[str, Any]]) -> dict[str, Any]:
        request, settings = self.request, self.settings
        return {
            **result_header(request.seed),
            **describe_target(self.target, settings["model_fingerprint"], len(verdicts.index), verdicts.bad),
            "threat": {"norm": request.norm, "eps": request.eps, "eps_text": settings["eps"]},
            "batch_size": request.batch_size,
            "precision": request.precision,
            "protocol": self.protocol,
            **verdicts.summary(),
            "findings": without_reassurance(findings),
        }


def _compile(context: RunContext) -> tuple[RunContext, Compilation]:
    x = torch.full((context.batch_size, 3, *context.preprocess.shape), 0.5, device=context.processes.device)
    model, compilation = compile_if_faster(context.model, x, context.processes.from_main)
    return replace(context, compiled=None if model is context.model else model), compilation


def _cost_of(named: tuple[str, Attack]) -> int:
    """At most, in forward passes, without the escalation of a staged ensemble."""
    gradients, forwards = ordinary_form(named[1]).passes()
    return 3 * gradients + forwards


def _strongest(attacks: Sequence[tuple[str, Attack]], verdicts: Verdicts, independent: bool) -> tuple[str, Attack]:
    """The attack that leaves the fewest samples, of those within the budget if there are any.

    Where each attacked only what the earlier ones left, the one with the most passes: their numbers cannot be compared.
    """
    within = [named for named in attacks if named[0] not in verdicts.outside] or attacks
    if independent:
        return min(within, key=lambda named: int(verdicts.held[named[0]].sum()))
    return max(within, key=_cost_of)


def example_arrays(context: RunContext, verdicts: Verdicts, name: str, attack: Attack) -> bytes | None:
    """`examples.npz`: a few samples, clean and as this attack perturbs them, for the report. It runs once more.

    Half of them are robust, but no more than a small part of all robust ones, which cost the most.
    """
    robust = verdicts.index[verdicts.robust]
    broken = verdicts.index[verdicts.correct & ~verdicts.robust]
    count = min(_EXAMPLES // 2, max(1, round(_EXAMPLE_SHARE * len(robust))))
    chosen = torch.cat([broken[: _EXAMPLES - min(count, len(robust))], robust[:count]])
    rows = chosen.sort().values.tolist()
    if not rows:
        return None
    how: dict[str, Any] = {"skip_bad": context.skip_bad, "device": context.processes.device}
    (batch,) = read_batches(context.source, [rows], context.preprocess, **how)
    attack = ordinary_form(attack)
    with context.arithmetic():
        z = attack(context.model, batch.x, batch.y, SampleRNG.of_samples(context.seed, batch.indices, batch.x.device))
        with torch.no_grad():
            prediction = context.model(z).argmax(1)
        try:
            shown = {"attention_x": batch.x, "attention_z": z}
            maps = {key: attention_over_patches(context.model, images) for key, images in shown.items()}
        except UserError:  # no attention maps over patches
            maps = {}
    arrays = {"index": batch.indices, "x": batch.x, "z": z, "label": batch.y, "prediction": prediction, **maps}
    about = {"attack": np.asarray(name), "own_rules": np.asarray(rules_of(attack) is not None)}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **(about | {key: tensor.cpu().numpy() for key, tensor in arrays.items()}))
    return buffer.getvalue()
