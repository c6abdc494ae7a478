"""Study `attention`: where one query attends, clean and under attack."""

from __future__ import annotations

from vitadel.quantities import percent
from vitadel.reporting.figures import COLORS, Picture, Strip, add_legend, as_images, strip_figure, style_axes
from vitadel.reporting.kind import Results, read_study_arrays, study
from vitadel.reporting.read_runs import Run
from vitadel.reporting.tables import Cell, Column, Table

_PANEL = 190  # points
_MOST_HEADS = 6  # that are drawn, each in two rows
_KINDS = {"attacked": ("worst", "attacked"), "random": ("clean", "changed at random")}


def _draw(run: Run) -> Picture | None:
    found, arrays = run.results["study"], read_study_arrays(run)
    if not arrays:
        return None
    strips = [Strip("image", as_images(arrays["x"])), Strip("attacked", as_images(arrays["z"]))]
    heads, blocks = arrays["maps clean"].shape[1], found.get("each_block")
    shown = list(range(heads))
    if heads > _MOST_HEADS:  # of many blocks some from the first to the last, of many heads the first
        apart = (heads - 1) / (_MOST_HEADS - 1) if blocks else 1
        shown = [round(place * apart) for place in range(_MOST_HEADS)]
    for head in shown:
        which = "attention" if heads == 1 else blocks[head]["attention"] if blocks else f"head {head}"
        clean, under = (arrays[f"maps {name}"][:, head] for name in ("clean", "attacked"))
        largest = float(max(clean.max(initial=0), under.max(initial=0)))  # one scale for what is compared
        notes = [f"{each:.2f}" for each in arrays["shown"]] if heads == 1 else ()
        strips += [
            Strip(f"{which}, clean", list(clean), (), largest),
            Strip(f"{which}, attacked", list(under), notes, largest),
        ]
    with strip_figure(strips, below=_PANEL + 10) as figure:
        height = 72 * figure.get_figheight()
        axes = figure.add_axes((0.08, 40 / height, 0.89, (_PANEL - 50) / height))
        for name, (color, label) in _KINDS.items():
            entry = found["cosine"][name]
            axes.stairs(entry["counts"], entry["edges"], color=COLORS[color], label=label)
        if found["other_images"] is not None:
            words = "mean of unrelated images"
            axes.axvline(found["other_images"], color=COLORS["muted"], linestyle=":", linewidth=1, label=words)
        axes.set(xlabel="cosine with the clean image's attention", ylabel="images")
        add_legend(axes, fontsize=8)
        style_axes(axes)
    return Picture("study-attention", figure, f"Maps of attention. {_sentence(found)}")


def _query(found: Results) -> str:
    names = {"centre": "the patch in the center", "class": "the class token"}
    return names.get(found["query"], f"the patch at {found['query']}")


def _sentence(found: Results) -> str:
    under, random = found["cosine"]["attacked"], found["cosine"]["random"]
    others = found["other_images"]
    scale = "" if others is None else f", and unrelated images have {others:.3f}"
    return (
        f"Attention of {_query(found)} in {found['attention']} keeps a cosine of {under['mean']:.3f} "
        f"({under['ci95'][0]:.3f} to {under['ci95'][1]:.3f}) over {found['n']:,} images under "
        f"{found['attack']['name']}, which fools {percent(found['fooled']['success'])}; random changes of the same "
        f"size keep {random['mean']:.3f}{scale}."
    )


def _tables(found: Results) -> list[Table]:
    quantiles = list(found["cosine"]["attacked"]["quantiles"])
    entries = [(label, found["cosine"][name]) for name, (_, label) in _KINDS.items()]
    entries += [(f"attacked, head {head}", each) for head, each in enumerate(found["each_head"] or ())]
    entries += [(f"attacked, {each['attention']}", each) for each in found.get("each_block") or ()]
    rows: list[tuple[Cell, ...]] = [
        (name, each["n"], each["mean"], *each["ci95"], *(each["quantiles"][part] for part in quantiles))
        for name, each in entries
    ]
    rows += [
        (f"attacked and {name}", each["n"], each["mean"], *each["ci95"], *(None for _ in quantiles))
        for name, each in found["by_outcome"].items()
        if each is not None
    ]
    headings = ("cosine", "from", "to", *(f"{100 * float(part):g} % quantile" for part in quantiles))
    columns = (Column("images"), Column("n", 0), *(Column(name, 3) for name in headings))
    caption = "Cosine with the clean image's attention, a mean over heads unless one is named."
    return [Table(caption, columns, tuple(rows))]


def _remarks(found: Results) -> list[str]:
    rows, columns = found["grid"]
    most = "at most " if found.get("each_block") else ""  # blocks may differ
    heads = "" if most else f"; {found['heads']} heads"
    return [
        f"The row of {_query(found)} over all tokens, of which {most}{rows} x {columns} are patches{heads}. "
        "Rows of unrelated images are similar, too: only differences between their cosine and 1 are informative."
    ]


KIND = study(
    title="Attention under attack",
    caption="Above, the query's attention as brightness, with the cosine below. Pairs of maps have one scale. Below, "
    "cosines over all images.",
    sentence=_sentence,
    draw=_draw,
    tables=_tables,
    remarks=_remarks,
)
