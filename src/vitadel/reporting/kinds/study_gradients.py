"""Study `gradients`: how noisy input gradients are, on the deployed model and through scaled attention."""

from __future__ import annotations

from vitadel.quantities import percent
from vitadel.reporting.figures import Picture, Strip, as_images, strip_figure
from vitadel.reporting.kind import Results, read_study_arrays, study
from vitadel.reporting.read_runs import Run
from vitadel.reporting.tables import Cell, Column, Table

_ROWS = {"deployed": "deployed", "scaled": "through scaled attention", "difference": "difference, image by image"}
_MEASURES = {"roughness": "roughness", "agreement": "agreement with a nearby gradient"}


def _draw(run: Run) -> Picture | None:
    arrays = read_study_arrays(run)
    if not arrays:
        return None
    strips = [Strip("image", as_images(arrays["x"]))]
    for model in ("deployed", "scaled"):
        maps = arrays[f"gradient {model}"]
        largest = [
            float(each.max()) or 1.0 for each in maps
        ]  # sizes differ by orders of magnitude: shapes are compared
        strips.append(Strip(_ROWS[model], [each / top for each, top in zip(maps, largest, strict=True)], (), 1.0))
    with strip_figure(strips) as figure:
        pass
    return Picture("study-gradients", figure, f"Size of the gradient. {_sentence(run.results['study'])}")


def _text(entry: Results | None) -> str:
    return "none" if entry is None else f"{entry['mean']:.3f} ({entry['ci95'][0]:.3f} to {entry['ci95'][1]:.3f})"


def _sentence(found: Results) -> str:
    parts = [
        f"{words} {_text(found[name]['deployed'])} on the deployed model and {_text(found[name]['scaled'])} through "
        "scaled attention"
        for name, words in _MEASURES.items()
    ]
    zero = found["zero"]
    return (
        f"Gradients of {found['n']:,} images: {'; '.join(parts)}; zero for {percent(zero['deployed']['share'])} and "
        f"{percent(zero['scaled']['share'])} of the images."
    )


def _tables(found: Results) -> list[Table]:
    rows: list[tuple[Cell, ...]] = []
    for name, words in _MEASURES.items():
        for which, model in _ROWS.items():
            entry = found[name][which]
            cells = (0, None, None, None) if entry is None else (entry["n"], entry["mean"], *entry["ci95"])
            rows.append((words, model, *cells))
    columns = (
        Column("measure"),
        Column("model"),
        Column("n", 0),
        *(Column(name, 3) for name in ("mean", "from", "to")),
    )
    return [Table("Noise of input gradients, means over images with a gradient.", columns, tuple(rows))]


def _remarks(found: Results) -> list[str]:
    factors = ", ".join(f"{each:.3g}" for each in found["factors"])
    return [
        "Roughness is 1 for independent Gaussian pixels and 0 for a constant; agreement is the cosine with the "
        f"gradient after a random change by {found['nearby']}. Factors of scaled attention: {factors}.",
        "A smoother gradient of a scaled model is not a better one for the deployed model: compare attacks.",
    ]


KIND = study(
    title="Noise of gradients",
    caption="Each image and the size of its gradient, mean over colors, brightest where it is largest.",
    sentence=_sentence,
    draw=_draw,
    tables=_tables,
    remarks=_remarks,
)
