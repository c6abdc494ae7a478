"""Checks on models whose sickness is known, beside the same models in health."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from toys import TinyNet, images, trained_toy
from vitadel.diagnosis.checks import attention as attention
from vitadel.diagnosis.checks import gradients as gradients
from vitadel.diagnosis.checks import masking as masking
from vitadel.diagnosis.checks import pixels_and_outputs as outputs
from vitadel.diagnosis.checks import randomness as randomness
from vitadel.diagnosis.checks import search_strength as strength
from vitadel.diagnosis.examination import LEVELS, Examination, level_named, probing_threat
from vitadel.diagnosis.finding import BROKEN, OK, SUSPICIOUS, NotExamined
from vitadel.diagnosis.surrogate_student import taught
from vitadel.errors import UserError

toy = cache(trained_toy)


class Around(nn.Module):
    def __init__(self, model: nn.Module, before=lambda x: x, after=lambda z: z) -> None:
        super().__init__()
        self.model, self.before, self.after = model, before, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.model(self.before(x)))


def visit(before=lambda x: x, after=lambda z: z, **more) -> Examination:
    model, x, y = toy()
    return Examination(Around(model, before, after).eval(), x[:60], y[:60], eps=0.08, **more)


HONEST = [
    outputs.pixel_range,
    outputs.finite_outputs,
    outputs.clean_accuracy,
    outputs.normalisation,
    outputs.probabilities,
    outputs.answers_by_search,
    outputs.eps_zero,
    outputs.gradient_mode,
    randomness.evaluation_mode,
    randomness.same_answer_twice,
    randomness.batch_composition,
    gradients.gradients_there,
    gradients.vanishing,
    gradients.finite_differences,
    gradients.same_gradient_twice,
    gradients.staircase,
    gradients.uphill,
    strength.more_steps,
    strength.more_restarts,
    strength.unbounded_eps,
    strength.loss_choice,
    masking.random_noise,
    masking.black_box,
    masking.single_step,
]


@pytest.mark.parametrize("check", HONEST, ids=lambda check: check.__name__)
def test_a_healthy_model_is_healthy(check):
    assert check(visit())[0] == OK


def test_hidden_gradients_are_seen_from_every_side():
    sick = visit(Tensor.detach)
    assert gradients.gradients_there(sick) == (BROKEN, {
        "not finite, cross-entropy": 0.0,
        "zero, cross-entropy": 1.0,
        "not finite, margin": 0.0,
        "zero, margin": 1.0,
    })  # fmt: skip
    assert gradients.vanishing(sick)[0] == SUSPICIOUS
    assert gradients.finite_differences(sick)[1]["relative error"] == 1  # autograd tells nothing of what there is
    assert strength.unbounded_eps(sick)[0] == BROKEN
    assert masking.black_box(sick)[0] == SUSPICIOUS


def test_a_stand_in_breaks_what_hidden_gradients_do_not():
    model = toy()[0]
    hidden = visit(Tensor.detach, surrogate=model)
    verdict, evidence = masking.transfer(hidden)
    assert verdict == SUSPICIOUS
    # The stand-in is the model itself, so transfer breaks just what the model's own gradients would.
    own = visit()
    assert evidence["transfer breaks of these"] == int((own.correct & ~own.held("pgd-10")).sum()) > 10
    assert masking.transfer(visit(surrogate=model))[0] == OK


def test_a_student_is_taught_where_there_is_no_stand_in():
    lessons = [(images(64, seed=turn), torch.zeros(64)) for turn in range(2)]
    hidden = visit(Tensor.detach, others=lambda count: lessons, batch_size=16)
    sizes = []
    hidden.model.register_forward_pre_hook(lambda _module, args: sizes.append(len(args[0])))
    before = torch.get_rng_state()
    masking.transfer(hidden)
    assert max(sizes) == 16
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(NotExamined, match="no other model"):
        masking.transfer(visit(Tensor.detach))


def test_large_logits_blind_the_cross_entropy_only():
    sick = visit(after=lambda z: 1e5 * z)
    assert gradients.gradients_there(sick)[0] == SUSPICIOUS
    assert gradients.vanishing(sick)[0] == OK
    verdict, evidence = strength.loss_choice(sick)
    assert verdict == SUSPICIOUS
    assert evidence["cw-10"] < evidence["pgd-10"] - 0.12


def test_a_reversed_or_wrong_gradient_is_not_true():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    verdict, evidence = gradients.finite_differences(visit(Doubled.apply))
    assert verdict == BROKEN
    assert evidence["relative error"] == pytest.approx(0.5, abs=1e-3)  # of the larger of the two, which is twice


def test_outputs():
    assert outputs.probabilities(visit(after=lambda z: z.softmax(1)))[0] == BROKEN
    assert outputs.probabilities(visit(after=lambda z: 100 * z.softmax(1)))[0] == BROKEN
    assert outputs.probabilities(visit(after=lambda z: z.log_softmax(1)))[0] == OK
    assert outputs.probabilities(visit(after=lambda z: 7 * z.softmax(1)))[0] == OK  # a temperature, and no percentages
    assert outputs.finite_outputs(visit(after=lambda z: z / 0))[0] == BROKEN
    assert outputs.clean_accuracy(visit(after=lambda z: z.roll(1, 1)))[0] == BROKEN  # classes in another order
    model, x, y = toy()
    assert outputs.pixel_range(Examination(model, x * 255, y))[0] == BROKEN
    assert outputs.pixel_range(Examination(model, x / 255, y))[0] == SUSPICIOUS
    assert outputs.pixel_range(Examination(model, x / 0, y))[0] == BROKEN


def test_normalisation_is_missed_and_found_again():
    verdict, evidence = outputs.normalisation(visit(lambda x: x / 255))
    assert verdict == BROKEN
    assert evidence["bytes"] == visit().share(visit().correct) > evidence["as given"] + 0.2


class Normalise(nn.Module):
    """As other libraries have it: the numbers are plain lists."""

    def __init__(self, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.mean, self.std = mean, std

    def forward(self, x: Tensor) -> Tensor:
        mean, std = (torch.tensor(numbers).view(1, 3, 1, 1) for numbers in (self.mean, self.std))
        return (x - mean) / std


@pytest.mark.parametrize(
    ("before", "verdict"),
    [
        (nn.Identity(), OK),
        (Normalise([0.0] * 3, [1.0] * 3), OK),  # which changes nothing
        (Normalise([0.5] * 3, [0.5] * 3), BROKEN),
    ],
)
def test_pixels_normalised_twice_are_seen_where_nothing_is_lost_by_it(before, verdict):
    model, x, y = toy()
    times = 2 if verdict == BROKEN else 1

    def undone(x: Tensor) -> Tensor:  # so that not one answer differs
        for _ in range(times):
            x = 0.5 * x + 0.5
        return x

    patient = nn.Sequential(before, Normalise([0.5] * 3, [0.5] * 3), Around(model, undone)).eval()
    assert torch.equal(patient(x[:60]).argmax(1), model(x[:60]).argmax(1))
    outcome, evidence = outputs.normalisation(Examination(patient, x[:60], y[:60], eps=0.08))
    assert outcome == verdict, evidence


@pytest.mark.parametrize(
    ("factor", "mean", "std", "verdict"),
    [(255, 127.5, 127.5, OK), (255, 116.3, 1.0, OK), (1, 127.5, 127.5, BROKEN), (255, 0.5, 0.5, BROKEN)],
)
def test_a_normalisation_is_given_what_it_is_for_bytes_or_pixels(factor, mean, std, verdict):
    model, x, y = toy()

    def undone(x: Tensor) -> Tensor:  # so that not one answer differs
        return (std * x + mean) / factor

    bytes_of = Around(nn.Identity(), lambda x: factor * x)
    patient = nn.Sequential(bytes_of, Normalise([mean] * 3, [std] * 3), Around(model, undone)).eval()
    outcome, evidence = outputs.normalisation(Examination(patient, x[:60], y[:60], eps=0.08))
    assert outcome == verdict, evidence


def test_what_only_looks_like_a_normalisation_is_left_alone():
    model, x, y = toy()
    patient = Around(model).eval()
    patient.spare = Normalise([0.5] * 3, [0.5] * 3)  # never run
    patient.odd = nn.Identity()
    patient.odd.mean, patient.odd.std = "mean", [object()] * 3
    verdict, evidence = outputs.normalisation(Examination(patient, x[:60], y[:60], eps=0.08))
    assert (verdict, "range of what is normalised" in evidence) == (OK, False)


class Autocast(nn.Module):
    """As many deployed models are: half precision inside, float32 outside."""

    def __init__(self) -> None:
        super().__init__()
        self.model = toy()[0]

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x).float()


def test_an_honest_model_with_autocast_inside_has_true_gradients():
    _, x, y = toy()
    e = Examination(Autocast().eval(), x[:24], y[:24], eps=0.08)
    for check in (gradients.finite_differences, gradients.staircase):
        verdict, evidence = check(e)
        assert verdict == OK, evidence
    assert not e.answers_exactly
    assert e.exact is not e.model


def test_a_defence_that_is_asleep_on_clean_images_answers_at_random():
    model, x, y = toy()

    def shaken(z: Tensor) -> Tensor:
        flat = (z[..., 1:] - z[..., :-1]).abs().flatten(1).mean(1) < 1e-6
        return torch.where(flat[:, None, None, None], z, z + 0.1 * torch.randn_like(z))

    flat = x[:24].mean((2, 3), keepdim=True).expand_as(x[:24]).contiguous()
    e = Examination(Around(model, shaken).eval(), flat, y[:24], eps=0.08)
    assert torch.equal(e.answers(flat), e.answers(flat))
    assert e.at_random


def test_pictures_of_one_channel_have_a_student_too():
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    lessons = [(torch.rand(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64))]
    assert taught(teacher, lessons, 1)(lessons[0][0]).shape == (8, 3)


class Searching(nn.Module):
    """Moves an image to where its answer is clearer, in one of the ways to ask for a gradient."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.model, self.way = toy()[0], way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "func":
            return self.model(x + torch.func.grad(lambda z: self.model(z).amax(1).sum())(x))
        with torch.enable_grad():
            z = x.detach().clone().requires_grad_()
            clear = self.model(z).amax(1).sum()
            if self.way == "grad":
                (slope,) = torch.autograd.grad(clear, z)
            else:
                clear.backward()
                slope = z.grad
        return self.model(x + slope)


