"""`shapes`: the built-in set, with its settings in brackets."""

from __future__ import annotations

from vitadel.data.sources.shapes import SPLITS, Shapes
from vitadel.data.spec import Request, whole_number
from vitadel.data.splits import pick_split
from vitadel.errors import UserError
from vitadel.quantities import read_quantity

__all__ = ["open_shapes"]


def open_shapes(request: Request) -> Shapes:
    """`shapes(size=64,texture=8/255,agreement=1,faintest=0.5,seed=1)`, each of them optional."""
    if request.argument:
        raise UserError(f"'{request.spec}': shapes takes settings in brackets, e.g. shapes(size=64,texture=0)")
    chosen = request.chosen(
        size=whole_number, texture=read_quantity, agreement=read_quantity, faintest=read_quantity, seed=whole_number
    )
    defaults = Shapes()
    shapes = Shapes(
        split=pick_split(SPLITS, request.split, "shapes"),
        size=int(chosen.get("size", defaults.size)),
        texture=float(chosen.get("texture", defaults.texture)),
        agreement=float(chosen.get("agreement", defaults.agreement)),
        faintest=float(chosen.get("faintest", defaults.faintest)),
        seed=int(chosen.get("seed", defaults.seed)),
    )
    if not 8 <= shapes.size <= 1024:
        raise UserError(f"shapes: size must be from 8 to 1024 pixels, got {shapes.size}")
    for name, value in (("texture", shapes.texture), ("agreement", shapes.agreement), ("faintest", shapes.faintest)):
        if not 0 <= value <= 1:
            raise UserError(f"shapes: {name} must be in [0, 1], got {value:g}")
    return shapes
