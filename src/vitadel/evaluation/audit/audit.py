"""The main job: clean accuracy, attacks, worst case, with intervals and a verdict for every sample."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitadel.attacks.parse import make, needs_known_family, numbered_targets, split_attack_list
from vitadel.attacks.settings import settings_of
from vitadel.attacks.threats import make_threat
from vitadel.backbones.model_checks import looks_like_probabilities, modules_in_train_mode
from vitadel.data.batches import read_batches
from vitadel.data.validation import BadSample
from vitadel.errors import Interrupted, UserError
from vitadel.evaluation.audit.evidence import findings_about
from vitadel.evaluation.audit.protocols import protocol_named, standing
from vitadel.evaluation.engine.calibration import calibrated, calibration_images, studies
from vitadel.evaluation.engine.class_subset import among_all_summary, choose_among
from vitadel.evaluation.engine.compilation import Compilation, compiled
from vitadel.evaluation.engine.preflight import preflight
from vitadel.evaluation.engine.run import Outcome, begun, context_for
from vitadel.evaluation.engine.saved_examples import IMAGES, PICTURES, PNG_HOLDS, ExampleSaver
from vitadel.evaluation.engine.stages import (
    NOTE,
    PRECISIONS,
    MemberResult,
    RunContext,
    attack_stage,
    clean_stage,
    rules_of,
)
from vitadel.evaluation.engine.target import Target, open_target
from vitadel.evaluation.engine.verdicts import Verdicts, described, heading, samples_table
from vitadel.findings import BROKEN, PROBABILITY_OUTPUTS, RANDOM_OUTPUTS, SUSPICIOUS, TRAIN_MODE, Finding
from vitadel.instrument.attention_rows import attention_over_patches
from vitadel.instrument.hooks import frozen
from vitadel.quantities import quantity_text, read_quantity
from vitadel.runtime.distributed import Processes, join_processes
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.run_folder import RunFolder, write_atomically, write_json
from vitadel.types import Attack, Source, Threat

__all__ = [
    "DEFAULT_ATTACKS",
    "DEFAULT_DATA",
    "DEFAULT_MODEL",
    "AuditRequest",
    "Outcome",
    "audit",
    "check_request",
    "run_audit",
]

DEFAULT_MODEL = "zoo:shapes-robust"
DEFAULT_DATA = "shapes"
DEFAULT_ATTACKS = ("fgsm", "pgd-20")
KEEP = ("nothing", "images", "png")
_PICTURES = 8  # samples kept with their perturbed versions, for the report


@dataclass(frozen=True)
class AuditRequest:
    """What an audit is asked to do: everything, beside model and data, that decides its result.

    Each attack works on the samples that the earlier ones left standing, so the last number is the worst case; with
    `independent` every attack sees all correctly classified samples. `keep` says whether images that fool the model
    are saved in the run folder, as floats or also as 8-bit pictures. `protocol` is a name that the run wants to bear.
    """

    attacks: tuple[str, ...] = DEFAULT_ATTACKS
    eps: float = 8 / 255
    norm: str = "linf"
    limit: int | None = None
    batch_size: int = 64
    seed: int = 0
    independent: bool = False
    precision: str = "fp32"
    skip_bad: bool | None = False  # None: whoever asks has no such flag, so that none is advised
    calibration: str | None = None
    compile: bool = False
    keep: str = "nothing"
    protocol: str | None = None

    def __post_init__(self) -> None:
        twice = sorted({name for name in self.attacks if self.attacks.count(name) > 1})
        if twice:
            raise UserError(
                f"attack {twice[0]!r} is listed twice; each name may stand once, settings make names differ"
            )
        if self.batch_size < 1:
            raise UserError(f"--batch-size must be at least 1, got {self.batch_size}")
        if self.keep not in KEEP:
            raise UserError(f"unknown choice {self.keep!r} of what to keep; allowed: {', '.join(KEEP)}")
        if self.precision not in PRECISIONS:
            raise UserError(f"unknown precision {self.precision!r}; allowed: {', '.join(PRECISIONS)}")
        if self.norm == "linf" and self.eps == 1:
            raise UserError("eps 1 lets every pixel become anything: pixels are in [0, 1] here. Did you mean 1/255?")
        if self.protocol is not None:
            protocol_named(self.protocol)
        self.crew()  # a wrong name, norm or budget is told before anything is loaded

    @property
    def threat(self) -> Threat:
        return make_threat(self.norm, self.eps)

    def crew(self) -> list[tuple[str, Attack]]:
        return [(name, make(name, eps=self.eps, norm=self.norm)) for name in self.attacks]

    def settings(self, target: Target, indices: Tensor) -> dict[str, Any]:
        """What a resumed run must agree with."""
        return {
            "model": target.model_spec,
            "model_fingerprint": target.model_fingerprint(),
            "data": target.data_spec,
            "data_fingerprint": target.data_fingerprint(indices),
            **dataclasses.asdict(self),
            "eps": quantity_text(self.eps),
            "skip_bad": bool(self.skip_bad),
        }


def audit(
    model: str | nn.Module = DEFAULT_MODEL,
    data: str | Source = DEFAULT_DATA,
    *,
    attacks: str | Sequence[str] = DEFAULT_ATTACKS,
    eps: float | str = 8 / 255,
    norm: str = "linf",
    limit: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
    independent: bool = False,
    precision: str = "fp32",
    skip_bad: bool = False,
    calibration: str | None = None,
    compile: bool = False,
    protocol: str | None = None,
    device: str = "auto",
    data_root: str | Path | None = None,
    model_options: Mapping[str, Any] | None = None,
    tokens: str | Path | None = None,
    allow_readable: bool = False,
    out: str | Path | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Audit a model from Python; returns what `results.json` holds. A run folder is written if `out` names one.

    The settings are those of `Order`; those that a `protocol` asks for come from `evaluation.protocols.settings`.
    `model_options` go to `load_model`. `tokens` is a file of robustness tokens for
    the model, which only its owner may read unless `allow_readable`. The precheck that `vitadel audit` begins
    with is not part of it: `vitadel.diagnose` looks closer.
    """
    names = tuple(split_attack_list(attacks) if isinstance(attacks, str) else attacks)
    budget = read_quantity(eps, "eps")
    request = AuditRequest(
        attacks=names,
        eps=budget,
        norm=norm,
        limit=limit,
        batch_size=batch_size,
        seed=seed,
        independent=independent,
        precision=precision,
        skip_bad=skip_bad,
        calibration=calibration,
        compile=compile,
        protocol=protocol,
    )
    processes = join_processes(device)
    target = open_target(
        model,
        data,
        data_root=data_root,
        model_options=model_options,
        skip_bad=skip_bad,
        tokens=tokens,
        allow_readable=allow_readable,
    )
    return run_audit(target, request, processes, out=out, resume=resume).results


