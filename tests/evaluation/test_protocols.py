"""A protocol's name is borne only by runs that agree with it in everything; all that differs is reported at once."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from vitadel.attacks.parse import make
from vitadel.backbones.classifier import Classifier, wrap
from vitadel.data.sources.shapes import SPLITS
from vitadel.errors import UserError
from vitadel.evaluation.audit import protocols
from vitadel.evaluation.audit.audit import AuditRequest, audit
from vitadel.evaluation.audit.protocols import (
    Protocol,
    compare_with_protocols,
    differences,
    list_digest,
    settings,
)
from vitadel.evaluation.engine.target import Target

PROTOCOLS = protocols.protocols()


@dataclass(frozen=True)
class Blank:
    """Images without content: protocols look at names, numbers and sizes only."""

    n: int
    side: int = 32
    classes: tuple[str, ...] = tuple("abcdefghij")

    def __len__(self) -> int:
        return self.n

    def labels(self) -> Tensor:
        return torch.arange(self.n) % 10

    def read(self, indices):
        return [Image.new("RGB", (self.side, self.side)) for _ in indices]

    def name(self, index: int) -> str:
        return f"n{index % 10:08d}/{index}.JPEG"


def subject_of(data: str = "cifar10", n: int = 10_000, side: int = 32, crop_pct: float = 0.875) -> Target:
    model = wrap(nn.Sequential(nn.Flatten(), nn.LazyLinear(10)), crop_pct=crop_pct)
    return Target(model, "toy", Blank(n, side), data)


def request_of(name: str, **changes) -> AuditRequest:
    asked = settings(name)
    asked["attacks"] = PROTOCOLS[name].attacks
    asked["eps"] = make("fgsm", eps=asked["eps"], norm=asked["norm"]).threat.eps
    return AuditRequest(**{**asked, **changes})


def reported(request: AuditRequest, target: Target) -> dict:
    return compare_with_protocols(request, target, torch.arange(len(target.source)))


def refusal(request: AuditRequest, target: Target) -> str:
    with pytest.raises(UserError, match="does not follow the protocol") as caught:
        reported(request, target)
    return str(caught.value)


def test_the_facts_of_the_leaderboards():
    known = {name: (p.norm, p.eps, p.attacks, p.images, p.data) for name, p in PROTOCOLS.items()}
    attacks = ("autoattack",)
    assert known["robustbench-cifar10"] == ("linf", "8/255", attacks, 10_000, ("cifar10",))
    assert known["robustbench-cifar10-l2"] == ("l2", "0.5", attacks, 10_000, ("cifar10",))
    assert known["robustbench-cifar100"] == ("linf", "8/255", attacks, 10_000, ("cifar100",))
    assert known["robustbench-imagenet"] == ("linf", "4/255", attacks, 5_000, ("imagenet",))
    assert known["unseen-l2"] == ("l2", "2", attacks, 5_000, ("imagenet",))
    assert known["unseen-l1"] == ("l1", "75", attacks, 5_000, ("imagenet",))
    assert known["unseen-union"] == ("linf,l2,l1", "4/255,2,75", attacks, 5_000, ("imagenet",))
    assert known["rvt"] == ("linf", "1/255", ("fgsm", "pgd-5(step=0.5/255)"), 50_000, ("imagenet",))


@pytest.mark.parametrize("name", [name for name, each in PROTOCOLS.items() if each.image_list is None])
def test_a_run_by_the_book_bears_the_name(name):
    protocol = PROTOCOLS[name]
    data = "imagenet:somewhere" if "imagenet" in protocol.data else protocol.data[0]
    target = subject_of(data, protocol.images, protocol.pixels or 64)
    found = reported(request_of(name), target)
    assert (found["name"], found["comparable_with"]) == (name, protocol.comparable_with)
    assert found["differences"] == {}
    unasked = reported(request_of(name, protocol=None), target)
    assert unasked["name"] == name  # anyone who does everything right need not know that there is a name


def test_the_same_attack_by_another_name_is_the_same():
    target = subject_of()
    assert (
        reported(request_of("robustbench-cifar10", attacks=("autoattack-100(targets=9)",)), target)["differences"] == {}
    )
    assert "attacks" in refusal(request_of("robustbench-cifar10", attacks=("autoattack-50",)), target)


def test_all_differences_are_reported_at_once():
    request = request_of(
        "robustbench-cifar10", eps=4 / 255, attacks=("pgd-20", "fgsm"), precision="bf16", skip_bad=True, norm="l2"
    )
    message = refusal(request, subject_of("shapes", 100, side=64))
    assert "data: shapes instead of cifar10" in message
    assert "norm: l2 instead of linf" in message
    assert "eps: 4/255 instead of 8/255" in message
    assert "attacks: pgd-20, fgsm instead of autoattack" in message
    assert "images: 100 instead of 10,000" in message
    assert "size of attacked images: 64 x 64 instead of 32 x 32" in message
    assert "precision: bf16 instead of fp32" in message
    assert "unreadable images: left out" in message
    assert "leave out --protocol" in message


def test_training_images_and_nameless_data_are_other_data():
    assert "data: cifar10@train" in refusal(request_of("robustbench-cifar10"), subject_of("cifar10@train"))
    assert reported(request_of("robustbench-cifar10"), subject_of("cifar10@test"))["name"]
    nameless = replace(subject_of(), given_as_object=True)
    assert "data: cifar10 instead of cifar10" in refusal(request_of("robustbench-cifar10"), nameless)


def test_a_part_of_a_larger_set_is_not_a_split_of_its_own():
    training = subject_of("imagenet:somewhere/train", 60_000, side=224)
    with pytest.raises(UserError, match="images: 50,000 of 60,000 instead of a whole split of 50,000") as caught:
        compare_with_protocols(request_of("rvt"), training, torch.arange(50_000))
    assert str(caught.value).count(" instead of ") == 1
    unasked = compare_with_protocols(request_of("rvt", protocol=None), training, torch.arange(50_000))
    assert (unasked["name"], unasked["nearest"], [*unasked["differences"]]) == (None, "rvt", ["images"])


def test_attacks_in_a_row_are_not_attacks_alone():
    message = refusal(request_of("rvt", independent=False), subject_of("imagenet:x", 50_000, side=224))
    assert "counting: attacks one after the other instead of each alone" in message
    assert message.count(" instead of ") == 1
    assert "counting" not in differences(
        PROTOCOLS["robustbench-cifar10"],
        request_of("robustbench-cifar10", independent=True),
        subject_of(),
        torch.arange(10_000),
    )  # of a single attack both are the same


def test_an_attack_that_a_protocol_rules_out_is_a_difference_and_no_fault():
    request = AuditRequest(
        attacks=("features-30(paper=true)",)
    )  # cannot be built in the norm of robustbench-cifar10-l2
    found = reported(request, subject_of())
    assert found["name"] is None
    assert found["differences"]["attacks"].startswith("features-30(paper=true) instead of ")
    wanted = PROTOCOLS["robustbench-cifar10-l2"]
    assert "attacks" in differences(wanted, request, subject_of(), torch.arange(10_000))


def test_weights_in_half_precision_are_another_precision():
    target = subject_of()
    target.model.to(torch.bfloat16)
    message = refusal(request_of("robustbench-cifar10"), target)
    assert "precision of weights: bfloat16 instead of float32" in message
    assert message.count(" instead of ") == 1


def test_rvt_is_at_224_pixels():
    message = refusal(request_of("rvt"), subject_of("imagenet:x", 50_000, side=384))
    assert "size of attacked images: 384 x 384 instead of 224 x 224" in message
    assert message.count(" instead of ") == 1


@pytest.mark.parametrize(
    ("changes", "own"),
    [
        ({"crop_pct": 0.9}, "shorter side to 248 pixels (bicubic)"),
        ({"interpolation": "bilinear"}, "shorter side to 256 pixels (bilinear)"),
        ({"crop_mode": "squash"}, "squashed to 256 x 256 pixels (bicubic)"),
    ],
)
def test_rvt_is_at_the_crop_of_its_paper(changes, own):
    target = subject_of("imagenet:x", 50_000, side=224)
    other = Classifier(target.model.backbone, replace(target.model.record, **changes))
    target = replace(target, model=other)
    message = refusal(request_of("rvt"), target)
    wanted = "shorter side to 256 pixels (bicubic), then the central 224 x 224"
    assert f"preprocessing: {own}, then the central 224 x 224 instead of {wanted}" in message
    assert message.count(" instead of ") == 1
    board = replace(PROTOCOLS["robustbench-imagenet"], image_list=None, images=50_000)
    found = differences(board, request_of("robustbench-imagenet"), target, torch.arange(50_000))
    assert found == {}  # there every model has its own way


def test_what_a_protocol_asks_of_opening_a_model():
    assert PROTOCOLS["rvt"].model_options == {"crop_pct": 0.875, "interpolation": "bicubic"}
    assert PROTOCOLS["robustbench-cifar10"].model_options == {}


def test_studies_on_other_images_are_other_attacks():
    message = refusal(request_of("paper-aas", calibration="svhn"), subject_of())
    assert "calibration: svhn instead of the training split" in message
    assert message.count(" instead of ") == 1
    idle = request_of("robustbench-cifar10", calibration="svhn")  # AutoAttack studies nothing
    assert reported(idle, subject_of())["name"] == "robustbench-cifar10"


def test_five_thousand_images_are_not_yet_those_of_the_list(monkeypatch):
    target = subject_of("imagenet:x", 5_000)
    message = refusal(request_of("robustbench-imagenet"), target)
    assert "images: other 5,000 images than those of imagenet:DIR(list=FILE)" in message
    names = [target.source.name(index) for index in range(5_000)]
    right = replace(PROTOCOLS["robustbench-imagenet"], image_list=list_digest(reversed(names)))
    monkeypatch.setattr(protocols, "protocols", lambda: {right.name: right})
    assert reported(request_of("robustbench-imagenet"), target)["name"] == "robustbench-imagenet"


def test_lists_are_named_by_their_images_alone():
    one = list_digest(["a/1.JPEG", "b/2.JPEG"])
    assert one == list_digest(["b/2.png", "a/1.JPEG", "a/1.JPEG"])
    assert one != list_digest(["a/1.JPEG", "b/3.JPEG"])
    assert one == hashlib.sha256(b"a/1\nb/2").hexdigest()


def test_a_run_without_a_name_hears_how_far_off_it_is():
    found = reported(AuditRequest(attacks=("autoattack",), eps=0.4, norm="l2"), subject_of())
    assert (found["name"], found["comparable_with"]) == (None, None)
    assert found["nearest"] == "robustbench-cifar10-l2"
    assert found["differences"] == {"eps": "0.4 instead of 0.5"}
    assert reported(AuditRequest(), subject_of("folder:x", 20))["nearest"] is None


def test_unknown_names_are_reported_with_the_known_ones():
    with pytest.raises(UserError, match="did you mean robustbench-cifar10") as caught:
        AuditRequest(protocol="robustbench-cifar-10")
    assert "paper-aas" in str(caught.value)


@pytest.mark.slow
def test_audits_write_it_down_and_refuse_before_they_run(monkeypatch, tmp_path):
    tiny = Protocol("tiny", "nobody", "no paper", ("shapes",), 20, "8/255", ("fgsm",))
    monkeypatch.setattr(protocols, "protocols", lambda: {"tiny": tiny})
    monkeypatch.setitem(SPLITS, "test", 20)
    done = audit(out=tmp_path / "run", **settings("tiny"))
    assert done["protocol"]["comparable_with"] == "nobody"
    assert json.loads((tmp_path / "run" / "results.json").read_text())["protocol"]["name"] == "tiny"
    with pytest.raises(UserError, match="images: 10 instead of 20"):
        audit(limit=10, out=tmp_path / "other", **settings("tiny"))
    assert not (tmp_path / "other").exists()
    off = audit(attacks="fgsm", eps="4/255")["protocol"]
    assert off["differences"] == {"eps": "4/255 instead of 8/255"}


def test_the_list_of_protocols_needs_no_torch():
    code = "import sys, vitadel.evaluation.audit.protocols; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
