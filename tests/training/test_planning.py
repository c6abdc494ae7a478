"""What a plan counts: the images of the audit at the end, and what an adapter adds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from small_recipes import recipe
from vitadel.adapters.tokens.token_classifier import TokenClassifier
from vitadel.adapters.tora.tora_vit import BranchClassifier
from vitadel.attacks.parse import make
from vitadel.backbones.classifier import Classifier
from vitadel.data import open_dataset
from vitadel.evaluation.engine import cost as engine_cost
from vitadel.runtime.distributed import Processes
from vitadel.training import training_cost as cost
from vitadel.training.recipes.build import build_recipe
from vitadel.training.recipes.compose import compose
from vitadel.training.run import open_training
from vitadel.training.training_cost import plan_training

CPU = Processes(0, 1, torch.device("cpu"))


@pytest.fixture
def quick(monkeypatch):
    """Every piece of work takes a second: what is counted is the point here."""
    for module in (cost, engine_cost):
        monkeypatch.setattr(module, "seconds_of", lambda work, device: 1.0)


def audited(limit: int | None, test: str | None = "shapes(size=16)@test") -> float:
    setup = open_training(recipe(audit={"limit": limit}, data={"test": test}), CPU)
    (row,) = [row for row in plan_training(setup, CPU)["rows"] if row["name"].startswith("audit")]
    return row["images"]


def test_an_audit_without_a_limit_is_of_all_test_images(quick):
    assert audited(None) == len(open_dataset("shapes@test")) > 1000


@pytest.mark.slow
def test_an_audit_is_of_no_more_images_than_there_are(quick):
    assert audited(30) == 30
    assert audited(10**6) == len(open_dataset("shapes@test"))
    assert audited(None, None) == audited(30, None) == 0


def test_processes_share_the_audit(quick):
    setup = open_training(recipe(audit={"limit": None}), CPU)
    of_two = plan_training(setup, replace(CPU, count=2))["rows"][-1]["images"]
    assert of_two == len(open_dataset("shapes@test")) / 2


@pytest.mark.parametrize(("precision", "kinds"), [("fp32", {torch.float32}), ("bf16", {torch.bfloat16})])
def test_loss_and_attack_are_timed_in_the_precision_of_the_training(monkeypatch, precision, kinds):
    seen = []

    def once(work, device):
        met = set()
        with block.register_forward_hook(lambda _module, _args, out: met.add(out.dtype)):
            work()
        seen.append(met)
        return 1.0

    for module in (cost, engine_cost):
        monkeypatch.setattr(module, "seconds_of", once)
    setup = open_training(recipe(train={"amp_dtype": precision}), CPU)
    block = setup.model.backbone.blocks[0].mlp.fc1
    plan_training(setup, CPU)
    loss, update, attack, *validated = seen
    assert not update  # which takes no pass
    assert loss == attack == kinds
    assert validated == [{torch.float32}] * 2  # a gradient and a pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "row", "attacked"),
    [
        ("tokens/shapes", None, Classifier),  # without the tokens, as in training
        ("tokens/shapes-through", None, TokenClassifier),
        ("tora/shapes", "tora", BranchClassifier),
    ],
)
def test_recipes_with_adapters_are_planned_as_they_are_trained(monkeypatch, name, row, attacked):
    seen, works = [], []

    def once(work, device):
        work()
        works.append(work)
        return float(len(works))  # every piece of work takes a second more than the one before

    real = cost.run_inner_attack
    for module in (cost, engine_cost):
        monkeypatch.setattr(module, "seconds_of", once)
    monkeypatch.setattr(
        cost,
        "run_inner_attack",
        lambda attack, model, *rest, **more: (seen.append(model), real(attack, model, *rest, **more))[1],
    )
    attack = "objective.attack=features-2" if name.startswith("tokens") else "objective.attack=pgd-2"
    document = compose(name, row, ["train.batch_size=4", "data.limit=8", attack])
    setup = open_training(build_recipe(document, name), CPU)
    rows = {part["name"]: part["seconds"] / part["images"] for part in plan_training(setup, CPU)["rows"]}
    assert [type(model) for model in seen] == [attacked] * 3  # timed, and two sizes of batches for the memory
    learning, updating, attacking, gradient, forward = (second / 4 for second in (1, 2, 3, 4, 5))  # an image of four
    assert rows["loss and gradients"] == learning
    assert rows["update"] == updating
    assert rows["attacks"] == attacking
    if name.startswith("tokens"):  # validated by their own attack and measure, the sixth piece of work
        assert rows["validation, at most"] == pytest.approx(attacking + 6 / 4)
    else:
        gradients, forwards = make("pgd-10").passes()
        assert rows["validation, at most"] == pytest.approx(gradients * gradient + (forwards + 2) * forward)
