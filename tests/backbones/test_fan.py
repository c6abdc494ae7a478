"""FAN against the paper's table, and every part against a computation written out another way."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from vitadel.backbones import Fan, load_model
from vitadel.backbones.checkpoints import load_classifier, save_classifier
from vitadel.backbones.load import model_names
from vitadel.errors import UserError
from vitadel.instrument import attention_maps, block_features, scaled_attention
from vits import make_vit, pixels, precise_vit

# Parameters; millions of them in the hybrid stem, one block, one class-attention block; giga-MACs at 224 pixels of
# convolutions and linear layers, and with the products of attention.
TABLE = {
    "fan_tiny_12_p16_224": (7_319_920, None, 0.500, 0.445, 1.298, 1.475),
    "fan_small_12_p16_224": (28_345_336, None, 1.959, 1.775, 5.104, 5.459),
    "fan_base_18_p16_224": (54_350_320, None, 2.658, 2.415, 10.037, 10.657),
    "fan_large_24_p16_224": (80_574_100, None, 3.048, 2.772, 15.075, 15.960),
    "fan_tiny_8_p4_hybrid": (7_467_240, 2.368, 0.500, 0.445, 3.521, 3.639),
    "fan_small_12_p4_hybrid": (26_117_944, 2.565, 1.959, 1.775, 6.690, 6.985),
    "fan_base_16_p4_hybrid": (50_475_048, 2.630, 2.658, 2.415, 11.218, 11.769),
    "fan_large_16_p4_hybrid": (76_855_140, 3.741, 3.048, 2.772, 16.872, 17.684),
}
SMALL = ["fan_tiny_32", "fan_tiny_hybrid_32", "fan_micro_32", "fan_micro_hybrid_32"]
both_stems = pytest.mark.parametrize("name", ["fan", "fan_hybrid"])


def unfilled(name: str, **kwargs: Any) -> Any:
    """The model without memory for its weights: large ones take no time."""
    with torch.device("meta"):
        return timm.create_model(name, **kwargs)


def weights_in(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def macs(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Of convolutions and linear layers, and of the two products of every attention."""
    layers = attention = 0

    def count(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal layers, attention
        if isinstance(module, nn.Conv2d | nn.Linear):
            layers += output.numel() * module.weight[0].numel()
        elif type(module).__name__ in ("TokenAttention", "ClassAttn"):
            attention += 2 * args[0].shape[1] * output.numel()

    for module in model.modules():
        module.register_forward_hook(count)
    model(x)
    return layers, attention


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_sizes_and_costs_are_those_of_the_papers_table(name: str) -> None:
    parameters, stem, block, class_block, layers, whole = TABLE[name]
    model = unfilled(name).eval()
    assert isinstance(model, Fan)
    assert weights_in(model) == parameters
    assert round(weights_in(model.blocks[0]) / 1e6, 3) == block
    assert round(weights_in(model.class_blocks[1]) / 1e6, 3) == class_block
    if stem is not None:
        assert round(weights_in(model.patch_embed) / 1e6, 3) == stem
    found, attention = macs(model, torch.empty(1, 3, 224, 224, device="meta"))
    assert round(found / 1e9, 3) == layers
    assert round((found + attention) / 1e9, 3) == whole


def test_all_names_are_listed_with_their_paper() -> None:
    names = model_names()
    assert {names[name] for name in (*TABLE, *SMALL)} == {"A fully attentional network, FAN (Zhou et al., ICML 2022)."}
    assert set(timm.list_models("fan_*")) == {*TABLE, *SMALL}


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "parameters"), [(10, 25_736_794), (100, 25_771_444)])
def test_other_numbers_of_classes(classes: int, parameters: int) -> None:
    model = unfilled("fan_small_12_p4_hybrid", num_classes=classes)
    assert weights_in(model) == parameters
    assert model.num_classes == classes


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_small_images_leave_64_tokens(name: str) -> None:
    model = unfilled(name, num_classes=10).eval()
    tokens, grid = model.patch_embed(torch.empty(2, 3, 32, 32, device="meta"))
    assert grid == (8, 8)
    assert tokens.shape == (2, 64, model.embed_dim)
    assert model(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)
    assert model.default_cfg["input_size"] == (3, 32, 32)
    if "micro" in name:
        assert weights_in(model) <= 3_000_000