def run_audit(
    target: Target,
    request: AuditRequest,
    processes: Processes,
    *,
    out: str | Path | None = None,
    in_folder: bool = False,
    resume: bool = False,
    shown: bool = False,
    argv: Sequence[str] = (),
    verb: str = "audit",
    examine: Callable[[Target], list[dict[str, Any]]] = lambda target: [],
) -> Outcome:
    """Audit, in a run folder if `out` names one or `in_folder` asks for a new one below runs/.

    `examine` gives findings about the model before anything is attacked.
    """
    target = choose_among(target)
    indices, mislabelled = target.selection(request.limit, request.seed, request.skip_bad)
    if not resume:
        check_request(target, request, indices, processes.device)
    comparable = standing(request, target, indices)
    settings = request.settings(target, indices)
    run = None
    if out is not None or in_folder:
        run, done = begun(verb, target.model_spec, settings, processes, out=out, resume=resume, argv=argv)
        if done is not None:
            return done
    elif processes.count > 1:
        raise UserError("with several processes an audit needs a run folder to share; give one with out=...")
    saver = ExampleSaver(run.path, target.model, request.keep == "png") if run and request.keep != "nothing" else None
    context = context_for(target, request, processes, run, shown=shown, precision=request.precision, saver=saver)
    compilation = None
    if request.compile:
        context, compilation = _with_compiled(context)
    try:
        findings = _findings_about_mode(context.model) + (examine(target) if processes.is_main else [])
        results = _run(context, target, request, indices, mislabelled, findings, settings, comparable, run, compilation)
        return Outcome(results, run, processes.is_main)
    except KeyboardInterrupt:
        if run is not None:
            raise Interrupted(run.path) from None
        raise


