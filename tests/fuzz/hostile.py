"""Strategies for hostile inputs: each knows the structure of what it spoils."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import material
import typer.main
import yaml
from driver import Case, Edit

from vitadel.cli.main import app

NUMBERS = (
    *(
        "0",
        "-1",
        "1",
        "2",
        "1.5",
        "-0",
        "1e3",
        "1e400",
        "nan",
        "inf",
        "-inf",
        "1/0",
        "8/255",
        "0/0",
        "9" * 25,
        "-" + "9" * 25,
    ),
    *(str(2**31), str(2**63), str(2**64), "1_0", "0x10", "٣", "½", "1,2", "1;2", "", " ", "none", "null", "true"),
)
TEXTS = (
    *(
        "",
        " ",
        "x",
        "nope",
        "../..",
        "/",
        "/dev/null",
        "~",
        "~nobody/x",
        "-",
        "--",
        "=",
        "a=b",
        ":",
        "@",
        "()",
        "(",
        ")",
    ),
    *(
        "[",
        "]",
        "{",
        "}",
        "{0..3}",
        "*",
        "?",
        "%s",
        "%(x)s",
        "{x}",
        "\\",
        "'",
        '"',
        "$HOME",
        "`x`",
        "<b>",
        "&amp;",
        "é",
        "漢",
    ),
    *(
        "\u202e",
        "\u200b",
        "a" * 300,
        "a/" * 200,
        "a b",
        "a,b",
        ",",
        ",,",
        "zoo:",
        "zoo:nope",
        "hf:",
        "python:",
        "python:a:b:c",
    ),
    *(
        "published:",
        "published:nope",
        "python:os:nope",
        "python:nope:x",
        "photos",
        "d.npz",
        "w.pt",
        "training.yaml",
        "npz:d.npz",
    ),
)
VALUES = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        10**6,
        2**31,
        2**63,
        2**200,
        1.5,
        -0.0,
        1e308,
        "",
        "x",
        "1",
        "é",
        "\n",
        "<script>",
        "a\0b",
        [],
    ),
    *(
        {},
        [[]],
        [None],
        {"a": {}},
        {"": 0},
        [1, "x"],
        "zoo:nope",
        "python:os:getcwd",
        "../../x",
        "a" * 5000,
        float("nan"),
    ),
    *(float("inf"), [[[[[[[[]]]]]]]], "8/255", "pgd-20", ["fgsm"], [0.5, 0.5, 0.5], "[", "shapes"),
)
_AT_LEAST_ONE = (
    "--limit",
    "--batch-size",
    "--size",
    "--num-classes",
    "--input-size",
    "--masks",
    "--steps",
    "--starts",
    "--fills",
)

numbers, texts, values = st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.sampled_from(VALUES)
anything = st.one_of(numbers, texts, st.text(max_size=12).filter(lambda text: "\0" not in text))

_STUDIES = ("curves", "attention", "accumulation", "saturation", "scaled-blocks", "perturbations", "corruption-masks")
_BASE = {
    **{name: (name, material.MODEL) for name in ("audit", "attack", "corruptions", "stability", "diagnose", "inspect")},
    "threat-levels": ("threat-levels", material.MODEL, "--tokens", "tokens.safetensors", "--levels", "T0,T6"),
    "trade-off": ("trade-off", material.MODEL),
    "plan": ("plan", material.MODEL),
    "harden": ("harden", "training.yaml"),
    "probe": ("probe", "probe.yaml"),
    "recipes check": ("recipes", "check", "training.yaml"),
    "recipes show": ("recipes", "show", "shapes/trades"),
    "recipes copy": ("recipes", "copy", "shapes/trades", "copy.yaml"),
    "report": ("report", "run"),
    "recipes new": ("recipes", "new", "new.yaml", "--model", "test_vit", "--data", "shapes"),
    "leaderboard": ("leaderboard", "run"),
    "merge": ("merge", "run"),
    "reproduce": ("reproduce", "aas/table5", "--plan"),
    "list": ("list", "attacks"),
    "selftest": ("selftest",),
    "ui": ("ui", material.MODEL),
    "corrupt": ("corrupt",),
    **{f"study {name}": ("study", name, material.MODEL) for name in _STUDIES},
}
_ABOUT_RUNS = {"report": "audit", "leaderboard": "audit", "merge": "shards"}


@cache
def _command(verb: str) -> Any:
    command = typer.main.get_command(app)
    for name in verb.split():
        command = command.commands[name]
    return command


def _flags(verb: str) -> list[tuple[str, bool]]:
    """Flags that take a value, and whether that is a whole number."""
    options = [each for each in _command(verb).params if each.opts[0].startswith("--") and not each.is_flag]
    return [(each.opts[0], each.type_descriptor.annotation in (int, int | None)) for each in options]


@st.composite
def arguments(draw: st.DrawFn) -> Case:
    """A verb that would work, with one to three flags or words that may be wrong."""
    verb = draw(st.sampled_from(sorted(_BASE)))
    words, wrong = list(_BASE[verb]), False
    flags = _flags(verb)
    for _ in range(draw(st.integers(1, 3))):
        if not flags or draw(st.integers(0, 4)) == 0:
            words.append(draw(anything))
            continue
        flag, whole = draw(st.sampled_from(flags))
        if flag in words:
            continue
        value = draw(numbers if whole else anything)
        words += [flag, value]
        wrong = wrong or _surely_wrong(flag, whole, value)
    if "--device" in dict(flags) and "--device" not in words:
        words += ["--device", "cpu"]
    return Case(tuple(words), base=_ABOUT_RUNS.get(verb, "inputs"), wrong=wrong)


def _surely_wrong(flag: str, whole: bool, value: str) -> bool:
    if not whole:
        return False
    try:
        number = int(value)
    except ValueError:
        return True
    return abs(number) >= 2**63 or (flag in _AT_LEAST_ONE and number < 1)


@st.composite
def models(draw: st.DrawFn) -> Case:
    """Names of models: published, shipped, of timm, of files and of code, with flags and weights that may not fit."""
    from vitadel.backbones.published import published_names

    names = st.one_of(
        st.sampled_from(sorted(published_names())),
        st.sampled_from(
            ["test_vit", "test_vit2.r160_in1k", "w.safetensors", "w.pt", material.MODEL, "zoo:shapes-tora"]
        ),
        anything,
    )
    name = draw(names)
    if draw(st.integers(0, 3)) == 0:
        row = draw(st.integers(0, len(name)))
        name = name[:row] + draw(anything) + name[row:]
    given: list[str] = []
    for _ in range(draw(st.integers(0, 2))):
        flag, value = draw(
            st.one_of(
                st.tuples(
                    st.just("--weights"), st.sampled_from(["w.pt", "w.safetensors", "random", "d.npz", "photos"])
                ),
                st.tuples(st.sampled_from(["--num-classes", "--input-size", "--mean", "--std", "--crop-pct"]), numbers),
                st.tuples(st.sampled_from(["--model-kwargs", "--head-classes", "--classes", "--tokens"]), anything),
                st.tuples(st.just("--model-kwargs"), anything.map(lambda text: f"depth={text}")),
            )
        )
        given += [flag, value]
    verb = draw(st.sampled_from([("attack", name), ("plan", name), ("recipes", "new", "new.yaml", "--model", name)]))
    flags = {name for name, _ in _flags("recipes new" if verb[0] == "recipes" else verb[0])}
    kept = [word for pair in zip(given[::2], given[1::2], strict=True) if pair[0] in flags for word in pair]
    return Case((*verb, *kept, "--data", "shapes(size=16)", *(() if verb[0] == "recipes" else ("--limit", "4"))))


@st.composite
def attack_strings(draw: st.DrawFn) -> Case:
    """Names of attacks with prefixes and settings, well-formed or not."""
    from vitadel.attacks.registry import ATTACKS, PREFIXES

    def one() -> str:
        name = draw(st.sampled_from([*sorted(ATTACKS), "nope", ""]))
        if draw(st.booleans()):
            name += "-" + draw(numbers)
        settings = ("restarts", "steps", "step", "loss", "eps", "seed", "norm", "targets", "queries", "n", "x", "")
        sign = draw(st.sampled_from(["="] * 8 + ["", "=="]))
        given = [f"{draw(st.sampled_from(settings))}{sign}{draw(anything)}"]
        given *= draw(st.integers(0, 2))
        inner = f"({','.join(given)})" if given else ""
        prefix = "".join(
            draw(st.sampled_from([*sorted(PREFIXES), "nope"])) + draw(st.sampled_from(["+", ":", ":3+", ":next+", ""]))
            for _ in range(draw(st.integers(0, 2)))
        )
        return prefix + name + inner

    text = ",".join(one() for _ in range(draw(st.integers(1, 2))))
    if draw(st.integers(0, 5)) == 0:
        row = draw(st.integers(0, len(text)))
        text = text[:row] + draw(texts) + text[row:]
    eps = ("--eps", draw(numbers)) if draw(st.integers(0, 2)) == 0 else ()
    norm = ("--norm", draw(st.sampled_from(["linf", "l2", "l1", "l0", "", "Linf"])))
    return Case(("attack", material.MODEL, "--attacks", text, *eps, *norm, "--limit", "4", "--device", "cpu"))


@st.composite
def data_specs(draw: st.DrawFn) -> Case:
    """Specs of data: kinds, paths, settings, splits."""
    from vitadel.data.spec import DATA_KINDS

    kinds = [kind for kind in sorted(DATA_KINDS) if kind != "hf"]
    paths = st.one_of(
        texts, st.sampled_from(["photos", "d.npz", "d.parquet", "d.tar", "w.pt", "d.tar/x", "*.npz", "d.{npz,tar}"])
    )
    spec = draw(st.sampled_from([*kinds, "nope", ""]))
    if draw(st.integers(0, 3)):
        spec += draw(st.sampled_from([":", "/"])) + draw(paths)
    if draw(st.booleans()):
        names = ("size", "texture", "images", "labels", "list", "classes", "config", "columns", "seed", "x", "")
        given = [f"{draw(st.sampled_from(names))}={draw(anything)}" for _ in range(draw(st.integers(1, 2)))]
        spec += f"({','.join(given)})"
    if draw(st.integers(0, 2)) == 0:
        spec += "@" + draw(st.sampled_from(["test", "train", "val", "nope", "", "é", "test@train"]))
    verb = draw(st.sampled_from(["attack", "corrupt"]))
    words = (verb, material.MODEL) if verb == "attack" else (verb,)
    return Case((*words, "--data", spec, "--data-root", ".", "--limit", "4", "--device", "cpu"))


def spoil_bytes(draw: st.DrawFn, name: str, path: Path) -> Edit:
    """Overwrite, insert, cut out or cut off some bytes; rather near the ends, where formats have their headers."""
    size = path.stat().st_size
    place = st.one_of(st.integers(0, min(size, 200)), st.integers(0, size), st.integers(max(0, size - 200), size))
    start = draw(place)
    how = draw(st.sampled_from(["overwrite", "insert", "remove", "cut"]))
    new = "" if how in ("remove", "cut") else draw(st.binary(min_size=1, max_size=8)).decode("latin-1")
    length = {"overwrite": len(new), "insert": 0, "remove": draw(st.integers(1, 64)), "cut": size}[how]
    return Edit(name, None, new, start, length)


_DATA = {
    "d.npz": "npz:d.npz",
    "d.parquet": "parquet:d.parquet",
    "d.tar": "shards:d.tar",
    "photos/a/0.png": "folder:photos",
}

_READING = ("attack", material.MODEL, "--attacks", "fgsm", "--head-classes", "0,1", "--device", "cpu", "--data")


@st.composite
def data_files(draw: st.DrawFn) -> Case:
    """Damaged arrays, tables, archives and images, in a run that reads them all."""
    name = draw(st.sampled_from(sorted(_DATA)))
    edits = tuple(spoil_bytes(draw, name, material.inputs() / name) for _ in range(draw(st.integers(1, 2))))
    skip = ("--skip-bad",) if draw(st.booleans()) else ()
    return Case((*_READING, _DATA[name], *skip), edits=edits, works=True)


@st.composite
def arrays(draw: st.DrawFn) -> Case:
    """Arrays of other shapes, types and labels, well-formed as files."""
    import io

    import numpy as np

    kinds = ["u1", "i1", "i8", "f2", "f4", "f8", "c8", "b1", "U3", "S3", "M8[s]"]
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 3, 4, 5, 16]), max_size=5)))
    labels = draw(st.one_of(st.lists(st.sampled_from([0, 1, 2, 9, -1, 10**6, 2**40, 2**62]), max_size=5), st.just(0)))
    content = {
        "images": np.zeros(shape, draw(st.sampled_from(kinds))),
        "labels": np.array(labels).astype(draw(st.sampled_from(kinds)), copy=False),
    }
    renamed = draw(st.sampled_from(["images", "x", "data", "images"]))
    buffer = io.BytesIO()
    np.savez(buffer, **{renamed: content["images"], "labels": content["labels"]})
    words = ("attack", material.MODEL, "--attacks", "fgsm", "--data", "npz:d.npz", "--device", "cpu")
    size = (material.inputs() / "d.npz").stat().st_size
    return Case(words, edits=(Edit("d.npz", None, buffer.getvalue().decode("latin-1"), 0, size),), works=True)


def _places(document: Any, above: tuple[str | int, ...] = (), most: int = 400) -> list[tuple[str | int, ...]]:
    """The places of all values in a document."""
    items = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document[:3])
        if isinstance(document, list)
        else ()
    )
    found = [above] if above else []
    for key, value in items:
        found += _places(value, (*above, key))
    return found[:most]


@cache
def _places_in(path: Path) -> list[tuple[str | int, ...]]:
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        document = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
        about = {key: json.loads(value) for key, value in document.get("__metadata__", {}).items() if value[:1] in "{["}
        inner = [("__metadata__", *place) for place in _places(about)]
        return [*_places(document)[:60], *inner]
    return _places(json.loads(content))


def spoil_value(draw: st.DrawFn, name: str, path: Path) -> Edit:
    """Replace or remove one value of a JSON document or of a safetensors header."""
    return Edit(name, draw(st.sampled_from(_places_in(path))), draw(st.one_of(values, st.just("<delete>"))))


_SPOILED = (".json", ".npz", ".parquet", ".jsonl", ".yaml", ".safetensors")


@st.composite
def run_folders(draw: st.DrawFn, kinds: tuple[str, ...] = tuple(material.RUNS)) -> Case:
    """Finished runs with edited values or damaged files, then reported, resumed or used as a model."""
    kind = draw(st.sampled_from(sorted(kinds)))
    base = material.run(kind)
    files = sorted(str(path.relative_to(base)) for path in base.rglob("*") if path.suffix in _SPOILED)
    important = [name for name in files if name in ("results.json", "command.json", "results.json")]
    edits = []
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(important * 2 + files))
        as_value = name.endswith((".json", ".safetensors")) and draw(st.integers(0, 4)) > 0
        if edits and not as_value:
            continue
        edits.append((spoil_value if as_value else spoil_bytes)(draw, name, base / name))
    edits = sorted(
        (Edit(f"run/{each.name}", each.place, each.value, each.start, each.length) for each in edits),
        key=lambda each: each.place is None,
    )
    words = draw(
        st.sampled_from(
            [("report", "run", "--out", "r.html")] * 2
            + [
                ("report", "run", "--out", "r.html", "--export", "tables", "--robustbench"),
                ("leaderboard", "run", "--out", "l.html"),
                ("recipes", "new", "new.yaml", "--model", "run", "--data", "shapes"),
                ("study", "attention", "run", "--device", "cpu", "--limit", "4"),
                ("audit", "run", "--device", "cpu", "--limit", "4"),
            ]
            + [(*material.RUNS[kind], "--out", "run", "--resume")]
        )
    )
    return Case(words, base=kind, edits=tuple(edits))


_TINY = ("--attacks", "fgsm", "--data", "shapes(size=16)", "--limit", "4", "--device", "cpu")


def sound() -> list[Case]:
    """The inputs that are spoiled here, as they were before: if these were refused, nothing would be tested."""
    verbs = [
        Case(
            (*words, *(("--device", "cpu") if "--device" in dict(_flags(verb)) else ())),
            _ABOUT_RUNS.get(verb, "inputs"),
        )
        for verb, words in _BASE.items()
    ]
    models = [
        ("w.safetensors",),
        ("test_vit", "--num-classes", "10", "--weights", "w.pt"),
        (material.MODEL, "--tokens", "tokens.safetensors"),
    ]
    attacked = [Case(("attack", *words, *_TINY)) for words in models]
    data = [Case((*_READING, spec), works=True) for spec in _DATA.values()]
    return [*verbs, *attacked, *data]


@st.composite
def checkpoints(draw: st.DrawFn) -> Case:
    """Damaged weight and token files, and well-formed ones whose metadata was edited."""
    name = draw(st.sampled_from(["w.safetensors", "w.safetensors", "w.pt", "tokens.safetensors"]))
    path = material.inputs() / name
    as_value = name.endswith(".safetensors") and draw(st.integers(0, 3)) > 0
    edit = (spoil_value if as_value else spoil_bytes)(draw, name, path)
    if name == "tokens.safetensors":
        words = ("attack", material.MODEL, "--tokens", name, "--allow-readable")
    elif name == "w.pt":
        words = ("attack", "test_vit", "--num-classes", "10", "--weights", name)
    elif draw(st.booleans()):
        words = ("attack", "vit_tiny_patch16_224", "--num-classes", "10", "--weights", name)
    else:
        words = ("attack", name)
    return Case((*words, *_TINY), edits=(edit,))


@st.composite
def recipes(draw: st.DrawFn) -> Case:
    """Recipes with wrong values, keys and sections, and damaged YAML."""
    name = draw(st.sampled_from(["training.yaml", "probe.yaml"]))
    text = (material.inputs() / name).read_text()
    document = yaml.safe_load(text)
    if draw(st.integers(0, 3)) == 0:
        row = draw(st.integers(0, len(text)))
        spoiled = (
            text[:row]
            + draw(
                st.sampled_from(
                    [
                        "&a ",
                        "*a",
                        "!!python/object:os.x ",
                        "!!map ",
                        "- ",
                        ": ",
                        "\t",
                        "? ",
                        "|",
                        "{",
                        "#",
                        "---\n",
                        "%YAML 9",
                        "<<: ",
                        "'",
                        "é",
                        "0o9",
                        "2020-01-01",
                    ]
                )
            )
            + text[row:]
        )
    else:
        for _ in range(draw(st.integers(1, 2))):
            place = draw(st.sampled_from(_places(document)))
            if draw(st.integers(0, 3)) == 0:
                place = (
                    *place[:-1],
                    draw(st.sampled_from(["nope", "", "extends", "rows", "use", "plugins", "a.b", "1", "adapter"])),
                )
            document = Edit("", place, draw(values))._changed(document)
        spoiled = yaml.safe_dump(document, allow_unicode=True)
    overrides = ()
    if draw(st.integers(0, 3)) == 0:
        keys = (
            "train.epochs",
            "train.batch_size",
            "model.name",
            "data.train",
            "optimizer.lr",
            "audit.attacks",
            "x",
            "train",
            "train.",
            ".",
        )
        overrides = (f"{draw(st.sampled_from(keys))}={draw(anything)}",)
    verb = "harden" if name == "training.yaml" else "probe"
    words = draw(
        st.sampled_from([("recipes", "check", "mine.yaml"), (verb, "mine.yaml", *overrides, "--device", "cpu")])
    )
    return Case(words, files=(("mine.yaml", spoiled),))