@pytest.mark.parametrize("seed", [0, 1])
def test_the_gate_starts_at_one_half(seed: int) -> None:
    """Queries and keys are shares of 64 tokens, so their product is about 1/64; another axis gives other numbers."""
    torch.manual_seed(seed)
    model = timm.create_model("fan_micro_32").eval()
    tokens = model.blocks[0].norm2(torch.randn(3, 64, 128))
    gate = model.blocks[0].channels.gate(tokens)
    assert gate.shape == (3, 1, 128)
    torch.testing.assert_close(
        gate, torch.full_like(gate, torch.sigmoid(torch.tensor(1 / 64)).item()), rtol=0, atol=1e-3
    )


def test_the_gate_equals_a_computation_number_by_number() -> None:
    model, _ = precise_vit("fan")
    part: Any = model.blocks[1].channels  # type: ignore[index, union-attr]
    x = torch.randn(2, 16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    gate, values = part.gate(x).tolist(), x.tolist()
    queries, temperatures = part.q(x).tolist(), part.temperature.flatten().tolist()
    for image in range(2):
        weights = [[math.exp(value) for value in token] for token in values[image]]
        for channel in range(24):
            scores = [math.exp(token[channel]) for token in queries[image]]
            head = range(channel // 8 * 8, channel // 8 * 8 + 8)
            alike = 0.0
            for score, token in zip(scores, weights, strict=True):
                shares = [token[c] / sum(each[c] for each in weights) for c in head]
                alike += score / sum(scores) * sum(shares) / 8
            expected = temperatures[channel // 8] / (1 + math.exp(-alike))
            assert gate[image][0][channel] == pytest.approx(expected, abs=1e-12)


def depthwise(x: Tensor, convolution: Any) -> Tensor:
    """A 3x3 convolution of every channel for itself, as nine shifted products: (batch, rows, columns, channels)."""
    rows, columns = x.shape[1:3]
    padded = nn.functional.pad(x, (0, 0, 1, 1, 1, 1))
    total = convolution.bias.expand_as(x)
    for down in range(3):
        for right in range(3):
            total = (
                total + convolution.weight[:, 0, down, right] * padded[:, down : down + rows, right : right + columns]
            )
    return total


def test_the_mlp_is_local_with_a_skip() -> None:
    model, _ = precise_vit("fan")
    mlp: Any = model.blocks[0].channels.mlp  # type: ignore[index, union-attr]
    x = torch.randn(2, 15, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    hidden = mlp.fc1(x)
    local, norm = depthwise(hidden.view(2, 3, 5, 96), mlp.local.conv1), mlp.local.bn
    local = (nn.functional.gelu(local) - norm.running_mean) / (norm.running_var + norm.eps).sqrt()
    local = depthwise(local * norm.weight + norm.bias, mlp.local.conv2).flatten(1, 2)
    torch.testing.assert_close(mlp(x, (3, 5)), mlp.fc2(mlp.gamma * local + hidden), rtol=0, atol=1e-12)


@both_stems
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_maps_reproduce_what_the_block_returns(name: str, fused: bool, factor: float) -> None:
    """And with a factor they are the softmax of the factor times the scores, computed from the projections."""
    model, x = precise_vit(name, fused)
    net: Any = model
    tokens, grid = net.patch_embed(x)
    tokens = tokens + net.pos_embed(1, *grid).flatten(2).mT
    with attention_maps(model) as maps, block_features(model) as features, scaled_attention(model, factor):
        model(x)
    assert grid == (4, 4)
    for block, seen, returned in zip(net.blocks, maps, features, strict=True):
        normed, part = block.norm1(tokens), block.attn
        q, k, v = (
            each.view(2, 16, 3, 8).transpose(1, 2) for each in (part.q(normed), *part.kv(normed).chunk(2, dim=-1))
        )
        torch.testing.assert_close(seen, (factor * q @ k.mT / math.sqrt(8)).softmax(-1), rtol=0, atol=1e-12)
        tokens = tokens + block.gamma1 * part.proj((seen @ v).transpose(1, 2).reshape(2, 16, 24))
        normed, gate = block.norm2(tokens), block.channels
        tokens = tokens + block.gamma2 * gate.gate(normed) * gate.norm_v(gate.mlp(normed, grid))
        torch.testing.assert_close(returned, tokens, rtol=0, atol=1e-10)


def test_class_attention_doubles_the_patch_tokens() -> None:
    model, _ = precise_vit("fan")
    block: Any = model.class_blocks[0]  # type: ignore[index]
    x = torch.randn(2, 17, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    patches = x[:, 1:]
    expected = 2 * block.norm2(patches + block.gamma1 * block.norm1(patches))
    torch.testing.assert_close(block(x)[:, 1:], expected, rtol=0, atol=1e-12)
    normed = block.norm1(x)
    q, k, v = block.attn.q(normed[:, :1]), block.attn.k(normed), block.attn.v(normed)
    q, k, v = (each.unflatten(-1, (3, 8)).transpose(1, 2) for each in (q, k, v))
    pooled = ((q @ k.mT / math.sqrt(8)).softmax(-1) @ v).transpose(1, 2).flatten(2)
    one = block.norm2(x[:, :1] + block.gamma1 * block.attn.proj(pooled))
    torch.testing.assert_close(block(x)[:, :1], one + block.gamma2 * block.mlp(one), rtol=0, atol=1e-12)


def test_logits_are_the_head_on_the_normed_class_token() -> None:
    model, x = precise_vit("fan_hybrid")
    net: Any = model
    with block_features(model) as features:
        logits = model(x)
    tokens = torch.cat([net.cls_token.expand(2, 1, -1), features[-1]], dim=1)
    for block in net.class_blocks:
        tokens = block(tokens)
    torch.testing.assert_close(logits, net.head(net.norm(tokens[:, 0])), rtol=0, atol=1e-12)


def test_positions_are_waves_over_the_whole_image_whatever_its_grid() -> None:
    model, _ = precise_vit("fan")
    encoding: Any = model.pos_embed
    for rows, columns in ((4, 4), (3, 7)):
        found = encoding(1, rows, columns)
        waves = torch.zeros(64, rows, columns, dtype=torch.float64)
        for row in range(rows):
            for column in range(columns):
                for axis, part in ((0, (row + 1) / rows), (32, (column + 1) / columns)):
                    for pair in range(16):
                        angle = 2 * math.pi * part / 10_000 ** (2 * pair / 32)
                        waves[axis + 2 * pair, row, column] = math.sin(angle)
                        waves[axis + 2 * pair + 1, row, column] = math.cos(angle)
        expected = nn.functional.conv2d(waves[None], encoding.token_projection.weight, encoding.token_projection.bias)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)  # it computes them in float32


def test_depth_is_dropped_alike_in_every_block_and_nowhere_else() -> None:
    model: Any = timm.create_model("fan_micro_32", drop_path_rate=0.3)
    assert [block.drop_path.drop_prob for block in model.blocks] == [0.3] * 6
    elsewhere = [*model.patch_embed.modules(), *model.class_blocks.modules()]
    assert not any(type(module).__name__ == "DropPath" for module in elsewhere)


@both_stems
def test_images_do_not_depend_on_each_other_nor_on_earlier_sizes(name: str) -> None:
    model, x = precise_vit(name)
    together = model(x)
    wide = model(torch.rand(1, 3, 48, 64, dtype=torch.float64))
    assert wide.shape == (1, 5)
    torch.testing.assert_close(torch.cat([model(x[:1]), model(x[1:])]), together, rtol=0, atol=1e-12)


@both_stems
def test_oblong_images_have_oblong_grids(name: str) -> None:
    net: Any = make_vit(name)
    tokens, grid = net.patch_embed(torch.rand(1, 3, 16, 40))
    assert grid == (2, 5)
    assert tokens.shape == (1, 10, 24)


def test_tokens_are_numbered_row_by_row() -> None:
    """Only the pixels of one patch differ between the images; in the hybrid's first grid nothing has spread yet."""
    net: Any = make_vit("fan_hybrid")
    with torch.no_grad():
        for name, parameter in net.patch_embed.named_parameters():
            if "conv_dw.weight" in name:
                parameter.zero_()
                parameter[:, :, 3, 3] = 1.0
    x, other = torch.zeros(1, 3, 32, 32), torch.zeros(1, 3, 32, 32)
    other[:, :, 8:16, 24:] = 1.0  # second row, fourth column of patches of 8
    moved = (net.patch_embed(x)[0] != net.patch_embed(other)[0]).any(-1)[0]
    assert moved.nonzero().flatten().tolist() == [7]


@both_stems
@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_finite_and_reach_everything(name: str, training: bool) -> None:
    torch.manual_seed(0)
    settings = {"stem_dims": (8, 16), "stem_depths": (1, 1)} if name == "fan_hybrid" else {}
    model = timm.create_model("fan_micro_32", num_classes=4, embed_dim=24, num_heads=3, depth=2, **settings)
    model.train(training)
    x = pixels("fan").requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() > 0
    for label, parameter in model.named_parameters():
        assert parameter.grad is not None, label
        assert parameter.grad.isfinite().all(), label


def test_one_image_can_be_trained_on() -> None:
    model: Any = make_vit("fan").train()
    before = model.blocks[0].channels.mlp.local.bn.running_mean.clone()
    model(pixels("fan", 1)).sum().backward()
    assert not torch.equal(model.blocks[0].channels.mlp.local.bn.running_mean, before)


@both_stems
def test_checkpointing_changes_no_gradient(name: str) -> None:
    model, x = precise_vit(name)
    net: Any = model

    def slope() -> Tensor:
        z = x.clone().requires_grad_()
        return torch.autograd.grad(net(z).square().sum(), z)[0]

    expected = slope()
    net.set_grad_checkpointing()
    torch.testing.assert_close(slope(), expected, rtol=0, atol=1e-12)


def test_half_precision_runs() -> None:
    model, x = make_vit("fan_hybrid"), pixels("fan_hybrid")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model(x).isfinite().all()
    assert model.bfloat16()(x.bfloat16()).dtype is torch.bfloat16


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model = timm.create_model("fan_tiny_hybrid_32", head_init_scale=0.001)
    assert model.blocks[0].channels.mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.head.weight.std().item() == pytest.approx(0.00002, rel=0.02)
    assert model.patch_embed.proj.weight.std().item() == pytest.approx(math.sqrt(2 / (4 * 192)), rel=0.02)
    depthwise_weight = model.blocks[0].channels.mlp.local.conv1.weight
    assert depthwise_weight.std().item() == pytest.approx(math.sqrt(2 / 9), rel=0.05)
    assert (model.blocks[3].gamma1 == 1).all()
    assert (model.patch_embed.stages[0].blocks[0].gamma == 1e-6).all()
    assert model.no_weight_decay() == {"cls_token", *(f"blocks.{n}.channels.temperature" for n in range(8))}


def test_there_is_nothing_to_download() -> None:
    for make in (
        lambda: timm.create_model("fan_small_12_p4_hybrid", pretrained=True),
        lambda: load_model("fan_small_12_p4_hybrid", weights="pretrained"),
    ):
        with pytest.raises(
            UserError, match=r"^there are no pretrained weights for 'fan_small_12_p4_hybrid'.*--weights FILE"
        ):
            make()


TINY = {"embed_dim": 24, "depth": 1, "num_heads": 3}


@pytest.mark.parametrize("name", ["fan_tiny_12_p16_224", "fan_tiny_8_p4_hybrid"])
def test_loaded_adapted_given_a_head_and_written(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"weights": "random", "num_classes": 7, "new_head": True, "small_images": True}
    model = load_model(name, **options, kwargs=TINY)
    x = torch.rand(2, 3, 32, 32)
    assert model(x).shape == (2, 7)
    assert (model.record.small_images, model.record.input_size, model.record.crop_pct) == (4, (32, 32), 1.0)
    with block_features(model) as features:
        model(x)
    assert features[0].shape == (2, 64, 24)
    save_classifier(model, tmp_path / "fan.safetensors")
    again = load_classifier(tmp_path / "fan.safetensors")
    assert torch.equal(again(x), model(x))


def test_other_image_sizes_are_loaded_and_leftovers_are_reported() -> None:
    model = load_model("fan_tiny_8_p4_hybrid", weights="random", num_classes=5, input_size=64, kwargs=TINY)
    assert model.record.input_size == (64, 64)
    assert model(torch.rand(1, 3, 64, 64)).shape == model(torch.rand(1, 3, 32, 96)).shape == (1, 5)
    with pytest.raises(UserError, match=r"40 x 64 pixels cannot be cut into patches of 16 x 16.*32 x 64 and 48 x 64"):
        model(torch.rand(1, 3, 40, 64))
    with pytest.raises(UserError, match="50 x 50 pixels cannot be cut"):
        load_model("fan_tiny_12_p16_224", weights="random", input_size=50, kwargs=TINY)


@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        ("fan_tiny_32", {"num_heads": 7}, "192 is not a multiple of num_heads 7"),
        ("fan_tiny_32", {"embed_dim": 36}, "36 is not a multiple of 8"),
        ("fan_tiny_32", {"patch_size": 12}, "cannot make patches of 12 pixels. Allowed: 1, 2, 4, 8, 16"),
        ("fan_tiny_hybrid_32", {"patch_size": 2}, "patches of 4, 8, 12, 16 ... pixels, not of 2"),
    ],
)
def test_what_cannot_be_built_is_reported(name: str, kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        timm.create_model(name, **kwargs)
