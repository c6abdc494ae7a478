"""Token files: closed to others, tied to one backbone, checked for damage, the same tokens after a round trip."""

from __future__ import annotations

import json
import os
import pickle
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from vitadel.adapters.adapter_file import backbone_fingerprint
from vitadel.adapters.tokens.token_classifier import TokenBank, TokenClassifier, fresh_tokens
from vitadel.adapters.tokens.token_files import load_tokens, read_tokens, save_tokens
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.record import ModelRecord
from vitadel.errors import UserError
from vitadel.runtime.secrets import write_secret
from vits import make_vit, pixels

SETTINGS = {"eps": "8/255", "steps": 50, "axis": "token", "seed": 3}


def classifier_of(name: str = "vit", **settings: Any) -> Classifier:
    return Classifier(make_vit(name, **settings), ModelRecord(name, num_classes=5))


def saved(folder: Path, name: str = "vit", **settings: Any) -> tuple[Path, TokenClassifier]:
    tokened = TokenClassifier(classifier_of(name), fresh_tokens(24, 3, scale=1.0, seed=5), **settings)
    save_tokens(tokened, folder / "tokens.safetensors", SETTINGS)
    return folder / "tokens.safetensors", tokened


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def rewritten(path: Path, **changes: Any) -> None:
    """The same file with other words about itself."""
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    about = json.loads(header["__metadata__"]["vitadel_tokens"])
    text = json.dumps({key: value for key, value in {**about, **changes}.items() if value is not None})
    tensors = safetensors.torch.load(content)
    write_secret(path, safetensors.torch.save(tensors, metadata={"vitadel_tokens": text}))


@pytest.mark.usefixtures("open_umask")
def test_mode_0600_even_with_umask_0(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("placement", ["prefix", "append"])
def test_a_round_trip(tmp_path: Path, placement: str) -> None:
    path, tokened = saved(tmp_path, placement=placement)
    again = load_tokens(path, classifier_of())
    assert torch.equal(again.tokens, tokened.tokens)
    assert again.tokens.requires_grad
    assert again.placement == placement
    x = pixels("vit")
    assert torch.equal(again(x), tokened(x))
    assert (
        read_tokens(path).fingerprint == read_tokens(str(path)).fingerprint == again.fingerprint == tokened.fingerprint
    )
    file = read_tokens(path)
    assert file.settings == SETTINGS
    assert file.about["backbone"] == "vit"


def test_the_file_holds_the_tokens_alone(tmp_path: Path) -> None:
    path, tokened = saved(tmp_path)
    tensors = safetensors.torch.load_file(path)
    assert list(tensors) == ["tokens"]
    assert torch.equal(tensors["tokens"], tokened.tokens)
    assert path.stat().st_size < 3 * 24 * 4 + 1000


@pytest.mark.parametrize("name", ["vit", "deit3", "dinov2_registers", "siglip", "eva02", "dinov3"])
def test_tokens_serve_other_image_sizes_and_other_heads(tmp_path: Path, name: str) -> None:
    path, tokened = saved(tmp_path, name)
    larger: Any = make_vit(name)
    larger.set_input_size(img_size=(48, 48))
    larger.reset_classifier(7)
    model = load_tokens(path, Classifier(larger.eval(), ModelRecord(name, num_classes=7)))
    assert torch.equal(model.tokens, tokened.tokens)
    assert model.fingerprint == tokened.fingerprint
    assert model(torch.rand(1, 3, 48, 48)).shape == (1, 7)


def test_the_backbones_fingerprint_sees_every_weight_that_tokens_pass() -> None:
    classifier = classifier_of("dinov2_registers")
    own = backbone_fingerprint(classifier)
    assert own == backbone_fingerprint(classifier_of("dinov2_registers"))
    unseen = set()
    for name, parameter in classifier.backbone.named_parameters():
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter.view(-1)[0] += 1
        if backbone_fingerprint(classifier) == own:
            unseen.add(name)
        with torch.no_grad():
            parameter.copy_(before)
    assert unseen == {"pos_embed", "head.weight", "head.bias"}


def test_other_models_are_refused(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    with pytest.raises(UserError, match=r"is for a backbone 24 wide, 'vit'; 'vit' is 36 wide \(same"):
        load_tokens(path, classifier_of(embed_dim=36))
    with pytest.raises(UserError, match=r"trained on other weights, those of 'vit'; this is 'vit'"):
        load_tokens(path, classifier_of(seed=1))
    with pytest.raises(UserError, match=r"trained on other weights, those of 'vit'; this is 'deit3'"):
        load_tokens(path, classifier_of("deit3"))
    with pytest.raises(UserError, match="no meaning for family 'swin'"):
        load_tokens(path, classifier_of("swin"))


def test_files_that_others_can_read_are_refused_unless_allowed(tmp_path: Path) -> None:
    path, tokened = saved(tmp_path)
    path.chmod(0o644)
    for read in (lambda: load_tokens(path, classifier_of()), lambda: read_tokens(path)):
        with pytest.raises(UserError, match=r"mode 0644: .* `chmod 600"):
            read()
    assert torch.equal(load_tokens(path, classifier_of(), allow_readable=True).tokens, tokened.tokens)
    assert read_tokens(path, allow_readable=True).fingerprint == tokened.fingerprint


def test_damage_anywhere_is_noticed(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    whole = path.read_bytes()
    for content in (b"", whole[:5], whole[:40], whole[:-1], whole + b"\0", b"\xff" * len(whole), b"[]" * 100):
        write_secret(path, content)
        with pytest.raises(UserError, match="cannot be read as a file of robustness tokens"):
            load_tokens(path, classifier_of())
    for place in (len(whole) - 1, len(whole) - 3 * 24 * 4):  # single bits of the tokens
        write_secret(path, whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match="do not match its fingerprint"):
            load_tokens(path, classifier_of())
    write_secret(path, whole)
    assert len(load_tokens(path, classifier_of()).tokens) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, r"schema 2, this version reads 1\. Update"),
        ({"count": 4}, "do not match its description"),
        ({"width": 25}, "do not match its description"),
        ({"salt": ""}, "do not match its description"),
        ({"salt": "no hex"}, "cannot be read as a file of robustness tokens"),
        ({"settings": 5}, "cannot be read as a file of robustness tokens"),
        ({"fingerprint": None}, "cannot be read as a file of robustness tokens"),
        ({"schema": None}, "cannot be read as a file of robustness tokens"),
        ({"placement": "middle"}, "unknown placement"),
    ],
)
def test_files_that_contradict_themselves(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path, _ = saved(tmp_path)
    rewritten(path)
    assert len(load_tokens(path, classifier_of()).tokens) == 3
    rewritten(path, **changes)
    with pytest.raises(UserError, match=message):
        load_tokens(path, classifier_of())


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os._exit, (9,))


