"""`vitadel audit`: clean accuracy, attacks, worst case; a run folder and a report."""

from __future__ import annotations

from typing import Annotated

import typer

from vitadel.cli import ladder, options, running


def audit(
    ctx: typer.Context,
    model: options.Model = "zoo:shapes-robust",
    data: options.Data = "shapes",
    attacks: options.Attacks = "fgsm,pgd-20",
    eps: options.Eps = "8/255",
    norm: options.Norm = "linf",
    limit: options.Limit = None,
    batch_size: options.BatchSize = 64,
    seed: options.Seed = 0,
    independent: Annotated[
        bool, typer.Option("--independent", help="every attack sees all correct samples, not only those still standing")
    ] = False,
    calibration: options.Calibration = None,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    mean: options.Mean = None,
    std: options.Std = None,
    input_size: options.InputSize = None,
    small_images: options.SmallImages = False,
    tokens: options.Tokens = None,
    allow_readable: options.AllowReadable = False,
    data_root: options.DataRoot = None,
    skip_bad: options.SkipBad = False,
    device: options.Device = "auto",
    precision: options.Precision = "fp32",
    compile_model: options.Compile = False,
    out: options.Out = None,
    resume: options.Resume = False,
    as_json: options.Json = False,
    suite: Annotated[
        str | None, typer.Option(help="another benchmark instead of --attacks: ladder, for secret tokens")
    ] = None,
    levels: ladder.Levels = None,
    steps: ladder.Steps = 30,
    queries: ladder.Queries = 5000,
    white_box: ladder.WhiteBox = "apgd-ce,apgd-t",
    surrogates: ladder.Surrogates = "2",
    bank: ladder.Bank = "2",
    recipe: ladder.Recipe = None,
    attacker_data: ladder.AttackerData = None,
    head: ladder.HeadFile = None,
    attacker_head: ladder.AttackerHead = None,
    other: ladder.Other = None,
    other_weights: ladder.OtherWeights = None,
) -> None:
    """How accurate is MODEL, and how much of that survives an attack? Writes a run folder and a report."""
    from vitadel.amounts import read_amount
    from vitadel.attacks.names import split_attack_list
    from vitadel.evaluation.audit import Order
    from vitadel.reporting import page, terminal

    chosen = options.model_options(weights, num_classes, mean, std, input_size, small_images)
    given = {name for name in ctx.params if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")}
    ladder.refuse_idle_flags(suite, given)
    if suite is not None:
        ladder.climb(
            suite,
            model,
            data,
            chosen,
            tokens=tokens,
            allow_readable=allow_readable,
            eps=eps if "eps" in given else None,  # the ladder has budgets of its own unless told otherwise
            levels=levels,
            steps=steps,
            queries=queries,
            white_box=white_box,
            surrogates=surrogates,
            bank=bank,
            recipe=recipe,
            attacker_data=attacker_data,
            head=head,
            attacker_head=attacker_head,
            other=other,
            other_weights=other_weights,
            limit=limit,
            batch_size=batch_size,
            seed=seed,
            data_root=data_root,
            skip_bad=skip_bad,
            device=device,
            out=out,
            resume=resume,
            as_json=as_json,
        )
        return
    order = Order(
        attacks=tuple(split_attack_list(attacks)),
        eps=read_amount(eps, "eps"),
        norm=norm,
        limit=limit,
        batch_size=batch_size,
        seed=seed,
        independent=independent,
        precision=precision,
        skip_bad=skip_bad,
        calibration=calibration,
        compile=compile_model,
    )
    done = running.run(
        "audit",
        order,
        model,
        data,
        data_root=data_root,
        model_options=chosen,
        device=device,
        out=out,
        resume=resume,
        tokens=tokens,
        allow_readable=allow_readable,
    )
    if done is None:
        return
    results, folder = done
    page.write_report([folder], folder / "report.html")
    if as_json:
        running.tell_json(results, folder)
        return
    terminal.show_results(results)
    typer.echo(f"report: {folder / 'report.html'}")
    typer.echo(str(folder))
