"""TORA on disk: what was trained and nothing else, found again on its own backbone and refused on others."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from toras import classifier_of, enlivened, tora_of
from vitadel.adapters.tora.tora_files import (
    Fusion,
    fusion_of,
    interpolate_fusions,
    load_tora,
    put_fusion,
    read_fusion,
    save_fusion,
    save_tora,
)
from vitadel.adapters.tora.tora_settings import ToraSettings
from vitadel.adapters.tora.tora_vit import Tora
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.record import ModelRecord
from vitadel.errors import UserError
from vits import make_vit, pixels

X = pixels("vit")


def phase_two(tora: Tora, seed: int) -> Tora:
    """As if the fusion had been trained on, beside the same adapters."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in tora.fusion.parameters():
            each += 0.3 * torch.randn(each.shape, generator=source).to(each)
    return tora


def answers(tora: Tora) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack(tora.branches(X))


def trained(folder: Path) -> tuple[Path, Path, Path]:
    """Files of phase 1 and of two trade-offs."""
    parts, low, high = (folder / f"{name}.safetensors" for name in ("parts", "low", "high"))
    save_tora(tora_of(lively=True), parts, {"epochs": 3})
    save_fusion(phase_two(tora_of(lively=True), 1), low, 0.1, {"epochs": 2})
    save_fusion(phase_two(tora_of(lively=True), 2), high, 0.9)
    return parts, low, high


def rewritten(path: Path, **changes: Any) -> None:
    """The same file with other words about itself."""
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    about = json.loads(header["__metadata__"]["vitadel_tora"])
    text = json.dumps({key: value for key, value in {**about, **changes}.items() if value != "gone"})
    path.write_bytes(safetensors.torch.save(safetensors.torch.load(content), metadata={"vitadel_tora": text}))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"slot": "separate", "heads": 2, "softmax": "joint"},
        {"kind": "adapterfusion"},
        {"kind": "single"},
        {"kind": "head"},
    ],
)
def test_a_round_trip(tmp_path: Path, settings: dict[str, Any]) -> None:
    tora = tora_of(lively=True, **settings)
    tora.trade_off = 0.3
    save_tora(tora, tmp_path / "new" / "tora.safetensors")
    again = load_tora(tmp_path / "new" / "tora.safetensors", classifier_of())
    assert again.settings == tora.settings
    assert again.trade_off == 0.3
    assert not again.training
    assert torch.equal(answers(again), answers(tora))
    assert "lambda 0.3" in again.record.notes["tora"]


def test_files_hold_what_was_trained_and_nothing_else(tmp_path: Path) -> None:
    parts, low, _ = trained(tmp_path)
    tora = tora_of()
    own = {name for name, each in tora.named_parameters() if each.requires_grad}
    assert set(safetensors.torch.load_file(parts)) == own
    small = set(safetensors.torch.load_file(low))
    assert small == {name for name in own if name.startswith("fusion.") or ".head." in name}
    assert low.stat().st_size < parts.stat().st_size
    assert not any("classifier" in name for name in own)


def test_one_fusion_for_each_trade_off(tmp_path: Path) -> None:
    parts, low, high = trained(tmp_path)
    tora = load_tora(parts, classifier_of(), fusion=low)
    assert tora.trade_off == 0.1
    assert torch.equal(answers(tora), answers(phase_two(tora_of(lively=True), 1)))
    put_fusion(tora, high)
    assert tora.trade_off == 0.9
    assert torch.equal(answers(tora), answers(phase_two(tora_of(lively=True), 2)))
    put_fusion(tora, read_fusion(low))
    assert torch.equal(answers(tora), answers(phase_two(tora_of(lively=True), 1)))
    assert read_fusion(low).training == {"epochs": 2}
    assert "tensor" not in repr(read_fusion(low))


def test_heads_trained_in_the_second_phase_come_along(tmp_path: Path) -> None:
    parts, low, _ = trained(tmp_path)
    tora = load_tora(parts, classifier_of(), fusion=low)
    with torch.no_grad():
        tora.acc.head.weight += 1
    save_fusion(tora, tmp_path / "heads.safetensors")
    again = load_tora(parts, classifier_of(), fusion=tmp_path / "heads.safetensors")
    assert torch.equal(answers(again), answers(tora))
    assert again.trade_off == 0.1


