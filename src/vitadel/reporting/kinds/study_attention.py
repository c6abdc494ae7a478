"""Where one query looks, clean and under attack, for people."""

from __future__ import annotations

from vitadel.reporting.cells import Cell, Column, Table
from vitadel.reporting.figures import COLOURS, Picture, blank, our_style
from vitadel.reporting.image_grid import Strip, as_images, draw_strips, height_of
from vitadel.reporting.kinds.training import plain_axes
from vitadel.reporting.read_runs import Run, percent
from vitadel.reporting.study import Study, Told, arrays_of

__all__ = ["ATTENTION"]

_PANEL = 190  # points
_MOST_HEADS = 6  # that are drawn, each in two rows
_KINDS = {"attacked": ("worst", "attacked"), "random": ("clean", "changed at random")}


def _draw(run: Run) -> Picture | None:
    told, arrays = run.results["study"], arrays_of(run)
    if not arrays:
        return None
    strips = [Strip("image", as_images(arrays["x"])), Strip("attacked", as_images(arrays["z"]))]
    heads = arrays["maps clean"].shape[1]
    for head in range(min(heads, _MOST_HEADS)):
        which = "attention" if heads == 1 else f"head {head}"
        clean, under = (arrays[f"maps {name}"][:, head] for name in ("clean", "attacked"))
        largest = float(max(clean.max(initial=0), under.max(initial=0)))  # one scale for what is compared
        notes = [f"{each:.2f}" for each in arrays["shown"]] if heads == 1 else ()
        strips += [
            Strip(f"{which}, clean", list(clean), (), largest),
            Strip(f"{which}, attacked", list(under), notes, largest),
        ]
    height = height_of(strips) + 16 + _PANEL
    with our_style():
        figure = blank(height)
        draw_strips(figure, strips)
        axes = figure.add_axes((0.08, 40 / height, 0.89, (_PANEL - 50) / height))
        for name, (color, label) in _KINDS.items():
            entry = told["cosine"][name]
            axes.stairs(entry["counts"], entry["edges"], color=COLOURS[color], label=label)
        if told["other_images"] is not None:
            words = "mean of unrelated images"
            axes.axvline(told["other_images"], color=COLOURS["muted"], linestyle=":", linewidth=1, label=words)
        axes.set(xlabel="cosine with the clean image's attention", ylabel="images")
        axes.legend(frameon=False, fontsize=8, labelcolor=COLOURS["muted"])
        plain_axes(axes)
    return Picture("study-attention", figure, f"Maps of attention. {_sentence(told)}")


def _query(told: Told) -> str:
    names = {"centre": "the patch in the centre", "class": "the class token"}
    return names.get(told["query"], f"the patch at {told['query']}")


def _sentence(told: Told) -> str:
    under, random = told["cosine"]["attacked"], told["cosine"]["random"]
    others = told["other_images"]
    scale = "" if others is None else f", and unrelated images have {others:.3f}"
    return (
        f"Attention of {_query(told)} in {told['attention']} keeps a cosine of {under['mean']:.3f} "
        f"({under['ci95'][0]:.3f} to {under['ci95'][1]:.3f}) over {told['n']:,} images under {told['attack']['name']}, "
        f"which fools {percent(told['fooled']['success'])}; random changes of the same size keep "
        f"{random['mean']:.3f}{scale}."
    )


def _tables(told: Told) -> list[Table]:
    quantiles = list(told["cosine"]["attacked"]["quantiles"])
    entries = [(label, told["cosine"][name]) for name, (_, label) in _KINDS.items()]
    entries += [(f"attacked, head {head}", each) for head, each in enumerate(told["each_head"] or ())]
    rows: list[tuple[Cell, ...]] = [
        (name, each["n"], each["mean"], *each["ci95"], *(each["quantiles"][part] for part in quantiles))
        for name, each in entries
    ]
    rows += [
        (f"attacked and {name}", each["n"], each["mean"], *each["ci95"], *(None for _ in quantiles))
        for name, each in told["by_outcome"].items()
        if each is not None
    ]
    headings = ("cosine", "from", "to", *(f"{100 * float(part):g} % quantile" for part in quantiles))
    columns = (Column("images"), Column("n", 0), *(Column(name, 3) for name in headings))
    caption = "Cosine with the clean image's attention, a mean over heads unless one is named."
    return [Table("", caption, columns, tuple(rows))]


def _remarks(told: Told) -> list[str]:
    rows, columns = told["grid"]
    return [
        f"The row of {_query(told)} over all tokens, of which {rows} x {columns} are patches; {told['heads']} heads. "
        "Rows of unrelated images are alike, too: only what lies between their cosine and 1 tells anything."
    ]


ATTENTION = Study(
    title="Attention under attack",
    caption="Above, where the query looks, in brightness, with the cosine below. Pairs of maps have one scale. Below, "
    "cosines over all images.",
    sentence=_sentence,
    draw=_draw,
    tables=_tables,
    remarks=_remarks,
)
