from __future__ import annotations

import builtins
from pathlib import Path

import pytest
from pictures import pixels_of

from films import write_video
from vitadel.data import open_dataset, skipped
from vitadel.data.sources.videos import VideoFrames
from vitadel.errors import UserError

pytest.importorskip("av")
GOOSE, TENCH = "n01855672", "n01440764"


def gray(video: int, frame: int) -> int:
    """The brightness that every pixel of a frame has."""
    return 20 + 60 * video + 12 * frame


def film(path: Path, number: int, frames: int) -> None:
    write_video(path, [gray(number, frame) for frame in range(frames)])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    film(tmp_path / "snow" / GOOSE / "a.mp4", 1, 3)
    film(tmp_path / "brightness" / TENCH / "b.mp4", 0, 4)
    film(tmp_path / "brightness" / TENCH / "c.mp4", 2, 2)
    return tmp_path


def test_every_frame_is_a_sample(root: Path) -> None:
    source = open_dataset(f"imagenet-p:{root}")
    assert isinstance(source, VideoFrames)
    assert len(source) == 9
    assert source.labels().tolist() == [0] * 6 + [99] * 3
    assert len(source.classes) == 1000
    expected = [(0, frame) for frame in range(4)] + [(2, 0), (2, 1)] + [(1, frame) for frame in range(3)]
    order = [8, 0, 5, 3, 3, 1]
    for image, index in zip(source.read(order), order, strict=True):
        assert abs(float(pixels_of(image).mean()) - gray(*expected[index])) < 4  # the codec is lossy, the steps are 12
    assert source.name(5) == f"brightness/{TENCH}/c.mp4 frame 1"
    assert list(source.parts.values()) == [range(4), range(4, 6), range(6, 9)]
    assert len(open_dataset(f"imagenet-p:{root}/snow")) == 3


def test_a_broken_video(root: Path) -> None:
    (root / "snow" / GOOSE / "b.mp4").write_bytes(b"not a video")
    with pytest.raises(UserError, match=r"b.mp4' cannot be read.*--skip-bad"):
        open_dataset(f"imagenet-p:{root}", skip_bad=False)
    source = open_dataset(f"imagenet-p:{root}", skip_bad=True)
    assert len(source) == 9
    assert len(skipped(source)) == 1


def test_a_video_that_shrank_since_gives_exceptions(root: Path) -> None:
    source = open_dataset(f"imagenet-p:{root}/snow")
    film(root / "snow" / GOOSE / "a.mp4", 1, 2)
    images = source.read([0, 1, 2])
    assert [isinstance(image, Exception) for image in images] == [False, False, True]
    assert "ends before this frame" in str(images[2])


def test_no_videos(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no videos"):
        open_dataset(f"imagenet-p:{tmp_path}")


def test_the_missing_package_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_av(name: str, *args: object, **keywords: object) -> object:
        if name == "av":
            raise ImportError(name)
        return real(name, *args, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_av)
    with pytest.raises(UserError, match=r"pip install 'vitadel\[video\]'"):
        open_dataset(f"imagenet-p:{root}")
