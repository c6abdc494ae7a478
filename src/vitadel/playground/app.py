"""The page, by Gradio Blocks: on loopback, without analytics, share links or anything from outside."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitadel.errors import UserError
from vitadel.playground import panels
from vitadel.playground.craft import AttackForm, CraftedImage, craft, ready_attack, transfer
from vitadel.playground.models import Chosen, ModelCache, Opened
from vitadel.playground.uploads import MOST_BYTES, MOST_PIXELS, MOST_RATIO, MOST_SIDE, take_upload
from vitadel.quantities import read_quantity

# Before gradio is imported: it reads this once.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
try:
    import gradio as gr
    from gradio.utils import get_upload_folder
except ImportError as missing:
    raise UserError("the playground needs gradio, which is not installed: pip install 'vitadel[ui]'") from missing

__all__ = ["build", "serving"]

ATTACKS = (
    "pgd-20",
    "fgsm",
    "pgd-100",
    "apgd-ce",
    "autoattack",
    "square",
    "targeted:least+pgd-50",
    "aas(images=64,steps=3)+pgd-20",
    "patch-fool",
    "noise",
)
BUDGETS = {"linf": "8/255", "l2": "0.5", "l1": "12"}
_EPS = ("1/255", "2/255", "4/255", "8/255", "16/255", "0.5", "1", "12")
_QUEUE: dict[str, Any] = {"concurrency_id": "models", "concurrency_limit": 1, "api_visibility": "private"}
"""One at a time: attacks put hooks on a model, and two would see each other's."""


def build(shelf: ModelCache) -> gr.Blocks:
    """The page; nothing is opened before somebody asks for it."""
    page: gr.Blocks = gr.Blocks(title="Vitadel playground", analytics_enabled=False, delete_cache=(60, 60))
    with page:
        gr.Markdown("# Vitadel playground\nPick a model, an image and an attack, and see what becomes of the answer.")
        chosen = gr.State(None)
        with gr.Row():
            with gr.Column(scale=1, min_width=280):
                _image_choice(shelf, chosen, page)
                wish = _wish_choice()
            with gr.Column(scale=3, min_width=300), gr.Tabs():
                with gr.Tab("One model"):
                    model = gr.Dropdown(shelf.specs, value=shelf.pair[0], label="Model", elem_id="model")
                    button = gr.Button("Attack", variant="primary", elem_id="attack")
                    result = gr.HTML(elem_id="result", min_height=120)
                    button.click(_attack(shelf), [chosen, model, *wish], result, scroll_to_output=True, **_QUEUE)
                with gr.Tab("Two models"):
                    pair = [
                        gr.Dropdown(shelf.specs, value=spec, label=f"{place.capitalize()} model", elem_id=place)
                        for spec, place in zip(shelf.pair, ("first", "second"), strict=True)
                    ]
                    compare = gr.Button("Attack both", variant="primary", elem_id="compare")
                    table = gr.HTML(elem_id="comparison", min_height=120)
                    compare.click(_compare(shelf), [chosen, *pair, *wish], table, scroll_to_output=True, **_QUEUE)
        page.unload(_forget(page))
    return page


def _forget(page: gr.Blocks) -> Callable[[gr.Request], None]:
    """Drop what a closed page has left here: Gradio keeps a picked image for another hour, and results for longer."""

    def forget(request: gr.Request) -> None:
        session = str(request.session_hash)
        page.state_holder.session_data.pop(session, None)
        page.state_holder.time_last_used.pop(session, None)

    return forget


def _image_choice(shelf: ModelCache, chosen: gr.State, page: gr.Blocks) -> None:
    """A number of the data, or a file; what was picked last is taken."""
    number = gr.Number(0, label=f"Image of {shelf.data}, by number", precision=0, minimum=0, elem_id="number")
    # Without `file_types`: the page would drop other files without a word, where `take_upload` says what is wrong.
    upload = gr.UploadButton("or send your own", size="sm", elem_id="upload")
    limits = (
        f"PNG, JPEG or WebP, at most {MOST_BYTES // 2**20} MB and {MOST_PIXELS // 10**6} million pixels, no side over "
        f"{MOST_SIDE:,} or {MOST_RATIO} times the other."
    )
    gr.HTML(f'<div class="vd muted"><small>{limits} Read in memory and not kept.</small></div>')
    preview = gr.HTML(elem_id="preview")

    def by_number(value: float | None) -> tuple[Chosen | None, str]:
        return _shown(lambda: shelf.image(int(value or 0)))

    def by_file(sent: Mapping[str, Any] | None) -> tuple[Chosen | None, str]:
        path = Path(str((sent or {}).get("path", "")))
        return _shown(lambda: Chosen(take_upload(path, Path(get_upload_folder())), "your picture"))

    quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
    number.change(by_number, number, [chosen, preview], **quiet)
    page.load(by_number, number, [chosen, preview], **quiet)
    # Gradio's own reading of the file leaves another one behind, and `take_upload` looks where the file lies itself.
    upload.upload(by_file, upload, [chosen, preview], preprocess=False, **quiet)


def _shown(pick: Callable[[], Chosen]) -> tuple[Chosen | None, str]:
    try:
        picked = pick()
    except UserError as mistake:
        return None, panels.mistake_panel(mistake)
    return picked, panels.chosen_panel(picked)


