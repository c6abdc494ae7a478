"""`vitadel corrupt`: write a corrupted copy of a data set."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from vitadel.cli.corruptions import Severities, corruption_list, severity_list
from vitadel.cli.execution import present, run_options
from vitadel.cli.options import DataFlags, RunFlags, expand_groups, option


@expand_groups
def corrupt(
    data: DataFlags = DataFlags("shapes"),
    corruptions: Annotated[str, option("common (15), all (19), or names: fog,snow")] = "common",
    severities: Severities = "1,2,3,4,5",
    file_format: Annotated[
        str, option("png (lossless), jpeg (quality 85, as ImageNet-C) or npy (as CIFAR-C)", "--format")
    ] = "png",
    size: Annotated[
        int | None, option("image size (default: 224 as ImageNet-C; images up to 96 pixels keep theirs)")
    ] = None,
    run: RunFlags = RunFlags(),
) -> None:
    """Write a corrupted copy of a data set."""
    from vitadel.data import open_dataset
    from vitadel.evaluation.corruptions.corrupted_copy import CorruptedCopyRequest, write_copy
    from vitadel.runtime.distributed import join_processes

    request = CorruptedCopyRequest(
        corruptions=corruption_list(corruptions),
        severities=severity_list(severities),
        format=file_format,
        size=size,
        **data.for_request(),
    )
    processes = join_processes(run.device)
    source = open_dataset(data.data, root=data.data_root, skip_bad=data.skip_bad)
    outcome = write_copy(source, data.data, request, processes, **run_options(run, **asdict(data)))
    present(outcome, run, report=False)