@pytest.mark.parametrize("way", ["func", "grad", "backward"])
def test_a_model_that_takes_gradients_to_answer_is_told(way):
    _, x, y = toy()
    e = Examination(Searching(way).eval(), x[:16], y[:16])
    assert outputs.answers_by_search(e) == (SUSPICIOUS, {"gradients taken per answer": 1})


def test_gradient_mode_tells_two_faces():
    two_faced = visit(after=lambda z: z if torch.is_grad_enabled() else -z)
    assert outputs.gradient_mode(two_faced)[0] == BROKEN


def test_train_mode_is_told_and_leaves_no_trace():
    model = TinyNet()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    verdict, evidence = randomness.evaluation_mode(Examination(model, images(16), torch.zeros(16, dtype=torch.long)))
    assert verdict in (SUSPICIOUS, BROKEN)
    assert evidence["modules in train mode"] == len(list(model.modules()))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training


def test_randomness_is_found_and_averaged():
    def jitter(z: Tensor) -> Tensor:
        return z + 0.1 * torch.randn_like(z)

    shaky = visit(after=jitter)
    assert randomness.same_answer_twice(shaky)[0] == SUSPICIOUS
    assert randomness.eot_gap(shaky)[0] == OK  # the noise is the same in every direction: nothing to average away
    for check in (outputs.gradient_mode, randomness.batch_composition, gradients.same_gradient_twice):
        with pytest.raises(NotExamined, match="at random"):
            check(shaky)
    with pytest.raises(NotExamined, match="same answer twice"):
        randomness.eot_gap(visit())


