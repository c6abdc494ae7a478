"""Evaluation protocols: what a run must agree in to be comparable with a leaderboard or a paper.

A protocol fixes budget, attacks, images and the size at which the budget counts. A run that names a protocol and
differs in anything is refused, with all differences at once; for other runs the differences are recorded.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from vitadel.errors import UserError, check_known
from vitadel.quantities import quantity_text, read_quantity

if TYPE_CHECKING:
    from torch import Tensor

    from vitadel.evaluation.audit.audit import AuditRequest
    from vitadel.evaluation.engine.target import Target
    from vitadel.types import Attack

__all__ = [
    "RVT",
    "Protocol",
    "compare_with_protocols",
    "differences",
    "kind_of_data",
    "list_digest",
    "protocol_named",
    "protocols",
    "settings",
]


@dataclass(frozen=True)
class Protocol:
    """What is the same in all runs of the protocol.

    `data` are the kinds of `--data` it is for, on their split for testing. `pixels` is the side of the images that are
    attacked: enlarging an image changes the threat; None leaves it to the model. `crop_pct` and `interpolation` say how
    images come to that size; None leaves it to the model, as leaderboards with models of many sizes do.
    `image_list` is the `list_digest` of the images, where they are not the whole split. With `independent` every attack
    is counted alone. `norm` and `eps` are lists if the protocol is about the union of several threats.
    """

    name: str
    comparable_with: str
    citation: str
    data: tuple[str, ...]
    images: int
    eps: str
    attacks: tuple[str, ...]
    norm: str = "linf"
    pixels: int | None = None
    crop_pct: float | None = None
    interpolation: str | None = None
    image_list: str | None = None
    independent: bool = False
    needs: str = ""
    remark: str = ""

    @property
    def budget(self) -> float:
        return read_quantity(self.eps, "eps")

    @property
    def model_options(self) -> dict[str, Any]:
        """What it asks of how a model is opened, as `load_model` takes it."""
        asked = {"crop_pct": self.crop_pct, "interpolation": self.interpolation}
        return {name: value for name, value in asked.items() if value is not None}

    def under(self, norm: str) -> Protocol:
        """The part of it under one norm; all of it if it has only that one, or not that one."""
        budgets = dict(zip(self.norm.split(","), self.eps.split(","), strict=True))
        return replace(self, norm=norm, eps=budgets[norm]) if norm in budgets else self

    @property
    def about(self) -> str:
        """One line for a list."""
        attacks = ", ".join(self.attacks) if len(self.attacks) < 4 else f"{len(self.attacks)} attacks"
        threats = " and ".join(map(" ".join, zip(self.norm.split(","), self.eps.split(","), strict=True)))
        return f"{attacks}, {threats}, {self.images:,} images of {' or '.join(self.data)}; {self.citation}"


_ROBUSTBENCH = "Croce et al. 2021, arXiv:2010.09670"
_RANDOMIZED = (
    "RobustBench lists no model that is randomized, has zero gradients or optimizes at inference: look at the findings "
    "first."
)
_PAPERS_ATTACKS = ("fgsm", "pgd-20", "pgd-100", "cw-100", "dlr-100", "gama-100")


def _robustbench(name: str, board: str, data: str, images: int, eps: str, **more: Any) -> Protocol:
    return Protocol(
        name=f"robustbench-{name}",
        comparable_with=f"RobustBench, {board}",
        citation=_ROBUSTBENCH,
        data=(data,),
        images=images,
        eps=eps,
        attacks=("autoattack",),
        remark=_RANDOMIZED,
        **more,
    )


def _aas(data: str, title: str) -> Protocol:
    return Protocol(
        name="paper-aas" if data == "cifar10" else f"paper-aas-{data}",
        comparable_with=f"Jain & Dutta 2024, {title}, by the numbers counted as in the paper",
        citation="Jain & Dutta 2024, adaptive attention scaling",
        data=(data,),
        images=10_000,
        eps="8/255",
        attacks=(*_PAPERS_ATTACKS, *(f"aas-paper+{attack}" for attack in _PAPERS_ATTACKS)),
        pixels=32,
        independent=True,
        remark="The paper does not state step sizes and starts: they are 2/255 and random here. It appears to judge on "
        "the rescaled model; the deployed model's accuracy is another number, and the one to go by.",
    )


RVT = Protocol(
    name="rvt",
    comparable_with="the FGSM and PGD columns of RVT (Mao et al. 2022), and of papers that take over its table",
    citation="Mao et al. 2022, arXiv:2105.07926",
    data=("imagenet",),
    images=50_000,
    eps="1/255",
    attacks=("fgsm", "pgd-5(step=0.5/255)"),
    pixels=224,
    crop_pct=0.875,
    interpolation="bicubic",
    independent=True,
    needs="imagenet:DIR, the whole validation split",
    remark="Five small steps at 1/255 say little about robustness: models that pass may fail stronger attacks.",
)
"""AFAT and TORA-ViT were evaluated by it, too: stability and trade-off take budget and attacks from here."""

_LIST_DIGEST = "2305860aee3636d88c990e932a0348b11f457aab6fc40af26963c6cf2b38877c"
_LISTED = "imagenet:DIR(list=FILE), where FILE is RobustBench's imagenet_test_image_ids.txt"


def _unseen_threat(name: str, norm: str, eps: str, threats: str) -> Protocol:
    return Protocol(
        name=f"unseen-{name}",
        comparable_with=f"Singh et al. 2023, {threats}, of models trained for Linf 4/255",
        citation="Singh et al. 2023, arXiv:2303.01870",
        data=("imagenet",),
        images=5_000,
        eps=eps,
        norm=norm,
        attacks=("autoattack",),
        image_list=_LIST_DIGEST,
        needs=_LISTED,
        remark="The union counts an image only if it is robust in all of Linf 4/255, L2 2 and L1 75: unseen-union.",
    )


@functools.cache
def protocols() -> Mapping[str, Protocol]:
    """All protocols by name."""
    known = (
        _robustbench("cifar10", "CIFAR-10, Linf 8/255", "cifar10", 10_000, "8/255", pixels=32),
        _robustbench("cifar10-l2", "CIFAR-10, L2 0.5", "cifar10", 10_000, "0.5", norm="l2", pixels=32),
        _robustbench("cifar100", "CIFAR-100, Linf 8/255", "cifar100", 10_000, "8/255", pixels=32),
        _robustbench(
            "imagenet",
            "ImageNet, Linf 4/255",
            "imagenet",
            5_000,
            "4/255",
            image_list=_LIST_DIGEST,
            needs=_LISTED,
        ),
        _unseen_threat("l2", "l2", "2", "L2 2"),
        _unseen_threat("l1", "l1", "75", "L1 75"),
        _unseen_threat("union", "linf,l2,l1", "4/255,2,75", "the union of Linf 4/255, L2 2 and L1 75"),
        RVT,
        _aas("cifar10", "CIFAR-10"),
        _aas("cifar100", "CIFAR-100"),
    )
    return {protocol.name: protocol for protocol in known}


def protocol_named(name: str) -> Protocol:
    check_known("protocol", name, protocols())
    return protocols()[name]


def settings(name: str) -> dict[str, Any]:
    """What a protocol fixes, as `audit` takes it: `audit(model, "cifar10", **settings("robustbench-cifar10"))`.

    How a model is opened is apart, in `protocol_named(name).model_options`.
    """
    protocol = protocol_named(name)
    return {
        "protocol": protocol.name,
        "attacks": ",".join(protocol.attacks),
        "eps": protocol.eps,
        "norm": protocol.norm,
        "independent": protocol.independent,
    }


def compare_with_protocols(request: AuditRequest, target: Target, indices: Tensor) -> dict[str, Any]:
    """The field `protocol` of the results. A `UserError` if the request names a protocol and differs from it.

    A request that names none is compared with the nearest protocol for its data.
    """
    if request.protocol is not None:
        protocol = protocol_named(request.protocol).under(request.norm)
        found = differences(protocol, request, target, indices)
        if found:
            raise UserError(
                f"this run does not follow the protocol {protocol.name}. It differs in:\n  "
                + "\n  ".join(f"{what}: {how}" for what, how in found.items())
                + f"\nChange these settings, or leave out --protocol: the number is then not comparable with "
                f"{protocol.comparable_with}."
            )
        return _comparison(protocol, {})
    kind = kind_of_data(target)[0]
    candidates = [each for each in protocols().values() if kind in each.data and "," not in each.norm]
    compared = [(differences(each, request, target, indices), each) for each in candidates]
    if not compared:
        return {"name": None, "comparable_with": None, "nearest": None, "differences": {}, "remark": ""}
    found, nearest = min(compared, key=lambda pair: len(pair[0]))
    return _comparison(nearest, found)


def _comparison(protocol: Protocol, found: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": None if found else protocol.name,
        "comparable_with": None if found else protocol.comparable_with,
        "nearest": protocol.name,
        "nearest_is": protocol.comparable_with,
        "differences": dict(found),
        "remark": protocol.remark,
    }


def differences(protocol: Protocol, request: AuditRequest, target: Target, indices: Tensor) -> dict[str, str]:
    """In what a run differs from a protocol, and how; empty if it follows it."""
    found: dict[str, str] = {}

    def require(what: str, given: object, wanted: object) -> None:
        if given != wanted:
            found[what] = f"{given} instead of {wanted}"

    kind, split = kind_of_data(target)
    if kind not in protocol.data or split == "train":
        found["data"] = f"{target.data_spec} instead of {protocol.needs or ' or '.join(protocol.data)}"
    require("norm", request.norm, protocol.norm)
    require("eps", quantity_text(request.eps), protocol.eps)
    found |= _about_attacks(protocol, request)
    require("images", f"{len(indices):,}", f"{protocol.images:,}")
    if not protocol.image_list and "images" not in found and len(target.source) != protocol.images:
        found["images"] = f"{len(indices):,} of {len(target.source):,} instead of a whole split of {protocol.images:,}"
    if protocol.image_list and "images" not in found:
        names = [target.source.name(index) for index in indices.tolist()]
        if list_digest(names) != protocol.image_list:
            found["images"] = f"other {len(names):,} images than those of {protocol.needs}"
    if protocol.pixels is not None:
        height, width = target.preprocess.shape
        require("size of attacked images", f"{height} x {width}", f"{protocol.pixels} x {protocol.pixels}")
    if protocol.crop_pct is not None and protocol.interpolation is not None:
        own = target.preprocess
        wanted = replace(own, crop_pct=protocol.crop_pct, interpolation=protocol.interpolation, crop_mode="center")
        require("preprocessing", own.about, wanted.about)
    require("precision", request.precision, "fp32")
    require("precision of weights", _weights(target), "float32")
    if request.skip_bad:
        found["unreadable images"] = "left out (--skip-bad) instead of an error"
    return found


def list_digest(names: Iterable[str]) -> str:
    """Identifies a set of images whatever their order and file format: 'n01440764/ILSVRC2012_val_00000293'."""
    bare = sorted({str(PurePosixPath(name).with_suffix("")) for name in names})
    return hashlib.sha256("\n".join(bare).encode()).hexdigest()


def kind_of_data(target: Target) -> tuple[str, str | None]:
    """The kind of the data and the split; data given as an object have no kind."""
    from vitadel.data.spec import parse_spec

    if target.given_as_object:
        return "", None
    request = parse_spec(target.data_spec, root=Path(), split=None)
    return request.kind, request.split


def _weights(target: Target) -> str:
    """The types of the model's parameters: half-precision weights compute in it, whatever the run asks for."""
    types = {str(each.dtype) for each in target.model.parameters() if each.is_floating_point()}
    return ", ".join(sorted(name.removeprefix("torch.") for name in types)) or "float32"


