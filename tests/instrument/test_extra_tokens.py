"""Extra prefix tokens, against forwards by hand and against timm's own registers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitadel.backbones.anatomy import ANATOMIES
from vitadel.errors import UserError
from vitadel.instrument import attention_maps, block_features, extra_tokens, scaled_attention
from vitadel.instrument.tokens import own_tokens, token_width
from vits import VITS, make_vit, pixels, precise_vit

ABLE = [name for name, tiny in VITS.items() if ANATOMIES[tiny.family].tokens is not None]
UNABLE = [name for name in VITS if name not in ABLE]
ABSOLUTE = [name for name in ABLE if VITS[name].family == "vit"]
fused_or_not = pytest.mark.parametrize("fused", [True, False], ids=["fused", "manual"])


def some_tokens(count: int = 3) -> Tensor:
    return torch.randn(count, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("name", ABSOLUTE)
@fused_or_not
def test_without_rotation_they_might_as_well_stand_at_the_end(name: str, fused: bool) -> None:
    """Attention is blind to the order of tokens, so appending by hand must give the same."""
    model, x = precise_vit(name, fused)
    net: Any = model
    tokens = some_tokens()
    stream = net.norm_pre(net._pos_embed(net.patch_embed(x)))
    stream = net.blocks(torch.cat([stream, tokens.expand(2, -1, -1)], dim=1))[:, :-3]
    features = net.norm(stream)
    expected = net.forward_head(features)
    assert (expected - model(x)).abs().max() > 1e-3
    for given in (tokens, tokens[None]):
        with extra_tokens(model, given):
            torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-11)
            torch.testing.assert_close(net.forward_features(x), features, rtol=0, atol=1e-11)


def with_registers(model: nn.Module, name: str, tokens: Tensor, setting: str) -> nn.Module:
    """The same model, whose own registers hold the tokens."""
    registers = max(VITS[name].prefix - 1, 0)
    settings: dict[str, Any] = {setting: registers + len(tokens)}
    twin, _ = precise_vit(name, **settings)
    state = dict(model.state_dict())
    state["reg_token"] = torch.cat([*([state["reg_token"][0]] if registers else []), tokens])[None]
    if "pos_embed" in state and state["pos_embed"].shape != twin.get_parameter("pos_embed").shape:
        position = state["pos_embed"]  # covers the prefix too: registers must get none
        state["pos_embed"] = torch.cat([position[:, :1], torch.zeros_like(tokens)[None], position[:, 1:]], dim=1)
    twin.load_state_dict(state)
    return twin


@pytest.mark.parametrize("name", ["eva02", "dinov3", "dinov2", "dinov2_registers"])
@fused_or_not
def test_they_work_like_registers(name: str, fused: bool) -> None:
    """For rotating models too: timm rotates what follows the registers."""
    model, x = precise_vit(name, fused)
    tokens = some_tokens()
    twin = with_registers(model, name, tokens, "num_reg_tokens" if VITS[name].family == "eva" else "reg_tokens")
    with extra_tokens(model, tokens), attention_maps(model) as maps, attention_maps(twin) as twin_maps:
        torch.testing.assert_close(model(x), twin(x), rtol=0, atol=1e-11)
        for seen, expected in zip(maps, twin_maps, strict=True):
            torch.testing.assert_close(seen, expected, rtol=0, atol=1e-11)
    with extra_tokens(model, tokens), scaled_attention(model, 0.5), scaled_attention(twin, 0.5):
        torch.testing.assert_close(model(x), twin(x), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ABLE)
def test_features_show_them_after_the_prefix(name: str) -> None:
    model, x = precise_vit(name)
    tokens, first = some_tokens(), VITS[name].prefix
    with block_features(model) as features:
        model(x)
        plain = features[-1].shape[1]
        with extra_tokens(model, tokens):
            model(x)
    assert [seen.shape[1] for seen in features] == [plain + 3] * 2

    before: list[Tensor] = []
    block: Any = model.get_submodule("blocks.0")
    with (
        extra_tokens(model, tokens),
        block.register_forward_pre_hook(lambda _module, args: before.append(args[0])),
    ):
        model(x)
    assert torch.equal(before[0][:, first : first + 3], tokens.expand(2, -1, -1))


@pytest.mark.parametrize("name", ABLE)
def test_no_tokens_change_no_bit(name: str) -> None:
    model, x = make_vit(name), pixels(name)
    plain = model(x)
    with extra_tokens(model, torch.empty(0, 24)):
        assert torch.equal(model(x), plain)
    with extra_tokens(model, torch.ones(2, 24)):
        assert not torch.equal(model(x), plain)
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("name", ["vit", "dinov3"])
def test_nested_tokens_add_up(name: str) -> None:
    model, x = precise_vit(name)
    tokens = some_tokens(5)
    with extra_tokens(model, tokens):
        expected = model(x)
    with extra_tokens(model, tokens[:2]), extra_tokens(model, tokens[2:]):
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["vit", "eva02"])
def test_gradients_of_tokens(name: str) -> None:
    model, x = precise_vit(name)
    tokens = some_tokens(2).requires_grad_()

    def value(given: Tensor) -> Tensor:
        with extra_tokens(model, given):
            out: Tensor = model(x)
        return out.square().sum()

    (slope,) = torch.autograd.grad(value(tokens), tokens)
    with torch.no_grad():
        step = 1e-5 * some_tokens(2).flip(0)
        difference = value(tokens + step) - value(tokens - step)
    torch.testing.assert_close((slope * 2 * step).sum(), difference, rtol=1e-5, atol=1e-10)


@pytest.mark.parametrize("name", UNABLE)
def test_families_without_a_place_for_them_say_why(name: str) -> None:
    message = rf"no meaning for family '{VITS[name].family}': its .*\. Families that take them: eva, .*vit\."
    with pytest.raises(UserError, match=message), extra_tokens(make_vit(name), torch.ones(1, 24)):
        pass


def test_a_model_of_no_known_family_hears_which_would_do() -> None:
    """Not only which families are known: most of those take no tokens either."""
    message = r"no place is known for extra tokens: no anatomy known for .*\. Families that take them: eva, .*vit\."
    for ask in (token_width, lambda model: extra_tokens(model, torch.ones(1, 24)).__enter__()):
        with pytest.raises(UserError, match=message):
            ask(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()))


@pytest.mark.parametrize("name", ABSOLUTE)
@fused_or_not
def test_appended_tokens_do_the_same_at_the_other_end(name: str, fused: bool) -> None:
    model, x = make_vit(name, fused), pixels(name)
    tokens = some_tokens().float()
    net: Any = model
    seen: list[Tensor] = []
    with torch.no_grad(), extra_tokens(model, tokens):
        logits, features = model(x), net.forward_features(x)
    with (
        torch.no_grad(),
        extra_tokens(model, tokens, placement="append"),
        net.blocks[0].register_forward_pre_hook(lambda _module, args: seen.append(args[0])),
    ):
        torch.testing.assert_close(model(x), logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(net.forward_features(x), features, rtol=0, atol=1e-5)
    assert torch.equal(seen[0][:, -3:], tokens.expand(2, -1, -1))


@pytest.mark.parametrize("name", ["eva02", "dinov3"])
def test_rotating_models_refuse_appended_tokens(name: str) -> None:
    message = r"cannot be appended to Eva: it rotates .* Use placement 'prefix'"
    with pytest.raises(UserError, match=message), extra_tokens(make_vit(name), torch.ones(1, 24), placement="append"):
        pass


def test_without_rotation_that_family_takes_them_at_the_end_too() -> None:
    model, x = precise_vit("eva02", use_rot_pos_emb=False)
    with extra_tokens(model, some_tokens()):
        expected = model(x)
    with extra_tokens(model, some_tokens(), placement="append"):
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-11)


def test_an_unknown_place() -> None:
    with (
        pytest.raises(UserError, match=r"'prefx'; did you mean prefix\? Known: prefix, append"),
        extra_tokens(make_vit("vit"), torch.ones(1, 24), placement="prefx"),
    ):
        pass


@pytest.mark.parametrize("name", ["vit", "eva02"])
def test_one_set_of_tokens_per_image(name: str) -> None:
    model, x = precise_vit(name)
    sets = some_tokens(6).view(2, 3, 24)
    expected = []
    for tokens, image in zip(sets, x, strict=True):
        with extra_tokens(model, tokens):
            expected.append(model(image[None]))
    with extra_tokens(model, sets):
        torch.testing.assert_close(model(x), torch.cat(expected), rtol=0, atol=1e-11)
    with (
        pytest.raises(UserError, match="2 sets of tokens given for 3 images"),
        extra_tokens(model, sets),
    ):
        model(x[[0, 1, 0]])


def test_no_image_at_all() -> None:
    model, x = make_vit("vit"), pixels("vit")
    for tokens in (torch.ones(3, 24), torch.ones(0, 3, 24)):
        with extra_tokens(model, tokens):
            assert model(x[:0]).shape == (0, 5)


@pytest.mark.parametrize("name", ["vit", "dinov2_registers", "siglip"])
def test_own_tokens_are_what_is_left_without_the_extra_ones(name: str) -> None:
    """Checked by the tokens' places: each block's input is what the last one returned."""
    model, x = precise_vit(name)
    first = VITS[name].prefix
    with block_features(model) as features, attention_maps(model) as maps, own_tokens(model) as own:
        model(x)
        assert torch.equal(own(features[0]), features[0])
        assert own.extra == 0
        count = features[0].shape[1]
        with extra_tokens(model, some_tokens(2), placement="append"), extra_tokens(model, some_tokens(3)):
            model(x)
        places = [*range(first), *range(first + 3, count + 3)]
        assert own.extra == 5
        for each in features:
            assert each.shape[1] == count + 5
            assert torch.equal(own(each), each[:, places])
        whole = maps[0]  # of the first block, not of a pooling attention
        assert torch.equal(own(own(whole, 2), 3), whole[:, :, places][:, :, :, places])
        model(x)  # the blocks have ended
        assert torch.equal(own(features[0]), features[0])


def test_own_tokens_of_families_without_extra_ones() -> None:
    model, x = make_vit("swin"), pixels("swin")
    with block_features(model) as features, own_tokens(model) as own:
        model(x)
    assert all(torch.equal(own(each), each) for each in features)


def test_the_width_of_tokens() -> None:
    assert token_width(make_vit("vit")) == 24
    assert token_width(make_vit("eva02", embed_dim=36)) == 36
    with pytest.raises(UserError, match="no meaning for family 'swin'"):
        token_width(make_vit("swin"))


@pytest.mark.parametrize("shape", [(24,), (1, 23), (2, 1, 23), (1, 1, 1, 24)])
def test_wrong_shapes(shape: tuple[int, ...]) -> None:
    with (
        pytest.raises(UserError, match=r"takes \(R, 24\) or \(1, R, 24\)"),
        extra_tokens(make_vit("vit"), torch.ones(shape)),
    ):
        pass


@pytest.mark.parametrize("name", ABSOLUTE)
@pytest.mark.parametrize("placement", ["prefix", "append"])
@pytest.mark.parametrize("layers", [(1,), (0, 1)])
def test_tokens_join_before_other_blocks(name: str, placement: str, layers: tuple[int, ...]) -> None:
    """Against a forward by hand: a share of them is appended before each of these blocks."""
    model, x = precise_vit(name)
    net: Any = model
    tokens = some_tokens(4)
    stream, shares = net.norm_pre(net._pos_embed(net.patch_embed(x))), list(tokens.chunk(len(layers)))
    length = stream.shape[1]
    by_hand = []
    for number, block in enumerate(net.blocks):
        if number in layers:
            stream = torch.cat([stream, shares.pop(0).expand(2, -1, -1)], dim=1)
        stream = block(stream)
        by_hand.append(stream[:, :length])
    expected = net.forward_head(net.norm(stream[:, :length]))
    with extra_tokens(model, tokens, placement=placement, layers=layers):
        with block_features(model) as features, own_tokens(model) as own:
            torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-11)
        assert own.extra == 4
        assert own.fits(length, length) == (0 not in layers)
        assert own.fits(length + 4, length)
        for seen, known in zip(features, by_hand, strict=True):
            torch.testing.assert_close(own(seen), known, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["eva02", "dinov3"])
def test_patches_keep_their_rotation_where_tokens_join_late(name: str) -> None:
    """Before the second block only: the first is as without them, the second as if its prefix were longer."""
    model, x = precise_vit(name)
    net: Any = model
    tokens, prefix, given = some_tokens(3), VITS[name].prefix, dict[str, Any]()
    with block_features(model) as plain:
        handle = net.blocks[1].register_forward_pre_hook(lambda _m, _a, words: given.update(words), with_kwargs=True)
        model(x)
        handle.remove()
    with extra_tokens(model, tokens, layers=(1,)), block_features(model) as features:
        model(x)
    torch.testing.assert_close(features[0], plain[0], rtol=0, atol=0)
    joined = torch.cat([plain[0][:, :prefix], tokens.expand(2, -1, -1), plain[0][:, prefix:]], dim=1)
    attention = net.blocks[1].attn
    attention.num_prefix_tokens += 3
    torch.testing.assert_close(features[1], net.blocks[1](joined, **given), rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("layers", "count", "words"),
    [((), 2, "rising order"), ((1, 0), 2, "rising order"), ((0, 9), 2, "from 0 to 1"), ((0, 1), 3, "shared equally")],
)
def test_wrong_layers_are_refused(layers: tuple[int, ...], count: int, words: str) -> None:
    model = make_vit("vit")
    with pytest.raises(UserError, match=words), extra_tokens(model, torch.zeros(count, 24), layers=layers):
        model(pixels("vit"))
