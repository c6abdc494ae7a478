"""Checks on models that are broken in a known way, beside the same models intact."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from toys import TinyNet, images, trained_toy
from vitadel.diagnosis.checks import BROKEN, OK, SUSPICIOUS, NotExamined, gradients, inputs, outputs
from vitadel.diagnosis.checks import attack_comparisons as comparisons
from vitadel.diagnosis.checks import attention_saturation as attention
from vitadel.diagnosis.checks.attack_comparisons import train_student
from vitadel.diagnosis.examination import LEVELS, Examination, level_named, probing_threat
from vitadel.diagnosis.gallery.inside import k_winners
from vitadel.errors import UserError

toy = cache(trained_toy)


class Around(nn.Module):
    def __init__(self, model: nn.Module, before=lambda x: x, after=lambda z: z) -> None:
        super().__init__()
        self.model, self.before, self.after = model, before, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.model(self.before(x)))


def examination(before=lambda x: x, after=lambda z: z, **more) -> Examination:
    model, x, y = toy()
    return Examination(Around(model, before, after).eval(), x[:60], y[:60], eps=0.08, **more)


HONEST = [
    inputs.pixel_range,
    inputs.finite_outputs,
    inputs.clean_accuracy,
    inputs.normalization,
    inputs.probability_outputs,
    outputs.inference_gradients,
    outputs.zero_budget,
    outputs.gradient_mode,
    inputs.train_mode,
    outputs.random_outputs,
    outputs.batch_dependence,
    gradients.zero_gradients,
    gradients.small_gradients,
    gradients.wrong_gradients,
    gradients.random_gradients,
    gradients.staircase,
    gradients.uninformative_gradients,
    gradients.gain_ratio,
    comparisons.step_sensitivity,
    comparisons.restart_sensitivity,
    comparisons.unbounded_attack,
    comparisons.loss_sensitivity,
    comparisons.random_noise,
    comparisons.black_box,
    comparisons.single_step,
]


@pytest.mark.parametrize("check", HONEST, ids=lambda check: check.identifier)
def test_an_honest_model_raises_nothing(check):
    assert check(examination())[0] == OK


def test_hidden_gradients_are_seen_from_every_side():
    broken = examination(Tensor.detach)
    assert gradients.zero_gradients(broken) == (BROKEN, {
        "not finite, cross-entropy": 0.0,
        "zero, cross-entropy": 1.0,
        "not finite, margin": 0.0,
        "zero, margin": 1.0,
    })  # fmt: skip
    assert gradients.small_gradients(broken)[0] == SUSPICIOUS
    assert gradients.wrong_gradients(broken)[1]["relative error"] == 1  # autograd gives zero
    assert comparisons.unbounded_attack(broken)[0] == BROKEN
    assert comparisons.black_box(broken)[0] == SUSPICIOUS


def test_a_surrogate_breaks_what_hidden_gradients_do_not():
    model = toy()[0]
    hidden = examination(Tensor.detach, surrogate=model)
    verdict, evidence = comparisons.transfer(hidden)
    assert verdict == SUSPICIOUS
    # The surrogate is the model itself, so transfer breaks just what the model's own gradients would.
    own = examination()
    assert evidence["transfer breaks of these"] == int((own.correct & ~own.robust("pgd-10")).sum()) > 10
    assert comparisons.transfer(examination(surrogate=model))[0] == OK


@pytest.mark.slow
def test_a_student_is_trained_where_there_is_no_surrogate():
    data = [(images(64, seed=turn), torch.zeros(64)) for turn in range(2)]
    hidden = examination(Tensor.detach, other_images=lambda count: data, batch_size=16)
    sizes = []
    hidden.model.register_forward_pre_hook(lambda _module, args: sizes.append(len(args[0])))
    before = torch.get_rng_state()
    comparisons.transfer(hidden)
    assert max(sizes) == 16
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(NotExamined, match="no other model"):
        comparisons.transfer(examination(Tensor.detach))


def test_large_logits_blind_the_cross_entropy_only():
    broken = examination(after=lambda z: 1e5 * z)
    assert gradients.zero_gradients(broken)[0] == SUSPICIOUS
    assert gradients.small_gradients(broken)[0] == OK
    verdict, evidence = comparisons.loss_sensitivity(broken)
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

    verdict, evidence = gradients.wrong_gradients(examination(Doubled.apply))
    assert verdict == BROKEN
    assert evidence["relative error"] == pytest.approx(0.5, abs=1e-3)  # of the larger of the two, which is twice


def test_outputs():
    assert inputs.probability_outputs(examination(after=lambda z: z.softmax(1)))[0] == BROKEN
    assert inputs.probability_outputs(examination(after=lambda z: 100 * z.softmax(1)))[0] == BROKEN
    assert inputs.probability_outputs(examination(after=lambda z: z.log_softmax(1)))[0] == OK
    assert (
        inputs.probability_outputs(examination(after=lambda z: 7 * z.softmax(1)))[0] == OK
    )  # a temperature, and no percentages
    assert inputs.finite_outputs(examination(after=lambda z: z / 0))[0] == BROKEN
    assert inputs.clean_accuracy(examination(after=lambda z: z.roll(1, 1)))[0] == BROKEN  # classes in another order
    model, x, y = toy()
    assert inputs.pixel_range(Examination(model, x * 255, y))[0] == BROKEN
    assert inputs.pixel_range(Examination(model, x / 255, y))[0] == SUSPICIOUS
    assert inputs.pixel_range(Examination(model, x / 0, y))[0] == BROKEN


def test_normalization_is_missed_and_found_again():
    verdict, evidence = inputs.normalization(examination(lambda x: x / 255))
    assert verdict == BROKEN
    assert evidence["bytes"] == examination().share(examination().correct) > evidence["as given"] + 0.2


class Normalize(nn.Module):
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
        (Normalize([0.0] * 3, [1.0] * 3), OK),  # which changes nothing
        (Normalize([0.5] * 3, [0.5] * 3), BROKEN),
    ],
)
def test_pixels_normalized_twice_are_seen_where_nothing_is_lost_by_it(before, verdict):
    model, x, y = toy()
    times = 2 if verdict == BROKEN else 1

    def undone(x: Tensor) -> Tensor:  # so that not one answer differs
        for _ in range(times):
            x = 0.5 * x + 0.5
        return x

    model_ = nn.Sequential(before, Normalize([0.5] * 3, [0.5] * 3), Around(model, undone)).eval()
    assert torch.equal(model_(x[:60]).argmax(1), model(x[:60]).argmax(1))
    outcome, evidence = inputs.normalization(Examination(model_, x[:60], y[:60], eps=0.08))
    assert outcome == verdict, evidence


@pytest.mark.parametrize(
    ("factor", "mean", "std", "verdict"),
    [(255, 127.5, 127.5, OK), (255, 116.3, 1.0, OK), (1, 127.5, 127.5, BROKEN), (255, 0.5, 0.5, BROKEN)],
)
def test_a_normalization_is_given_what_it_is_for_bytes_or_pixels(factor, mean, std, verdict):
    model, x, y = toy()

    def undone(x: Tensor) -> Tensor:  # so that not one answer differs
        return (std * x + mean) / factor

    bytes_of = Around(nn.Identity(), lambda x: factor * x)
    model_ = nn.Sequential(bytes_of, Normalize([mean] * 3, [std] * 3), Around(model, undone)).eval()
    outcome, evidence = inputs.normalization(Examination(model_, x[:60], y[:60], eps=0.08))
    assert outcome == verdict, evidence


def standardized(x: Tensor) -> Tensor:
    """Below 0 and above 1, for every image by other numbers; plain images become gray."""
    return (x - x.mean((1, 2, 3), keepdim=True)) / (x.std((1, 2, 3), keepdim=True) + 1e-3) + 0.5


def stretched(x: Tensor) -> Tensor:
    """From the darkest pixel to the brightest; plain images become darker than black."""
    low, high = x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)
    return (x - low) / (high - low).clamp(min=0.05) * 2 - 0.1


@pytest.mark.parametrize(("change", "plain"), [(standardized, 0.5), (stretched, -0.1)])
def test_the_contrast_of_each_image_is_no_normalization(change, plain):
    model, x, _ = toy()
    x = x[:60]
    assert change(x).max() > 1.4
    first = Around(nn.Identity(), change)
    model_ = nn.Sequential(first, Normalize([0.5] * 3, [0.5] * 3), Around(model, lambda x: 0.5 * x + 0.5)).eval()
    outcome, evidence = inputs.normalization(Examination(model_, x, model_(x).argmax(1), eps=0.08))
    assert (outcome, evidence["range of what is normalised"]) == (OK, [[plain, plain]])


def test_what_only_looks_like_a_normalization_is_left_alone():
    model, x, y = toy()
    model_ = Around(model).eval()
    model_.spare = Normalize([0.5] * 3, [0.5] * 3)  # never run
    model_.odd = nn.Identity()
    model_.odd.mean, model_.odd.std = "mean", [object()] * 3
    verdict, evidence = inputs.normalization(Examination(model_, x[:60], y[:60], eps=0.08))
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
    for check in (gradients.wrong_gradients, gradients.staircase):
        verdict, evidence = check(e)
        assert verdict == OK, evidence
    assert not e.has_double_logits
    assert e.double_model is not e.model


def test_a_defence_that_is_asleep_on_clean_images_answers_at_random():
    model, x, y = toy()

    def shaken(z: Tensor) -> Tensor:
        flat = (z[..., 1:] - z[..., :-1]).abs().flatten(1).mean(1) < 1e-6
        return torch.where(flat[:, None, None, None], z, z + 0.1 * torch.randn_like(z))

    flat = x[:24].mean((2, 3), keepdim=True).expand_as(x[:24]).contiguous()
    e = Examination(Around(model, shaken).eval(), flat, y[:24], eps=0.08)
    assert torch.equal(e.logits_of(flat), e.logits_of(flat))
    assert e.is_random


def test_pictures_of_one_channel_have_a_student_too():
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    data = [(torch.rand(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64))]
    assert train_student(teacher, data, 1)(data[0][0]).shape == (8, 3)


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
def test_gradients_at_inference_are_found(way):
    _, x, y = toy()
    e = Examination(Searching(way).eval(), x[:16], y[:16])
    assert outputs.inference_gradients(e) == (SUSPICIOUS, {"gradients taken per answer": 1})


def test_gradient_mode_finds_different_outputs():
    two_faced = examination(after=lambda z: z if torch.is_grad_enabled() else -z)
    assert outputs.gradient_mode(two_faced)[0] == BROKEN


def test_train_mode_is_found_and_leaves_no_trace():
    model = TinyNet()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    verdict, evidence = inputs.train_mode(Examination(model, images(16), torch.zeros(16, dtype=torch.long)))
    assert verdict in (SUSPICIOUS, BROKEN)
    assert evidence["modules in train mode"] == len(list(model.modules()))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training


def test_randomness_is_found_and_averaged():
    def jitter(z: Tensor) -> Tensor:
        return z + 0.1 * torch.randn_like(z)

    shaky = examination(after=jitter)
    assert outputs.random_outputs(shaky)[0] == SUSPICIOUS
    assert outputs.eot(shaky)[0] == OK  # the noise is the same in every direction: nothing to average away
    for check in (outputs.gradient_mode, outputs.batch_dependence, gradients.random_gradients):
        with pytest.raises(NotExamined, match="random"):
            check(shaky)
    with pytest.raises(NotExamined, match="not random"):
        outputs.eot(examination())


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
    verdict, evidence = outputs.eot(Examination(Foggy(), x, torch.zeros(48, dtype=torch.long), eps=0.06))
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
    verdict, evidence = comparisons.single_step(Examination(Bent(), x, torch.zeros(32, dtype=torch.long), eps=0.08))
    assert verdict == SUSPICIOUS
    assert evidence == {"clean": 1.0, "fgsm": 1.0, "pgd-10": 0.0, "fgsm, half of eps": 0.0}


def test_a_fine_staircase_with_a_gradient_that_predicts_moves_by_eps_is_honest():
    def fine(x: Tensor) -> Tensor:
        return x + ((x * 255).round() / 255 - x).detach()

    for check in (gradients.staircase, gradients.wrong_gradients):
        assert check(examination(fine))[0] == OK
        # A replaced gradient that is not the right one predicts nothing.
        assert check(examination(lambda x: ((x * 255).round() / 255).detach() + 2 * (x - x.detach())))[0] == BROKEN
    assert gradients.staircase(examination(lambda x: (x * 255).round() / 255))[0] == BROKEN


def test_a_staircase_is_felt_in_the_dark():
    assert gradients.staircase(examination(lambda x: (x * 7).round() / 7))[0] == BROKEN
    straight = examination(lambda x: x + ((x * 3).round() / 3 - x).detach())  # far coarser than the budget
    assert gradients.staircase(straight)[0] == BROKEN
    assert gradients.wrong_gradients(straight)[0] == BROKEN


def test_softening_brings_gaps_to_two():
    gaps = [torch.full((100,), 20.0), torch.full((100,), 0.5)]
    assert attention.softening_factors(gaps) == (0.1, 1.0)
    assert attention.softening_factors(gaps[1:]) == (0.1,)
    with pytest.raises(NotExamined, match="attention is not known"):
        attention.attention_saturation(examination())


def test_levels_and_the_probing_budget():
    assert probing_threat("linf", torch.zeros(1, 3, 2, 2)).eps == 0.5
    assert probing_threat("l2", torch.zeros(1, 3, 2, 2)).eps == pytest.approx(12**0.5 / 2)
    assert probing_threat("l1", torch.zeros(1, 3, 2, 2)).eps == 6
    assert level_named("thorough").images > LEVELS["quick"].images
    with pytest.raises(UserError, match="did you mean quick"):
        level_named("quik")


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "eps"), [("l2", 0.5), ("l1", 5.0), ("linf", 1 / 255)])
def test_an_honest_model_raises_nothing_in_other_norms_and_small_budgets(norm, eps):
    model, x, y = toy()
    e = Examination(model, x[:60], y[:60], norm=norm, eps=eps)
    checks = [check for check in HONEST if norm != "l1" or check is not comparisons.single_step]
    assert {check.identifier: check(e)[0] for check in checks} == {check.identifier: OK for check in checks}
    if norm == "l1":
        with pytest.raises(NotExamined, match="a single pixel"):
            comparisons.single_step(e)


# --- kinks are no lies ----------------------------------------------------------------------------------------------


def test_a_slope_on_either_side_of_a_kink_or_between_is_correct():
    ahead, behind = torch.tensor([1.0, 2.0, -1.0]), torch.tensor([-1.0, 2.0, 3.0])
    for correct in ([1.0, 2.0, 3.0], [-1.0, 2.0, -1.0], [0.3, 2.0, 0.0]):
        assert gradients.slope_error(torch.tensor(correct), ahead, behind) == 0
    # Only the second has one slope; the errors of the others are those from the nearer end.
    wrong = gradients.slope_error(torch.tensor([2.0, 0.0, -2.0]), ahead, behind)
    assert wrong == pytest.approx(math.sqrt(1 + 4 + 1) / math.sqrt(4 + 0 + 4))
    assert gradients.slope_error(torch.zeros(3), torch.ones(3), torch.ones(3)) == 1  # no gradient


def eight_bits(x: Tensor) -> Tensor:
    return (x * 255).round() / 255


def largest(x: Tensor) -> Tensor:
    return nn.functional.max_pool2d(nn.functional.pad(x, (0, 1, 0, 1), mode="replicate"), 2, 1)


def median(x: Tensor) -> Tensor:
    padded = nn.functional.pad(x, (1, 1, 1, 1), mode="replicate")
    return padded.unfold(2, 3, 1).unfold(3, 3, 1).flatten(4).median(4).values


@pytest.mark.parametrize("change", [largest, median, Tensor.abs, lambda x: (x - 0.5).relu() + 0.5])
def test_kinks_at_ties_of_8_bit_pixels_are_honest(change):
    model, x, y = toy()
    coarse = (x[:60] * 15).round() / 15  # many neighbors are equal
    e = Examination(Around(model, change).eval(), coarse, y[:60], eps=0.08)
    verdict, evidence = gradients.wrong_gradients(e)
    assert verdict == OK, evidence
    # The same change with a gradient that is not its own is still found, and named.
    hidden = Around(model, nn.Sequential(Changed(lambda x: change(x).detach() + 0.5 * (x - x.detach())))).eval()
    verdict, evidence = gradients.wrong_gradients(Examination(hidden, coarse, y[:60], eps=0.08))
    assert verdict == BROKEN


class Changed(nn.Module):
    def __init__(self, change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


@pytest.mark.parametrize("check", [gradients.wrong_gradients, gradients.zero_gradients])
def test_the_module_at_fault_is_named(check):
    model, x, y = toy()
    hidden = nn.Sequential(Changed(Tensor.detach), model).eval()
    verdict, evidence = check(Examination(hidden, x[:60], y[:60], eps=0.08))
    assert (verdict, evidence["modules"]) == (BROKEN, ["0"])


def test_square_spends_its_queries_on_the_images_that_are_left():
    honest, hidden = examination(), examination(Tensor.detach)
    (of_honest,) = [name for name in comparisons.black_box(honest)[1] if "queries" in name]
    (of_hidden,) = [name for name in comparisons.black_box(hidden)[1] if "queries" in name]
    assert of_hidden == "Square, 500 queries, breaks of these" or int(of_hidden.split()[1]) >= 500
    standing = sum(bool(each) for each in comparisons._robust_to_white_box(honest))
    assert int(of_honest.split()[1]) == min(2000, 500 * 60 // max(standing, 1))


# --- promises -------------------------------------------------------------------------------------------------------


class Score(nn.Module):
    """Two classes, by a function of the mean brightness relative to a gray level."""

    def __init__(self, score) -> None:
        super().__init__()
        self.score = score

    def forward(self, x: Tensor) -> Tensor:
        value = self.score((x - 0.5).flatten(1).mean(1))
        return torch.stack([value, -value], 1)


def bright(score) -> Examination:
    x = torch.full((24, 3, 8, 8), 0.5) + torch.linspace(0.1, 0.2, 24).view(-1, 1, 1, 1)
    return Examination(Score(score).eval(), x, torch.zeros(24, dtype=torch.long), eps=0.08)


def test_a_linear_model_keeps_its_promises_exactly():
    verdict, evidence = gradients.gain_ratio(bright(lambda u: u))
    assert verdict == OK
    assert evidence["median share of the promise kept, clean"] == pytest.approx([1, 1, 1], abs=1e-3)
    assert evidence["lengths, in units of eps"] == [0.0625, 0.25, 1]


def test_a_promise_beyond_the_boundary_is_kept_by_crossing_it():
    def high(u: Tensor) -> Tensor:
        """Falls steeply to just below zero, and no further: what is promised there is 20 times what is delivered."""
        return (40 * (u - 0.095)).clamp(min=-0.01)

    verdict, evidence = gradients.gain_ratio(bright(high))
    assert evidence["median share of the promise kept, clean"] == pytest.approx([1, 1, 1], abs=1e-3)
    assert verdict == OK


def test_a_promise_that_ends_before_the_boundary_is_broken():
    def shallow(u: Tensor) -> Tensor:
        return 1 + 0.05 * torch.tanh(400 * (u - 0.1).remainder(0.01))

    verdict, evidence = gradients.gain_ratio(bright(shallow))
    assert evidence["median share of the promise kept, clean"][2] < 0.4
    assert verdict == SUSPICIOUS


@pytest.mark.parametrize("period", [0.5, 2, 8])
def test_ripples_between_rounding_and_budget_are_found(period):
    def rippled(u: Tensor) -> Tensor:
        turns = 2 * math.pi * 255 / period
        return u + 5 / turns * torch.sin(turns * u)

    verdict, evidence = gradients.gain_ratio(bright(rippled))
    assert verdict == SUSPICIOUS, evidence


def layers(activation: nn.Module) -> Examination:
    """Two hidden layers with random weights, examined on their own answers."""
    generator = torch.Generator().manual_seed(0)
    wide, narrow = nn.Linear(512, 512), nn.Linear(512, 4)
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 512), activation, wide, activation, narrow).eval()
    for weight in net.parameters():
        if weight.ndim > 1:
            nn.init.orthogonal_(weight, 2.0, generator=generator)
        else:
            nn.init.zeros_(weight)
    x = torch.rand(24, 3, 8, 8, generator=generator)
    return Examination(net, x, net(x).argmax(1).detach(), eps=0.05)


def test_an_output_that_jumps_is_found_though_single_steps_deliver():
    verdict, evidence = gradients.gain_ratio(layers(k_winners(0.3)))
    for start in ("clean", "noisy"):
        assert all(0.6 < share < 3 for share in evidence[f"median share of the promise kept, {start}"])
    assert evidence["median share of wild steps at the border"] > 0.3
    assert verdict == SUSPICIOUS


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh()])
def test_kinks_and_curvature_do_not_jump(activation):
    verdict, evidence = gradients.gain_ratio(layers(activation))
    assert evidence["median share of wild steps at the border"] <= 0.02
    assert evidence["n, border"] == 24
    assert verdict == OK


def test_steps_that_rounding_decides_are_left_to_other_checks():
    """As after quantization-aware training: the shortest steps deliver nothing or a whole step of the grid."""

    class Rounded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.tanh() + ((8 * x.tanh()).round() / 8 - x.tanh()).detach()

    verdict, evidence = gradients.gain_ratio(layers(Rounded()))
    assert "median share of wild steps at the border" not in evidence
    assert verdict == OK
