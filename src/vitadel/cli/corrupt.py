"""`vitadel corrupt`: write a corrupted copy of a data set."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from vitadel.cli.corruptions import Severities, corruption_list, severity_list
from vitadel.cli.execution import present, run_options
from vitadel.cli.options import DataFlags, RunFlags, expand_groups, option
from vitadel.errors import UserError


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
    augmix: Annotated[
        int | None, option("instead, this number of AugMix copies of each image, to train on (as data.extra)")
    ] = None,
    run: RunFlags = RunFlags(),
) -> None:
    """Write a corrupted copy of a data set."""
    from vitadel.data import open_dataset
    from vitadel.evaluation.corruptions.corrupted_copy import CorruptedCopyRequest, write_copy
    from vitadel.runtime.distributed import join_processes

    if augmix is not None:
        from vitadel.evaluation.corruptions.augmix_copy import AugmixCopyRequest, write_augmix_copy

        if (corruptions, severities, size) != ("common", "1,2,3,4,5", None):
            raise UserError("--augmix writes images of their own size without corruptions; drop the other settings")
        copies = AugmixCopyRequest(copies=augmix, format=file_format, **data.for_request())
        source = open_dataset(data.data, root=data.data_root, skip_bad=data.skip_bad)
        options = run_options(run, **asdict(data))
        present(write_augmix_copy(source, data.data, copies, join_processes(run.device), **options), run, report=False)
        return
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
