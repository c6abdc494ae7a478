"""The guard against catastrophic overfitting, with a model that withstands FGSM and not PGD."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from training_toys import FakeTraining

from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.attacks import Linf
from vitadel.backbones.load import load_model
from vitadel.errors import UserError
from vitadel.training.interfaces import AfterEpoch, Stateful
from vitadel.training.plugins import overfitting_guard
from vitadel.training.plugins.overfitting_guard import OverfittingGuard

EPS = 8 / 255


class Wavy(nn.Module):
    """How far gray images are brightened decides: the wrong class leads by wave * sin(pi * d / eps) + slope * d / eps
    - 0.5. A wave of 1 is wrong half way to the ball's surface, and right again on it, where FGSM lands."""

    def __init__(self) -> None:
        super().__init__()
        self.wave, self.slope = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        self.register_buffer("epochs_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        way = (x.mean((1, 2, 3)) - 0.5) / EPS
        lead = self.wave * torch.sin(math.pi * way) + self.slope * way - 0.5
        return torch.stack([torch.zeros_like(lead), lead], 1)

    def become(self, wave: float = 0.0, slope: float = 0.0) -> None:
        with torch.no_grad():
            self.wave.fill_(wave)
            self.slope.fill_(slope)
            self.epochs_seen += 1


HEALTHY, OVERFITTED, BEATEN = {}, {"wave": 1.0}, {"slope": 2.0}


def guarded(action: str = "warn", **settings: float) -> tuple[OverfittingGuard, FakeTraining, Wavy]:
    model = Wavy().train()
    gray = (torch.full((6, 3, 4, 4), 0.5), torch.zeros(6, dtype=torch.int64))
    return OverfittingGuard(action, **settings), FakeTraining(model, [gray, gray], Linf(EPS)), model


def epochs(guard: OverfittingGuard, run: FakeTraining, *states: dict[str, float]) -> None:
    for state in states:
        run.model.become(**state)
        guard.after_epoch(run)
        run.epoch += 1


@pytest.mark.parametrize(("state", "left"), [(HEALTHY, (1, 1)), (OVERFITTED, (1, 0)), (BEATEN, (0, 0))])
def test_both_accuracies_are_measured(state, left):
    guard, run, model = guarded(images=12)
    assert isinstance(guard, AfterEpoch)
    assert isinstance(guard, Stateful)
    epochs(guard, run, state)
    assert {name: run.logged[name] for name in ("fgsm_accuracy", "pgd_accuracy")} == {
        "fgsm_accuracy": left[0],
        "pgd_accuracy": left[1],
    }
    assert run.asked == [12, 12, 12]
    assert model.training
    assert model.wave.requires_grad


def test_a_gap_is_reported_and_training_goes_on():
    guard, run, _ = guarded()
    epochs(guard, run, HEALTHY, OVERFITTED)
    assert run.reported == [
        "catastrophic overfitting in epoch 2: held-out accuracy is 100% under FGSM and 0% under PGD-10"
    ]
    assert not run.stopped


def test_a_fall_counts_only_against_the_epoch_before():
    guard, run, _ = guarded()
    epochs(guard, run, BEATEN, BEATEN)
    assert run.reported == []
    epochs(guard, run, HEALTHY, BEATEN, BEATEN)
    assert run.reported == [
        "catastrophic overfitting in epoch 4: held-out accuracy under PGD-10 is 0%, after 100% an epoch ago"
    ]


def test_new_attention_factors_are_no_fall():
    """AAS-AT changes the model between two epochs: what it does to the accuracy is not overfitting."""
    guard, run, model = guarded("stop")
    model.register_buffer("attention_factors", torch.ones(2))
    epochs(guard, run, HEALTHY)
    model.attention_factors.fill_(0.5)
    resumed = OverfittingGuard("stop")
    resumed.load({name: each.clone() for name, each in guard.state().items()})
    epochs(resumed, run, BEATEN)
    assert not run.stopped
    epochs(resumed, run, HEALTHY, BEATEN)  # with the factors of the epoch before
    assert run.stopped.startswith("catastrophic overfitting in epoch 4")


def test_the_gain_of_a_step_is_measured():
    """A slope delivers all it promises, the wave nothing after a step of eps; without slope there is no promise."""
    guard, run, _ = guarded(gap=1.0, fall=1.0)
    epochs(guard, run, HEALTHY)
    assert "step_gain" not in run.logged
    epochs(guard, run, {"slope": 0.25})
    assert run.logged["step_gain"] == pytest.approx(1, abs=1e-3)
    assert run.reported == []
    epochs(guard, run, OVERFITTED)
    assert run.logged["step_gain"] == pytest.approx(0, abs=1e-3)
    assert run.reported[0].startswith("catastrophic overfitting in epoch 3: a step of length eps delivers")


def test_limits_are_settings():
    guard, run, _ = guarded(gap=1.0, fall=1.0, least_gain=-1.0)
    epochs(guard, run, HEALTHY, OVERFITTED)
    assert run.reported == []


def test_stop():
    guard, run, model = guarded("stop")
    epochs(guard, run, HEALTHY)
    assert not run.stopped
    epochs(guard, run, OVERFITTED)
    assert run.stopped == run.reported[0]
    assert model.wave.item() == 1


def test_rollback_puts_the_last_good_epoch_back():
    guard, run, model = guarded("rollback")
    epochs(guard, run, HEALTHY, {"slope": 0.125}, OVERFITTED)
    assert (model.wave.item(), model.slope.item(), int(model.epochs_seen)) == (0, 0.125, 2)
    assert run.back_to == 1
    assert run.stopped.endswith("the weights of the last epoch without alarm are restored")


def test_rollback_without_a_good_epoch_says_so():
    guard, run, model = guarded("rollback")
    epochs(guard, run, OVERFITTED)
    assert model.wave.item() == 1
    assert "no epoch without alarm" in run.stopped


def test_rollback_puts_secret_tokens_back(monkeypatch):
    kwargs = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    model = TokenClassifier(
        load_model("vit_tiny_patch16_224", weights="random", num_classes=2, kwargs=kwargs), fresh_tokens(16, 3)
    )
    good, guard, run = model.tokens.detach().clone(), OverfittingGuard("rollback"), FakeTraining(model)
    left = iter([0.5, 0.5, 0.9, 0.1])  # FGSM and PGD after two epochs, the second overfitted
    monkeypatch.setattr(OverfittingGuard, "_accuracy", lambda *_: next(left))
    monkeypatch.setattr(overfitting_guard, "_step_gain", lambda *_: 1.0)
    guard.after_epoch(run)
    assert [name for name in guard.state() if "classifier.backbone" in name] == []  # frozen: nothing to put back
    resumed = OverfittingGuard("rollback")
    resumed.load(guard.state())
    with torch.no_grad():
        model.tokens.add_(1.0)
    resumed.after_epoch(run)
    assert torch.equal(model.tokens, good)
    assert run.stopped.endswith("are restored")


@pytest.mark.parametrize("action", ["stop", "rollback"])
def test_a_resumed_guard_remembers(action):
    guard, run, model = guarded(action)
    empty = OverfittingGuard(action)
    empty.load(guard.state())
    assert empty.state() == {}
    epochs(guard, run, {"slope": 0.125})
    resumed = OverfittingGuard(action)
    resumed.load({name: each.clone() for name, each in guard.state().items()})
    epochs(resumed, run, BEATEN)
    assert run.stopped
    assert model.slope.item() == (0.125 if action == "rollback" else 2)


def test_it_waits_for_its_epoch():
    guard, run, _ = guarded("stop", from_epoch=2)
    epochs(guard, run, OVERFITTED, OVERFITTED)
    assert (run.stopped, run.asked) == ("", [])
    epochs(guard, run, OVERFITTED)
    assert run.stopped


def test_settings_and_missing_images():
    with pytest.raises(UserError, match=r"'halt'.*warn, stop, rollback"):
        OverfittingGuard("halt")
    with pytest.raises(UserError, match="got 0 and 10"):
        OverfittingGuard(images=0)
    guard, run, _ = guarded()
    run.batches.clear()
    with pytest.raises(UserError, match="held_out"):
        guard.after_epoch(run)