def test_interpolation_is_a_knob_between_two_fusions(tmp_path: Path) -> None:
    parts, low, high = trained(tmp_path)
    first, second = read_fusion(low), read_fusion(high)
    tora = load_tora(parts, classifier_of())
    ends = []
    for fusion in (first, second):
        put_fusion(tora, fusion)
        ends.append(answers(tora))
    seen = []
    for t in (0.0, 0.25, 0.5, 1.0):
        put_fusion(tora, interpolate_fusions(first, second, t))
        seen.append(answers(tora))
    assert torch.equal(seen[0], ends[0])
    assert torch.equal(seen[-1], ends[1])
    for here, there in itertools.pairwise(seen):
        assert (here - there).abs().max() > 1e-3
    middle = interpolate_fusions(first, second, 0.25)
    name = "fusion.1.key.weight"
    torch.testing.assert_close(middle.weights[name], 0.75 * first.weights[name] + 0.25 * second.weights[name])
    assert middle.trade_off is None
    assert middle.training == {"interpolated": {"from": 0.1, "to": 0.9, "at": 0.25}}
    put_fusion(tora, middle)
    again = tmp_path / "between.safetensors"
    save_fusion(tora, again)
    assert torch.equal(read_fusion(again).weights[name], middle.weights[name])
    for t in (-0.1, 1.1, float("nan")):
        with pytest.raises(UserError, match=r"between two fusions, must be in \[0, 1\], got"):
            interpolate_fusions(first, second, t)
    with pytest.raises(UserError, match="trained with different adapters"):
        interpolate_fusions(first, fusion_of(enlivened(tora_of(), seed=5)), 0.5)


def test_other_image_sizes_and_heads_are_no_other_backbone(tmp_path: Path) -> None:
    parts, low, _ = trained(tmp_path)
    larger: Any = make_vit("vit")
    larger.set_input_size(img_size=(48, 48))
    larger.reset_classifier(9)
    host = Classifier(larger.eval(), ModelRecord("vit", num_classes=9))
    assert load_tora(parts, host, fusion=low)(torch.rand(1, 3, 48, 48)).shape == (1, 5)


def test_other_backbones_are_refused(tmp_path: Path) -> None:
    parts, low, _ = trained(tmp_path)
    with pytest.raises(UserError, match=r"parts.* is for a backbone 24 wide, 'vit'; 'vit' is 36 wide"):
        load_tora(parts, classifier_of(embed_dim=36))
    with pytest.raises(UserError, match=r"parts.* trained on other weights, those of 'vit'; this is 'vit'"):
        load_tora(parts, classifier_of(seed=1))
    with pytest.raises(UserError, match="plain ViT; 'swin' is of family 'swin'"):
        load_tora(parts, classifier_of("swin"))
    wide = Tora(classifier_of(embed_dim=36), ToraSettings(reduction=6))
    with pytest.raises(UserError, match=r"low.* is for a backbone 24 wide, 'vit'; 'vit' is 36 wide"):
        put_fusion(wide, low)
    with pytest.raises(UserError, match=r"low.* trained on other weights, those of 'vit'; this is 'deit3'"):
        put_fusion(tora_of("deit3"), low)
    for other in (enlivened(tora_of(), seed=7), tora_of(lively=True, heads=2), tora_of(lively=True, softmax="token")):
        with pytest.raises(UserError, match=r"low.* was trained with other adapters than this model's"):
            put_fusion(other, low)
    with pytest.raises(UserError, match="the fusion was trained with other adapters"):
        put_fusion(enlivened(tora_of(), seed=7), read_fusion(low))


def test_a_fusion_for_other_classes_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """Adapters alike, heads not."""
    save_fusion(tora_of(), tmp_path / "five")
    nine = Tora(classifier_of(), ToraSettings(reduction=8), num_classes=9)
    before = answers(nine)
    with pytest.raises(UserError, match=r"five.* do not fit this model, e\.g\. '(acc|rob)\.head\.\w+'"):
        put_fusion(nine, tmp_path / "five")
    assert torch.equal(answers(nine), before)


