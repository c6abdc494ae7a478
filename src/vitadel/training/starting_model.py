"""The model that a training starts from: with random or pretrained weights and a head for the data's classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from vitadel.backbones.checkpoints import read_record
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.load import has_no_head, load_model
from vitadel.backbones.timm_models import is_timm_name
from vitadel.errors import UserError
from vitadel.training.recipes.training_sections import ModelSection


@dataclass(frozen=True, eq=False)
class StartingModel:
    """`fresh_head`: the backbone is pretrained, its head is not."""

    classifier: Classifier
    fresh_head: bool = False


def starting_model(section: ModelSection, classes: int, data: str) -> StartingModel:
    """The model of a section with a head for `classes` classes; `data` names the data in messages."""
    if section.num_classes is not None and section.num_classes != classes:
        raise UserError(
            f"model.num_classes is {section.num_classes}, but {data} has {classes} classes; drop it or take other data"
        )
    kept = section.head_classes
    if kept is not None and len(kept) != classes:
        raise UserError(f"model.head_classes keeps {len(kept)} classes, but {data} has {classes}; name one for each")
    named = is_timm_name(section.name)
    weights = section.weights or ("random" if named else None)
    options = {"weights": weights, **section.options()}
    if weights == "random":
        if kept is not None:
            raise UserError(
                "model.head_classes selects classes of a pretrained head, but this model has random weights"
            )
        return StartingModel(load_model(section.name, num_classes=classes, **options))
    if kept is None and has_no_head(section.name, weights):
        return StartingModel(load_model(section.name, num_classes=classes, new_head=True, **options), fresh_head=True)
    if kept is None and section.num_classes is None and named and weights != "pretrained":
        return _from_file(section.name, classes, options)
    model = load_model(section.name, num_classes=section.num_classes, head_classes=kept, **options)
    if model.record.num_classes == classes:
        return StartingModel(model)
    if model.record.num_classes is None:  # a user's own model that does not say
        return StartingModel(Classifier(model.backbone, replace(model.record, num_classes=classes)))
    return StartingModel(load_model(section.name, num_classes=classes, new_head=True, **options), fresh_head=True)


def contradictions(section: ModelSection) -> list[str]:
    """Settings, often inherited by `extends`, that differ from what is known of the weights a training starts from.

    Known is the record in a file of Vitadel's, else timm's configuration of the model, which other weights may not
    share: so these are warnings.
    """
    if section.weights in (None, "random") or not is_timm_name(section.name):
        return []
    file = Path(section.weights)
    recorded = read_record(file) if file.suffix == ".safetensors" and file.is_file() else None
    config = timm.get_pretrained_cfg(section.name)
    if recorded is not None:
        known, source = {"mean": recorded.mean, "std": recorded.std}, f"the record in {section.weights}"
        size = recorded.input_size
    elif config is not None:
        known, source = {"mean": config.mean, "std": config.std}, f"timm's {section.name}"
        size = config.input_size[1:]
    else:
        return []
    found = []
    for name, value in known.items():
        given = getattr(section, name)
        if given is not None and any(abs(ours - theirs) > 1e-3 for ours, theirs in zip(given, value, strict=False)):
            shown = ", ".join(f"{each:g}" for each in value)
            found.append(
                f"model.{name} is {list(given)}, but {source} has [{shown}]: with other pixels than it was trained on "
                f"the model starts worse. Set model.{name}=null for its own."
            )
    if section.input_size is not None and size is not None and section.input_size != size[0]:
        found.append(
            f"model.input_size is {section.input_size}, but {source} has {size[0]}: position embeddings are resampled. "
            "Set model.input_size=null for its own."
        )
    return found


def check_answer(model: Classifier, size: tuple[int, int], name: str, classes: int, trains_model: bool) -> None:
    """Check a user's own model before a long training: images, classes, logits, gradients, and saving.

    With `trains_model` its own parameters are trained.
    """
    trainable = [each for each in model.parameters() if each.requires_grad] if trains_model else []
    if trains_model and not trainable:
        raise UserError(f"'{name}' has no parameters that require gradients, so there is nothing to train")
    _check_weights(model.backbone, name)
    halves = sorted({str(each.dtype) for each in trainable if each.dtype in (torch.float16, torch.bfloat16)})
    if halves:
        raise UserError(
            f"'{name}' has parameters of {', '.join(halves)}, which small steps would not change; return "
            "model.float(), and set train.amp_dtype for mixed precision"
        )
    x = torch.full((2, 3, *size), 0.5, device=model.mean.device, requires_grad=True)
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.enable_grad():
            logits = model.eval()(x)
    except UserError:
        raise
    except Exception as error:  # a user's module may raise anything
        raise UserError(f"'{name}' failed on two gray images of {size[0]} x {size[1]} pixels: {error}") from error
    finally:
        for module, training in modes:
            module.training = training
    if logits.shape != (2, classes):
        raise UserError(
            f"'{name}' returns for two images a tensor of shape {tuple(logits.shape)}, but data.train has {classes} "
            f"classes; let it return logits of shape (batch, {classes})"
        )
    if not bool(logits.isfinite().all()):
        raise UserError(f"'{name}' gives NaN or infinite logits for gray images; check its weights")
    gradients = torch.autograd.grad(logits.sum(), [x, *trainable], allow_unused=True) if logits.requires_grad else ()
    if not gradients or gradients[0] is None or (trains_model and all(gradient is None for gradient in gradients[1:])):
        what = "pixels" if not gradients or gradients[0] is None else "parameters"
        raise UserError(
            f"no gradient of the logits of '{name}' reaches its {what}: is there a detach() or torch.no_grad() in its "
            "forward?"
        )


def _check_weights(backbone: nn.Module, name: str) -> None:
    """Check that the state_dict can be saved as tensors and loaded back."""
    state = backbone.state_dict()
    other = [key for key, value in state.items() if not isinstance(value, torch.Tensor)]
    if other:
        raise UserError(
            f"the state_dict of '{name}' has entries that are no tensors and cannot be saved: {', '.join(other)}"
        )
    try:
        backbone.load_state_dict(state)
    except Exception as error:
        raise UserError(f"'{name}' cannot load its own state_dict, so it could not be opened again: {error}") from error


def _from_file(name: str, classes: int, options: Mapping[str, Any]) -> StartingModel:
    """With the file's head if it fits; few files record their number of classes."""
    try:
        return StartingModel(load_model(name, num_classes=classes, **options))
    except UserError:  # any other problem is raised again below
        return StartingModel(load_model(name, num_classes=classes, new_head=True, **options), fresh_head=True)
