"""ImageNet-P from its videos: flips frame by frame, of the same images in every perturbation."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from films import write_video
from vitadel.errors import UserError
from vitadel.evaluation.corruptions.run import corruptions

pytest.importorskip("av")
GOOSE, TENCH = "n01855672", "n01440764"
STEADY, ONCE, BLINKING = [40] * 5, [40, 40, 210, 210, 210], [40, 210, 40, 210, 40]


class Bright(nn.Module):
    num_classes = 1000

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.zeros(len(x), 1000)
        logits[:, 99] = 2 * x.mean((1, 2, 3)) - 1
        return logits


@pytest.fixture
def root(tmp_path):
    for name, videos in (("tilt", (STEADY, ONCE, BLINKING)), ("gaussian_noise", (BLINKING, STEADY, ONCE))):
        for number, levels in enumerate(videos):
            write_video(tmp_path / "p" / name / (TENCH, TENCH, GOOSE)[number] / f"{number}.mp4", levels)
    return tmp_path


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_flips_of_videos_made_by_hand(root, batch_size):
    out = root / "run"
    results = corruptions(Bright().eval(), f"imagenet-p:{root}/p", batch_size=batch_size, device="cpu", out=out)
    noise, tilt = results["perturbations"]["rows"]
    assert [row["perturbation"] for row in (noise, tilt)] == ["gaussian_noise", "tilt"]  # in the benchmark's order
    table = pq.read_table(out / "samples.parquet").to_pydict()
    assert table["flips:tilt"] == pytest.approx([0, 1 / 4, 1])
    assert table["flips:gaussian_noise"] == pytest.approx([2 / 4, 0, 3 / 4])  # against the first frame
    assert table["label"] == [0, 0, 99]
    assert tilt["flip_probability"] == pytest.approx(1.25 / 3)
    assert noise["frames"] == tilt["frames"] == 5
    assert results["perturbations"]["mfr"] is None  # two of ten
    assert tilt["flip_rate"] == pytest.approx(100 * 1.25 / 3 / 0.0705)
    assert results["clean"] is None
    assert "corruptions" not in results


def test_a_limit_keeps_the_numbers_of_the_videos(root):
    results = corruptions(Bright().eval(), f"imagenet-p:{root}/p", limit=2, device="cpu", out=root / "run")
    table = pq.read_table(root / "run" / "samples.parquet").to_pydict()
    whole = {"tilt": [0, 1 / 4, 1], "gaussian_noise": [2 / 4, 0, 3 / 4]}
    assert table["label"] == [0, 99]
    assert table["index"][1] == 2  # the only goose
    for name, flips in whole.items():
        assert table[f"flips:{name}"] == pytest.approx([flips[index] for index in table["index"]])
    assert "32 x 32 pixels" in results["perturbations"]["remarks"][0]
    assert len(results["perturbations"]["remarks"]) == 1  # nothing was made in memory


def test_what_is_missing_is_reported(root):
    with pytest.raises(UserError, match="has sequences only"):
        corruptions(Bright().eval(), f"imagenet-p:{root}/p", corruptions=("snow",), device="cpu")
    (root / "p" / "tilt" / GOOSE / "2.mp4").unlink()
    with pytest.raises(UserError, match=f"missing: tilt/{GOOSE}/2.mp4"):
        corruptions(Bright().eval(), f"imagenet-p:{root}/p", device="cpu")
    write_video(root / "p" / "tilt" / GOOSE / "2.mp4", STEADY[:3])
    with pytest.raises(UserError, match=f"have 5 frames, but not {GOOSE}/2.mp4"):
        corruptions(Bright().eval(), f"imagenet-p:{root}/p", device="cpu")
    with pytest.raises(UserError, match="holds no snow; there are: gaussian_noise, tilt"):
        corruptions(Bright().eval(), f"imagenet-p:{root}/p", perturbations=("snow",), device="cpu")
