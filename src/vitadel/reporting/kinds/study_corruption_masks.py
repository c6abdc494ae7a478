"""Study `corruption-masks`: which patches a patch selector chooses."""

from __future__ import annotations

from vitadel.quantities import interval_text, percent
from vitadel.reporting.figures import Picture, Strip, as_images, strip_figure
from vitadel.reporting.kind import Results, read_study_arrays, study
from vitadel.reporting.read_runs import Run
from vitadel.reporting.tables import Cell, Column, Table, share_cells, share_columns

_SELECTIONS = {
    "learned": "chosen by the patch selector",
    "usual": "its commonest positions, in every image",
    "random": "at random",
}


def _draw(run: Run) -> Picture | None:
    found, arrays = run.results["study"], read_study_arrays(run)
    if not arrays:
        return None
    masks = arrays["chosen"].reshape(-1, *found["grid"]).astype(float)
    heat = [arrays[f"heat {how}"] for how in ("learned", "random")]
    largest = float(max(each.max() for each in heat))
    strips = [
        Strip("image", as_images(arrays["x"])),
        Strip("chosen patches", list(masks)),
        Strip("with noise", as_images(arrays["z"])),
        Strip("how often chosen", heat, ("learned", "random"), largest),
    ]
    with strip_figure(strips) as figure:
        return Picture("study-corruption-masks", figure, f"Chosen patches. {_sentence(found)}")


def _sentence(found: Results) -> str:
    accuracy, harm, masks = found["accuracy"], found["harm"]["learned"], found["masks"]["learned"]
    low, high = harm["ci95"]
    sure = "not clearly different" if low <= 0 <= high else f"so its choice {'harms more' if low > 0 else 'harms less'}"
    return (
        f"With noise in {found['corrupted']} of {found['patches']} patches {percent(accuracy['learned']['mean'])} of "
        f"{found['n']:,} images are correct if the patch selector chooses them, and "
        f"{percent(accuracy['random']['mean'])} at random ({sure}); it chooses as if among "
        f"{masks['positions']:.1f} of {found['patches']} positions."
    )


def _tables(found: Results) -> list[Table]:
    rows: list[tuple[Cell, ...]] = []
    for how, name in _SELECTIONS.items():
        seen = found["accuracy"][how]
        cells = (*share_cells(seen, "mean"), *share_cells(seen["worst"], "accuracy"))
        rows.append((name, *cells, *share_cells(found["harm"].get(how), "difference")))
    headings = ("accuracy", f"worst of {found['fills']}", "lost beyond random")
    columns = (Column("patches"), *(column for name in headings for column in share_columns(name)))
    first = Table(f"Accuracy with noise in {found['corrupted']} of {found['patches']} patches.", columns, tuple(rows))
    spread: list[tuple[Cell, ...]] = []
    for how in ("learned", "random"):
        seen = found["masks"][how]
        common = None if seen["overlap"] is None else 100 * seen["overlap"]
        spread.append((_SELECTIONS[how], seen["bits"], seen["most_bits"], seen["positions"], common))
    names = (("entropy, bits", 3), ("uniform, bits", 3), ("as many positions", 1), ("common to two images, %", 1))
    return [
        first,
        Table(
            "How evenly positions are chosen.",
            (Column("patches"), *(Column(*each) for each in names)),
            tuple(spread),
        ),
    ]


def _remarks(found: Results) -> list[str]:
    usual, trained = found["harm"]["usual"], found["trained_here"]
    origin = "trained here against this very model, on other images" if trained else "taken from a file"
    return [
        f"The patch selector was {origin}. Its commonest positions, used in every image, cost "
        f"{percent(usual['difference'])} ({interval_text(usual['ci95'])}) beyond random patches: any further "
        "loss comes from looking at the image.",
        f"Two random masks have {percent(found['overlap_by_chance'])} of their patches in common on average. With so "
        "few images even random choices stay below the uniform entropy: compare with the row of random patches.",
    ]


KIND = study(
    title="Masks of the patch selector",
    caption="Above, images, the patches chosen, and the noise in them. Below, the share of images in which each "
    "position is chosen, by the patch selector and in as many random masks.",
    sentence=_sentence,
    draw=_draw,
    tables=_tables,
    remarks=_remarks,
)
