"""The table of families: recognized under any wrapping, counted right, and clear about what it does not know."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from other_vits import OTHERS
from vitadel.backbones import anatomy
from vitadel.backbones.anatomy import (
    ANATOMIES,
    Anatomy,
    ScoreSeam,
    anatomy_of,
    attentions_of,
    backbone_of,
    blocks_of,
    family_of,
    prefix_tokens_of,
)
from vitadel.errors import UserError
from vitadel.instrument import attention_maps, block_features, scaled_attention
from vits import VITS, make_vit, pixels


class Wrapping(nn.Module):
    """As normalizing, parallel and compiled wrappers do: the model is an attribute."""

    def __init__(self, attribute: str, inner: nn.Module) -> None:
        super().__init__()
        self.attribute = attribute
        self.add_module(attribute, inner)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.get_submodule(self.attribute)((x - 0.5) / 0.25)
        return out


@pytest.mark.parametrize("name", VITS)
def test_each_family_is_known_with_its_parts(name: str) -> None:
    model, tiny = make_vit(name), VITS[name]
    assert family_of(model) == tiny.family
    assert anatomy_of(model) is ANATOMIES[tiny.family]
    assert tuple(part.heads for part in attentions_of(model)) == tiny.heads
    assert len(blocks_of(model)) == tiny.blocks
    assert prefix_tokens_of(model) == tiny.prefix


def test_every_row_is_tried() -> None:
    assert {tiny.family for tiny in (*VITS.values(), *OTHERS.values())} == set(ANATOMIES)


@pytest.mark.parametrize("name", VITS)
def test_parts_are_listed_in_the_order_in_which_they_run(name: str) -> None:
    model = make_vit(name)
    ran: list[str] = []
    attentions, blocks = [part.name for part in attentions_of(model)], [part.name for part in blocks_of(model)]
    for label in dict.fromkeys(attentions + blocks):
        model.get_submodule(label).register_forward_hook(lambda *_, label=label: ran.append(label))
    model(pixels(name))
    assert [label for label in ran if label in attentions] == attentions
    assert [label for label in ran if label in blocks] == blocks


def test_only_talking_heads_are_scaled_as_a_whole() -> None:
    for name in VITS:
        seams = {part.seam for part in attentions_of(make_vit(name))}
        assert (ScoreSeam.WHOLE in seams) == (name == "cait")
    assert [part.seam.value for part in attentions_of(make_vit("cait"))] == ["whole", "whole", "content", "content"]


@pytest.mark.parametrize("attributes", [["backbone"], ["module", "_orig_mod", "backbone"]])
def test_wrappers_are_seen_through(attributes: list[str]) -> None:
    inner = make_vit("cait")
    model: nn.Module = inner
    for attribute in reversed(attributes):
        model = Wrapping(attribute, model)
    assert backbone_of(model) is inner
    assert family_of(model) == "cait"
    x = pixels("cait")
    plain = model(x)
    with scaled_attention(model, 0.5), attention_maps(model) as maps, block_features(model) as features:
        assert not torch.equal(model(x), plain)
    assert len(maps) == len(features) == 4
    assert torch.equal(model(x), plain)


def test_subclasses_count_and_namesakes_do_not() -> None:
    class MyVit(timm.models.vision_transformer.VisionTransformer):  # type: ignore[misc]
        pass

    class VisionTransformer(nn.Module):
        pass

    assert family_of(MyVit(img_size=32, patch_size=8, depth=1, embed_dim=24, num_heads=3)) == "vit"
    with pytest.raises(UserError):
        family_of(VisionTransformer())


def test_the_row_of_a_class_precedes_those_of_its_ancestors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Variant(timm.models.vision_transformer.VisionTransformer):  # type: ignore[misc]
        pass

    row = Anatomy(classes=(f"{__name__}.{Variant.__qualname__}",), blocks=("Block",))
    monkeypatch.setitem(anatomy.ANATOMIES, "variant", row)
    assert family_of(Variant(img_size=32, patch_size=8, depth=1, embed_dim=24, num_heads=3)) == "variant"


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_unknown_family_is_reported(wrapped: bool) -> None:
    inner: nn.Module = nn.Conv2d(3, 3, 1)
    model = Wrapping("module", Wrapping("backbone", inner)) if wrapped else inner
    with pytest.raises(UserError) as caught:
        family_of(model)
    message = str(caught.value)
    assert "torch.nn.modules.conv.Conv2d" in message
    assert ", ".join(sorted(ANATOMIES)) in message
    assert "add a row to backbones/anatomy.py" in message


def test_two_backbones_are_one_too_many_unless_they_are_the_same() -> None:
    one = make_vit("vit")
    with pytest.raises(UserError, match=r"2 backbones side by side \(VisionTransformer, Xcit\)"):
        family_of(nn.ModuleList([one, make_vit("xcit")]))
    assert backbone_of(nn.ModuleList([one, one])) is one


def test_an_unknown_attention_in_a_known_family_is_reported() -> None:
    model = make_vit("vit", attn_layer="diff", num_heads=2)
    assert len(blocks_of(model)) == 2
    with pytest.raises(UserError, match=r"block 'blocks\.0' attends by DiffAttention.* Known here: Attention,"):
        attentions_of(model)


def test_one_row_adds_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixer(nn.Module):
        num_heads = 2

        def forward(self, x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
            mixed: Tensor = (heads @ heads.mT).softmax(-1) @ heads
            return mixed

    class Home(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixers = nn.ModuleList([Mixer()])

        def forward(self, x: Tensor) -> Tensor:
            mixed: Tensor = self.mixers[0](x)
            return mixed.transpose(1, 2).flatten(2)

    row = Anatomy(
        classes=(f"{__name__}.{Home.__qualname__}",), blocks=("Mixer",), attentions={"Mixer": ScoreSeam.CONTENT}
    )
    monkeypatch.setitem(anatomy.ANATOMIES, "home", row)
    model: Any = Home()
    x = torch.randn(1, 5, 4)
    assert family_of(model) == "home"
    with scaled_attention(model, 0.5), attention_maps(model) as maps:
        model(x)
    heads = x.view(1, 5, 2, 2).transpose(1, 2)
    torch.testing.assert_close(maps[0], (0.5 * heads @ heads.mT).softmax(-1))
