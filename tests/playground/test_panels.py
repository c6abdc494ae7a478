"""What the page says, and that hostile names stay words."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace

import torch
from PIL import Image

from vitadel.playground.craft import AttackForm, CraftedImage, Prediction, TransferResult
from vitadel.playground.models import ChosenImage
from vitadel.playground.panels import comparison_panel, error_panel, image_panel, result_panel

BAD = "<img src=x onerror=alert(1)>"


def crafted(fooled: bool = True) -> CraftedImage:
    x = torch.full((1, 3, 4, 4), 100 / 255)
    z = x + 2 / 255
    before = Prediction(0, torch.tensor([0.75, 0.25]), torch.tensor([[0.5, 0.5], [0.0, 0.0]]))
    after = Prediction(1, torch.tensor([0.125, 0.875]), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    picture = torch.full((3, 4, 4), 102, dtype=torch.uint8)
    return CraftedImage(x, z, before, after if fooled else before, fooled, False, picture, False, 20, 3, 1.25)


def pictures(page: str) -> list[Image.Image]:
    found = re.findall(r'<img src="data:image/png;base64,([^"]+)"', page)
    return [Image.open(io.BytesIO(base64.b64decode(content))) for content in found]


def test_everything_about_a_success_is_reported() -> None:
    page = result_panel(crafted(), ("cat", "dog"), AttackForm("pgd-20", 8 / 255), "cat")
    assert "Fooled: cat became dog." in page
    assert "pgd-20, linf 8/255: used Linf 2.00/255, L2 0.054; 20 gradients, 3 other passes, 1.2 s." in page
    once = result_panel(replace(crafted(), gradients=1, forwards=1), ("cat", "dog"), AttackForm(), "cat")
    assert "; 1 gradient, 1 other pass, 1.2 s." in once
    assert "75.0 %" in page
    assert "87.5 %" in page
    assert "no longer fools the model" in page
    assert "true class" not in page
    clean, change, attacked, before, after = pictures(page)
    assert clean.getpixel((0, 0)) == (100,) * 3
    assert change.getpixel((0, 0)) == (255,) * 3
    assert attacked.getpixel((0, 0)) == (102,) * 3
    # One scale for both maps: half of the brightest attention is half as bright.
    brightest = after.getpixel((0, 0))
    assert before.getpixel((0, 0)) != brightest == (252, 253, 191)
    assert before.getpixel((0, 191)) == after.getpixel((191, 191)) == (13, 16, 45)


def test_downloads_hold_the_image() -> None:
    page = result_panel(crafted(), ("cat", "dog"), AttackForm(), None)
    content = re.search(r'download="adversarial.png" href="data:image/png;base64,([^"]+)"', page)
    assert content
    image = Image.open(io.BytesIO(base64.b64decode(content[1])))
    assert (image.size, image.getpixel((3, 3))) == ((4, 4), (102, 102, 102))


def test_failures_voids_and_wrong_models_are_reported_as_such() -> None:
    assert "Robust: still cat." in result_panel(crafted(fooled=False), ("cat", "dog"), AttackForm(), "cat")
    void = replace(crafted(), fooled=False, void=True)
    assert "exceeded its budget" in result_panel(void, ("cat", "dog"), AttackForm(), None)
    wrong = result_panel(crafted(), ("cat", "dog"), AttackForm(), "dog")
    assert "The true class is dog: the model is already wrong on the clean image." in wrong
    blind = replace(crafted(), before=Prediction(0, torch.tensor([0.75, 0.25]), None, "it attends in windows."))
    page = result_panel(blind, ("cat", "dog"), AttackForm(), None)
    assert "No attention shown: it attends in windows." in page
    assert len(pictures(page)) == 3


def test_comparison_says_who_is_fooled_by_whose_image() -> None:
    stays, moves = Prediction(0, torch.tensor([0.9, 0.1]), None), Prediction(1, torch.tensor([0.2, 0.8]), None)
    transferred = [TransferResult(stays, stays, False), TransferResult(stays, moves, True)]
    made = [crafted(fooled=False), crafted()]
    page = comparison_panel(("A", "B"), [("cat", "dog")] * 2, made, transferred, AttackForm())
    cells = re.findall(r'<td class="(\w+)">([^<]*)', page)
    assert cells == [
        ("held", "cat (75.0 %)"),  # A on its own image
        ("fooled", "dog (80.0 %)"),  # A on B's
        ("held", "cat (90.0 %)"),  # B on A's
        ("fooled", "dog (87.5 %)"),  # B on its own
    ]
    assert "different sizes" in page
    assert "Only B is fooled. What fools B also fools A." in page


def test_comparison_begins_with_its_verdict() -> None:
    stays, moves = Prediction(0, torch.tensor([0.9, 0.1]), None), Prediction(1, torch.tensor([0.2, 0.8]), None)
    moved = {True: TransferResult(stays, moves, False), False: TransferResult(stays, stays, False)}
    for fooled, also, reported in (
        ((False, False), (False, True), "Both models are robust.</p>"),
        ((True, False), (False, False), "Only A is fooled. What fools A does not fool B.</p>"),
        ((True, True), (True, False), "Both are fooled. What fools A also fools B. What fools B does not fool A.</p>"),
    ):
        made = [crafted(fooled=each) for each in fooled]
        page = comparison_panel(("A", "B"), [("cat", "dog")] * 2, made, [moved[each] for each in also], AttackForm())
        assert reported in page
        assert page.index(reported) < page.index("<img")


def test_hostile_names_stay_words() -> None:
    seen = [
        error_panel(ValueError(BAD)),
        image_panel(ChosenImage(Image.new("RGB", (5, 5)), BAD)),
        result_panel(crafted(), (BAD, BAD), AttackForm(BAD), BAD + "!"),
        comparison_panel(
            (BAD, BAD), [(BAD, BAD)] * 2, [crafted()] * 2, [TransferResult(*_both(), False)] * 2, AttackForm(BAD)
        ),
    ]
    for page in seen:
        assert BAD not in page
        assert "&lt;img src=x onerror=alert(1)&gt;" in page


def _both() -> tuple[Prediction, Prediction]:
    return crafted().before, crafted().after


def test_large_pictures_are_made_small_for_the_page() -> None:
    (small,) = pictures(image_panel(ChosenImage(Image.new("RGB", (4000, 2000)), "photo")))
    assert small.size == (448, 224)
