"""TORA-ViT (Li & Xu, CVPR 2023): accuracy and robustness adapters with gated fusion on a frozen, pretrained ViT.

Only slides of the paper are public. What they leave open is chosen so that the numbers of parameters and operations
match theirs, and so that the untrained module equals the pretrained model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitadel.adapters.tora.tora_fusion import (
    Adapted,
    Bottleneck,
    GatedFusion,
    Gates,
    PfeifferFusion,
    Tokens,
    blank_linear,
    start_linear,
)
from vitadel.adapters.tora.tora_settings import BRANCHES, ToraSettings, check_host, check_trade_off, describe
from vitadel.backbones.anatomy import prefix_tokens_of
from vitadel.backbones.attention_hooks import scaled_scores
from vitadel.backbones.classifier import Classifier, check_image_size
from vitadel.backbones.record import ModelRecord
from vitadel.errors import UserError, check_known
from vitadel.instrument.tokens import extra_tokens, patch_grid

_PARTS = {"acc": "acc", "rob": "rob", "single": "single", "fusion": "fusion", "classifier": "backbone"}
_HEAD_SCALE = 0.02  # as timm's own
_PULL = 0.01  # towards identity, AdapterFusion's own


class Branch(nn.Module):
    """The parts for one loss: an adapter per block, a class token as it enters the first block, and a head."""

    token: nn.Parameter | None

    def __init__(self, name: str, backbone: Any, settings: ToraSettings, classes: int, seed: int) -> None:
        super().__init__()
        like, width = backbone.cls_token, backbone.embed_dim
        depth = len(backbone.blocks) if settings.adapts else 0
        self.adapters = nn.ModuleList(Bottleneck(width, round(width / settings.reduction), like) for _ in range(depth))
        for layer, adapter in enumerate(self.adapters):
            cast(Bottleneck, adapter).start(seed, _place(name), layer)
        self.token = nn.Parameter(_class_token(backbone)) if settings.adapts else None
        self.head = blank_linear(width, classes, like)
        start_linear(self.head, _HEAD_SCALE, seed, "head", _place(name))
        own = backbone.head
        if isinstance(own, nn.Linear) and own.weight.shape == self.head.weight.shape and own.bias is not None:
            self.head.load_state_dict(own.state_dict())

    def adapted(self, layer: int, tokens: Tensor) -> Adapted:
        return Adapted(tokens, self.adapters[layer](tokens))


class Tora(nn.Module):
    """A classifier with two branches, one for accuracy and one for robustness; it returns their joint prediction.

    After each frozen block both adapters transform its output, and the fusion combines them to the input of the next
    block. In slot "shared" blocks see the mean of both class tokens, and both get what a block adds to the mean. In
    slot "separate" they see both, with scores lowered by log 2, so that two equal tokens count as one.

    The given classifier itself is used: its parameters are frozen and it stays in eval mode. Untrained, the outputs are
    those of the classifier if the number of classes is the same; otherwise the heads are initialized from `seed`.
    `trade_off` is the lambda that the fusion was trained for, or None; `loss_at` is for its training.
    """

    acc: Branch
    rob: Branch
    single: Branch

    def __init__(
        self,
        classifier: Classifier,
        settings: ToraSettings | None = None,
        *,
        num_classes: int | None = None,
        seed: int = 0,
        trade_off: float | None = None,
    ) -> None:
        super().__init__()
        settings = ToraSettings() if settings is None else settings
        check_host(classifier)
        backbone: Any = classifier.backbone
        _check_width(backbone.embed_dim, settings)
        self.settings = settings
        self.trade_off = None if trade_off is None else check_trade_off(trade_off)
        self.loss_at = "own"
        self.num_classes = _class_count(classifier, num_classes)
        self.classifier = classifier.requires_grad_(False).eval()
        for name in settings.branches:
            self.add_module(name, Branch(name, backbone, settings, self.num_classes, seed))
        fusions = [_fusion(backbone, settings) for _ in backbone.blocks] if settings.fuses else []
        for layer, fusion in enumerate(fusions):
            fusion.start(seed, layer)
        self.fusion = nn.ModuleList(fusions)

    @property
    def record(self) -> ModelRecord:
        """The classifier's record, with the number of classes of the heads and a note."""
        record = self.classifier.record
        lambda_text = "no lambda" if self.trade_off is None else f"lambda {self.trade_off:g}"
        return replace(
            record,
            num_classes=self.num_classes,
            notes=record.notes | {"tora": f"{describe(self.settings)}, {lambda_text}"},
        )

    def forward(self, x: Tensor) -> Tensor:
        acc, rob = self.branches(x)
        if self.settings.joint == "logits":
            return (acc + rob) / 2
        # Log-probabilities are logits of the same probabilities.
        return torch.logaddexp(acc.log_softmax(1), rob.log_softmax(1)) - math.log(2)

    def branches(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the accuracy and the robustness branch in one pass; twice the same for a single branch."""
        acc_token, rob_token = self.class_tokens(x)
        if self.settings.kind == "single":
            logits = _at_least_float32(self.single.head(acc_token))
            return logits, logits
        return _at_least_float32(self.acc.head(acc_token)), _at_least_float32(self.rob.head(rob_token))

    def class_tokens(self, x: Tensor, gates: list[Gates] | None = None) -> tuple[Tensor, Tensor]:
        """The inputs of the two heads, (batch, width); `gates` collects the gates of every layer.

        The final norm takes whole sequences, the robust branch's last, for instruments that hook it.
        """
        plain = self.classifier.attention_factors is None and self.settings.slot == "shared"
        streams = self._streams(x, gates) if plain else _run_instrumented(self, x, gates)
        backbone: Any = self.classifier.backbone
        found = [backbone.fc_norm(backbone.norm(stream)[:, 0]) for stream in streams]
        return found[0], found[-1]

    def gates(self, x: Tensor) -> list[Gates]:
        """How the fusion of each layer weights the two adapters on these images."""
        if not self.settings.fuses:
            raise UserError(
                f"kind '{self.settings.kind}' has no fusion and no gates. Use kind 'tora' or 'adapterfusion'."
            )
        found: list[Gates] = []
        self.class_tokens(x, found)
        return found

    def scalable_classifier(self) -> Classifier:
        """The classifier, for training with attention factors that change."""
        if self.settings.fuses and self.trade_off is not None:
            raise UserError(
                "attention scaling belongs to phase 1 of TORA: the fusions of all lambdas share one model with the "
                "factors of phase 1. Remove plugins.attention_scaling from phase 2."
            )
        return self.classifier

    def identity_penalty(self, weight: float = _PULL) -> Tensor:
        """AdapterFusion's penalty on the distance of value matrices from the identity; 0 for other kinds."""
        distances = [each.far_from_identity() for each in self.fusion if isinstance(each, PfeifferFusion)]
        return weight * torch.stack(distances).sum() if distances else self.classifier.mean.new_zeros(())

    def no_weight_decay(self) -> set[str]:
        """For timm's optimizers, which exclude biases and norms themselves."""
        return {f"{name}.token" for name in self.settings.branches}

    def train(self, mode: bool = True) -> Tora:
        super().train(mode)
        self.classifier.eval()
        return self

    def extra_repr(self) -> str:
        return f"{describe(self.settings)}, trade_off={self.trade_off}"

    def _streams(self, x: Tensor, gates: list[Gates] | None) -> list[Tensor]:
        """The tokens after the last block and its fusion, class token first, for each class token."""
        embedded = self._embedded(x)
        if self.settings.fuses:
            return self._fused(embedded, gates)
        backbone: Any = self.classifier.backbone
        if self.settings.kind == "head":
            return [backbone.blocks(embedded)]
        tokens = torch.cat([_for_each(self.single.token, embedded), embedded[:, 1:]], 1)
        for layer, block in enumerate(backbone.blocks):
            tokens = self.single.adapted(layer, block(tokens)).output
        return [tokens]

    def _fused(self, embedded: Tensor, gates: list[Gates] | None) -> list[Tensor]:
        backbone: Any = self.classifier.backbone
        step, place = (
            (_shared_step, 0) if self.settings.slot == "shared" else (_separate_step, backbone.num_prefix_tokens)
        )
        # In slot "separate" the embedded tokens already contain the robust branch's token, after the prefix.
        rest = torch.cat([embedded[:, 1:place], embedded[:, place + 1 :]], 1)
        tokens = Tokens(_for_each(self.acc.token, embedded), _for_each(self.rob.token, embedded), rest)
        for layer, block in enumerate(backbone.blocks):
            z, for_acc, for_rob = step(block, tokens, place)
            adapted = self.acc.adapted(layer, for_acc), self.rob.adapted(layer, for_rob)
            tokens, gate = self.fusion[layer](z, *adapted)
            if gates is not None:
                gates.append(gate)
        return [torch.cat([token, tokens.rest], 1) for token in (tokens.acc, tokens.rob)]

    def _embedded(self, x: Tensor) -> Tensor:
        """The classifier's steps before the first block."""
        classifier, backbone = self.classifier, cast(Any, self.classifier.backbone)
        if x.ndim == 4:
            check_image_size(backbone, (x.shape[2], x.shape[3]), classifier.record.name)
        z = (x - classifier.mean) / classifier.std if classifier.record.normalizes else x
        patches = backbone.patch_embed(z.to(backbone.cls_token.dtype))
        embedded: Tensor = backbone.norm_pre(backbone.patch_drop(backbone._pos_embed(patches)))
        return embedded


def find_tora(model: nn.Module) -> Tora | None:
    """The TORA inside a model, or None."""
    return next((module for module in model.modules() if isinstance(module, Tora)), None)


class BranchClassifier(nn.Module):
    """A model that returns the logits of one branch, for attacks on it and for its accuracy."""

    def __init__(self, tora: Tora, branch: str) -> None:
        super().__init__()
        check_known("branch", branch, BRANCHES, " of TORA")
        self.tora = tora
        self.branch = branch
        self.training = tora.training

    @property
    def record(self) -> ModelRecord:
        record = self.tora.record
        return replace(record, notes=record.notes | {"tora": f"{record.notes['tora']}, {self.branch} head only"})

    def forward(self, x: Tensor) -> Tensor:
        return self.tora.branches(x)[BRANCHES.index(self.branch)]


def part_of(name: str) -> str:
    """The part a parameter belongs to: 'acc', 'rob', 'single' (of either loss), 'fusion', or 'backbone' (frozen)."""
    first = name.partition(".")[0]
    if first not in _PARTS:
        raise UserError(f"'{name}' is not a parameter of a Tora; those begin with {', '.join(_PARTS)}.")
    return _PARTS[first]


def trainable_parameters(
    tora: Tora, phase: int, branch: str | None = None, *, heads: bool = False
) -> dict[str, nn.Parameter]:
    """Trainable parameters by name: in phase 1 for one branch's loss, in phase 2 for the weighted sum of both.

    Phase 2 trains the fusion, and the heads if `heads`. Kinds without fusion train all parameters in phase 2.
    """
    if phase not in (1, 2) or (branch in BRANCHES) != (phase == 1):
        raise UserError(
            f"TORA has phase 1, with the loss of branch 'acc' or 'rob', and phase 2, without a branch; got phase "
            f"{phase} and branch {branch!r}."
        )
    own = {name: each for name, each in tora.named_parameters() if part_of(name) != "backbone"}
    if phase == 1:
        return {name: each for name, each in own.items() if part_of(name) in (branch, "fusion", "single")}
    if not tora.settings.fuses:
        return own
    return {
        name: each
        for name, each in own.items()
        if part_of(name) == "fusion" or (heads and name.split(".")[1] == "head")
    }


def _shared_step(block: nn.Module, tokens: Tokens, _where: int) -> tuple[Tensor, Tensor, Tensor]:
    """The block's output, and the inputs of both adapters."""
    shared = (tokens.acc + tokens.rob) / 2
    z = block(torch.cat([shared, tokens.rest], 1))
    update, rest = z[:, :1] - shared, z[:, 1:]
    return z, torch.cat([tokens.acc + update, rest], 1), torch.cat([tokens.rob + update, rest], 1)


def _separate_step(block: nn.Module, tokens: Tokens, place: int) -> tuple[Tensor, Tensor, Tensor]:
    before, behind = tokens.rest[:, : place - 1], tokens.rest[:, place - 1 :]
    whole = torch.cat([tokens.acc, before, tokens.rob, behind], 1)
    lower = whole.new_zeros(whole.shape[1])
    lower[[0, place]] = -math.log(2)
    z = block(whole, attn_mask=lower.expand(1, 1, 1, -1))
    acc, rob, rest = z[:, :1], z[:, place : place + 1], torch.cat([z[:, 1:place], z[:, place + 1 :]], 1)
    return torch.cat([acc, rob, rest], 1), torch.cat([acc, rest], 1), torch.cat([rob, rest], 1)


def _instrumented(tora: Tora, x: Tensor, gates: list[Gates] | None) -> list[Tensor]:
    backbone, factors = tora.classifier.backbone, tora.classifier.attention_factors
    with ExitStack() as stack:
        if factors is not None:
            stack.enter_context(scaled_scores(backbone, factors))
        if tora.settings.slot == "separate":
            # As an extra token, so that instruments do not take it for a patch.
            stack.enter_context(extra_tokens(backbone, cast(Tensor, tora.rob.token)))
        return tora._streams(x, gates)


# Never compiled: hooks change at run time.
_run_instrumented: Callable[[Tora, Tensor, list[Gates] | None], list[Tensor]] = torch.compiler.disable(_instrumented)


def _fusion(backbone: Any, settings: ToraSettings) -> GatedFusion | PfeifferFusion:
    width, like = backbone.embed_dim, backbone.cls_token
    if settings.kind == "adapterfusion":
        return PfeifferFusion(width, like)
    return GatedFusion(width, settings.heads, settings.softmax, like)


def _class_token(backbone: Any) -> Tensor:
    """The pretrained class token as it enters the first block, (1, 1, width), with its position embedding if any."""
    with torch.no_grad():
        token: Tensor = backbone.cls_token
        if backbone.pos_embed is not None and not backbone.no_embed_class:
            token = token + backbone.pos_embed[:, :1]
        normed: Tensor = backbone.norm_pre(token)
        return normed.clone()


def _class_count(classifier: Classifier, given: int | None) -> int:
    count = getattr(cast(Any, classifier.backbone).head, "out_features", None) if given is None else given
    if count is None or count < 2:
        raise UserError(f"TORA needs the number of classes, at least 2, got {count}. Give num_classes.")
    return int(count)


def _check_width(width: int, settings: ToraSettings) -> None:
    for name, number in (("reduction", settings.reduction), ("heads", settings.heads)):
        parts = width / number
        if settings.adapts and (round(parts) < 1 or abs(parts - round(parts)) > 1e-6):
            fitting = ", ".join(str(each) for each in range(1, width + 1) if width % each == 0)
            raise UserError(
                f"{name} {number} of TORA does not divide the backbone's width, {width}. Divisors: {fitting}."
            )


def _place(name: str) -> int:
    return 1 if name == "rob" else 0


def _for_each(token: nn.Parameter | None, embedded: Tensor) -> Tensor:
    assert token is not None
    return token.expand(len(embedded), -1, -1)


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def gate_maps(tora: Tora, x: Tensor) -> Tensor:
    """The accuracy adapter's share of each patch in the fusion, (layers, batch, rows, columns), in [0, 1].

    The robustness adapter's share is 1 minus that by construction, so the two maps always complement each other. With
    softmax "adapter" this is the mean of the gates over all queries.
    """
    height, width = patch_grid(tora, x)
    first = prefix_tokens_of(tora)
    with torch.no_grad():
        shares = [_share(gates)[:, first : first + height * width] for gates in tora.gates(x)]
    return torch.stack(shares).view(len(shares), len(x), height, width)


def _share(gates: Gates) -> Tensor:
    """The share of the first adapter for each key, (batch, keys)."""
    dense = gates.dense()
    acc, rob = (each.double().mean((1, 2)) for each in (dense.acc, dense.rob))
    share = (acc / (acc + rob)).nan_to_num(0.5)  # a patch without any attention prefers neither adapter
    return share.to(torch.promote_types(gates.acc.dtype, torch.float32))