def _about_attacks(protocol: Protocol, request: AuditRequest) -> dict[str, str]:
    """Different attacks; or the same, counted differently or calibrated on different images."""
    from vitadel.evaluation.engine.attack_preparation import needs_calibration

    wanted = _built(protocol.attacks, protocol)
    try:
        same = _effect(_built(request.attacks, protocol)) == _effect(wanted)
    except UserError:  # the protocol's norm or budget rules out an attack
        same = False
    if not same:
        return {"attacks": f"{', '.join(request.attacks)} instead of {', '.join(protocol.attacks)}"}
    found = {}
    if request.independent != protocol.independent and len(request.attacks) > 1:
        found["counting"] = (
            "attacks one after the other instead of each alone (--independent)"
            if protocol.independent
            else "each attack alone instead of one after the other"
        )
    if request.calibration is not None and any(map(needs_calibration, wanted)):
        found["calibration"] = f"{request.calibration} instead of the training split (no --calibration)"
    return found


def _built(names: Iterable[str], protocol: Protocol) -> list[Attack]:
    from vitadel.attacks.parse import make

    return [make(name, eps=protocol.eps, norm=protocol.norm) for name in names]


def _effect(attacks: Iterable[Attack]) -> list[object]:
    """What attacks do, however they are written: 'autoattack' is 'autoattack-100'."""
    from vitadel.attacks.settings import settings_of

    return [(type(attack).__name__, settings_of(attack)) for attack in attacks]
