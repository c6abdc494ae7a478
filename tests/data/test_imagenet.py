from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pictures import picture, pixels_of, write_png

from vitadel.data import open_dataset, skipped
from vitadel.data.sources.folders import ImageFiles
from vitadel.data.sources.imagenet import class_numbers, imagenet_classes, named_like_imagenet
from vitadel.errors import UserError

FIRST_FIVE_OF_SEED_0 = [32, 45, 46, 56, 70]
TENCH, GOLDFISH, STINGRAY, GOOSE = "n01440764", "n01443537", "n01498041", "n01855672"  # classes 0, 1, 6 and 99


def test_wordnet_ids_become_the_usual_numbers(tmp_path: Path) -> None:
    for number, wnid in enumerate((GOOSE, TENCH, STINGRAY)):
        write_png(tmp_path / wnid / "ILSVRC2012_val_1.JPEG", number)
    source = open_dataset(f"imagenet:{tmp_path}")
    assert source.labels().tolist() == [0, 6, 99]
    assert [source.classes[label] for label in (0, 6, 99)] == ["tench", "stingray", "goose"]
    assert len(source.classes) == len(set(source.classes)) == 1000  # the two cranes have different names
    assert source.name(2) == f"{GOOSE}/ILSVRC2012_val_1.JPEG"
    assert np.array_equal(pixels_of(source.read([2])[0]), picture(0))


def test_validation_is_the_default_even_beside_a_test_folder(tmp_path: Path) -> None:
    for number, split in enumerate(("train", "val", "test")):
        write_png(tmp_path / split / TENCH / "x.JPEG", number)
    for suffix, number in (("", 1), ("@val", 1), ("@train", 0), ("@test", 2)):
        source = open_dataset(f"imagenet:{tmp_path}{suffix}")
        assert np.array_equal(pixels_of(source.read([0])[0]), picture(number))


@pytest.mark.parametrize(("kind", "member", "stranger"), [("a", STINGRAY, TENCH), ("r", GOLDFISH, TENCH)])
def test_two_hundred_of_the_thousand(kind: str, member: str, stranger: str, tmp_path: Path) -> None:
    write_png(tmp_path / member / "x.jpg", 0)
    (tmp_path / "README.txt").write_text("as shipped")
    source = open_dataset(f"imagenet-{kind}:{tmp_path}")
    assert isinstance(source, ImageFiles)
    assert source.labels().tolist() == [6 if kind == "a" else 1]
    assert len(source.classes) == 1000
    assert source.among is not None
    assert len(set(source.among)) == 200
    assert list(source.among) == sorted(source.among)
    assert source.labels().item() in source.among
    write_png(tmp_path / stranger / "x.jpg", 0)
    with pytest.raises(UserError, match=f"{stranger}' is not one of the 200 classes"):
        open_dataset(f"imagenet-{kind}:{tmp_path}")
    with pytest.raises(UserError, match="no split 'train'"):
        open_dataset(f"imagenet-{kind}:{tmp_path}@train")


def make_c(root: Path) -> None:
    """Two corruptions, one of them below a folder of its family, as the archives unpack."""
    number = 0
    for corruption in ("blur/defocus_blur", "fog"):
        for severity in (1, 2):
            for wnid in (GOOSE, TENCH):
                write_png(root / corruption / str(severity) / wnid / "x.JPEG", number)
                number += 1


def test_the_tree_of_corruptions(tmp_path: Path) -> None:
    make_c(tmp_path / "c")
    source = open_dataset(f"imagenet-c:{tmp_path}/c")
    assert isinstance(source, ImageFiles)
    assert source.labels().tolist() == [0, 99] * 4  # the tench's id sorts before the goose's
    assert source.parts == {
        "defocus_blur/1": range(2),
        "defocus_blur/2": range(2, 4),
        "fog/1": range(4, 6),
        "fog/2": range(6, 8),
    }
    assert source.name(7) == f"fog/2/{GOOSE}/x.JPEG"
    assert np.array_equal(pixels_of(source.read([7])[0]), picture(6))


@pytest.mark.parametrize(("part", "parts"), [("fog", ["fog/1", "fog/2"]), ("fog/2", ["fog/2"])])
def test_a_part_of_the_tree(part: str, parts: list[str], tmp_path: Path) -> None:
    make_c(tmp_path)
    source = open_dataset(f"imagenet-c:{tmp_path}/{part}")
    assert isinstance(source, ImageFiles)
    assert list(source.parts) == parts
    assert source.labels().tolist() == [0, 99] * len(parts)