def test_lambda_outside_the_unit_interval_is_refused(tmp_path: Path) -> None:
    tora = tora_of()
    for trade_off in (-0.1, 1.01, float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"lambda, the weight of the robust loss, must be in \[0, 1\], got"):
            save_fusion(tora, tmp_path / "fusion", trade_off)
    assert not list(tmp_path.iterdir())
    for trade_off in (0, 1):
        save_fusion(tora, tmp_path / "fusion", trade_off)
        assert read_fusion(tmp_path / "fusion").trade_off == trade_off
    rewritten(tmp_path / "fusion", trade_off=3)
    with pytest.raises(UserError, match=r"must be in \[0, 1\], got 3"):
        put_fusion(tora, tmp_path / "fusion")


def test_kinds_without_fusion_keep_no_fusion(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"kind 'single' has no fusion to save separately\. Save the whole"):
        save_fusion(tora_of(kind="single"), tmp_path / "fusion", 0.5)


def test_damage_anywhere_is_noticed(tmp_path: Path) -> None:
    parts, low, _ = trained(tmp_path)
    whole = low.read_bytes()
    for content in (b"", whole[:5], whole[:40], whole[:-1], whole + b"\0", b"\xff" * len(whole), b"[]" * 100):
        low.write_bytes(content)
        with pytest.raises(UserError, match="cannot be read as a fusion of TORA"):
            read_fusion(low)
    low.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    with pytest.raises(UserError, match="do not match its fingerprint"):
        read_fusion(low)
    low.write_bytes(whole)
    with pytest.raises(UserError, match="holds a fusion of TORA; give the parts of TORA"):
        load_tora(low, classifier_of())
    with pytest.raises(UserError, match="holds the parts of TORA; give a fusion of TORA"):
        read_fusion(parts)
    with pytest.raises(UserError, match=r"absent.* cannot be read: No such file"):
        read_fusion(tmp_path / "absent")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, r"schema 2, this version reads 1\. Update"),
        ({"schema": "gone"}, "cannot be read as the parts of TORA"),
        ({"settings": 5}, "cannot be read as the parts of TORA"),
        ({"settings": {"kind": "unknown"}}, "cannot be read as the parts of TORA"),
        ({"num_classes": "gone"}, "cannot be read as the parts of TORA"),
        ({"num_classes": 6}, r"do not fit this model, e\.g\. '(acc|rob)\.head"),
        ({"settings": {"reduction": 12}}, "do not fit this model"),
        ({"trade_off": "much"}, "its lambda is not a number"),
        ({"fingerprint": "gone"}, "do not match its fingerprint"),
        ({"width": "gone"}, "is for a backbone None wide"),
    ],
)
def test_files_that_contradict_themselves(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    parts, _, _ = trained(tmp_path)
    rewritten(parts)
    assert load_tora(parts, classifier_of()).num_classes == 5
    rewritten(parts, **changes)
    with pytest.raises(UserError, match=message):
        load_tora(parts, classifier_of())


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os._exit, (9,))


def test_nothing_is_ever_unpickled(tmp_path: Path) -> None:
    (tmp_path / "bomb").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(UserError, match="cannot be read as the parts of TORA"):
        load_tora(tmp_path / "bomb", classifier_of())
    (tmp_path / "weights").write_bytes(safetensors.torch.save({"head": torch.zeros(3)}))
    with pytest.raises(UserError, match="is a safetensors file, but not a fusion of TORA"):
        read_fusion(tmp_path / "weights")


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    tora = tora_of()
    with pytest.raises(UserError, match="settings cannot be written"):
        save_tora(tora, tmp_path / "parts", {"path": tmp_path})
    with torch.no_grad():
        tora.acc.head.bias[0] = torch.nan
    with pytest.raises(UserError, match=r"diverged\. Nothing was written"):
        save_tora(tora, tmp_path / "parts")
    assert not list(tmp_path.iterdir())


def test_fusions_are_copies() -> None:
    tora = tora_of(lively=True)
    kept = fusion_of(tora)
    assert isinstance(kept, Fusion)
    before = answers(tora)
    phase_two(tora, 3)
    assert not torch.equal(answers(tora), before)
    put_fusion(tora, kept)
    assert torch.equal(answers(tora), before)


def test_double_precision_survives(tmp_path: Path) -> None:
    tora = tora_of(lively=True, precise=True)
    save_tora(tora, tmp_path / "parts")
    again = load_tora(tmp_path / "parts", classifier_of().double())
    assert all(torch.equal(here, there) for here, there in zip(again.parameters(), tora.parameters(), strict=True))