def test_nothing_is_ever_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "tokens.safetensors"
    write_secret(path, pickle.dumps(_Bomb()))
    with pytest.raises(UserError, match="cannot be read as a file of robustness tokens"):
        load_tokens(path, classifier_of())


def test_weights_are_no_tokens(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write_secret(path, safetensors.torch.save({"tokens": torch.zeros(3, 24)}))
    with pytest.raises(UserError, match="safetensors file, but not a file of robustness tokens"):
        load_tokens(path, classifier_of())


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    tokened = TokenClassifier(classifier_of(), fresh_tokens(24, 3))
    with pytest.raises(UserError, match="settings cannot be written"):
        save_tokens(tokened, tmp_path / "tokens", {"path": tmp_path})
    with torch.no_grad():
        tokened.tokens[0, 0] = torch.nan
    with pytest.raises(UserError, match=r"diverged\. Nothing was written"):
        save_tokens(tokened, tmp_path / "tokens", {})
    assert not list(tmp_path.iterdir())


def test_neither_the_file_nor_a_bank_prints_tokens(tmp_path: Path) -> None:
    path, tokened = saved(tmp_path)
    file = read_tokens(path)
    assert "tensor" not in repr(file)
    assert repr(file.salt) not in repr(file)
    assert tokened.fingerprint in repr(file)
    bank = TokenBank(classifier_of(), [file.tokens, fresh_tokens(24, 3)])
    assert bank.fingerprint in repr(bank)
    assert "tensor" not in repr(bank).partition("(classifier)")[0]


def test_layers_are_kept(tmp_path: Path) -> None:
    tokened = TokenClassifier(classifier_of(), fresh_tokens(24, 4, scale=1.0, seed=5), layers=(0, 1))
    save_tokens(tokened, tmp_path / "tokens.safetensors", SETTINGS)
    again = load_tokens(tmp_path / "tokens.safetensors", classifier_of())
    assert again.layers == (0, 1)
    with torch.no_grad():
        assert torch.equal(again(pixels("vit")), tokened(pixels("vit")))
        first = TokenClassifier(classifier_of(), tokened.tokens)(pixels("vit"))
        assert not torch.allclose(first, again(pixels("vit")), atol=1e-4)
    rewritten(tmp_path / "tokens.safetensors", layers=None)  # as earlier versions wrote it
    assert load_tokens(tmp_path / "tokens.safetensors", classifier_of()).layers == (0,)


def released(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


def test_released_files_are_read(tmp_path: Path) -> None:
    """As in the authors' repository: a dict with the tokens of one model, at the end of the sequence, and no secret."""
    tokens = 0.01 * torch.randn(1, 10, 24, generator=torch.Generator().manual_seed(0))
    path = released(tmp_path / "small.pt", {"rtokens": tokens})
    path.chmod(0o644)
    tokened = load_tokens(path, classifier_of())
    assert torch.equal(tokened.tokens, tokens[0])
    assert tokened.placement == "append"
    assert tokened.fingerprint == load_tokens(path, classifier_of()).fingerprint
    with torch.no_grad():
        by_hand = TokenClassifier(classifier_of(), tokens[0], placement="append")(pixels("vit"))
        assert torch.equal(tokened(pixels("vit")), by_hand)
    assert load_tokens(path, classifier_of("eva02")).placement == "prefix"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"tokens": torch.zeros(1, 10, 24)}, "needs a tensor 'rtokens' of shape .1, tokens, width., and has none"),
        ({"rtokens": torch.zeros(10, 24)}, r"has \(10, 24\)"),
        ({"rtokens": torch.zeros(1, 10, 32)}, "tokens are 24 wide"),
        ({"rtokens": torch.full((1, 10, 24), float("nan"))}, "finite"),
    ],
)
def test_other_files_of_torch_are_refused(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_tokens(released(tmp_path / "small.pt", content), classifier_of())
