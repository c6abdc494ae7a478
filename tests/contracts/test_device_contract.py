"""Everything that computes runs on a device as on the CPU: nothing left behind, few waits, the same numbers.

The device is a double (tests/device_double.py): no GPU is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from test_attack_contract import BUDGETS, EVERY_GEOMETRY, SHORT, SHORTER, images_for, model_for
from test_study_contract import SHORT_PROBES, SMALL
from torch import Tensor
from torch.nn import Module
from torch.nn.attention import SDPBackend, sdpa_kernel

import vitadel
from device_double import DeviceDouble
from small_probes import linear, masks
from small_recipes import recipe
from toras import classifier_of
from toys import images
from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.attacks.parse import make
from vitadel.cli.study import STUDIES
from vitadel.data import batches
from vitadel.diagnosis.run import DiagnosisRequest, run_diagnosis
from vitadel.errors import UserError
from vitadel.evaluation.audit import audit
from vitadel.evaluation.audit.audit import AuditRequest, run_audit
from vitadel.evaluation.corruptions.request import CorruptionRequest
from vitadel.evaluation.corruptions.run import run_corruptions
from vitadel.evaluation.engine import cost
from vitadel.evaluation.engine.run import Outcome
from vitadel.evaluation.engine.target import Target, open_target
from vitadel.evaluation.stability.run import StabilityRequest, run_stability
from vitadel.heads.probe import run_probe
from vitadel.heads.probe_recipe import build_probe
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.studies import find_study
from vitadel.threat_levels.request import ThreatLevelsRequest
from vitadel.threat_levels.run import run_threat_levels
from vitadel.training.recipes.instantiate import component_names
from vitadel.training.run import run_harden
from vitadel.types import Calibrated

CPU = torch.device("cpu")
COUNT = 4
MOST_WAITS, MOST_WAITS_L1 = 8, 34
"""In a forward pass, with its gradient, beside 12 at the start; PGD and APGD have a bound of their own (test_waits)."""
CHANGING = ("seconds", "seconds_likely", "seconds_at_most", "hours", "fingerprint", "notes", "spec")


@pytest.fixture(autouse=True)
def plain_attention(monkeypatch):
    """The double has no fused attention, so the CPU takes the plain one, too; no processes for a handful of images."""
    monkeypatch.setattr("vitadel.data.worker_processes.usual_workers", lambda processes: 0)
    with sdpa_kernel(SDPBackend.MATH):
        yield


def crafted(name: str, norm: str, device: torch.device, double: DeviceDouble | None = None) -> Tensor:
    """What the attack finds; on the double, waits for it are within the stated bound."""
    model, x = model_for(name), images_for(name, "", COUNT)
    with torch.no_grad():
        y = model(x).argmax(1)
    y[0] = (y[0] + 1) % 3  # one label is wrong from the start
    model, x, y = model.to(device), x.to(device), y.to(device)
    attack = make(name, eps=BUDGETS[norm], norm=norm)
    if isinstance(attack, Calibrated):
        given = images(8, seed=9, side=x.shape[-1]).to(device), (torch.arange(8) % 2).to(device)
        attack = attack.prepared(model, [given])
    passes: list[Module] = []
    model.register_forward_pre_hook(lambda module, _: passes.append(module))
    rng = SampleRNG.of_samples(0, range(COUNT), device)
    before = 0 if double is None else double.waits.total()
    z = attack(model, x, y, rng)
    if double is not None:
        assert double.waits.total() - before <= 12 + len(passes) * (MOST_WAITS_L1 if norm == "l1" else MOST_WAITS)
    return z


@pytest.mark.slow
@pytest.mark.parametrize(("name", "norm"), EVERY_GEOMETRY)
def test_attacks(name, norm):
    name = SHORTER.get(name, name)
    expected = crafted(name, norm, CPU)
    with DeviceDouble() as double:
        found = crafted(name, norm, double.device, double)
        assert found.device == double.device
        assert torch.equal(found.cpu(), expected)


def small_target() -> Target:
    model = vitadel.wrap(model_for("aas+pgd-2"))
    x = images(60, side=32)
    x = (x * 255).round() / 255
    with torch.no_grad():
        y = model(x).argmax(1)
    return open_target(model, (x.numpy(), y.numpy()))


def audited(processes: Processes, out: Path) -> Outcome:
    request = AuditRequest(attacks=("fgsm", "pgd-3", "square(queries=5)"), limit=12, batch_size=5)
    return run_audit(small_target(), request, processes, out=out)


def staged(processes: Processes, out: Path) -> Outcome:
    request = AuditRequest(
        attacks=(SHORTER[SHORT["autoattack-fast"]], "aas(images=4,steps=1)+pgd-2"), limit=8, batch_size=4
    )
    return run_audit(small_target(), request, processes, out=out)


def corrupted(processes: Processes, out: Path) -> Outcome:
    request = CorruptionRequest(severities=(3,), perturbations=("gaussian_noise",), limit=4, batch_size=2)
    return run_corruptions(small_target(), request, processes, out=out)


def stable(processes: Processes, out: Path) -> Outcome:
    request = StabilityRequest(masks=2, watched=1, training_steps=2, attacks=("fgsm", "patch-fool-2"), limit=4)
    return run_stability(small_target(), request, processes, out=out)


def leveled(processes: Processes, out: Path) -> Outcome:
    model = TokenClassifier(classifier_of(), fresh_tokens(24, 2, seed=11)).eval()
    x = images(40, side=32)
    target = open_target(model, (x.numpy(), model(x).argmax(1).numpy()))
    request = ThreatLevelsRequest(
        eps=(4 / 255,), levels=("T0", "T2", "T6"), steps=2, queries=5, white_box=("pgd-2",), limit=3, batch_size=3
    )
    return run_threat_levels(target, request, processes, out=out)


def diagnosed(processes: Processes, out: Path) -> Outcome:
    request = DiagnosisRequest(limit=16, batch_size=16)
    return run_diagnosis(small_target(), request, processes, out=out)


def studied(name: str) -> Callable[[Processes, Path], Outcome]:
    def run(processes: Processes, out: Path) -> Outcome:
        make_request, study = find_study(name)
        request = make_request(limit=2, batch_size=2, **SMALL.get(name, {}))
        with SHORT_PROBES:
            return study(small_target(), request, processes, out=out, argv=["study", name])

    return run


def trained(**changes: Any) -> Callable[[Processes, Path], Outcome]:
    sizes = {
        "data": {"limit": 16, "held_out": 10, "test": None},
        "train": {"epochs": 1, "batch_size": 8, "amp_dtype": "fp32"},  # the double has no autocast
        "optimizer": {"fused": False},  # and no fused kernels
        "validation": {"limit": 10},
    }

    def run(processes: Processes, out: Path) -> Outcome:
        mixed = {key: {**sizes.get(key, {}), **changes.get(key, {})} for key in {*sizes, *changes}}
        return run_harden(recipe(**mixed), "small", processes, out=out)

    return run


def probed(document: dict[str, Any]) -> Callable[[Processes, Path], Outcome]:
    return lambda processes, out: run_probe(build_probe(document, "toy"), "toy", processes, out=out)


ATTACK = "pgd-1(step=5/255)"
OBJECTIVES = {
    "adversarial": trained(objective={"use": "adversarial", "attack": ATTACK}),
    "afat": trained(objective={"use": "afat"}),
    "mart": trained(objective={"use": "mart", "attack": ATTACK}),
    "mimir": trained(
        model={"kwargs": {"patch_size": 4, "embed_dim": 32, "global_pool": "avg"}},
        objective={"use": "mimir", "attack": "pgd-1(step=10/255)"},
        adapter={"use": "masked_autoencoder", "width": 32, "heads": 2, "depth": 1},
    ),
    "robustness_tokens": trained(
        objective={"use": "robustness_tokens", "attack": "features-2"}, adapter={"use": "tokens", "count": 2, "seed": 7}
    ),
    "standard": trained(objective={"use": "standard"}, augmentation={"mixup": 0.8}),
    "tora": trained(objective={"use": "tora", "attack": ATTACK}, adapter={"use": "tora", "reduction": 8}),
    "trades": trained(objective={"use": "trades", "attack": "kl-1(step=5/255)"}),
}
PLUGINS = {
    "attention_scaling": {"gap": 1, "images": 8, "steps": 1},
    "awp": {},
    "epsilon_warmup": {"epochs": 1},
    "overfitting_guard": {},
    "patch_augmentation": {},
    "random_dropping": {},
    "weight_average": {},
}
SEARCHED = "plug-in attention_scaling"
"""Trained for two epochs, because its first search is before the second."""
RUNS = {
    "audit": audited,
    "audit in stages": staged,
    "corruptions": corrupted,
    "stability": stable,
    "threat levels": leveled,
    "diagnosis": diagnosed,
    **{f"study {name}": studied(name) for name in sorted(STUDIES)},
    **{f"objective {name}": run for name, run in OBJECTIVES.items()},
    **{f"plug-in {name}": trained(plugins={name: settings}) for name, settings in PLUGINS.items()},
    SEARCHED: trained(plugins={"attention_scaling": PLUGINS["attention_scaling"]}, train={"epochs": 2}),
    "head linear": probed(linear()),
    "head segmentation": probed(masks()),
}


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Where two results differ, down to the last bit; times, salted fingerprints and the folder's path may."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            if not key.endswith(CHANGING):
                yield from differences(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for place, (mine, yours) in enumerate(zip(one, other, strict=True)):
            yield from differences(mine, yours, f"{where}[{place}]")
    elif one != other:
        yield f"{where}: {one} and {other}"


def kept_record(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        return json.loads((file.metadata() or {}).get("vitadel", "{}"))  # files of adapters have none


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_runs(name, tmp_path):
    # The double has no fused attention, whose rounding a search for factors and later steps would carry on.
    with sdpa_kernel(SDPBackend.MATH) if name == SEARCHED else nullcontext():
        expected = RUNS[name](Processes(0, 1, CPU), tmp_path / "cpu").results
        with DeviceDouble() as double:
            found = RUNS[name](Processes(0, 1, double.device), tmp_path / "device").results
    if name == "diagnosis":  # its evidence has times
        found, expected = ({each["check"]: each["verdict"] for each in run["findings"]} for run in (found, expected))
    assert list(differences(found, expected)) == []
    assert double.copies
    one, other = (tmp_path / each / "weights" / "last.safetensors" for each in ("cpu", "device"))
    assert one.exists() == name.startswith(("objective", "plug-in"))
    if one.exists():
        here, there = load_file(one), load_file(other)
        assert here.keys() == there.keys()
        rounding = 1e-7 if name == SEARCHED else 0.0  # of the backward pass through attention, over more steps
        assert all(torch.allclose(here[key], there[key], rtol=0, atol=rounding) for key in here)
        assert kept_record(one) == kept_record(other)  # with the factors
        assert name != SEARCHED or kept_record(one)["attention_factors"] != [1.0, 1.0]


@pytest.mark.slow
def test_an_audit_copies_its_images_as_bytes_and_nothing_else_of_their_size(tmp_path, monkeypatch):
    """Beside the model and a few numbers for each image, also for the checks, the likely time and the examples."""
    monkeypatch.setattr(cost, "SHORT", 0.0)  # the likely time is estimated, which a fast machine leaves out
    monkeypatch.setattr(audit, "SHORT", 0.0)
    sent, copied = [], batches.copied_to

    def counted(device: torch.device, *tensors: Tensor) -> list[Tensor]:
        sent.append([each.nbytes for each in tensors])
        return copied(device, *tensors)

    monkeypatch.setattr(batches, "copied_to", counted)
    model = vitadel.wrap(model_for("aas+pgd-2"))
    x = (images(60, side=32) * 255).round().to(torch.uint8)
    with torch.no_grad():
        y = model(x / 255).argmax(1)
    target = open_target(model, (x.numpy(), y.numpy()))
    request = AuditRequest(attacks=("fgsm", "pgd-3"), limit=12, batch_size=5)
    with DeviceDouble() as double:
        run_audit(target, request, Processes(0, 1, double.device), out=tmp_path / "run", show_progress=True)
    assert sum(labels for _, labels in sent) >= 8 * 3 * 12  # clean images, and for two attacks
    assert all(pixels == labels // 8 * 3 * 32 * 32 for pixels, labels in sent)
    weights = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    assert sum(double.copies) - sum(map(sum, sent)) - weights < 3 * 32 * 32 * 4  # less than one image as floats


WITHOUT_FLOAT64 = ["audit", "corruptions", "objective adversarial", "objective trades", "plug-in weight_average"]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_FLOAT64)
def test_runs_on_a_device_without_float64(name, tmp_path):
    """The model computes there, and distances are measured on the CPU: the same results."""
    expected = RUNS[name](Processes(0, 1, CPU), tmp_path / "cpu").results
    with DeviceDouble("mps", floats=32) as double:
        found = RUNS[name](Processes(0, 1, CPU, double.device), tmp_path / "device").results
    assert list(differences(found, expected)) == []
    assert double.copies


@pytest.mark.slow
@pytest.mark.parametrize("name", ["audit", "diagnosis", "objective adversarial"])
def test_runs_on_intel_s_gpus(name, tmp_path):
    """The path of CUDA under another name."""
    expected = RUNS[name](Processes(0, 1, CPU), tmp_path / "cpu").results
    with DeviceDouble("xpu") as double:
        found = RUNS[name](Processes(0, 1, double.device), tmp_path / "device").results
    if name == "diagnosis":
        found, expected = ({each["check"]: each["verdict"] for each in run["findings"]} for run in (found, expected))
    assert list(differences(found, expected)) == []
    assert double.copies


def test_what_looks_inside_a_model_on_a_device_without_float64_is_refused():
    with DeviceDouble("mps", floats=32) as double:
        model = Processes(0, 1, CPU, double.device).place(model_for("patch-fool-2"))
        x, y = images_for("patch-fool-2", "", 2), torch.tensor([0, 1])
        with pytest.raises(UserError, match=r"looks inside the model.*--device cpu"):
            make("patch-fool-2", eps=8 / 255)(model, x, y, SampleRNG.of_samples(0, range(2)))


def test_all_components_of_recipes_are_met():
    assert set(OBJECTIVES) == set(component_names("objective"))
    assert set(PLUGINS) == set(component_names("plug-in"))
    used = "".join(map(str, component_names("adapter")))
    assert used == "masked_autoencodertokenstorawhole_model"  # in the objectives that need them


def test_differences_are_found():
    one, other = {"a": [1, 0.5], "b": "x", "seconds": 1}, {"a": [1, 0.6], "b": "y", "seconds": 2}
    assert list(differences(one, other)) == [".a[1]: 0.5 and 0.6", ".b: x and y"]
    assert list(differences({"a": 1}, {"b": 1})) == [": {'a': 1} and {'b': 1}"]
