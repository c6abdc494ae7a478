"""The playground in a real browser: from a click to a picture, silent, and asking no one else for anything."""

from __future__ import annotations

import asyncio
import base64
import gc
import importlib.util
import io
import itertools
import os
import socket
import sys
import time
import urllib.request
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from browsing import DESKTOP, PHONE, Visit, browsing, keep_screenshot
from vitadel.errors import UserError
from vitadel.playground.models import ChosenImage, ModelCache
from vitadel.playground.uploads import MOST_BYTES

pytestmark = [
    pytest.mark.browser,
    pytest.mark.filterwarnings("ignore"),  # of a web server and its parts, in threads of their own
]


def cache() -> ModelCache:
    return ModelCache((), "shapes", torch.device("cpu"))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if importlib.util.find_spec("gradio") is None:
        pytest.skip("the playground needs gradio: pip install 'vitadel[ui]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vitadel.playground.app import serve

        with serve(cache(), "127.0.0.1", 0) as address:
            yield address


@pytest.fixture(scope="module")
def visit(address: str) -> Iterator[Visit]:
    with browsing(address) as visit:
        visit.page.goto(address)
        visit.page.wait_for_selector("#preview img")
        yield visit


def choose(visit: Visit, elem_id: str, value: str) -> None:
    box = visit.page.locator(f"#{elem_id} input")
    box.fill(value)
    box.press("Enter")


def press(visit: Visit, button: str, panel: str) -> Any:
    """Click, and wait for a panel that was not there before."""
    visit.page.evaluate(f"document.querySelector('#{panel} .vd')?.setAttribute('data-old', '')")
    visit.page.click(f"#{button}")
    fresh = visit.page.locator(f"#{panel} .vd:not([data-old])")
    fresh.wait_for()
    return fresh


def send(visit: Visit, path: Path) -> None:
    visit.page.set_input_files("input[type=file]", path)


def uploaded() -> list[Path]:
    return [path for path in Path(os.environ["GRADIO_TEMP_DIR"]).rglob("*") if path.is_file()]


@pytest.mark.slow
def test_an_attack_from_click_to_picture(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    choose(visit, "model", "zoo:shapes-standard")
    press(visit, "attack", "result")
    assert page.locator("#result .verdict").inner_text().startswith("Fooled: disc became ")
    assert page.locator("#result img").count() == 5
    assert page.evaluate("[...document.querySelectorAll('#result img')].every(i => i.naturalWidth >= 192 && i.alt)")
    for name in ("adversarial.png", "adversarial.safetensors"):
        with page.expect_download() as coming:
            page.click(f"#result a[download='{name}']")
        coming.value.save_as(tmp_path / name)
    kept = load_file(tmp_path / "adversarial.safetensors")
    assert float((kept["adversarial"] - kept["clean"]).abs().max()) <= 8 / 255 + 1e-6
    assert Image.open(tmp_path / "adversarial.png").size == (32, 32)
    assert (visit.errors, visit.outside) == ([], [])


def test_passes_are_counted_while_an_attack_runs(visit: Visit) -> None:
    page = visit.page
    choose(visit, "model", "zoo:shapes-robust")
    choose(visit, "name", "square(queries=500)")
    choose(visit, "eps", "1/255")  # too little to be fooled by, so that it goes all the way
    page.click("#attack")
    page.wait_for_function(r"/\d+\/50\d passes/.test(document.querySelector('#result').innerText)")
    page.locator("#result .verdict", has_text="Robust: still").wait_for()
    choose(visit, "name", "pgd-20")
    choose(visit, "eps", "8/255")
    assert (visit.errors, visit.outside) == ([], [])


def test_two_models_on_all_screens(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    choose(visit, "model", "zoo:shapes-standard")
    press(visit, "attack", "result")
    page.get_by_role("tab", name="Two models").click()
    press(visit, "compare", "comparison")
    assert page.locator("#comparison td").count() == 6
    assert "What fools zoo:shapes-standard does not fool zoo:shapes-robust." in page.locator("#comparison").inner_text()
    for screen, tab in itertools.product((DESKTOP, PHONE), ("One model", "Two models")):
        page.set_viewport_size(screen)
        page.get_by_role("tab", name=tab).click()  # both are there, on a phone too
        page.wait_for_timeout(300)
        assert not visit.scrolls_sideways()
        for scheme in ("light", "dark"):
            # What the system's setting does when a page is opened; opening it again would forget the results.
            page.evaluate(f"document.body.classList.toggle('dark', {str(scheme == 'dark').lower()})")
            page.wait_for_timeout(500)  # colors fade over
            name = f"playground-{tab.partition(' ')[0].lower()}-{screen['width']}-{scheme}"
            keep_screenshot(page, name, tmp_path)
    page.evaluate("document.body.classList.remove('dark')")
    page.get_by_role("tab", name="One model").click()
    page.set_viewport_size(DESKTOP)
    assert (visit.errors, visit.outside) == ([], [])


def test_an_upload_is_attacked_and_not_kept(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    Image.new("RGB", (200, 100), (10, 200, 30)).save(tmp_path / "mine.png")
    send(visit, tmp_path / "mine.png")
    page.wait_for_selector("#preview figcaption:has-text('200 x 100 pixels')")
    assert uploaded() == []
    shown = press(visit, "attack", "result").locator("img[alt='the clean image']").get_attribute("src")
    clean = Image.open(io.BytesIO(base64.b64decode(shown.partition(",")[2])))
    assert clean.getpixel((90, 90)) == (10, 200, 30)
    assert (visit.errors, visit.outside) == ([], [])


def test_errors_are_shown_in_the_page(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    (tmp_path / "evil.png").write_bytes(b"<script>alert(1)</script>")
    send(visit, tmp_path / "evil.png")
    page.wait_for_selector("#preview .mistake:has-text('not an image that can be read')")
    assert uploaded() == []
    assert "no image is chosen" in press(visit, "attack", "result").inner_text()
    page.locator("#number input").fill("7")
    page.wait_for_selector("#preview figcaption:has-text('shapes test 7')")
    choose(visit, "name", "<b>pgdd</b>-20${7*7}{{7*7}}")
    message = press(visit, "attack", "result").inner_text()
    assert message.startswith("unknown attack")
    assert "<b>pgdd</b>-20${7*7}{{7*7}}" in message  # as it was written: neither markup nor template
    keep_screenshot(page, "playground-mistake", tmp_path)
    assert (visit.errors, visit.outside) == ([], [])


def test_refused_files_are_reported(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    (tmp_path / "notes.txt").write_text("no picture")
    send(visit, tmp_path / "notes.txt")
    page.wait_for_selector("#preview .mistake:has-text('not an image that can be read')")
    page.locator("#number input").fill("3")
    page.wait_for_selector("#preview figcaption:has-text('shapes test 3')")
    (tmp_path / "large.png").write_bytes(bytes(MOST_BYTES + 1))
    send(visit, tmp_path / "large.png")
    page.get_by_text("exceed the maximum allowed size of 10.0 Mb").wait_for()
    assert uploaded() == []
    assert (visit.errors, visit.outside) == ([], [])


def test_a_closed_page_leaves_no_picture_behind(visit: Visit, tmp_path: Path) -> None:
    Image.new("RGB", (123, 77)).save(tmp_path / "mine.png")
    page = visit.page.context.new_page()
    page.goto(visit.page.url)
    page.wait_for_selector("#preview img")
    page.set_input_files("input[type=file]", tmp_path / "mine.png")
    page.wait_for_selector("#preview figcaption:has-text('123 x 77 pixels')")
    chosen = [each for each in gc.get_objects() if isinstance(each, ChosenImage) and each.picture.size == (123, 77)]
    kept = [weakref.ref(each) for each in chosen]
    del chosen
    assert any(each() for each in kept)
    page.close()
    until = time.monotonic() + 120  # an hour without care
    while any(each() for each in kept) and time.monotonic() < until:
        time.sleep(0.1)
        gc.collect()
    assert not any(each() for each in kept)


@pytest.mark.parametrize("hindrance", ["busy", "proxy"])
def test_a_page_is_served_whatever_gradio_thinks_of_localhost(
    address: str, hindrance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitadel.playground.app import serve

    if hindrance == "busy":
        monkeypatch.setattr("gradio.networking.url_ok", lambda url: False)  # as where 3 seconds are too few
    else:
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # no one listens there
    with serve(cache(), "127.0.0.1", 0) as other:
        assert other != address
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        assert "Vitadel playground" in direct.open(other, timeout=60).read().decode()
    assert "no_proxy" not in os.environ or hindrance == "busy"


@pytest.mark.slow
def test_no_event_loop_is_left_open(address: str) -> None:
    """They would be complained of wherever they are collected: in a test that has nothing to do with them."""
    from vitadel.playground.app import serve

    def open_loops() -> int:
        gc.collect()
        return sum(isinstance(each, asyncio.BaseEventLoop) and not each.is_closed() for each in gc.get_objects())

    made: list[asyncio.AbstractEventLoop] = []  # kept, so that none is collected before it is counted
    policy = asyncio.get_event_loop_policy()

    class Noting(type(policy)):  # type: ignore[misc]
        def new_event_loop(self) -> asyncio.AbstractEventLoop:
            made.append(super().new_event_loop())
            return made[-1]

    before = open_loops()
    asyncio.set_event_loop_policy(Noting())
    try:
        with serve(cache(), "127.0.0.1", 0):
            pass
    finally:
        asyncio.set_event_loop_policy(policy)
    assert made
    assert open_loops() == before


def test_a_port_that_is_taken_is_a_user_error(address: str) -> None:
    from vitadel.playground.app import serve

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with (
            pytest.raises(UserError, match="Choose another --port"),
            serve(cache(), "127.0.0.1", taken.getsockname()[1]),
        ):
            pass


@pytest.mark.slow
def test_without_gradio_the_way_to_get_it_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vitadel.playground.app", raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(UserError, match=r"pip install 'vitadel\[ui\]'"):
        import vitadel.playground.app  # noqa: F401
