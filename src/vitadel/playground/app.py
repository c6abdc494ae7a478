"""The page, by Gradio Blocks: on loopback, without analytics, share links or external resources."""

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
from vitadel.playground.access import OnlyThisPage
from vitadel.playground.craft import AttackForm, CraftedImage, craft, prepare_attack, transfer
from vitadel.playground.models import ChosenImage, ModelCache, OpenedModel
from vitadel.playground.uploads import MOST_BYTES, MOST_PIXELS, MOST_RATIO, MOST_SIDE, take_upload
from vitadel.quantities import read_quantity

# Before gradio is imported: it reads this once.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
try:
    import gradio as gr
    from gradio.utils import get_upload_folder
    from starlette.middleware import Middleware
except ImportError as error:
    raise UserError("the playground needs gradio, which is not installed: pip install 'vitadel[ui]'") from error


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
"""One attack at a time: attacks put hooks on a model, and two would see each other's."""

_MOST_WAITING = 256
"""Requests in the queue; more are refused, so that requests cannot fill the memory."""


def build(cache: ModelCache) -> gr.Blocks:
    """The page; models are opened on first use."""
    page: gr.Blocks = gr.Blocks(title="Vitadel playground", analytics_enabled=False, delete_cache=(60, 60))
    with page:
        gr.Markdown("# Vitadel playground\nChoose a model, an image and an attack, and see how the prediction changes.")
        chosen = gr.State(None)
        with gr.Row():
            with gr.Column(scale=1, min_width=280):
                _image_choice(cache, chosen, page)
                form = _attack_choice()
            with gr.Column(scale=3, min_width=300), gr.Tabs():
                with gr.Tab("One model"):
                    model = gr.Dropdown(cache.specs, value=cache.pair[0], label="Model", elem_id="model")
                    button = gr.Button("Attack", variant="primary", elem_id="attack")
                    result = gr.HTML(elem_id="result", min_height=120)
                    button.click(
                        _attack_handler(cache), [chosen, model, *form], result, scroll_to_output=True, **_QUEUE
                    )
                with gr.Tab("Two models"):
                    pair = [
                        gr.Dropdown(cache.specs, value=spec, label=f"{place.capitalize()} model", elem_id=place)
                        for spec, place in zip(cache.pair, ("first", "second"), strict=True)
                    ]
                    compare = gr.Button("Attack both", variant="primary", elem_id="compare")
                    table = gr.HTML(elem_id="comparison", min_height=120)
                    compare.click(
                        _compare_handler(cache), [chosen, *pair, *form], table, scroll_to_output=True, **_QUEUE
                    )
        page.unload(_forget(page))
    return page


def _forget(page: gr.Blocks) -> Callable[[gr.Request], None]:
    """Drop the state of a closed page: Gradio keeps images for another hour, and results for longer."""

    def forget(request: gr.Request) -> None:
        session = str(request.session_hash)
        page.state_holder.session_data.pop(session, None)
        page.state_holder.time_last_used.pop(session, None)

    return forget


def _image_choice(cache: ModelCache, chosen: gr.State, page: gr.Blocks) -> None:
    """An image of the data by its number, or an uploaded file; the last choice counts."""
    number = gr.Number(0, label=f"Image of {cache.data}, by number", precision=0, minimum=0, elem_id="number")
    # Without `file_types`: the page would silently drop other files, where `take_upload` says what is wrong.
    upload = gr.UploadButton("or upload your own", size="sm", elem_id="upload")
    limits = (
        f"PNG, JPEG or WebP, at most {MOST_BYTES // 2**20} MB and {MOST_PIXELS // 10**6} million pixels, no side over "
        f"{MOST_SIDE:,} or {MOST_RATIO} times the other."
    )
    gr.HTML(f'<div class="vd muted"><small>{limits} Read in memory and not stored.</small></div>')
    preview = gr.HTML(elem_id="preview")

    def by_number(value: float | None) -> tuple[ChosenImage | None, str]:
        return _shown(lambda: cache.image(int(value or 0)))

    def by_file(sent: Mapping[str, Any] | None) -> tuple[ChosenImage | None, str]:
        path = Path(str((sent or {}).get("path", "")))
        return _shown(lambda: ChosenImage(take_upload(path, Path(get_upload_folder())), "your image"))

    quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
    number.change(by_number, number, [chosen, preview], **quiet)
    page.load(by_number, number, [chosen, preview], **quiet)
    # Gradio's own reading of the file would leave a copy behind; `take_upload` checks the path itself.
    upload.upload(by_file, upload, [chosen, preview], preprocess=False, **quiet)


def _shown(pick: Callable[[], ChosenImage]) -> tuple[ChosenImage | None, str]:
    try:
        picked = pick()
    except UserError as error:
        return None, panels.error_panel(error)
    return picked, panels.image_panel(picked)


