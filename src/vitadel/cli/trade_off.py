"""`vitadel trade-off RUN [RUN ...]`: accuracy against robustness over lambda, TORA beside its baselines."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vitadel.cli import options, run_verb
from vitadel.cli.flag_groups import bundled


@bundled
def trade_off(
    runs: Annotated[
        list[str], typer.Argument(help="run folders of 'vitadel harden tora/...', baselines, or any other MODEL")
    ],
    sampling: options.Sampling = options.Sampling("shapes"),
    eps: Annotated[str, typer.Option(help="budgets of the worst case, comma-separated")] = "1/255,2/255,4/255",
    attacks: Annotated[
        str, typer.Option(help="on the joint output, one after the other; see 'vitadel list attacks'")
    ] = "pgd-50(restarts=5),autoattack",
    aimed: Annotated[
        str, typer.Option(help="then aimed at each head, judged on the joint output; '' for none")
    ] = "pgd-50(restarts=5)",
    knob: Annotated[int, typer.Option(help="so many fusions between those of the smallest and largest lambda")] = 0,
    maps: Annotated[int, typer.Option(help="draw and check the adapters' maps on so many images")] = 0,
    run: options.Running = options.Running(),
) -> None:
    """Which RUN is more accurate, which more robust? All on the same images, every head and the joint output."""
    from vitadel.evaluation.trade_off.candidates import open_candidates
    from vitadel.evaluation.trade_off.run import TradeOffRequest, run_trade_off
    from vitadel.reporting import terminal
    from vitadel.reporting.kinds.trade_off import show_trade_off
    from vitadel.reporting.read_runs import read_run
    from vitadel.runtime.distributed import join_processes

    request = TradeOffRequest.read(eps, attacks, aimed, maps=maps, **sampling.for_request())
    processes = join_processes(run.device)
    candidates = open_candidates(
        runs, sampling.data, data_root=sampling.data_root, skip_bad=sampling.skip_bad, knob=knob
    )
    outcome = run_trade_off(
        candidates, request, processes, out=run.out, resume=run.resume, show_progress=True, argv=sys.argv[1:]
    )
    if not outcome.is_main or outcome.folder is None:
        return
    folder = outcome.folder.path

    def show(results: dict[str, object]) -> None:
        show_trade_off(read_run(folder))
        terminal.show_findings(outcome.results["findings"])

    run_verb.tell(outcome.results, folder, run, show)
