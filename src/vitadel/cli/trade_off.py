"""`vitadel trade-off RUN [RUN ...]`: accuracy against robustness over lambda, for TORA and its baselines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from vitadel.cli.execution import present, run_options
from vitadel.cli.options import DataFlags, RunFlags, expand_groups, option, rare


@expand_groups
def trade_off(
    runs: Annotated[
        list[str], typer.Argument(help="run folders of 'vitadel harden tora/...', baselines, or any other MODEL")
    ],
    data: DataFlags = DataFlags("shapes"),
    eps: Annotated[str, option("budgets of the worst case, comma-separated")] = "1/255,2/255,4/255",
    attacks: Annotated[
        str, option("attacks on the joint output; see 'vitadel list attacks'")
    ] = "pgd-50(restarts=5),autoattack",
    aimed: Annotated[
        str, option("attacks on each head, judged on the joint output; '' for none")
    ] = "pgd-50(restarts=5)",
    knob: Annotated[int, option("extra fusions between the smallest and the largest lambda")] = 0,
    maps: Annotated[int, option("draw and check the adapters' maps on this many images")] = 0,
    crop_pct: Annotated[str | None, rare("share of the image that is kept, e.g. 0.875 as in RVT")] = None,
    run: RunFlags = RunFlags(),
) -> None:
    """Compare accuracy and robustness of several runs.

    All models see the same images; every head and the joint output is measured.
    """
    from vitadel.evaluation.trade_off.candidates import open_candidates
    from vitadel.evaluation.trade_off.run import TradeOffRequest, crop_option, run_trade_off
    from vitadel.runtime.distributed import join_processes

    request = TradeOffRequest.read(eps, attacks, aimed, maps=maps, **data.for_request())
    processes = join_processes(run.device)
    opened = crop_option(crop_pct)
    candidates = open_candidates(
        runs, data.data, data_root=data.data_root, skip_bad=data.skip_bad, knob=knob, model_options=opened
    )
    present(run_trade_off(candidates, request, processes, **run_options(run, **asdict(data), crop_pct=crop_pct)), run)