def test_an_empty_class(tmp_path: Path) -> None:
    write_png(tmp_path / TENCH / "x.JPEG", 0)
    (tmp_path / GOOSE).mkdir()
    with pytest.raises(UserError, match=f"class '{GOOSE}' is empty"):
        open_dataset(f"imagenet:{tmp_path}")
    source = open_dataset(f"imagenet:{tmp_path}", skip_bad=True)
    assert skipped(source) == (f"class '{GOOSE}' is empty",)


def test_trees_that_are_something_else(tmp_path: Path) -> None:
    write_png(tmp_path / "flat" / "ILSVRC2012_val_1.JPEG", 0)
    write_png(tmp_path / "pets" / "cat" / "x.JPEG", 0)
    write_png(tmp_path / "c" / "fog" / "1" / "cat" / "x.JPEG", 0)
    (tmp_path / "bare" / TENCH).mkdir(parents=True)
    for spec, message in (
        ("imagenet:{}/flat", "no sub-folders.*sort them into such folders"),
        ("imagenet:{}/pets", "not one of the 1000 ImageNet classes; for classes with other names use folder:DIR"),
        ("imagenet:{}/bare", "holds no images"),
        ("imagenet-c:{}/c", "not in a folder of an ImageNet class"),
        ("imagenet-c:{}/bare", "holds no images"),
        ("imagenet:{}/missing", "does not exist"),
    ):
        with pytest.raises(UserError, match=message):
            open_dataset(spec.format(tmp_path))


def test_a_list_of_images_picks_them_and_only_them(tmp_path: Path) -> None:
    names = [f"{wnid}/{number}.JPEG" for wnid in (TENCH, GOOSE) for number in range(3)]
    for number, name in enumerate(names):
        write_png(tmp_path / "val" / name, number)
    chosen = tmp_path / "ids.txt"
    chosen.write_text("\n".join([names[4], names[1], names[1]]) + "\n")
    source = open_dataset(f"imagenet:{tmp_path}(list={chosen})")
    assert [source.name(index) for index in range(len(source))] == [names[1], names[4]]
    assert source.labels().tolist() == [0, 99]
    assert np.array_equal(pixels_of(source.read([1])[0]), picture(4))
    chosen.write_text(f"{names[0]}\n{TENCH}/elsewhere.JPEG")
    with pytest.raises(UserError, match=r"names 1 images that are not below .*elsewhere\.JPEG"):
        open_dataset(f"imagenet:{tmp_path}(list={chosen})")
    chosen.write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        open_dataset(f"imagenet:{tmp_path}(list={chosen})")
    with pytest.raises(UserError, match=r"list of images .* does not exist"):
        open_dataset(f"imagenet:{tmp_path}(list={tmp_path / 'nowhere'})")


def test_a_set_is_imagenet_by_what_its_classes_are_called() -> None:
    names = list(imagenet_classes())
    assert named_like_imagenet(names)
    assert named_like_imagenet([name.replace(" ", "_").title() for name in names])
    assert named_like_imagenet(list(class_numbers()))
    own = [f"my {name}" if number % 11 == 0 else name for number, name in enumerate(names)]
    assert named_like_imagenet(own)  # one of eleven goes by another name
    assert not named_like_imagenet(sorted(names))  # another order is another meaning of labels
    assert not named_like_imagenet([str(number) for number in range(1000)])
    assert not named_like_imagenet(names[:200])


def make_whole(root: Path, folders: tuple[str, ...]) -> None:
    for split in ("train", "val"):
        for number, wnid in enumerate(folders):
            write_png(root / split / wnid / "x.JPEG", number)


def test_some_classes_drawn_with_a_seed(tmp_path: Path) -> None:
    """As many classes as asked for, in ImageNet's order; the draw depends on the seed and not on the folder."""
    make_whole(tmp_path, tuple(class_numbers())[:3] + tuple(class_numbers())[900:])
    with pytest.raises(UserError, match=r"selects 100 classes, and .* has no folder for \d+ of them: n"):
        open_dataset(f"imagenet:{tmp_path}(classes=100,seed=0)")
    for wnid in class_numbers():
        for split in ("train", "val"):
            (tmp_path / split / wnid).mkdir(exist_ok=True)
            (tmp_path / split / wnid / "x.JPEG").touch()  # never read here
    drawn = {seed: open_dataset(f"imagenet:{tmp_path}(classes=100,seed={seed})") for seed in (0, 1)}
    for source in drawn.values():
        numbers = [imagenet_classes().index(name) for name in source.classes]
        assert len(set(numbers)) == 100
        assert numbers == sorted(numbers)
        assert sorted(source.labels().tolist()) == list(range(100))
        wnids = [source.name(sample).partition("/")[0] for sample in range(len(source))]
        assert [class_numbers()[wnid] for wnid in wnids] == [numbers[label] for label in source.labels().tolist()]
    assert drawn[0].classes != drawn[1].classes
    assert open_dataset(f"imagenet:{tmp_path}(classes=100)@train").classes == drawn[0].classes
    # Published with results: the draw must never change.
    assert [class_numbers()[drawn[0].name(k).partition("/")[0]] for k in range(5)] == FIRST_FIVE_OF_SEED_0


