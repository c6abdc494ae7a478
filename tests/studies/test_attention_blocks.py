"""All attentions in one study: each as if it were studied alone."""

from __future__ import annotations

import numpy as np
import pytest
from test_attention_study import lively, studied

from vitadel.backbones.classifier import wrap
from vitadel.errors import UserError
from vitadel.reporting.kind import kind_of
from vitadel.reporting.read_runs import read_run
from vitadel.studies.attention import AttentionRequest
from vits import make_vit


@pytest.mark.slow
def test_every_block_is_as_if_studied_alone(tmp_path):
    model = lively()
    together = studied(model, tmp_path / "all", block="all", eps=0.3)
    alone = [studied(model, tmp_path / str(block), block=str(block), eps=0.3) for block in (0, 1)]
    assert [each["attention"] for each in together["each_block"]] == [each["attention"] for each in alone]
    for one, other in zip(together["each_block"], alone, strict=True):
        assert one["mean"] == pytest.approx(other["cosine"]["attacked"]["mean"], abs=1e-5)
        assert one["quantiles"] == pytest.approx(other["cosine"]["attacked"]["quantiles"], abs=1e-5)
    mean = np.mean([each["cosine"]["attacked"]["mean"] for each in alone])
    assert together["cosine"]["attacked"]["mean"] == pytest.approx(mean, abs=1e-5)
    assert together["other_images"] == pytest.approx(np.mean([each["other_images"] for each in alone]), abs=1e-5)
    with np.load(tmp_path / "all" / "study.npz") as arrays, np.load(tmp_path / "1" / "study.npz") as last:
        assert arrays["maps clean"].shape == (6, 2, 4, 4)
        np.testing.assert_allclose(arrays["maps attacked"][:, 1], last["maps attacked"][:, 0], atol=1e-5)
    run = read_run(tmp_path / "all")
    (section, *_) = kind_of(run).sections(run)
    assert [row[0] for row in section.tables[0].rows][2:4] == ["attacked, blocks.0.attn", "attacked, blocks.1.attn"]


@pytest.mark.slow
def test_stages_with_fewer_patches_are_enlarged(tmp_path):
    model = wrap(make_vit("rvt", classes=10), mean=(0.5,) * 3, std=(0.5,) * 3)
    reported = studied(model, tmp_path / "run", block="all", eps=0.3)
    with np.load(tmp_path / "run" / "study.npz") as arrays:
        maps = arrays["maps clean"]
    assert maps.shape[1] == len(reported["each_block"])
    assert maps.shape[2:] == (maps.shape[2],) * 2


def test_one_thing_for_each_at_a_time():
    with pytest.raises(UserError, match="with --block all heads are averaged"):
        AttentionRequest(block="all", heads="each")
    with pytest.raises(UserError, match="the block must be last, all or a number"):
        AttentionRequest(block="every")