def check_request(target: Target, request: AuditRequest, indices: Tensor, device: torch.device) -> None:
    """Whether model, images and attacks go together: told before anything long begins, or is written."""
    _check_sense(target, request, indices)
    crew = request.crew()
    if any(studies(attack) for _, attack in crew):
        calibration_images(target, indices, request.calibration, 1, request.seed)
    preflight(target.model.to(device), crew, target.preprocess.shape)


def _check_sense(target: Target, request: AuditRequest, indices: Tensor) -> None:
    """What only the data can tell: a budget that reaches everything, a target that is a label."""
    pixels = 3 * math.prod(target.preprocess.shape)
    widest = {"l2": math.sqrt(pixels), "l1": float(pixels)}.get(request.norm, math.inf)
    if request.eps >= widest:
        raise UserError(
            f"eps {request.eps:g} in {request.norm} lets every pixel become anything: pixels are in [0, 1], so the box "
            f"of these images is {widest:g} wide. Did you mean {request.eps:g}/255?"
        )
    for name in request.attacks:
        check_targets(name, target.source.labels()[indices])


def check_targets(name: str, labels: Tensor) -> None:
    """A `UserError` if an attack by this name is to reach a class that some of the samples have."""
    for aimed_class in numbered_targets(name):
        of_aimed_class = int((labels == aimed_class).sum())
        if of_aimed_class:
            raise UserError(
                f"{name}: class {aimed_class} is the label of {of_aimed_class} of the {len(labels)} samples, so "
                "there is nothing to reach for them; choose targets by a rule: targeted:next+, :least+ or :random+"
            )


def _with_compiled(context: RunContext) -> tuple[RunContext, Compilation]:
    x = torch.full((context.batch_size, 3, *context.preprocess.shape), 0.5, device=context.processes.device)
    model, verdict = compiled(context.model, x, context.processes.from_main)
    return dataclasses.replace(context, compiled=None if model is context.model else model), verdict


def _run(
    context: RunContext,
    target: Target,
    request: AuditRequest,
    indices: Tensor,
    mislabelled: Sequence[BadSample],
    findings: list[dict[str, Any]],
    settings: dict[str, Any],
    comparable: dict[str, Any],
    run: RunFolder | None,
    compilation: Compilation | None,
) -> dict[str, Any]:
    crew = request.crew()
    main = context.processes.is_main
    with frozen(context.model):
        verdicts = Verdicts.of_clean(clean_stage(context, indices), mislabelled)
        if len(verdicts.index) == 0:
            raise UserError(
                "no sample could be read, so there is nothing to audit; see the reasons with --skip-bad off"
            )
        findings += _findings_about_outputs(context, verdicts)
        results = _results(target, request, verdicts, settings, findings, comparable)
        kept: list[MemberResult] = []
        for number, (name, attack) in enumerate(crew):
            if run and main:
                write_json(run.path / "results.json", results)
            asked, attack = attack, calibrated(attack, context, target, indices, request.calibration)
            crew[number] = name, attack
            own_rules = rules_of(attack) is not None
            alone = request.independent or own_rules
            exposed = verdicts.index[verdicts.correct if alone else verdicts.standing]
            title = f"{number:02d} {name}"
            legs = attack_stage(context, title, attack, request.threat, exposed, needs_known_family(name))
            told = {**settings_of(asked), **settings_of(attack)}  # how it was prepared, and what came of it
            told |= {"norm": request.norm, "eps": settings["eps"], "seed": request.seed}
            verdicts.add(name, told, legs, alone=alone, own_rules=own_rules)
            findings += findings_about(name, legs, len(verdicts.index))
            kept += legs
            results = _results(target, request, verdicts, settings, findings, comparable)
        results |= among_all_summary(context, verdicts.index)
        if compilation is not None:
            results["compile"] = compilation.told()
        if request.keep != "nothing":
            results["kept"] = _kept(kept, request.keep == "png")
        results["complete"] = True
        if run and main:
            if crew:
                _keep_pictures(context, run, verdicts, *min(crew, key=lambda named: _weight(named[1])))
            write_atomically(run.path / "samples.parquet", samples_table(verdicts))
            write_json(run.path / "results.json", results)
            run.finish()
        context.processes.wait()
    return results


def _results(
    target: Target,
    request: AuditRequest,
    verdicts: Verdicts,
    settings: dict[str, Any],
    findings: list[dict[str, Any]],
    comparable: dict[str, Any],
) -> dict[str, Any]:
    return {
        **heading(request.seed, complete=False),
        **described(target, verdicts, settings["model_fingerprint"]),
        "threat": {"norm": request.norm, "eps": request.eps, "eps_text": settings["eps"]},
        "batch_size": request.batch_size,
        "precision": request.precision,
        "protocol": comparable,
        **verdicts.summary(),
        "findings": findings,
    }


