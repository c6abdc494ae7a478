"""Which patches a corruption model chooses, for people."""

from __future__ import annotations

from vitadel.reporting.cells import Cell, Column, Table, share_cells, share_columns
from vitadel.reporting.figures import Picture, blank, our_style
from vitadel.reporting.image_grid import Strip, as_images, draw_strips, height_of
from vitadel.reporting.read_runs import Run, interval_text, percent
from vitadel.reporting.study import Study, Told, arrays_of

__all__ = ["CORRUPTION_MASKS"]

_WHO = {
    "learned": "chosen by the corruption model",
    "usual": "its commonest positions, in every image",
    "random": "at random",
}


def _draw(run: Run) -> Picture | None:
    told, arrays = run.results["study"], arrays_of(run)
    if not arrays:
        return None
    masks = arrays["chosen"].reshape(-1, *told["grid"]).astype(float)
    heat = [arrays[f"heat {who}"] for who in ("learned", "random")]
    largest = float(max(each.max() for each in heat))
    strips = [
        Strip("image", as_images(arrays["x"])),
        Strip("chosen patches", list(masks)),
        Strip("with noise", as_images(arrays["z"])),
        Strip("how often chosen", heat, ("learned", "random"), largest),
    ]
    with our_style():
        figure = blank(height_of(strips) + 12)
        draw_strips(figure, strips)
    return Picture("study-corruption-masks", figure, f"Chosen patches. {_sentence(told)}")


def _sentence(told: Told) -> str:
    accuracy, harm, masks = told["accuracy"], told["harm"]["learned"], told["masks"]["learned"]
    low, high = harm["ci95"]
    sure = "not clearly different" if low <= 0 <= high else f"so its choice {'harms more' if low > 0 else 'harms less'}"
    return (
        f"With noise in {told['corrupted']} of {told['patches']} patches {percent(accuracy['learned']['mean'])} of "
        f"{told['n']:,} images are right if the corruption model chooses them, and "
        f"{percent(accuracy['random']['mean'])} if chance does ({sure}); it chooses as if among "
        f"{masks['positions']:.1f} of {told['patches']} positions."
    )


def _tables(told: Told) -> list[Table]:
    rows: list[tuple[Cell, ...]] = []
    for who, name in _WHO.items():
        seen = told["accuracy"][who]
        cells = (*share_cells(seen, "mean"), *share_cells(seen["worst"], "accuracy"))
        rows.append((name, *cells, *share_cells(told["harm"].get(who), "difference")))
    headings = ("accuracy", f"worst of {told['fills']}", "lost beyond random")
    columns = (Column("patches"), *(column for name in headings for column in share_columns(name)))
    first = Table("", f"Accuracy with noise in {told['corrupted']} of {told['patches']} patches.", columns, tuple(rows))
    spread: list[tuple[Cell, ...]] = []
    for who in ("learned", "random"):
        seen = told["masks"][who]
        common = None if seen["overlap"] is None else 100 * seen["overlap"]
        spread.append((_WHO[who], seen["bits"], seen["most_bits"], seen["positions"], common))
    names = (("entropy, bits", 3), ("uniform, bits", 3), ("as many positions", 1), ("common to two images, %", 1))
    return [
        first,
        Table(
            "",
            "How evenly positions are chosen.",
            (Column("patches"), *(Column(*each) for each in names)),
            tuple(spread),
        ),
    ]


def _remarks(told: Told) -> list[str]:
    usual, trained = told["harm"]["usual"], told["trained_here"]
    whose = "trained here against this very model, on other images" if trained else "taken from a file"
    return [
        f"The corruption model was {whose}. Its commonest positions, painted over in every image, cost "
        f"{percent(usual['difference'])} ({interval_text(usual['ci95'])}) beyond random patches: what it takes more "
        "than that comes from looking at the image.",
        f"Two random masks have {percent(told['overlap_by_chance'])} of their patches in common on average, and so few "
        "images leave even random choices short of the uniform entropy: compare with the row below.",
    ]


CORRUPTION_MASKS = Study(
    title="Masks of the corruption model",
    caption="Above, images, the patches chosen, and the noise in them. Below, the share of images in which each "
    "position is chosen, by the corruption model and in as many random masks.",
    sentence=_sentence,
    draw=_draw,
    tables=_tables,
    remarks=_remarks,
)
