"""How good the likely time of `vitadel plan` is: estimate, trial and truth in processor time, as a Markdown table.

    python benchmarks/time_estimates.py zoo:shapes-robust shapes 200 autoattack-fast 8/255 [WEIGHTS]

Processor time, so that other work on the machine does not disturb; run it with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import time

import torch

from vitadel.attacks.parse import split_attack_list
from vitadel.evaluation.audit.audit import AuditRequest, run_audit
from vitadel.evaluation.audit.audit_plan import plan_audit
from vitadel.evaluation.engine.target import open_target
from vitadel.quantities import duration, read_quantity
from vitadel.runtime.distributed import join_processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "data", "limit", "attacks", "eps"):
        parser.add_argument(name)
    parser.add_argument("weights", nargs="?")
    given = parser.parse_args()
    torch.set_num_threads(1)
    time.perf_counter = time.process_time  # every clock of the estimate and of the run
    request = AuditRequest(
        attacks=tuple(split_attack_list(given.attacks)), eps=read_quantity(given.eps), limit=int(given.limit)
    )
    processes = join_processes("cpu")
    target = open_target(given.model, given.data, model_options={"weights": given.weights} if given.weights else None)
    start = time.process_time()
    cost = plan_audit(target, request, processes)
    planned = time.process_time()
    results = run_audit(target, request, processes, in_memory=True).results
    spent = time.process_time() - planned
    robust = results["worst_case"]["robust_accuracy"]
    likely, most = cost["seconds_likely"], cost["seconds_at_most"]
    cells = [given.model, given.attacks, given.eps, given.limit, f"{100 * robust:.1f} %"]
    cells += [duration(planned - start), duration(likely), duration(most), duration(spent), f"{likely / spent:.2f}"]
    print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
