"""The cosines of every mask and layer are kept, and agree with the means that are reported."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
from test_stability import columns, lively, measured

from vitadel.reporting.kinds.stability import KIND
from vitadel.reporting.read_runs import read_run


@pytest.mark.slow
def test_cosines_of_every_mask_and_layer(tmp_path):
    reported = measured(lively(), tmp_path / "run", learned=True, watched=3).results["stability"]
    table = pq.read_table(tmp_path / "run" / "cosines.parquet").to_pydict()
    layers = [name for name in table if name.startswith("cosine:")]
    assert layers == ["cosine:blocks.0.attn", "cosine:blocks.1.attn"]
    patches, index, mask = (np.asarray(table[name]) for name in ("patches", "index", "mask"))
    cosines = np.stack([np.asarray(table[name]) for name in layers], 1)
    assert (patches == "random").sum() == 12 * 3
    assert (patches == "learned").sum() == 12
    whole = columns(tmp_path / "run")
    for row, sample in enumerate(whole["index"]):
        own = (patches == "random") & (index == sample)
        assert sorted(mask[own].tolist()) == [0, 1, 2]
        over_layers = cosines[own].mean(1)
        assert over_layers.mean() == pytest.approx(whole["random:cosine"][row], abs=1e-6)
        assert over_layers.min() == pytest.approx(whole["random:cosine_worst"][row], abs=1e-6)
    np.testing.assert_allclose(
        cosines[patches == "random"].mean(0), reported["random"]["similarity"]["layers"], atol=1e-6
    )
    first = reported["random"]["similarity"]["images"][0]
    own = cosines[(patches == "random") & (index == first["index"])].mean(1)
    assert (first["masks"], first["mean"]) == (3, pytest.approx(own.mean(), abs=1e-6))
    assert first["quantiles"] == pytest.approx(np.quantile(own, (0.05, 0.25, 0.5, 0.75, 0.95)), abs=1e-6)
    (section, *_) = [each for each in KIND.sections(read_run(tmp_path / "run")) if "Stability" in each.title]
    assert any("cosines.parquet has every image" in table.caption for table in section.tables)
