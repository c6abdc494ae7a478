"""Strategies for what comes from elsewhere: shards of other machines, other runs, attack libraries, object storage."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import hypothesis.strategies as st
import material
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from driver import Case, Edit, Replacement
from hostile import anything, numbers, spoil_bytes, spoil_value, texts

_CPU = ("--device", "cpu")


def _whole(name: str, content: bytes, size: int) -> Edit:
    """Another content for a file of this size."""
    return Edit(name, None, content.decode("latin-1"), 0, size)


# Shards


@cache
def _shard_files() -> tuple[str, ...]:
    base = material.run("shards")
    return tuple(sorted(str(path.relative_to(base)) for path in base.rglob("*") if path.is_file()))


def _changed_array(draw: st.DrawFn, array: np.ndarray) -> np.ndarray | None:
    """Another type, shape or other values; None to leave it out."""
    how = draw(st.sampled_from(["missing", "type", "shape", "scalar", "values", "text"]))
    if how == "missing":
        return None
    if how == "type":
        kind = draw(st.sampled_from(["f8", "c8", "U3", "b1", "M8[s]", "i1"]))
        return np.zeros(array.shape, kind)
    if how == "shape":
        return np.zeros((*array.shape, 2), array.dtype) if draw(st.booleans()) else np.zeros(7, array.dtype)
    if how == "scalar":
        return np.asarray(draw(st.sampled_from([0, -1, 2**62, 1.5])))
    if how == "text":
        return np.asarray(draw(texts))
    return np.full_like(array, draw(st.sampled_from([-1, 99]))) if array.dtype.kind in "if" else ~array.astype(bool)


def _forged_record(draw: st.DrawFn, name: str) -> Edit:
    """A batch record that is a sound file, with one array that is not."""
    path = material.run("shards") / name
    with np.load(path) as file:
        arrays = {each: file[each] for each in file.files}
    which = draw(st.sampled_from(sorted(arrays)))
    changed = _changed_array(draw, arrays.pop(which))
    if changed is not None:
        arrays[which] = changed
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return _whole(f"run/{name}", buffer.getvalue(), path.stat().st_size)


@st.composite
def merges(draw: st.DrawFn) -> Case:
    """Shards with edited values, forged or damaged records, files that are none, and folders of other names."""
    base = material.run("shards")
    name = draw(st.sampled_from(_shard_files()))
    edits, replaced = [], []
    how = draw(st.sampled_from(["value", "value", "bytes", "record", "record", "special", "folders", "none"]))
    records = [each for each in _shard_files() if each.endswith(".npz")]
    documents = [each for each in _shard_files() if each.endswith(".json")]
    if how == "value":
        for _ in range(draw(st.integers(1, 2))):
            name = draw(st.sampled_from(documents))
            edits.append(spoil_value(draw, f"run/{name}", base / name))
    elif how == "bytes":
        edits.append(spoil_bytes(draw, f"run/{name}", base / name))
    elif how == "record":
        edits.append(_forged_record(draw, draw(st.sampled_from(records))))
    elif how == "special":
        whole = st.sampled_from([*_shard_files(), "shards", "shards/1-of-2", "shards/1-of-2/partial"])
        what = draw(st.sampled_from(["pipe", "device", "folder", "missing", "link above"]))
        replaced.append(Replacement(f"run/{draw(whole)}", what))
    elif how == "folders":
        to = draw(st.sampled_from(["1-of-3", "3-of-2", "0-of-2", "0-of-0", "2-of-1", "1-of-2x", "999999-of-999999"]))
        replaced.append(Replacement("run/shards/1-of-2", "copy", f"run/shards/{to}"))
        if draw(st.booleans()):
            replaced.append(Replacement("run/shards/2-of-2", "missing"))
    runs = draw(
        st.sampled_from(
            [("run",)] * 4 + [("run", "--out", "merged")] * 4 + [("run", "run", "--out", "merged"), ("run", "run")]
        )
    )
    if draw(st.integers(0, 3)) == 0:
        more = st.tuples(st.sampled_from(["--fail-under", "--fail-on", "--summary", "--out", "--device"]), anything)
        runs += draw(st.one_of(more, st.tuples(anything)))
    words = ("merge", *runs, *(() if "--device" in runs else _CPU))
    return Case(words, "shards", tuple(edits), works=True, replaced=tuple(replaced))


# Audits that compare with another run, that stop by a rule, that are divided, that are submitted


@cache
def _samples() -> pa.Table:
    return pq.read_table(material.run("within") / "samples.parquet")


def _forged_table(draw: st.DrawFn) -> Edit:
    """A table of samples that is a sound file, with one column that is not."""
    table = _samples()
    place = draw(st.integers(0, table.num_columns - 1))
    name, rows = table.column_names[place], len(table)
    columns: dict[str, Any] = {
        "missing": None,
        "nulls": pa.nulls(rows, table.schema.field(place).type),
        "negative": pa.array([-1] * rows),
        "huge": pa.array([2**62] * rows),
        "same": pa.array([0] * rows),
        "text": pa.array(["x"] * rows),
        "lists": pa.array([[1]] * rows),
        "flags": pa.array([True] * rows),
        "fractions": pa.array([0.5] * rows),
    }
    column = columns[draw(st.sampled_from(sorted(columns)))]
    table = table.remove_column(place) if column is None else table.set_column(place, name, column)
    if draw(st.integers(0, 3)) == 0:
        table = table.slice(0, draw(st.sampled_from([0, 1, 50])))
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    size = (material.run("within") / "samples.parquet").stat().st_size
    return _whole("run/samples.parquet", buffer.getvalue(), size)


@st.composite
def comparisons(draw: st.DrawFn) -> Case:
    """Audits compared with a run that was edited, damaged, or is of another kind."""
    kind = draw(st.sampled_from(["within"] * 6 + ["audit", "corruptions", "harden", "shards", "compare"]))
    base = material.run(kind)
    edits, replaced = [], []
    how = draw(st.sampled_from(["value"] * 3 + ["table", "table", "bytes", "special", "none"]))
    files = [each for each in ("results.json", "command.json", "samples.parquet") if (base / each).is_file()]
    documents = [each for each in files if each.endswith(".json")]
    if how == "value":
        name = documents[0] if draw(st.integers(0, 3)) else documents[-1]
        edits.append(spoil_value(draw, f"run/{name}", base / name))
    elif how == "table" and kind == "within":
        edits.append(_forged_table(draw))
    elif how == "bytes":
        name = draw(st.sampled_from(files))
        edits.append(spoil_bytes(draw, f"run/{name}", base / name))
    elif how == "special":
        what = draw(st.sampled_from(["pipe", "device", "folder", "missing", "link above"]))
        replaced.append(Replacement(f"run/{draw(st.sampled_from(files))}", what))
    more = draw(st.one_of(st.just(()), st.tuples(st.sampled_from(["--limit", "--eps", "--norm", "--data"]), anything)))
    words = (*material.COMPARED, "--compare-with", "run", *more, *_CPU)
    return Case(words, kind, tuple(edits), replaced=tuple(replaced))


_PARTS = ("1/2", "2/2", "0/2", "3/2", "1/0", "-1/2", "1/999999", "1/9999999", "1/2/3", "٣/٤", " 1/2 ", "1 / 2", "a/b")
_KEYS = (
    "shards",
    "partition",
    "timeout_min",
    "mem_gb",
    "gpus_per_node",
    "array_parallelism",
    "signal_delay_s",
    "x",
    "",
)


@st.composite
def divisions(draw: st.DrawFn) -> Case:
    """Audits in shards, as jobs, or until an interval is narrow, by values that may be wrong."""
    flag = draw(st.sampled_from(["--shard", "--launcher", "--within", "--compare-with"]))
    if flag == "--shard":
        value = draw(st.one_of(st.sampled_from(_PARTS), anything))
    elif flag == "--launcher":
        pairs = st.tuples(st.sampled_from(_KEYS), st.one_of(st.sampled_from(["2", "16", "gpu", "10"]), anything))
        given = ",".join(f"{key}={value}" for key, value in draw(st.lists(pairs, max_size=3)))
        value = draw(st.sampled_from(["slurm", "slurm", "slurm", "pbs", "local", ""])) + f"({given})" * bool(given)
        value += draw(st.sampled_from(["", "", "", "(", ")", "()()", " "]))
    else:
        small = st.sampled_from(["1e-9", "1e-170", "1e-300", "0.001", "9", "49.999", "50", "-2"])
        value = draw(st.one_of(small, numbers) if flag == "--within" else anything)
    out = () if draw(st.integers(0, 4)) == 0 else ("--out", draw(st.sampled_from(["out"] * 6 + ["d.npz", "a" * 300])))
    others = ("--within", "--shard", "--launcher", "--compare-with", "--norm", "--fail-under", "--batch-size")
    more = () if draw(st.booleans()) else (draw(st.sampled_from(others)), draw(anything))
    more = () if more[:1] == (flag,) else more
    if draw(st.integers(0, 3)) == 0:
        more += (draw(st.sampled_from(["--resume", "--json", "--independent", "--skip-bad", "--compile"])),)
    words = ("audit", material.MODEL, "--attacks", "fgsm", "--no-precheck", flag, value, *more, *out, "--limit", "160")
    return Case((*words, *_CPU))


# Attacks of other libraries


@cache
def _foreign_names() -> tuple[str, ...]:
    """Names of all classes where the libraries keep their attacks: also of those that are none."""
    import importlib
    import inspect
    import warnings

    places = {"torchattacks": "torchattacks", "foolbox": "foolbox.attacks", "art": "art.attacks.evasion"}
    found = []
    for library, place in places.items():
        try:
            with warnings.catch_warnings(action="ignore"):
                module = importlib.import_module(place)
        except ImportError:
            continue
        found += [f"{library}:{name}" for name, kind in sorted(vars(module).items()) if inspect.isclass(kind)]
    return tuple(found)


_CODE = (
    *("python:os:getcwd", "python:os.path:join", "python:builtins:dict", "python:builtins:int", "python:json:nope"),
    *("python:nope:x", "python:nope", "python:a:b:c", "python::", "python:..:x", "python:os:", "python:builtins:type"),
    *("Python:os:getcwd", "PYTHON:sys:exit", "python:sys:exit", "python:builtins:exit", "python:builtins:object"),
    *("python:os:environ", "python:sys:maxsize", "python:material:", "python:functools:partial"),
)
_SETTINGS = (
    *("eps", "steps", "alpha", "max_iter", "norm", "n_queries", "targeted", "batch_size", "model", "estimator", "x"),
    *("random_start", "restarts", "num_random_init", "verbose", "rel_stepsize", "device", "loss", "self", "", "a.b"),
)


@st.composite
def foreign_attacks(draw: st.DrawFn) -> Case:
    """Names of attacks of other libraries and of the user's code, with settings that may not exist or not fit."""
    strange = st.tuples(st.sampled_from(["torchattacks:", "foolbox:", "art:", "python:", "nope:"]), texts).map("".join)
    names = _foreign_names()
    name = draw(
        st.one_of(st.sampled_from(names or _CODE), st.sampled_from(names or _CODE), st.sampled_from(_CODE), strange)
    )
    if draw(st.booleans()):
        pairs = [f"{draw(st.sampled_from(_SETTINGS))}={draw(anything)}" for _ in range(draw(st.integers(1, 2)))]
        name += f"({','.join(pairs)})"
    if draw(st.integers(0, 4)) == 0:
        name = draw(st.sampled_from(["fgsm,", "aas+", "targeted:next+", "patches-random+", "bpda+", "-20+"])) + name
    if draw(st.integers(0, 5)) == 0:
        row = draw(st.integers(0, len(name)))
        name = name[:row] + draw(texts) + name[row:]
    eps = ("--eps", draw(numbers)) if draw(st.integers(0, 4)) == 0 else ()
    norm = ("--norm", draw(st.sampled_from(["linf", "l2", "l1"])))
    verb = draw(st.sampled_from(["attack", "audit"]))
    return Case((verb, material.MODEL, "--attacks", name, *eps, *norm, "--limit", "4", *_CPU))