class Foggy(nn.Module):
    """The answer hardly moves, its gradient points anywhere: eight looks see through what one does not."""

    def forward(self, x: Tensor) -> Tensor:
        signal = (x - 0.5).flatten(1).mean(1)
        fog = 40 * torch.randn_like(x)
        score = signal + 0.004 + ((x - x.detach()) * fog).flatten(1).mean(1) + 1e-3 * torch.randn(len(x))
        return torch.stack([score, torch.zeros_like(score)], 1)


def test_averaging_sees_through_fog():
    torch.manual_seed(0)
    x = 0.5 + 0.001 * images(48)
    verdict, evidence = randomness.eot_gap(Examination(Foggy(), x, torch.zeros(48, dtype=torch.long), eps=0.06))
    assert verdict == SUSPICIOUS
    assert evidence["eot:8+pgd-10"] < evidence["pgd-10"]


class Bent(nn.Module):
    """Right at the image and at the end of one full step, wrong half-way: what single-step training can end in."""

    def forward(self, x: Tensor) -> Tensor:
        along = (x - 0.5).flatten(1).mean(1) / 0.08
        score = 0.2 + torch.cos(2 * torch.pi * along) - 0.1 * along
        return torch.stack([score, torch.zeros_like(score)], 1)


def test_one_step_jumps_over_what_many_find():
    x = torch.full((32, 3, 8, 8), 0.5)
    verdict, evidence = masking.single_step(Examination(Bent(), x, torch.zeros(32, dtype=torch.long), eps=0.08))
    assert verdict == SUSPICIOUS
    assert evidence == {"clean": 1.0, "fgsm": 1.0, "pgd-10": 0.0, "fgsm, half of eps": 0.0}


