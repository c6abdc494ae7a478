"""Rows of attention maps in every family, against the maps that `attention_maps` shows."""

from __future__ import annotations

import pytest
import torch

from vitadel.backbones.anatomy import attentions_of
from vitadel.errors import UserError
from vitadel.instrument.attention import attention_maps
from vitadel.instrument.attention_rows import find_row, over_patches, read_several
from vitadel.instrument.tokens import extra_tokens
from vits import VITS, make_vit, pixels

# name -> (attention that 'last' means for a patch, its row for the center, grid there)
CENTRE = {
    "vit": (1, 1 + 2 * 4 + 2, (4, 4)),
    "deit_distilled": (1, 2 + 10, (4, 4)),
    "dinov2_registers": (1, 5 + 10, (4, 4)),
    "siglip": (1, 10, (4, 4)),
    "eva02": (1, 11, (4, 4)),
    "dinov3": (1, 15, (4, 4)),
    "beit": (1, 11, (4, 4)),
    "pit": (2, 1 + 2 * 4 + 2, (4, 4)),
    "cait": (1, 10, (4, 4)),
    "fan": (1, 10, (4, 4)),
    "rvt": (2, 1 * 2 + 1, (2, 2)),
    "swin": (3, 2 * 4 + 2, (4, 4)),  # at the end one window is the whole image
    "swinv2": (3, 10, (4, 4)),
}
CLASS = {"vit": 1, "dinov2_registers": 1, "siglip": 2, "eva02": 1, "beit": 1, "pit": 2, "cait": 3, "xcit": 3}
NO_CLASS = ("fan", "rvt")


@pytest.mark.parametrize("name", CENTRE)
def test_the_patch_in_the_centre(name):
    model, x = make_vit(name), pixels(name)
    place, row, grid = CENTRE[name]
    found = find_row(model, x, "centre", "last")
    assert (found.row, found.grid) == (row, grid)
    check(model, x, found, place)


@pytest.mark.parametrize("name", CLASS)
def test_the_class_token(name):
    model, x = make_vit(name), pixels(name)
    found = find_row(model, x, "class", "last")
    assert found.row == 0
    check(model, x, found, CLASS[name])


def check(model, x, found, place):
    assert found.attention.name == attentions_of(model)[place].name
    with torch.no_grad(), attention_maps(model) as maps:
        model(x)
    (rows,) = read_several(model, [found], x)
    torch.testing.assert_close(rows, maps[place][:, :, found.row], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(rows.sum(-1), torch.ones(rows.shape[:2]), atol=1e-5, rtol=1e-5)
    over = over_patches(found, rows)
    assert over.shape[2:] == found.grid
    torch.testing.assert_close(over.sum((2, 3)), torch.ones(rows.shape[:2]), atol=1e-5, rtol=1e-5)
    first = rows[0, 0, -found.patches] / rows[0, 0, -found.patches :].sum()
    assert float(over[0, 0, 0, 0]) == pytest.approx(float(first), rel=1e-5)


@pytest.mark.parametrize("name", NO_CLASS)
def test_models_without_a_class_token_are_refused(name):
    with pytest.raises(UserError, match="no class token"):
        find_row(make_vit(name), pixels(name), "class", "last")


@pytest.mark.parametrize(
    ("name", "block", "words"), [("xcit", "last", "channels"), ("swin", "0", "windows"), ("levit", "1", "queries")]
)
def test_attentions_without_patch_queries_are_refused(name, block, words):
    with pytest.raises(UserError, match=words):
        find_row(make_vit(name), pixels(name), "centre", block)


def test_blocks_and_places_by_number():
    model, x = make_vit("vit"), pixels("vit")
    found = find_row(model, x, "3,0", "0")
    assert (found.row, found.attention.name) == (1 + 12, attentions_of(model)[0].name)
    assert find_row(model, x, "centre", "-2").attention.name == attentions_of(model)[0].name
    for query, block, words in (
        ("4,0", "last", "no patch 4,0"),
        ("middle", "last", "ROW,COL"),
        ("centre", "2", "no attention 2"),
        ("centre", "first", "0 is the first"),
    ):
        with pytest.raises(UserError, match=words):
            find_row(model, x, query, block)


def test_only_the_chosen_attention_runs_unfused(monkeypatch):
    """Of two attentions one is looked into, so that the other calls the fused product."""
    model, x = make_vit("vit", fused=True), pixels("vit")
    calls = []
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or real(*a, **k)
    )
    found = find_row(model, x, "centre", "last")
    calls.clear()
    read_several(model, [found], x)
    assert len(calls) == 1
    assert len(VITS["vit"].heads) == 2


@pytest.mark.parametrize("placement", ["prefix", "append"])
def test_extra_tokens_are_neither_queries_nor_keys(placement):
    model, x = make_vit("vit"), pixels("vit")
    extra = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    with extra_tokens(model, extra, placement=placement):
        found = find_row(model, x, "centre", "last")
        (rows,) = read_several(model, [found], x)
        with torch.no_grad(), attention_maps(model) as maps:
            model(x)
    own = [place for place in range(20) if not (1 <= place < 4 if placement == "prefix" else place >= 17)]
    assert found.row == 1 + 2 * 4 + 2
    torch.testing.assert_close(rows, maps[1][:, :, own[found.row]][..., own], atol=1e-5, rtol=1e-4)


def test_a_register_is_no_class_token():
    model = make_vit("vit", class_token=False, reg_tokens=2, global_pool="avg")
    with pytest.raises(UserError, match="no class token"):
        find_row(model, pixels("vit"), "class", "last")