def _wish_choice() -> list[gr.components.Component]:
    attack = gr.Dropdown(list(ATTACKS), value=ATTACKS[0], label="Attack", allow_custom_value=True, elem_id="name")
    norm = gr.Radio(list(BUDGETS), value="linf", label="Norm", elem_id="norm")
    eps = gr.Dropdown(
        list(_EPS), value=BUDGETS["linf"], label="eps, in pixels of [0, 1]", allow_custom_value=True, elem_id="eps"
    )
    norm.input(lambda kind: BUDGETS[kind], norm, eps, api_visibility="private", show_progress="hidden")
    return [attack, norm, eps]


def _wish(attack: str | None, norm: str, eps: str | None) -> AttackForm:
    if not attack or not eps:
        raise UserError("name an attack and a budget: for example pgd-20 with eps 8/255")
    return AttackForm(str(attack), read_quantity(str(eps), "eps"), norm)


def _run(opened: Opened, picked: Chosen | None, wish: AttackForm, title: str, progress: gr.Progress) -> CraftedImage:
    if picked is None:
        raise UserError("there is no image to attack; pick one by its number, or send a picture")

    def tell(done: int, most: int | None) -> None:
        if most is None:
            progress(None, desc=f"{title}: studying the model, pass {done:,}")
        else:
            progress((done, most), desc=title, unit="passes")

    attack = ready_attack(opened, wish, picked.index, tell)
    return craft(opened.target.model, opened.pixels(picked.picture), attack, wish, tell)


def _attack(shelf: ModelCache) -> Callable[..., str]:
    def work(
        picked: Chosen | None,
        spec: str,
        attack: str | None,
        norm: str,
        eps: str | None,
        progress: gr.Progress = gr.Progress(),  # noqa: B008 (how Gradio finds the bar)
    ) -> str:
        try:
            wish, opened = _wish(attack, norm, eps), shelf.open(spec)
            crafted = _run(opened, picked, wish, wish.attack, progress)
        except UserError as mistake:
            return panels.mistake_panel(mistake)
        label = picked.label if picked is not None and opened.knows_data else None
        return panels.result_panel(crafted, opened.names, wish, label)

    return work


def _compare(shelf: ModelCache) -> Callable[..., str]:
    def work(
        picked: Chosen | None,
        first: str,
        second: str,
        attack: str | None,
        norm: str,
        eps: str | None,
        progress: gr.Progress = gr.Progress(),  # noqa: B008 (how Gradio finds the bar)
    ) -> str:
        try:
            wish, specs = _wish(attack, norm, eps), (first, second)
            both = [shelf.open(spec) for spec in specs]
            crafted = [
                _run(opened, picked, wish, f"{wish.attack} on {spec}", progress)
                for opened, spec in zip(both, specs, strict=True)
            ]
            transferred = [
                transfer(made, other.target.model, other.target.preprocess.shape, other.device)
                for made, other in zip(crafted, reversed(both), strict=True)
            ]
        except UserError as mistake:
            return panels.mistake_panel(mistake)
        return panels.comparison_panel(specs, [opened.names for opened in both], crafted, transferred, wish)

    return work


@contextmanager
def serving(shelf: ModelCache, host: str, port: int) -> Iterator[str]:
    """Serve the page while the block runs, and give its address. What browsers send lies in a folder of its own for
    a moment, and the folder is removed at the end; `port` 0 takes any that is free."""
    # Gradio writes what a browser sends into the folder that GRADIO_TEMP_DIR names, when it begins to serve.
    with tempfile.TemporaryDirectory(prefix="vitadel-ui-") as folder, _variable("GRADIO_TEMP_DIR", folder):
        try:
            with _variable("no_proxy", _direct(host)):
                page, address = _launched(shelf, host, _free_port(host, port))
        except OSError as error:
            raise UserError(
                f"cannot listen on {host}:{port}: {error}. Take another --port; if the machine is busy, try again."
            ) from error
        try:
            yield address
        finally:
            page.close(verbose=False)


def _free_port(host: str, port: int) -> int:
    """The port itself, or for 0 any that is free. Gradio asks too, but leaves its sockets open where one is not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as trial:
        return int(trial.getsockname()[1])


def _launched(shelf: ModelCache, host: str, port: int) -> tuple[gr.Blocks, str]:
    """The page, served, and its address."""

    async def launch() -> tuple[gr.Blocks, str]:
        page = build(shelf)
        _, address, _ = page.queue(max_size=16).launch(
            server_name=host,
            server_port=port,
            share=False,
            inbrowser=False,
            prevent_thread_lock=True,
            quiet=True,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            enable_monitoring=False,
            max_file_size=MOST_BYTES,
            footer_links=[],
            theme=_theme(),
            css=panels.CSS,
            _frontend=False,  # else it gives up where the page takes over 3 seconds to answer: busy machines
        )
        return page, str(address)

    # Where no event loop runs, Gradio makes several and closes none. So one runs, which `asyncio.run` closes, in a
    # thread of its own, because in a notebook one runs here already.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, launch()).result()


def _direct(host: str) -> str:
    """The hosts to reach without a proxy, with this machine among them: Gradio asks its own server before it serves."""
    told = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    return ",".join(dict.fromkeys([*filter(None, told.split(",")), "localhost", "127.0.0.1", host]))


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """A variable of the environment, set while the block runs."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _theme() -> gr.themes.Base:
    """Fonts of the reader's own system: none is fetched."""
    own = ("ui-sans-serif", "system-ui", "sans-serif")
    return gr.themes.Soft(primary_hue="blue", font=own, font_mono=("ui-monospace", "monospace"))