# Object storage

_PROTOCOLS = (
    *("memory", "file", "local", "s3", "gs", "gcs", "hf", "abfs", "az", "http", "https", "ftp", "sftp", "ssh", "smb"),
    *(
        "zip",
        "tar",
        "data",
        "dir",
        "reference",
        "github",
        "gist",
        "git",
        "hdfs",
        "webhdfs",
        "webHDFS",
        "jupyter",
        "dask",
    ),
    *(
        "cached",
        "simplecache",
        "blockcache",
        "filecache",
        "generic",
        "libarchive",
        "dbfs",
        "oci",
        "oss",
        "wandb",
        "root",
    ),
    *(
        "asynclocal",
        "arrow_hdfs",
        "lakefs",
        "nope",
        "",
        "S3",
        "é",
        "a b",
        "simplecache::s3",
        "zip::file",
        "::",
        "x::memory",
    ),
)
_PLACES = (
    *(
        "bucket/d.npz",
        "d.npz",
        "./d.npz",
        "photos",
        "d.{npz,tar}",
        "*",
        "**",
        "[",
        "{",
        "{0..99999999}.tar",
        "b/{a,b}" * 30,
    ),
    *("", "/", "//", "/dev/zero", "/dev/stdin", "/proc/self/environ", "../d.npz", "a/../../b", "~/x", "a" * 300, "é/x"),
    *("127.0.0.1:9/x", "127.0.0.1:1", "user:pass@127.0.0.1:9/x", "[::1]:9/x", "localhost:99999/x", "10.255.255.1/x"),
    *(
        "d.npz::file://d.npz",
        "a.npz::zip://d.npz",
        "?x=y",
        "#x",
        "%2e%2e/x",
        "b?versionId=1",
        "org/repo@main:x",
        "b/x y",
    ),
)


