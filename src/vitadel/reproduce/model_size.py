"""The size of a model as tables print it: parameters, those that were trained, and multiply-adds of one image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from vitadel.adapters.adapted_model import open_model
from vitadel.evaluation.engine.run import Outcome, Run, RunOptions, execute, result_header
from vitadel.instrument.hooks import count_macs
from vitadel.runtime.distributed import Processes

_SIDE = 224  # pixels, for models that take images of any size


def run_model_size(
    model: str, options: Mapping[str, Any], processes: Processes, **run_options: Unpack[RunOptions]
) -> Outcome:
    """Count parameters and, with torch's counter, multiply-adds of convolutions, linear layers and attention."""

    def work(run: Run) -> dict[str, Any]:
        opened = open_model(model, dict(options) or None)
        height, width = opened.record.input_size or (_SIDE, _SIDE)
        macs = count_macs(opened, (height, width))
        # What adapters are added to is frozen as soon as the model is opened.
        trained = sum(each.numel() for each in opened.parameters() if each.requires_grad)
        return {
            **result_header(0),
            "size": {
                "parameters": sum(each.numel() for each in opened.parameters()) / 1e6,
                "trained": trained / 1e6,
                "gmacs": None if macs is None else macs / 1e9,
                "image": [height, width],
            },
        }

    return execute("model-size", model, {"model": model, "options": dict(options)}, processes, work, **run_options)