def _attack_choice() -> list[gr.components.Component]:
    attack = gr.Dropdown(list(ATTACKS), value=ATTACKS[0], label="Attack", allow_custom_value=True, elem_id="name")
    norm = gr.Radio(list(BUDGETS), value="linf", label="Norm", elem_id="norm")
    eps = gr.Dropdown(
        list(_EPS), value=BUDGETS["linf"], label="eps, in pixels of [0, 1]", allow_custom_value=True, elem_id="eps"
    )
    norm.input(lambda kind: BUDGETS[kind], norm, eps, api_visibility="private", show_progress="hidden")
    return [attack, norm, eps]


def _read_form(attack: str | None, norm: str, eps: str | None) -> AttackForm:
    if not attack or not eps:
        raise UserError("attack and eps are both needed: for example pgd-20 with eps 8/255")
    return AttackForm(str(attack), read_quantity(str(eps), "eps"), norm)


def _run(
    opened: OpenedModel, picked: ChosenImage | None, form: AttackForm, title: str, progress: gr.Progress
) -> CraftedImage:
    if picked is None:
        raise UserError("no image is chosen; choose one by its number, or upload one")

    def report(done: int, most: int | None) -> None:
        if most is None:
            progress(None, desc=f"{title}: calibrating, pass {done:,}")
        else:
            progress((done, most), desc=title, unit="passes")

    attack = prepare_attack(opened, form, picked.index, report)
    return craft(opened.target.model, opened.pixels(picked.picture), attack, form, report)


def _attack_handler(cache: ModelCache) -> Callable[..., str]:
    def work(
        picked: ChosenImage | None,
        spec: str,
        attack: str | None,
        norm: str,
        eps: str | None,
        progress: gr.Progress = gr.Progress(),  # noqa: B008 (how Gradio finds the bar)
    ) -> str:
        try:
            form, opened = _read_form(attack, norm, eps), cache.open(spec)
            crafted = _run(opened, picked, form, form.attack, progress)
        except UserError as error:
            return panels.error_panel(error)
        label = picked.label if picked is not None and opened.knows_data else None
        return panels.result_panel(crafted, opened.names, form, label)

    return work


def _compare_handler(cache: ModelCache) -> Callable[..., str]:
    def work(
        picked: ChosenImage | None,
        first: str,
        second: str,
        attack: str | None,
        norm: str,
        eps: str | None,
        progress: gr.Progress = gr.Progress(),  # noqa: B008 (how Gradio finds the bar)
    ) -> str:
        try:
            form, specs = _read_form(attack, norm, eps), (first, second)
            both = [cache.open(spec) for spec in specs]
            crafted = [
                _run(opened, picked, form, f"{form.attack} on {spec}", progress)
                for opened, spec in zip(both, specs, strict=True)
            ]
            transferred = [
                transfer(made, other.target.model, other.target.preprocess.shape, other.device)
                for made, other in zip(crafted, reversed(both), strict=True)
            ]
        except UserError as error:
            return panels.error_panel(error)
        return panels.comparison_panel(specs, [opened.names for opened in both], crafted, transferred, form)

    return work


@contextmanager
def serve(cache: ModelCache, host: str, port: int) -> Iterator[str]:
    """Serve the page while the block runs, and yield its address; `port` 0 takes any that is free.

    Uploads go to a temporary folder, which is removed at the end.
    """
    # Gradio reads GRADIO_TEMP_DIR, the folder of uploads, when it begins to serve.
    with tempfile.TemporaryDirectory(prefix="vitadel-ui-") as folder, _variable("GRADIO_TEMP_DIR", folder):
        try:
            with _variable("no_proxy", _direct(host)):
                page, address = _launch(cache, host, _free_port(host, port))
        except OSError as error:
            raise UserError(
                f"cannot listen on {host}:{port}: {error}. Choose another --port; if the machine is busy, try again."
            ) from error
        try:
            yield address
        finally:
            page.close(verbose=False)


def _free_port(host: str, port: int) -> int:
    """The port itself, or for 0 any that is free. Gradio checks too, but leaves sockets open if it is not free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as trial:
        return int(trial.getsockname()[1])


def _launch(cache: ModelCache, host: str, port: int) -> tuple[gr.Blocks, str]:
    """Start serving; returns the page and its address."""

    async def launch() -> tuple[gr.Blocks, str]:
        page = build(cache)
        _, address, _ = page.queue(max_size=_MOST_WAITING).launch(
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
            app_kwargs={"middleware": [Middleware(OnlyThisPage, host=host)]},
            theme=_theme(),
            css=panels.CSS,
            _frontend=False,  # otherwise it gives up where a busy machine takes over 3 seconds to answer
        )
        return page, str(address)

    # Without a running event loop, Gradio makes several and closes none. So `asyncio.run` provides one and closes it,
    # in a thread of its own, because in a notebook one runs here already.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, launch()).result()


def _direct(host: str) -> str:
    """Hosts to reach without a proxy, including this machine: Gradio calls its own server before it serves."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    return ",".join(dict.fromkeys([*filter(None, given.split(",")), "localhost", "127.0.0.1", host]))


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable while the block runs."""
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
    """Fonts of the reader's own system, so that none is fetched."""
    own = ("ui-sans-serif", "system-ui", "sans-serif")
    return gr.themes.Soft(primary_hue="blue", font=own, font_mono=("ui-monospace", "monospace"))
