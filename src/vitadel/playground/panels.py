"""What the page shows, as HTML; images and downloads are embedded, so that no files are needed."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
import torch
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from vitadel.playground.craft import AttackForm, CraftedImage, Prediction, TransferResult, perturbation_image
from vitadel.playground.models import ChosenImage
from vitadel.quantities import quantity_text

_SIDE = 192  # smaller images are shown at least this wide, in whole pixels
_MOST_SIDE = 448
_ANSWERS = 5
_HOT = np.array([[13, 16, 45], [106, 30, 110], [203, 71, 74], [250, 158, 59], [252, 253, 191]], float)

CSS = """
.vd { color: var(--body-text-color); font-size: 15px; line-height: 1.45; }
.vd figure { margin: 0; max-width: 224px; min-width: 0; }
.vd figcaption { margin-top: 6px; overflow-wrap: anywhere; }
.vd small, .vd .muted { font-weight: 400; font-size: 13px;
  color: color-mix(in srgb, var(--body-text-color) 72%, transparent); }
.vd img { display: block; width: 100%; height: auto; border-radius: 6px; image-rendering: pixelated; }
.vd .row { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); margin: 14px 0; }
.vd .two { display: grid; gap: 24px; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); margin: 14px 0; }
.vd .verdict { font-size: 18px; font-weight: 600; margin: 0 0 2px; }
.vd .verdict.fooled { color: #b3402a; } .dark .vd .verdict.fooled { color: #ff9d85; }
.vd .verdict.held { color: #1d6f42; } .dark .vd .verdict.held { color: #7fd6a4; }
.vd h3 { font-size: 15px; font-weight: 600; margin: 0 0 6px; }
.vd .bar { display: grid; grid-template-columns: minmax(0, 9em) 1fr 4.2em; gap: 8px; align-items: center; }
.vd .bar span { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.vd .bar span:last-child { text-align: right; font-variant-numeric: tabular-nums; }
.vd .bar i { background: var(--border-color-primary); border-radius: 4px; display: block; height: 9px; }
.vd .bar i b { background: #6d8fc4; border-radius: 4px; display: block; height: 9px; }
.vd .after .bar i b { background: #d9974a; }
.vd .downloads { display: flex; flex-wrap: wrap; gap: 8px; margin-top: 12px; }
.vd .downloads a { border: 1px solid var(--border-color-primary); border-radius: 8px; color: inherit;
  padding: 8px 14px; text-decoration: none; }
.vd .downloads a:hover { background: var(--background-fill-secondary); }
.vd .mistake { background: #fdf0ec; border-left: 4px solid #b3402a; border-radius: 6px; color: #5c2115;
  overflow-wrap: anywhere; padding: 12px 16px; }
.dark .vd .mistake { background: #3a201a; color: #ffd9cf; }
.vd .scroll { overflow-x: auto; }
.vd table { border-collapse: collapse; margin: 8px 0; min-width: 100%; }
.vd table, .vd table thead, .vd table tbody, .vd table tr { border: 0 !important; }
.vd th, .vd td { border: 0; border-bottom: 1px solid var(--border-color-primary); padding: 8px 12px 8px 0;
  text-align: left; vertical-align: top; }
.vd td { white-space: nowrap; }
.vd td.fooled { color: #b3402a; font-weight: 600; } .dark .vd td.fooled { color: #ff9d85; }
"""

Names = Sequence[str]


def error_panel(error: Exception) -> str:
    """The message of an error."""
    return _page(Markup('<div class="mistake" role="alert">{}</div>').format(str(error)))


def image_panel(chosen: ChosenImage) -> str:
    """The chosen image before any preprocessing, no larger than what the page shows."""
    small = chosen.picture.copy()
    small.thumbnail((_MOST_SIDE, _MOST_SIDE))
    pixels = torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1)
    size = f"{chosen.picture.width} x {chosen.picture.height} pixels"
    return _page(_figure(pixels, chosen.name, chosen.name, size))


def result_panel(crafted: CraftedImage, names: Names, form: AttackForm, label: str | None) -> str:
    """Everything about one attack on one image."""
    return _page(
        _verdict(crafted, names, label),
        _spent(crafted, form),
        _pictures(crafted, names),
        Markup('<div class="two">{}{}</div>').format(
            _answers(crafted.before, names, "Clean"), _answers(crafted.after, names, "Attacked", "after")
        ),
        _downloads(crafted),
    )


def comparison_panel(
    specs: Sequence[str],
    names: Sequence[Names],
    crafted: Sequence[CraftedImage],
    transferred: Sequence[TransferResult],
    form: AttackForm,
) -> str:
    """Two models on the clean image and on those crafted for each; `transferred[i]` is the other's answer to `i`'s."""
    first, second = crafted
    # By each model, on the images in their order.
    seen: list[tuple[CraftedImage | TransferResult, ...]] = [(first, transferred[1]), (transferred[0], second)]
    head = Markup("<tr><th>Model</th><th>clean</th>{}</tr>").format(
        Markup("").join(Markup("<th>crafted for {}</th>").format(spec) for spec in specs)
    )
    rows = Markup("").join(
        Markup("<tr><th>{}</th><td>{}</td>{}{}</tr>").format(
            spec, _top(each.before, known), *(_cell(answers, known) for answers in row)
        )
        for spec, each, known, row in zip(specs, crafted, names, seen, strict=True)
    )
    pictures = [_figure(first.x[0], "the clean image", "clean")]
    pictures += [
        _figure(each.z[0], f"the image crafted for {spec}", f"crafted for {spec}")
        for spec, each in zip(specs, crafted, strict=True)
    ]
    note = f"{form.attack}, {form.norm} {quantity_text(form.eps)}. Marked: the answer differs from the clean one."
    if any(each.resized for each in transferred):
        note += " The models take images of different sizes: images were resampled, which can undo an attack."
    return _page(
        _summary(specs, crafted, transferred),
        Markup('<div class="row">{}</div>').format(Markup("").join(pictures)),
        Markup('<div class="scroll"><table>{}{}</table></div><p class="muted">{}</p>').format(head, rows, note),
    )


def _summary(specs: Sequence[str], crafted: Sequence[CraftedImage], transferred: Sequence[TransferResult]) -> Markup:
    """Which model is fooled by the image crafted for it, and by the other's."""
    fooled = [spec for spec, each in zip(specs, crafted, strict=True) if each.fooled]
    sentence = ("Both models are robust.", f"Only {''.join(fooled)} is fooled.", "Both are fooled.")[len(fooled)]
    for spec, each, moved, other in zip(specs, crafted, transferred, reversed(specs), strict=True):
        if each.fooled:
            sentence += f" What fools {spec} {'also fools' if moved.fooled else 'does not fool'} {other}."
    kind = "fooled" if fooled else "held"
    return Markup('<p class="verdict {}" role="status">{}</p>').format(kind, sentence)


def _page(*parts: Markup) -> str:
    return str(Markup('<div class="vd">{}</div>').format(Markup("").join(parts)))


def _verdict(crafted: CraftedImage, names: Names, label: str | None) -> Markup:
    before, after = names[crafted.before.answer], names[crafted.after.answer]
    if crafted.void:
        kind, sentence = "held", "The attack exceeded its budget, so its image does not count."
    elif crafted.fooled:
        kind, sentence = "fooled", f"Fooled: {before} became {after}."
    else:
        kind, sentence = "held", f"Robust: still {before}."
    remark = Markup("")
    if label is not None and label != before:
        remark = Markup("<p>The true class is {}: the model is already wrong on the clean image.</p>").format(label)
    return Markup('<p class="verdict {}" role="status">{}</p>{}').format(kind, sentence, remark)


def _spent(crafted: CraftedImage, form: AttackForm) -> Markup:
    used = f"Linf {crafted.size('linf') * 255:.2f}/255, L2 {crafted.size('l2'):.3f}"
    gradients, passes = _count(crafted.gradients, "gradient"), _count(crafted.forwards, "other pass", "es")
    return Markup('<p class="muted">{}, {} {}: used {}; {}, {}, {:.1f} s.</p>').format(
        form.attack, form.norm, quantity_text(form.eps), used, gradients, passes, crafted.seconds
    )


def _count(number: int, what: str, ending: str = "s") -> str:
    return f"{number:,} {what}{'' if number == 1 else ending}"


def _pictures(crafted: CraftedImage, names: Names) -> Markup:
    change, factor = perturbation_image(crafted)
    figures = [
        _figure(crafted.x[0], "the clean image", "Clean", f"classified as {names[crafted.before.answer]}"),
        _figure(change, "the perturbation, rescaled", "Perturbation", f"× {factor:.3g}, gray is no change"),
        _figure(crafted.z[0], "the adversarial image", "Attacked", f"classified as {names[crafted.after.answer]}"),
    ]
    maps = (crafted.before.attention, crafted.after.attention)
    if maps[0] is None or maps[1] is None:
        remark = Markup('<p class="muted">No attention shown: {}.</p>').format(crafted.before.no_attention.rstrip("."))
    else:
        remark = Markup("")
        top = float(max(each.max() for each in (maps[0], maps[1])))  # one scale, so that the two can be compared
        for each, when in zip((maps[0], maps[1]), ("before", "after"), strict=True):
            note = f"last layer, brightest {float(each.max()):.1%}"
            figures.append(_figure(_heat(each / top), f"attention {when} the attack", f"Attention {when}", note))
    return Markup('<div class="row">{}</div>{}').format(Markup("").join(figures), remark)


def _answers(seen: Prediction, names: Names, title: str, kind: str = "before") -> Markup:
    top = seen.probabilities.topk(min(_ANSWERS, len(seen.probabilities)))
    bar = Markup(
        '<div class="bar"><span title="{0}">{0}</span><i><b style="width:{1:.1f}%"></b></i><span>{2}</span></div>'
    )
    bars = [
        bar.format(names[place], 100 * share, _percent(share))
        for share, place in zip(top.values.tolist(), top.indices.tolist(), strict=True)
    ]
    return Markup('<div class="{}"><h3>{}: probabilities</h3>{}</div>').format(kind, title, Markup("").join(bars))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _top(seen: Prediction, names: Names) -> str:
    return f"{names[seen.answer]} ({_percent(float(seen.probabilities[seen.answer]))})"


def _cell(seen: CraftedImage | TransferResult, names: Names) -> Markup:
    before, after = seen.before, seen.after
    left = float(after.probabilities[before.answer])
    lost = "" if after.answer == before.answer else f"{names[before.answer]} now {_percent(left)}"
    return Markup('<td class="{}">{}<br><small>{}</small></td>').format(
        "fooled" if seen.fooled else "held", _top(after, names), lost
    )


def _downloads(crafted: CraftedImage) -> Markup:
    png = _png(Image.fromarray(crafted.picture.permute(1, 2, 0).numpy()))
    floats = crafted.safetensors()
    links = [("adversarial.png", "image/png", png), ("adversarial.safetensors", "application/octet-stream", floats)]
    link = Markup('<a download="{0}" href="data:{1};base64,{2}">Download {0}</a>')
    parts = [link.format(name, kind, _base64(content)) for name, kind, content in links]
    if not crafted.fooled:
        remark = "Both files contain the last image that the attack tried."
    elif crafted.picture_fools:
        remark = "The PNG (8 bits) fools the model as well."
    else:
        remark = "The PNG (8 bits) no longer fools the model; the floats in the safetensors file do."
    joined = Markup("").join(parts)
    return Markup('<div class="downloads">{}</div><p class="muted">{}</p>').format(joined, remark)


def _figure(pixels: Tensor, alt: str, title: str, note: str = "") -> Markup:
    """`pixels` (3, height, width), floats in [0, 1] or uint8; small images are enlarged without smoothing."""
    if pixels.is_floating_point():
        pixels = (pixels.clamp(0, 1) * 255).round().to(torch.uint8)
    picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    times = max(1, -(-_SIDE // max(picture.size)))
    picture = picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)
    return Markup(
        '<figure><img src="data:image/png;base64,{}" alt="{}"><figcaption>{}<br><small>{}</small></figcaption></figure>'
    ).format(_base64(_png(picture)), alt, title, note)


def _heat(shares: Tensor) -> Tensor:
    """From 0 (dark) to 1 (bright), as colors: (3, rows, columns)."""
    places = np.linspace(0, 1, len(_HOT))
    channels = [np.interp(shares.numpy(), places, _HOT[:, channel]) for channel in range(3)]
    return torch.from_numpy(np.stack(channels).round().astype(np.uint8))


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
