"""RVT: the sizes of the paper, each part against a computation of its own, and images of any size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitadel.backbones import load_model, wrap
from vitadel.backbones.checkpoints import load_classifier, save_classifier
from vitadel.backbones.families.rvt import VARIANTS, Attention, ConvFeedForward, Stem
from vitadel.errors import UserError
from vitadel.instrument import attention_maps, block_features
from vitadel.instrument.tokens import patch_grid
from vits import make_vit, precise_vit

TINY = {"img_size": 32, "patch_size": 8, "depths": (2,), "widths": (24,), "heads": (3,)}


def small(name: str = "rvt_tiny", **settings: Any) -> Any:
    torch.manual_seed(0)
    return timm.create_model(name, **{**TINY, "num_classes": 5, "scaled_blocks": 0, **settings}).eval()


def lively_scores(model: nn.Module) -> None:
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("position_scores"):
            nn.init.normal_(parameter)


# Sizes


@pytest.mark.parametrize(
    ("name", "scaled_blocks", "parameters", "with_factors"),
    [
        ("rvt_tiny", 10, 8_646_376, 10_951_336),
        ("rvt_small", 5, 22_148_392, 23_300_872),
        ("rvt_base", 5, 86_223_784, 88_528_744),
        ("rvt_base", 12, 86_223_784, 91_755_688),
    ],
)
def test_parameters_are_as_many_as_in_the_paper(
    name: str, scaled_blocks: int, parameters: int, with_factors: int
) -> None:
    with torch.device("meta"):
        plain, plus = timm.create_model(name), timm.create_model(f"{name}_plus", scaled_blocks=scaled_blocks)
    assert sum(each.numel() for each in plain.parameters()) == parameters
    assert sum(each.numel() for each in plus.parameters()) == with_factors
    assert VARIANTS[f"{name}_plus"]["scaled_blocks"] == {"rvt_tiny": 10}.get(name, 5)


@pytest.mark.parametrize(("name", "products"), [("rvt_tiny", 1.284), ("rvt_small", 4.645), ("rvt_base", 17.491)])
def test_billions_of_products_are_as_many_as_in_the_released_code(name: str, products: float) -> None:
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = timm.create_model(name).eval()
        assert model(torch.empty(1, 3, 224, 224)).shape == (1, 1000)
    assert round(counter.get_total_flops() / 2e9, 3) == products


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.endswith("_32")])
def test_names_for_32_pixels_keep_64_tokens(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=10)
        assert patch_grid(model, torch.empty(1, 3, 32, 32)) == (8, 8)
    if "micro" in name:
        assert sum(parameter.numel() for parameter in model.parameters()) < 1_500_000
    scores = [value for key, value in model.state_dict().items() if key.endswith("position_scores")]
    assert len(scores) == VARIANTS[name].get("scaled_blocks", 0)
    assert all(each.shape == (VARIANTS[name]["heads"][0], 64, 64) for each in scores)


def test_the_stem_is_convolution_norm_pooling_and_patches() -> None:
    stem = Stem(16, 3, 24).eval()
    assert [type(part).__name__ for part in stem.children()] == ["Conv2d", "BatchNorm2d", "MaxPool2d", "Conv2d"]
    x, sides = torch.rand(2, 3, 224, 224), []
    for part in stem.children():
        x = part(x)
        sides.append(x.shape[-1])
    assert sides == [111, 111, 56, 14]
    tokens, grid = Stem(4, 1, 24)(torch.rand(2, 1, 32, 48))
    assert (tokens.shape, grid) == ((2, 96, 24), (8, 12))


def test_paths_are_dropped_more_and_more_often() -> None:
    model = timm.create_model("rvt_tiny", **{**TINY, "depths": (3, 1), "widths": (24, 48), "heads": (3, 3)})
    assert not any(type(module).__name__ == "DropPath" for module in model.modules())
    model = small(depths=(3, 1), widths=(24, 48), heads=(3, 3), drop_path_rate=0.4)
    blocks = [block for stage in model.stages for block in stage.blocks]
    rates = [[getattr(block, name, None) for name in ("drop_path1", "drop_path2")] for block in blocks]
    assert [[getattr(path, "drop_prob", 0.0) for path in pair] for pair in rates] == [
        pytest.approx([rate, rate]) for rate in (0.0, 0.1, 0.2, 0.3)
    ]


# Parts


def test_places_are_only_known_to_the_convolutions_and_the_learned_scores() -> None:
    """Without both, tokens in another order give the same tokens in that order; with either they do not."""
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 16, 24)
    for settings, blind in (
        ({"conv_ffn": False}, True),
        ({"conv_ffn": True}, False),
        ({"conv_ffn": False, "scaled_blocks": 1}, False),
    ):
        model = small(**settings)
        lively_scores(model)
        stage = model.stages[0]
        moved, stayed = stage(x[:, order], (4, 4))[0], stage(x, (4, 4))[0][:, order]
        assert torch.allclose(moved, stayed, atol=1e-5) == blind
        assert not any(word in key for key in model.state_dict() for word in ("pos_embed", "cls_token", "reg_token"))


def test_open_factors_are_plain_attention() -> None:
    plain, scaled = small(), small(scaled_blocks=2)
    scaled.load_state_dict(plain.state_dict(), strict=False)
    x = torch.rand(2, 3, 32, 32)
    for block in scaled.stages[0].blocks:
        nn.init.constant_(block.attn.position_scores, 40.0)
    assert torch.allclose(scaled(x), plain(x), atol=1e-5)
    for block in scaled.stages[0].blocks:
        nn.init.constant_(block.attn.position_scores, -40.0)  # all scores 0: every token is the mean of the values
    with attention_maps(scaled) as maps:
        scaled(x)
    assert torch.allclose(torch.stack(list(maps)), torch.tensor(1 / 16), atol=1e-6)


def test_attention_by_hand() -> None:
    torch.manual_seed(2)
    attention = Attention(12, 3, (2, 3)).double()
    lively_scores(attention)
    assert attention.position_scores is not None
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    q, k, v = (part.view(2, 6, 3, 4) for part in attention.qkv(x).split(12, dim=2))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 2  # the root of 4 channels
    factors = 1 / (1 + (-attention.position_scores).exp())
    weights = (scores * factors).exp()
    mixed = torch.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdim=True), v).reshape(2, 6, 12)
    torch.testing.assert_close(attention(x, (2, 3)), attention.proj(mixed))


@pytest.mark.parametrize("training", [False, True])
def test_the_feed_forward_part_by_hand(training: bool) -> None:
    torch.manual_seed(3)
    part = ConvFeedForward(5).double().train(training)
    norms = [module for module in part.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            assert tensor is not None
            nn.init.uniform_(tensor, 0.5, 1.5)
    running = [(norm.running_mean.clone(), norm.running_var.clone()) for norm in norms]  # type: ignore[union-attr]
    x = torch.randn(2, 12, 5, dtype=torch.float64)

    def normed(values: Tensor, place: int) -> Tensor:
        mean, variance = running[place]
        if training:
            mean, variance = values.mean((0, 1)), values.var((0, 1), correction=0)
        return (values - mean) / (variance + norms[place].eps).sqrt() * norms[place].weight + norms[place].bias

    def gelu(values: Tensor) -> Tensor:
        return values * (1 + torch.erf(values / math.sqrt(2))) / 2

    convs: list[Any] = [module for module in part.modules() if isinstance(module, nn.Conv2d)]
    hidden = gelu(normed(x @ convs[0].weight[:, :, 0, 0].mT + convs[0].bias, 0))
    padded = F.pad(hidden.view(2, 3, 4, 20), (0, 0, 1, 1, 1, 1))
    mixed = convs[1].bias + sum(
        padded[:, row : row + 3, column : column + 4] * convs[1].weight[:, 0, row, column]
        for row in range(3)
        for column in range(3)
    )
    hidden = gelu(normed(mixed.view(2, 12, 20), 1))
    expected = normed(hidden @ convs[2].weight[:, :, 0, 0].mT + convs[2].bias, 2)
    torch.testing.assert_close(part(x, (3, 4)), expected)


def test_blocks_and_head_by_hand() -> None:
    model, x = precise_vit("rvt")
    net: Any = model
    with attention_maps(model) as maps, block_features(model) as features:
        logits = model(x)
    stream, grid = net.patch_embed(x)
    place = 0
    for stage in net.stages:
        if stage.pool is not None:
            stream = stage.pool(stream.mT.reshape(2, -1, *grid)).flatten(2).mT
            grid = (2, 2)
        for block in stage.blocks:
            v = block.attn.qkv(block.norm1(stream)).chunk(3, dim=2)[2].unflatten(2, (block.attn.num_heads, -1))
            assert torch.allclose(maps[place].sum(-1), torch.ones(1, dtype=torch.float64))
            stream = stream + block.attn.proj((maps[place] @ v.transpose(1, 2)).transpose(1, 2).flatten(2))
            stream = stream + block.mlp(block.norm2(stream), grid)
            torch.testing.assert_close(features[place], stream)
            place += 1
    mean = stream.mean(1)
    pooled = (mean - mean.mean(1, keepdim=True)) / (mean.var(1, correction=0, keepdim=True) + 1e-6).sqrt()
    pooled = pooled * net.fc_norm.weight + net.fc_norm.bias
    torch.testing.assert_close(logits, pooled @ net.head.weight.mT + net.head.bias)


def test_every_parameter_learns() -> None:
    model = make_vit("rvt").train()
    model(torch.rand(4, 3, 32, 32)).square().sum().backward()
    # Not the biases: one before a batch norm is taken away again by it, and one on all keys alike changes no softmax.
    for name, parameter in model.named_parameters():
        if name.endswith(("weight", "position_scores")):
            assert parameter.grad is not None
            assert parameter.grad.abs().max() > 1e-4


# Images of other sizes


@pytest.mark.parametrize("size", [(32, 32), (64, 64), (40, 64), (24, 24)])
def test_any_multiple_of_the_patch_and_any_batch(size: tuple[int, int]) -> None:
    model = small(depths=(1, 1), widths=(24, 48), heads=(3, 3), scaled_blocks=2, num_classes=7)
    lively_scores(model)
    x = torch.rand(3, 3, *size)
    both = model(x)
    assert both.shape == (3, 7)
    torch.testing.assert_close(model(x[:1]), both[:1])
    assert patch_grid(model, x) == (size[0] // 8, size[1] // 8)
    model.set_input_size(size)
    torch.testing.assert_close(model(x), both)
    assert model.stages[0].blocks[0].attn.position_scores.shape[1] == size[0] * size[1] // 64


def test_the_paper_model_at_160_pixels() -> None:
    model = timm.create_model("rvt_tiny_plus", num_classes=10).eval()
    assert model(torch.rand(1, 3, 160, 160)).shape == (1, 10)


def test_scores_are_resampled_over_the_grid_of_queries_and_that_of_keys() -> None:
    """What is a sum of a picture of queries and one of keys becomes the sum of both pictures, resized."""
    torch.manual_seed(4)
    old, new = (3, 4), (6, 5)
    of_query, of_key = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4)
    attention = Attention(12, 2, old)
    attention.position_scores = nn.Parameter(of_query.view(2, 12, 1) + of_key.view(2, 1, 12), requires_grad=False)
    attention.set_grid(new)
    expected = [F.interpolate(each, new, mode="bicubic").view(2, 30) for each in (of_query, of_key)]
    torch.testing.assert_close(attention.position_scores, nn.Parameter(expected[0][:, :, None] + expected[1][:, None]))
    assert not attention.position_scores.requires_grad


def test_a_size_with_a_rest_is_refused() -> None:
    with pytest.raises(UserError, match=r"36 x 32 pixels cannot be cut into patches of 8 x 8 by 'wrapped'"):
        wrap(small())(torch.rand(1, 3, 36, 32))
    with pytest.raises(UserError, match=r"22 x 22 pixels cannot be cut into patches of 4 x 4 by 'rvt_micro_32'"):
        load_model("rvt_micro_32", weights="random", num_classes=3, input_size=22)
    with pytest.raises(UserError, match="no adaptation to small images is known for 'RVT'"):
        load_model("rvt_tiny", weights="random", num_classes=3, small_images=True, kwargs={**TINY})


# By name


def test_loading_resizing_saving_and_loading_again(tmp_path: Path) -> None:
    few = {"depths": (2,), "scaled_blocks": 1}
    model = load_model("rvt_micro_plus_32", weights="random", num_classes=3, input_size=16, kwargs=few)
    assert model.record.input_size == (16, 16)
    assert model.record.mean == pytest.approx((0.485, 0.456, 0.406))
    lively_scores(model)
    save_classifier(model, tmp_path / "model.safetensors")
    again = load_classifier(tmp_path / "model.safetensors")
    x = torch.rand(2, 3, 16, 16)
    assert torch.equal(again(x), model(x))
    fresh = load_model(str(tmp_path / "model.safetensors"), num_classes=5, new_head=True)
    assert fresh(x).shape == (2, 5)


def test_a_file_of_the_other_kind_is_reported(tmp_path: Path) -> None:
    few = {"depths": (1,), "widths": (24,), "heads": (3,)}
    for name in ("rvt_micro_32", "rvt_micro_plus_32"):
        blocks = {**few, "scaled_blocks": int("plus" in name)}
        model = load_model(name, weights="random", num_classes=3, kwargs=blocks)
        torch.save(model.backbone.state_dict(), tmp_path / f"{name}.pt")
    with pytest.raises(UserError, match=r"the model is an RVT with position-aware .* the file is not"):
        load_model("rvt_micro_plus_32", weights=tmp_path / "rvt_micro_32.pt", num_classes=3, kwargs=blocks)
    with pytest.raises(UserError, match=r"the file holds an RVT with position-aware .* the model is not"):
        load_model("rvt_micro_32", weights=tmp_path / "rvt_micro_plus_32.pt", num_classes=3, kwargs=few)


def test_other_channels_and_no_head() -> None:
    assert small(in_chans=1)(torch.rand(2, 1, 32, 32)).shape == (2, 5)
    model = small(num_classes=0)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 24)
    model.reset_classifier(3)
    assert model.get_classifier().weight.shape == (3, 24)
    assert small(global_pool="").forward_head(torch.rand(2, 16, 24), pre_logits=True).shape == (2, 16, 24)


def test_where_the_learned_scores_start_and_that_they_do_not_decay() -> None:
    model = small(scaled_blocks=2)
    scores = [block.attn.position_scores for block in model.stages[0].blocks]
    assert all(torch.equal(each.sigmoid(), torch.full_like(each, 2.0).sigmoid()) for each in scores)
    halved = small(scaled_blocks=2, scaling_start="paper").stages[0].blocks[0].attn.position_scores
    assert abs(float(halved.detach().mean())) < 0.005
    assert float(halved.detach().std()) == pytest.approx(0.02, rel=0.1)
    groups = create_optimizer_v2(model, "adamw", weight_decay=0.1).param_groups
    still = {id(each) for group in groups if group["weight_decay"] == 0 for each in group["params"]}
    assert {id(each) for each in scores} <= still
    assert id(model.stages[0].blocks[0].attn.qkv.weight) not in still


def test_scores_decay_as_in_the_papers_training() -> None:
    model = small(scaled_blocks=2, scaling_start="paper")
    groups = create_optimizer_v2(model, "adamw", weight_decay=0.1).param_groups
    decayed = {id(each) for group in groups if group["weight_decay"] == 0.1 for each in group["params"]}
    assert {id(block.attn.position_scores) for block in model.stages[0].blocks} <= decayed
    assert model.no_weight_decay() == set()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scaled_blocks": 3}, "scaled_blocks must be from 0 to 2, the number of blocks, got 3"),
        ({"scaled_blocks": 1, "scaling_start": "shut"}, "unknown scaling_start 'shut'. Known: open, paper"),
        ({"patch_size": 6}, "cannot make patches of 6 pixels. Known: 4, 8 and 16"),
        ({"global_pool": "token"}, "RVT has no class token"),
        ({"widths": (25,)}, "each width a multiple of its heads"),
        ({"heads": (3, 3)}, "one number per stage"),
        ({"img_size": 4}, "4 x 4 pixels hold no patch of 8"),
        ({"pretrained": True}, "there are no pretrained weights for 'rvt_tiny' to download"),
    ],
)
def test_what_cannot_be_built_is_reported(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        small(**settings)


def test_missing_pretrained_weights_are_reported() -> None:
    with pytest.raises(UserError, match=r"^there are no pretrained weights for 'rvt_tiny' to download\. Give a file"):
        load_model("rvt_tiny", weights="pretrained")
