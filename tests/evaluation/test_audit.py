"""The audit, from Python: what is counted, what is noticed, what is refused."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

import vitadel
from toys import TinyNet
from vitadel.data.sources.shapes import Shapes
from vitadel.errors import UserError
from vitadel.evaluation.audit.audit import AuditRequest


class Brightness(nn.Module):
    """Ten classes by mean brightness: accuracy and robust accuracy can be worked out by hand."""

    num_classes = 10

    def forward(self, x: Tensor) -> Tensor:
        centres = torch.linspace(0.05, 0.95, 10, dtype=x.dtype)
        return -((x.mean((1, 2, 3))[:, None] - centres).square()) * 100


def worked_out(eps: float, limit: int) -> tuple[int, int]:
    """Clean and robust counts of `Brightness`: an attack shifts the mean by eps, as far as the box lets it."""
    from vitadel.data.batches import balanced_subset

    source = Shapes("test")
    rows = balanced_subset(source.labels(), limit, 0)
    pixels, label, _ = source.render(rows)
    x = pixels.double() / 255

    def said(z: Tensor) -> Tensor:
        return (z.mean((1, 2, 3)) * 10).floor().clamp(0, 9).long()

    correct = said(x) == label
    survives = correct & (said((x + eps).clamp(0, 1)) == label) & (said((x - eps).clamp(0, 1)) == label)
    return int(correct.sum()), int(survives.sum())


def test_counts_are_those_worked_out_by_hand():
    eps = 4 / 255
    correct, survives = worked_out(eps, 400)
    results = vitadel.audit(Brightness(), "shapes", attacks="fgsm,pgd-10", eps=eps, limit=400)
    assert results["clean"]["correct"] == correct
    assert 0 < survives < correct
    assert results["worst_case"]["held"] == survives
    assert results["worst_case"]["n"] == 400
    assert results["complete"]
    assert results["threat"] == {"norm": "linf", "eps": eps, "eps_text": "4/255"}
    low, high = results["worst_case"]["ci95"]
    assert low < survives / 400 < high


def test_later_attacks_see_only_what_stands_unless_independent(tmp_path):
    attacks = ["fgsm", "pgd-3", "pgd-6"]
    model = TinyNet(10).eval()
    source = Shapes("test", size=8)
    cascade = vitadel.audit(model, source, attacks=attacks, eps=3 / 255, limit=120, out=tmp_path / "cascade")
    alone = vitadel.audit(
        model, source, attacks=attacks, eps=3 / 255, limit=120, independent=True, out=tmp_path / "alone"
    )
    held = [entry["held"] for entry in cascade["attacks"]]
    assert held == sorted(held, reverse=True)
    assert [entry["attacked"] for entry in cascade["attacks"]] == [cascade["clean"]["correct"], *held[:-1]]
    assert {entry["attacked"] for entry in alone["attacks"]} == {alone["clean"]["correct"]}
    assert alone["worst_case"]["held"] == cascade["worst_case"]["held"]
    for folder, results in ((tmp_path / "cascade", cascade), (tmp_path / "alone", alone)):
        table = pq.read_table(folder / "samples.parquet").to_pydict()
        assert sum(table["clean_correct"]) == results["clean"]["correct"]
        assert [sum(table[f"held:{entry['name']}"]) for entry in results["attacks"]] == [
            entry["held"] for entry in results["attacks"]
        ]
        assert json.loads((folder / "results.json").read_text()) == results
        assert not (folder / "partial").exists()
        assert table["index"] == sorted(table["index"])


def test_costs_are_counted_per_sample():
    results = vitadel.audit(TinyNet(10).eval(), Shapes("test", size=8), attacks="fgsm", limit=50, batch_size=16)
    (entry,) = results["attacks"]
    assert entry["gradient_calls"] == entry["attacked"]
    assert entry["forward_calls"] == entry["attacked"]  # the judge's


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_other_norms(norm):
    results = vitadel.audit(Brightness(), attacks="pgd-20", norm=norm, eps={"l2": 2.0, "l1": 100.0}[norm], limit=200)
    assert results["worst_case"]["held"] < results["clean"]["correct"]
    assert results["attacks"][0]["void"] == 0


def test_train_mode_and_probabilities_are_noticed():
    class Probabilities(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).softmax(1)

    model = Probabilities(10)
    results = vitadel.audit(model, Shapes("test", size=8), attacks="fgsm", limit=20)
    found = [(finding["check"], finding["verdict"]) for finding in results["findings"]]
    assert found[-2:] == [("train-mode", "suspicious"), ("probability-outputs", "broken")]
    assert {check for check, _ in found[:-2]} <= {"clean-accuracy", "constant-prediction"}  # it is untrained
    assert model.training


def test_an_honest_model_raises_nothing():
    assert vitadel.audit("zoo:shapes-robust", attacks="fgsm", limit=20)["findings"] == []


def test_attacks_that_break_the_rules_gain_nothing(monkeypatch):
    from vitadel.attacks import registry

    class Cheat:
        def __call__(self, model, x, y, rng=None):
            return 1 - x

        def passes(self):
            return 0, 0

    import dataclasses

    cheat = dataclasses.make_dataclass("Cheat", [], bases=(Cheat,), frozen=True)
    monkeypatch.setitem(registry.ATTACKS, "cheat", registry.AttackEntry(lambda threat: cheat(), "breaks the budget"))
    results = vitadel.audit(Brightness().eval(), attacks="cheat", limit=40)
    (entry,) = results["attacks"]
    assert entry["void"] == entry["attacked"]
    assert entry["held"] == results["clean"]["correct"]


def test_nan_outputs_and_missing_classes_are_reported():
    class Broken(Brightness):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float("nan")

    with pytest.raises(UserError, match="NaN"):
        vitadel.audit(Broken().eval(), limit=10)

    class Three(Brightness):
        num_classes = 3

    with pytest.raises(UserError, match=r"label 3 is outside 0\.\.2"):
        vitadel.audit(Three().eval(), limit=10)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"attacks": ("fgsm", "fgsm")}, "listed twice"),
        ({"batch_size": 0}, "at least 1"),
        ({"precision": "int8"}, "fp32, bf16, fp16"),
        ({"eps": 8.0}, "8/255"),
        ({"eps": 1.0}, "1/255"),
        ({"norm": "l3"}, "linf, l2, l1"),
        ({"attacks": ("pgd-0",)}, "at least 1 step"),
    ],
)
def test_senseless_requests_are_reported_before_anything_is_loaded(fault, said):
    with pytest.raises(UserError, match=said):
        AuditRequest(**fault)


def test_half_precision_is_used_and_recorded():
    model, seen = TinyNet(10).eval(), set()
    model.features[0].register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    results = vitadel.audit(model, Shapes("test", size=8), attacks="fgsm", limit=20, precision="bf16")
    assert results["precision"] == "bf16"
    assert torch.bfloat16 in seen


def save_pictures(folder, count):
    from PIL import Image

    for number in range(count):
        (folder / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (30 * number, 90, 200)).save(folder / f"class{number % 2}" / f"{number}.png")


class Two(Brightness):
    num_classes = 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :2]


def test_what_cannot_be_used_is_left_out_and_counted(tmp_path):
    save_pictures(tmp_path / "photos", 8)
    (tmp_path / "photos" / "class0" / "0.png").write_bytes(b"not a picture")
    with pytest.raises(UserError, match=r"0\.png"):
        vitadel.audit(Two().eval(), f"folder:{tmp_path}/photos", attacks="fgsm")
    results = vitadel.audit(Two().eval(), f"folder:{tmp_path}/photos", attacks="fgsm", skip_bad=True)
    assert (results["data"]["n"], results["data"]["left_out"]) == (7, 1)

    class One(Shapes):
        pass

    labels = One("test", size=8).labels()
    labels[:3] = 77
    source = One("test", size=8)
    object.__setattr__(source, "labels", lambda: labels)
    counted = vitadel.audit(Brightness().eval(), source, attacks="fgsm", limit=20, skip_bad=True)
    assert (counted["data"]["n"], counted["data"]["left_out"]) == (20, 3)


def test_an_image_lost_between_two_stages_is_reported_and_not_counted_as_robust(tmp_path, monkeypatch):
    from vitadel.evaluation.audit import audit as audit_module
    from vitadel.evaluation.engine import verdicts as module

    save_pictures(tmp_path / "photos", 6)
    clean_stage = module.clean_stage

    def then_lose_them_all(context, indices, stage):
        pieces = clean_stage(context, indices, stage)
        for file in (tmp_path / "photos").rglob("*.png"):
            file.write_bytes(b"gone")
        return pieces

    monkeypatch.setattr(module, "clean_stage", then_lose_them_all)
    monkeypatch.setattr(audit_module, "findings_about_outputs", lambda context, indices: [])
    with pytest.raises(UserError, match="cannot be read now"):
        vitadel.audit(Two().eval(), f"folder:{tmp_path}/photos", attacks="fgsm", skip_bad=True)


def test_fewer_outputs_than_labels_are_reported():
    class Five(Brightness):
        num_classes = None

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, :5]

    with pytest.raises(UserError, match="5 outputs, but the data has label"):
        vitadel.audit(Five().eval(), limit=20)


def test_a_damaged_piece_is_work_not_done(tmp_path):
    from vitadel.runtime.run_folder import FolderCache, RunFolder

    cache = FolderCache(RunFolder(tmp_path))
    cache.save("clean", 0, {"index": torch.arange(3).numpy()})
    assert cache.find("clean", 0)["index"].tolist() == [0, 1, 2]
    path = RunFolder(tmp_path).batch_file("clean", 0)
    path.write_bytes(path.read_bytes()[:40])
    assert cache.find("clean", 0) is None
    assert cache.find("clean", 1) is None


@pytest.mark.slow
def test_an_attack_by_rules_of_its_own_sees_all_and_stays_out_of_the_worst_case(tmp_path):
    names = ["fgsm", "patches-random(share=0.3,masks=2)"]
    results = vitadel.audit("zoo:shapes-robust", attacks=names, limit=30, eps="8/255", out=tmp_path / "run")
    ball, patches = results["attacks"]
    assert patches["own_rules"]
    assert patches["attacked"] == results["clean"]["correct"] > ball["held"]
    assert "no part of the worst case" in patches["counts"]
    assert results["worst_case"]["held"] == ball["held"]
    assert patches["void"] == 0  # judged by the number of patches: in Linf it would all be void
    assert patches["held"] < patches["attacked"]
    alone = vitadel.audit("zoo:shapes-robust", attacks=names[1:], limit=30)
    assert alone["worst_case"] is None


class Hopeless(nn.Module):
    """Never right on shapes (labels below 10), and unable to take no image at all, as XCiT is."""

    def forward(self, x: Tensor) -> Tensor:
        assert len(x), "no image"
        return torch.cat((torch.zeros(len(x), 10), x.mean((1, 2, 3))[:, None] + 1), 1)


def test_where_nothing_stands_no_model_is_asked(tmp_path):
    results = vitadel.audit(Hopeless(), "shapes", attacks=["pgd-2", "autoattack(steps=2,queries=4)"], limit=6)
    assert [entry["n"] for entry in results["attacks"]] == [6, 6]
    assert results["worst_case"]["held"] == 0
    assert all(entry["gradient_calls"] == entry["forward_calls"] == 0 for entry in results["attacks"])