def _findings_about_mode(model: nn.Module) -> list[dict[str, Any]]:
    training = modules_in_train_mode(model)
    if not training:
        return []
    return [
        Finding(
            TRAIN_MODE.identifier,
            SUSPICIOUS,
            f"{len(training)} modules were in train mode, the first: {training[0]}",
            "audited in eval mode; call model.eval() before deploying, or dropout and batch norm differ",
            TRAIN_MODE.title,
        ).as_dict()
    ]


def _findings_about_outputs(context: RunContext, verdicts: Verdicts) -> list[dict[str, Any]]:
    """Probabilities instead of logits saturate the cross-entropy; random answers make single verdicts worthless."""
    first = [verdicts.index[: min(8, context.batch_size)].tolist()]
    (batch,) = read_batches(context.source, first, context.preprocess, skip_bad=context.skip_bad)
    with torch.no_grad():
        outputs, again = (context.model(batch.to(context.processes.device).x) for _ in range(2))
    findings = []
    change = float((outputs - again).abs().max() / outputs.abs().max().clamp(min=1e-12))
    if change > 1e-4:
        findings.append(
            Finding(
                RANDOM_OUTPUTS.identifier,
                SUSPICIOUS,
                f"the logits of the same {len(outputs)} images changed by {change:.1e} of their size",
                "the model answers at random: attack it with autoattack-rand or the prefix eot:20+, and do "
                "not trust a verdict from a single pass",
                RANDOM_OUTPUTS.title,
            ).as_dict()
        )
    if not looks_like_probabilities(outputs):
        return findings
    return [
        *findings,
        Finding(
            PROBABILITY_OUTPUTS.identifier,
            BROKEN,
            f"all outputs of {len(outputs)} images lie in [0, 1] and add up to 1",
            "return logits instead of probabilities: a softmax before the loss hides gradients from attacks",
            PROBABILITY_OUTPUTS.title,
        ).as_dict(),
    ]


def _kept(legs: Sequence[MemberResult], png: bool) -> dict[str, Any]:
    """How many images were saved, and of how many the 8-bit picture fools no more."""
    pieces = [piece for leg in legs for piece in leg.pieces]
    saved = sum(int((~piece["held"]).sum()) for piece in pieces)
    lost = sum(int(piece[f"{NOTE}{PNG_HOLDS}"].sum()) for piece in pieces) if png else None
    return {"images": saved, "folder": IMAGES, "pictures": PICTURES if png else None, "undone_by_8_bits": lost}


def _weight(attack: Attack) -> int:
    gradients, forwards = attack.passes()
    return 2 * gradients + forwards


def _keep_pictures(context: RunContext, run: RunFolder, verdicts: Verdicts, name: str, attack: Attack) -> None:
    """A few samples, clean and as an attack leaves them, for the report: the cheapest, for it runs once more."""
    rows = verdicts.index[verdicts.correct][:_PICTURES].tolist()
    if not rows:
        return
    (batch,) = read_batches(context.source, [rows], context.preprocess, skip_bad=context.skip_bad)
    batch = batch.to(context.processes.device)
    with context.arithmetic():
        z = attack(context.model, batch.x, batch.y, SampleRNG.of_samples(context.seed, batch.indices, batch.x.device))
        with torch.no_grad():
            prediction = context.model(z).argmax(1)
        maps = _gazes(context.model, attention_x=batch.x, attention_z=z)
    buffer = io.BytesIO()
    arrays = {"index": batch.indices, "x": batch.x, "z": z, "label": batch.y, "prediction": prediction, **maps}
    about = {"attack": np.asarray(name), "own_rules": np.asarray(rules_of(attack) is not None)}
    np.savez_compressed(buffer, **(about | {key: tensor.cpu().numpy() for key, tensor in arrays.items()}))
    write_atomically(run.path / "examples.npz", buffer.getvalue())


def _gazes(model: nn.Module, **shown: Tensor) -> dict[str, Tensor]:
    """Where the model looks in these images; nothing of a model that has no maps over patches."""
    try:
        return {name: attention_over_patches(model, images) for name, images in shown.items()}
    except UserError:
        return {}