@st.composite
def storage_urls(draw: st.DrawFn) -> Case:
    """URLs of data: of all protocols of fsspec, of none, chained, with globs and braces that grow."""
    kind = draw(st.sampled_from(["npz", "folder", "parquet", "shards", "cifar10", "nope"]))
    protocol = draw(st.sampled_from(_PROTOCOLS))
    place = draw(st.one_of(st.sampled_from(_PLACES), texts))
    spec = f"{kind}:{protocol}://{place}"
    if draw(st.integers(0, 3)) == 0:
        spec += f"({draw(st.sampled_from(['size', 'images', 'labels', 'x']))}={draw(anything)})"
    if draw(st.integers(0, 3)) == 0:
        spec += "@" + draw(st.sampled_from(["test", "train", "nope", ""]))
    words = draw(st.sampled_from([("attack", material.MODEL), ("corrupt",)]))
    return Case((*words, "--data", spec, "--data-root", "runs", "--limit", "4", *_CPU))


def sound() -> list[Case]:
    """The inputs that are spoiled here, as they were before."""
    npz = "npz:file://d.npz"
    return [
        Case(("merge", "run", *_CPU), "shards", works=True),
        Case(("merge", "run", "--out", "merged", *_CPU), "shards", works=True),
        Case((*material.COMPARED, "--compare-with", "run", *_CPU), "within"),
        Case(("audit", material.MODEL, "--attacks", "fgsm", "--shard", "1/2", "--out", "out", "--limit", "4", *_CPU)),
        Case(
            ("attack", material.MODEL, "--attacks", "fgsm", "--data", npz, "--data-root", "runs", "--limit", "4", *_CPU)
        ),
    ]