def test_the_classes_of_the_light_recipe_are_those_that_its_code_draws(tmp_path: Path) -> None:
    """jax.random.choice(PRNGKey(0), 1000, (100,), replace=False), by a Threefry of our own.

    The generator gives the known answers of Salmon et al. 2011, and JAX's own for the halves of key 0. A choice without
    replacement sorts the numbers by 32 random bits each, once for so few.
    """
    zero, pi = np.zeros(1, np.uint32), np.array([0x243F6A88], np.uint32)
    assert [int(word[0]) for word in threefry((0, 0), zero, zero)] == [0x6B200159, 0x99BA4EFE]
    digits = threefry((0x13198A2E, 0x03707344), pi, np.array([0x85A308D3], np.uint32))
    assert [int(word[0]) for word in digits] == [0xC4923A9C, 0x483DF7A0]
    halves = random_bits((0, 0), 4).reshape(2, 2)
    assert halves.tolist() == [[4146024105, 967050713], [2718843009, 1272950319]]
    drawn = random_bits(tuple(halves[1].tolist()), 1000).argsort(kind="stable")[:100]
    wnids = tuple(tuple(class_numbers())[number] for number in sorted(drawn.tolist()))
    for wnid in wnids:
        (tmp_path / wnid).mkdir()
        (tmp_path / wnid / "x.JPEG").touch()  # never read here
    source = open_dataset(f"imagenet:{tmp_path}(classes=light-recipe)")
    assert [source.name(k) for k in range(100)] == [f"{wnid}/x.JPEG" for wnid in wnids]
    assert source.labels().tolist() == list(range(100))


def threefry(key: tuple[int, int], left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32 with 20 rounds."""
    words = [np.uint32(key[0]), np.uint32(key[1]), np.uint32(key[0] ^ key[1] ^ 0x1BD11BDA)]
    with np.errstate(over="ignore"):
        left, right = left + words[0], right + words[1]
        for group in range(5):
            for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
                left = left + right
                right = (right << np.uint32(turn) | right >> np.uint32(32 - turn)) ^ left
            left, right = left + words[(group + 1) % 3], right + words[(group + 2) % 3] + np.uint32(group + 1)
    return left, right


def random_bits(key: tuple[int, int], count: int) -> np.ndarray:
    return np.concatenate(threefry(key, *np.split(np.arange(count, dtype=np.uint32), 2)))


def test_classes_of_a_list_keep_its_order(tmp_path: Path) -> None:
    make_whole(tmp_path / "data", (TENCH, GOLDFISH, STINGRAY, GOOSE))
    listed = tmp_path / "classes.txt"
    listed.write_text(f"# mine\n{GOOSE} goose\n{TENCH}\n\n")
    source = open_dataset(f"imagenet:{tmp_path / 'data'}(classes={listed})")
    assert source.classes == ("goose", "tench")
    assert [(source.name(k), int(source.labels()[k])) for k in range(2)] == [
        (f"{TENCH}/x.JPEG", 1),
        (f"{GOOSE}/x.JPEG", 0),
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("imagenet:{}(seed=1)", "seed belongs to a number of classes"),
        ("imagenet:{}(classes=1)", "classes must be from 2 to 1000"),
        ("imagenet:{}(classes=-5)", "classes must be from 2 to 1000"),
        ("imagenet:{}(classes=1001)", "classes must be from 2 to 1000"),
        ("imagenet:{}(classes=10,seed=-1)", "the seed must be"),
        ("imagenet:{}(classes=absent.txt)", "absent.txt"),
        ("imagenet:{}(classes={}/twice.txt)", "names a class twice"),
        ("imagenet:{}(classes={}/strange.txt)", "'dog', which is not one of the 1000"),
        ("imagenet:{}(classes={}/strange.txt,seed=0)", "needs no seed"),
        ("imagenet-r:{}(classes=100)", "fixed set of 200 classes"),
    ],
)
def test_wrong_choices_of_classes(spec: str, message: str, tmp_path: Path) -> None:
    write_png(tmp_path / GOLDFISH / "x.JPEG", 0)
    (tmp_path / "twice.txt").write_text(f"{TENCH}\n{TENCH}\n")
    (tmp_path / "strange.txt").write_text("dog\ncat\n")
    with pytest.raises(UserError, match=message):
        open_dataset(spec.replace("{}", str(tmp_path)))
