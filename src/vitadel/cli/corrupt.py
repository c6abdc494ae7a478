"""`vitadel corrupt`: write a corrupted copy of a data set."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from vitadel.cli import options, run_verb
from vitadel.cli.corruptions import corruption_list, severity_list
from vitadel.cli.flag_groups import bundled


@bundled
def corrupt(
    sampling: options.Sampling = options.Sampling("shapes"),
    corruptions: Annotated[
        str, typer.Option(help="common (15), all (19), or names: fog,snow; what cannot be had is told")
    ] = "common",
    severities: Annotated[str, typer.Option(help="some of 1,2,3,4,5")] = "1,2,3,4,5",
    file_format: Annotated[
        str,
        typer.Option(
            "--format", help="png (every pixel kept), jpeg (quality 85, as ImageNet-C) or npy (arrays, as CIFAR-C)"
        ),
    ] = "png",
    size: Annotated[
        int | None, typer.Option(help="image size; else 224 as ImageNet-C, and up to 96 pixels their own")
    ] = None,
    run: options.Running = options.Running(),
) -> None:
    """Write a copy of the data, corrupted: corruption/severity/class/picture, or one array per corruption."""
    from vitadel.data import open_dataset
    from vitadel.evaluation.corruptions.corrupted_copy import CorruptedCopyRequest, write_copy
    from vitadel.runtime.distributed import join_processes

    request = CorruptedCopyRequest(
        corruptions=corruption_list(corruptions),
        severities=severity_list(severities),
        format=file_format,
        size=size,
        **sampling.for_request(),
    )
    processes = join_processes(run.device)
    source = open_dataset(sampling.data, root=sampling.data_root, skip_bad=sampling.skip_bad)
    outcome = write_copy(
        source, sampling.data, request, processes, out=run.out, resume=run.resume, show_progress=True, argv=sys.argv[1:]
    )
    run_verb.tell_outcome(outcome, run, _show, report=False)


def _show(results: dict[str, Any]) -> None:
    told, (height, width) = results["copy"], results["copy"]["size"]
    typer.echo(
        f"{results['data']['n']} images of {height} x {width} pixels, {len(told['corruptions'])} corruptions at "
        f"{len(told['severities'])} severities ({told['format']})"
    )
    data = results["data"]
    if data["left_out"]:
        typer.echo(f"{data['left_out']} images left out, as they cannot be used: {', '.join(data['left_out_names'])}")
    for name, reason in told["left_out"].items():
        typer.echo(f"without {name}: {reason}")
