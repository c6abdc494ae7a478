"""Honest models with few images, small batches or coarse numbers raise nothing; and what must be raised still is."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache

import pytest
import timm
import torch
from torch import Tensor, nn

from imagenet_a import RIGHT, answering, write_imagenet_a
from toys import trained_toy
from vitadel.adapters.adapted_model import open_model
from vitadel.attacks.attention_scaling.gaps import ROUNDS_TO_ONE
from vitadel.backbones.classifier import wrap
from vitadel.diagnosis.checks import BROKEN, OK, SUSPICIOUS, NotExamined, gradients, inputs, outputs
from vitadel.diagnosis.checks import attack_comparisons as comparisons
from vitadel.diagnosis.checks import attention_saturation as attention
from vitadel.diagnosis.examination import LEVELS, Examination
from vitadel.diagnosis.gallery import quantize_by_attention
from vitadel.diagnosis.run import CHECKS, Check, DiagnosisRequest, diagnose, examination_of, run_checks, summarize
from vitadel.evaluation.engine.target import open_target
from vitadel.runtime.distributed import join_processes
from vitadel.runtime.rng import SampleRNG
from vits import make_vit

toy = cache(trained_toy)
CPU = join_processes("cpu")


class Rule(nn.Module):
    """Logits by any rule, with weights of a chosen precision beside it."""

    def __init__(self, rule, precision: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.rule, self.weight = rule, nn.Parameter(torch.ones(1, dtype=precision))

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(x)


def examination(rule, precision: torch.dtype = torch.float32, **more) -> Examination:
    _, x, y = toy()
    return Examination(Rule(rule, precision).eval(), x[:48], y[:48], eps=0.08, **more)


def scored(rule, side: int = 8, count: int = 48) -> Examination:
    """Two classes; the first is right, and stands as long as the score of the images, which are gray, is positive."""

    def logits(x: Tensor) -> Tensor:
        score = rule((x - 0.5) / 0.08)
        return torch.stack([score, torch.zeros_like(score)], 1)

    gray = torch.full((count, 3, side, side), 0.5)
    return Examination(Rule(logits).eval(), gray, torch.zeros(count, dtype=torch.long), eps=0.08)


def refuse_more_than(most: int, model: nn.Module) -> nn.Module:
    def too_many(_module: nn.Module, args: tuple[Tensor]) -> None:
        if len(args[0]) > most:
            raise torch.OutOfMemoryError(f"{len(args[0])} images\nand many more words")

    model.register_forward_pre_hook(too_many)
    return model


# --- attention ------------------------------------------------------------------------------------------------------


def test_rows_with_a_single_key_are_not_saturated():
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        embed_dim=12,
        depths=(1, 1, 1, 1),
        num_heads=(1, 2, 2, 2),
        num_classes=4,
    )
    x = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    verdict, evidence = attention.attention_saturation(Examination(swin.eval(), x, torch.zeros(8, dtype=torch.long)))
    assert verdict == OK
    assert len(evidence["median gap, per block"]) == 3  # the last stage has one token, which attends to itself
    json.dumps(evidence, allow_nan=False)


def test_attention_is_looked_at_batch_by_batch():
    model, x = make_vit("vit").eval(), torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    e = Examination(model, x, torch.zeros(16, dtype=torch.long))
    whole = attention.attention_saturation(e)
    refuse_more_than(4, model)
    with pytest.raises(torch.OutOfMemoryError):
        attention.attention_saturation(e)
    parts = attention.attention_saturation(Examination(model, x, e.y, batch_size=4))
    assert parts[0] == whole[0]
    assert parts[1]["99th percentile, per block"] == pytest.approx(whole[1]["99th percentile, per block"], abs=2e-3)


@pytest.mark.parametrize("precision", list(ROUNDS_TO_ONE))
def test_attention_saturates_where_numbers_of_its_precision_do(precision):
    def largest(gap: float) -> float:
        return float(torch.tensor([gap, 0.0], dtype=precision).softmax(0)[0])

    at = ROUNDS_TO_ONE[precision]
    # Who computes in float32 and rounds at the end gets there by a factor of two, 0.7, later.
    assert largest(at - 0.2) < 1 == largest(at + 0.8)
    assert math.exp(-attention._LEAVES_NORMAL[precision]) == pytest.approx(torch.finfo(precision).tiny, rel=0.5)


@pytest.mark.slow
def test_a_saturated_book_hides_what_softened_attention_finds():
    model = open_model("zoo:shapes-standard")

    def reader(gap: float) -> Examination:
        target = open_target(quantize_by_attention(model, 16, gap), "shapes")
        return examination_of(target, DiagnosisRequest(limit=16), CPU)[0]

    sharp, blurred = reader(1000.0), reader(1.0)
    assert attention.attention_saturation(sharp)[1]["rows beyond the normal range, per block"][0] > 0.8
    verdict, evidence = attention.attention_scaling(sharp)
    assert verdict == SUSPICIOUS
    assert evidence["pgd-10(restarts=4)"] > 0.9
    assert evidence["softened"] == evidence["random factors"] == 0
    # What rounds to nothing in float32 is there in float64, in part.
    assert 0 < evidence["in float64"] < 0.9
    assert evidence["clean, of the softened model"] == 1
    # The same book, not so sharp, hides nothing.
    assert attention.attention_saturation(blurred)[0] == attention.attention_scaling(blurred)[0] == OK
    assert blurred.share(blurred.robust("pgd-10")) == 0


def softened(model: nn.Module, **more) -> Examination:
    """Softened attention has broken what the plain attack left standing, and the rest is still to be found out."""
    x = torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    e = Examination(model.eval(), x, model(x).argmax(1).detach(), eps=1e-6, **more)
    e._robust[e.level.restarted, e.eps] = torch.ones(16, dtype=torch.bool)
    e._robust["softened", e.eps] = torch.zeros(16, dtype=torch.bool)
    return e


def test_scaled_attention_that_finds_more_is_reported_with_its_controls():
    verdict, evidence = attention.attention_scaling(softened(make_vit("vit")))
    assert verdict == SUSPICIOUS
    # With next to no budget neither random factors nor exact numbers break anything.
    assert (evidence["softened"], evidence["random factors"], evidence["in float64"]) == (0, 1, 1)


@pytest.mark.slow
def test_a_missing_float64_run_is_not_reported_as_one():
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_vit("vit")

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x.float())

    verdict, evidence = attention.attention_scaling(softened(Single()))
    assert (verdict, evidence["in float64"]) == (SUSPICIOUS, "the model does not run in float64")
    e = softened(make_vit("vit"), batch_size=4)
    refuse_more_than(4, e.double_model)
    assert attention.attention_scaling(e)[1]["in float64"] == 1
    refuse_more_than(0, e.double_model)
    assert "OutOfMemoryError" in attention.attention_scaling(e)[1]["in float64"]


# --- batches and failures -------------------------------------------------------------------------------------------


def test_no_check_asks_for_more_than_a_batch_with_gradients():
    model, x, y = toy()
    model_ = Rule(model).eval()
    refuse_more_than(4, model_)
    diagnosis = run_checks(Examination(model_, x[:24], y[:24], eps=0.08, batch_size=4))
    assert {finding.verdict for finding in diagnosis.findings} == {OK}
    no_attention = {"attention-saturation", "attention-scaling"}
    assert set(diagnosis.not_examined) == no_attention | {"eot", "batch-dependence"}
    assert diagnosis.not_examined["batch-dependence"] == "left out: OutOfMemoryError: 12 images"


def test_a_failure_is_left_out_unless_it_is_vital():
    def failing(e: Examination):
        raise ValueError("only squares")

    free = CHECKS[0].own_cost
    diagnosis = run_checks(examination(toy()[0]), [Check("odd", "Odd", failing, free), CHECKS[0]])
    assert diagnosis.not_examined == {"odd": "left out: ValueError: only squares"}
    assert [finding.check for finding in diagnosis.findings] == ["pixel-range"]
    assert diagnosis.worst == SUSPICIOUS
    found = summarize(diagnosis, 24)
    assert "1 of 2 checks failed, the first is 'odd' (ValueError: only squares)" in found
    with pytest.raises(ValueError, match="only squares"):
        run_checks(examination(toy()[0]), [Check("odd", "Odd", failing, free, vital=True)])


def test_a_model_that_refuses_gradients_gets_no_clean_bill():
    class Refusing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = toy()[0]

        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                raise RuntimeError("for inference only")
            return self.model(x)

    _, x, y = toy()
    diagnosis = run_checks(Examination(Refusing().eval(), x[:24], y[:24], eps=0.08))
    assert not any(finding.verdict != OK for finding in diagnosis.findings)
    assert "zero-gradients" in diagnosis.failed
    assert diagnosis.worst == SUSPICIOUS
    found = {finding.check: finding for finding in diagnose(Refusing(), (x[:24], y[:24]), eps=0.08, device="cpu")}
    assert found["zero-gradients"].verdict == SUSPICIOUS
    assert "for inference only" in str(found["zero-gradients"].evidence)
    assert summarize(diagnosis, 24).startswith("It is unknown whether robustness numbers of this model can be trusted")


@pytest.mark.parametrize("batch_size", [1, 2, 4, 64])
def test_company_is_felt_whatever_the_batch_size(batch_size):
    def in_company(x: Tensor) -> Tensor:
        logits = toy()[0](x)
        return logits - 5 * logits.mean(0) if len(x) > 4 else logits

    assert outputs.batch_dependence(examination(in_company, batch_size=batch_size))[0] == BROKEN


def test_what_is_drawn_once_per_batch_is_drawn_several_times():
    lots = iter([0, 0, 0, 1] + [0] * 100)  # three batches of sixteen would all get the same

    def drawing(x: Tensor) -> Tensor:
        return toy()[0](x) + 5 * next(lots) * torch.arange(4)

    assert outputs.random_outputs(examination(drawing))[0] == SUSPICIOUS


# --- few images -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "n", "classes", "expected"),
    [
        (11, 16, 2, None),
        (8, 16, 2, None),
        (16, 16, 2, OK),
        (0, 16, 2, BROKEN),
        (128, 256, 2, BROKEN),
        (5, 48, 10, BROKEN),
        (0, 48, 1000, BROKEN),
        (2, 16, 1000, BROKEN),  # the images have two classes, whatever the head can say
    ],
)
def test_guessing_is_reported_only_where_a_weak_model_would_differ(right, n, classes, expected):
    e = Examination(
        Rule(lambda x: nn.functional.one_hot(torch.zeros(len(x), dtype=torch.long), classes).float()),
        torch.rand(n, 3, 4, 4),
        (torch.arange(n) >= right).long(),
    )
    if expected is None:
        with pytest.raises(NotExamined, match="too few images"):
            inputs.clean_accuracy(e)
    else:
        assert inputs.clean_accuracy(e)[0] == expected


def test_some_classes_count_where_a_benchmark_says_so(tmp_path):
    models = [wrap(make_vit("vit", classes=1000), mean=(0.5,) * 3, std=(0.5,) * 3) for _ in range(2)]
    for model in models:
        nn.init.zeros_(model.backbone.patch_embed.proj.weight)
        answering(model.backbone.head)
    target = open_target(models[0], write_imagenet_a(tmp_path / "a"))
    e = examination_of(target, DiagnosisRequest(), CPU, models[1])[0]
    assert e.logits.shape == (4, 200)
    assert int(e.correct.sum()) == RIGHT
    assert e.surrogate is not None
    assert torch.equal(e.logits_of(e.x, e.surrogate), e.logits)


# --- coarse numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "verdict"), [(torch.bfloat16, OK), (torch.float32, SUSPICIOUS)])
def test_rounding_is_that_of_the_weights(precision, verdict):
    def rounded(x: Tensor) -> Tensor:
        alone_or_watched = len(x) == 1 or torch.is_grad_enabled()
        return toy()[0](x) * (1 + 2**-8 * alone_or_watched)

    e = examination(rounded, precision)
    assert outputs.batch_dependence(e)[0] == outputs.gradient_mode(e)[0] == verdict


def test_infinite_gradients_are_no_gradients():
    verdict, evidence = gradients.zero_gradients(examination(lambda x: toy()[0](x + (x - x.detach()).sqrt())))
    assert verdict == BROKEN
    assert evidence["not finite, margin"] == 1


# --- comparisons of attacks -----------------------------------------------------------------------------------------


def hollow(u: Tensor, at: float, width: float) -> Tensor:
    """One everywhere, and well below zero at one place."""
    return 1 - 3 * torch.exp(-(((u - at) / width) ** 2))


@pytest.mark.parametrize(("at", "verdict"), [(0.75, OK), (0.5, SUSPICIOUS)])
def test_one_step_that_costs_much_is_bent_only_if_half_of_it_costs_more(at, verdict):
    e = scored(lambda u: u.flatten(1).mean(1))
    darker = torch.arange(48) % 5 < 2
    e.x[darker, 0] += 0.1  # these fall to the whole step; uniform moves do not change what says them
    e.x[darker, 1] -= 0.1

    def score(x: Tensor) -> Tensor:
        u = ((x - 0.5) / 0.08).flatten(1).mean(1)
        found = (x[:, 0] - x[:, 1]).flatten(1).mean(1).detach() > 0.1
        value = hollow(u, at, 0.1) - 0.1 * u - 1.5 * found * (u - 0.9).relu() * 10
        return torch.stack([value, torch.zeros_like(value)], 1)

    outcome, evidence = comparisons.single_step(Examination(Rule(score).eval(), e.x, e.y, eps=0.08))
    assert evidence["clean"] == 1
    assert evidence["fgsm"] == pytest.approx(1 - float(darker.double().mean()))
    assert evidence["pgd-10"] < 0.1
    assert outcome == verdict


def test_a_hollow_between_the_steps_is_found_by_finer_ones():
    # The mean of even starts, moved by k steps of a quarter and cut off at 1, is 0.23 and then 0.44; by eighths, 0.34.
    e = scored(lambda u: hollow(u.flatten(1).mean(1), 0.34, 0.03) - 0.1 * u.flatten(1).mean(1), side=32)
    verdict, evidence = comparisons.step_sensitivity(e)
    assert verdict == SUSPICIOUS
    assert evidence["pgd-20"] < evidence["pgd-10"] - 0.5


def test_a_second_start_finds_the_other_side():
    signs = SampleRNG.of_samples(0, range(1)).signs(3, 8, 8)

    def ridge(u: Tensor) -> Tensor:
        along = (u * signs).flatten(1).mean(1)
        return 0.5 - 0.2 * along.square() - 0.6 * along.relu().square()

    verdict, evidence = comparisons.restart_sensitivity(scored(ridge))
    assert verdict == SUSPICIOUS
    assert 0.25 < evidence["pgd-10"] < 0.75  # one of two sides gives way


def test_noise_finds_what_gradients_lead_away_from():
    def shy(u: Tensor) -> Tensor:
        rough = u.detach().abs().flatten(1).mean(1) > 0.9
        away = ((u - u.detach()) * u.detach()).flatten(1).mean(1)
        return 1 - 2.0 * rough + 10 * away

    verdict, evidence = comparisons.random_noise(scored(shy))
    assert verdict == SUSPICIOUS
    assert evidence["noise breaks of these"] == 48


# --- honest models of other kinds -----------------------------------------------------------------------------------


def raised(e: Examination) -> list[str]:
    checks = [check for check in CHECKS if check.identifier != "transfer"]  # no images to train a student on
    return [finding.check for finding in run_checks(e, checks).findings if finding.verdict != OK]


def test_an_honest_model_of_two_classes_raises_nothing():
    model, x, y = toy()

    def pairs(images: Tensor) -> Tensor:
        logits = model(images)
        return torch.stack([logits[:, :2].logsumexp(1), logits[:, 2:].logsumexp(1)], 1)

    assert raised(Examination(Rule(pairs).eval(), x[:48], y[:48] // 2, eps=0.08)) == []


@pytest.mark.slow
def test_an_honest_cross_covariance_model_raises_nothing():
    x = torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    model, level = make_vit("xcit").eval(), replace(LEVELS["quick"], queries=50)
    assert raised(Examination(model, x, model(x).argmax(1).detach(), eps=1 / 255, level=level)) == []
