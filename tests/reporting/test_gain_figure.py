"""The figure of promised and delivered gains."""

from __future__ import annotations

import numpy as np

from vitadel.reporting.audit_figures import draw_gains


def entry(name: str, ratio: float) -> dict:
    promised = np.geomspace(1e-4, 10, 30)
    return {"name": name, "gains": {"points": [[float(p), float(ratio * p)] for p in promised]}}


def points_of(axes) -> tuple[np.ndarray, np.ndarray]:
    (line,) = (line for line in axes.lines if line.get_marker() == "o")
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


def test_a_kept_promise_lies_on_the_line_and_a_broken_one_below_zero():
    picture = draw_gains([entry("honest", 1.0), entry("masked", -0.5)])
    honest, masked = picture.figure.axes
    x, y = points_of(honest)
    assert np.allclose(x, y)
    x, y = points_of(masked)
    assert (y < 0).all()
    assert "honest: the median image delivers 1.00 times the promise" in picture.alt
    assert "masked: the median image delivers -0.50 times the promise" in picture.alt


def test_four_attacks_fit():
    assert len(draw_gains([entry(str(number), 1.0) for number in range(6)]).figure.axes) == 4