def test_a_staircase_is_felt_in_the_dark():
    assert gradients.staircase(visit(lambda x: (x * 7).round() / 7))[0] == BROKEN
    straight = visit(lambda x: x + ((x * 7).round() / 7 - x).detach())
    assert gradients.staircase(straight)[0] == BROKEN
    assert gradients.finite_differences(straight)[0] == BROKEN


def test_softening_brings_gaps_to_two():
    gaps = [torch.full((100,), 20.0), torch.full((100,), 0.5)]
    assert attention.softening_factors(gaps) == (0.1, 1.0)
    assert attention.softening_factors(gaps[1:]) == (0.1,)
    with pytest.raises(NotExamined, match="attention is not known"):
        attention.attention_saturation(visit())


def test_levels_and_the_probing_budget():
    assert probing_threat("linf", torch.zeros(1, 3, 2, 2)).eps == 0.5
    assert probing_threat("l2", torch.zeros(1, 3, 2, 2)).eps == pytest.approx(12**0.5 / 2)
    assert probing_threat("l1", torch.zeros(1, 3, 2, 2)).eps == 6
    assert level_named("thorough").images > LEVELS["quick"].images
    with pytest.raises(UserError, match="did you mean quick"):
        level_named("quik")


@pytest.mark.parametrize(("norm", "eps"), [("l2", 0.5), ("l1", 5.0), ("linf", 1 / 255)])
def test_a_healthy_model_is_healthy_in_other_norms_and_small_budgets(norm, eps):
    model, x, y = toy()
    e = Examination(model, x[:60], y[:60], norm=norm, eps=eps)
    checks = [check for check in HONEST if norm != "l1" or check is not masking.single_step]
    assert {check.__name__: check(e)[0] for check in checks} == {check.__name__: OK for check in checks}
    if norm == "l1":
        with pytest.raises(NotExamined, match="a single pixel"):
            masking.single_step(e)
