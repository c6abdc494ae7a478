"""Hostile inputs that once ended in a traceback, a hang or a silent success: now in one message and exit code 2."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import stat
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from PIL import Image

import vitadel
from vitadel.cli.main import main
from vitadel.errors import UserError
from vitadel.runtime.run_folder import Command, RunFolder, open_run, write_json

AUDIT = ("audit", "zoo:shapes-standard", "--limit", "8", "--attacks", "fgsm", "--no-precheck", "--device", "cpu")


@pytest.fixture
def vitadel_ends(monkeypatch, capsys, tmp_path):
    """Run the command in process; return its message after checking that it ends as a user's mistake should."""

    def run(*words: object, writes: bool = False) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["vitadel", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        assert end.value.code == 2, printed.err
        assert "Traceback" not in printed.err
        assert writes or not (tmp_path / "runs").exists(), "nothing is written"
        return " ".join(printed.err.split())

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    vitadel.audit("zoo:shapes-standard", attacks="fgsm", limit=8, out=folder, device="cpu")
    return folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def edit(path: Path, change) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


# Models


@pytest.mark.parametrize("body", ["import sys; sys.exit()", "def build():\n    import sys; sys.exit(0)"])
def test_a_factory_that_exits_is_an_error(vitadel_ends, tmp_path, body):
    (tmp_path / "exiting_factory.py").write_text(body)
    sys.modules.pop("exiting_factory", None)
    message = vitadel_ends(AUDIT[0], "python:exiting_factory:build", *AUDIT[2:])
    assert "SystemExit" in message
    recipe = tmp_path / "own.yaml"
    recipe.write_text("extends: shapes/standard\nmodel: {name: python:exiting_factory:build}\n")
    for words in (("harden", "shapes/standard", "model.name=python:exiting_factory:build"), ("harden", str(recipe))):
        sys.modules.pop("exiting_factory", None)
        assert "SystemExit" in vitadel_ends(*words, "--trust-code", "--device", "cpu", "--out", "trained", writes=True)


@pytest.mark.filterwarnings("error")
def test_pickles_of_new_protocols_are_refused_without_a_warning_of_torch(tmp_path):
    (tmp_path / "w.pt").write_bytes(pickle.dumps(_Hostile(), protocol=4))
    with pytest.raises(UserError, match="Nothing was run"):
        vitadel.load_model("test_vit", weights=tmp_path / "w.pt", num_classes=10)


class _Hostile:
    def __reduce__(self):
        return os.system, ("exit 1",)


def test_integer_weights_are_refused(tmp_path):
    model = vitadel.load_model("zoo:shapes-standard")
    weights = {key: value.clone() for key, value in model.backbone.state_dict().items()}
    key = next(key for key, value in weights.items() if value.is_floating_point())
    weights[key] = weights[key].round().to(torch.int32)
    safetensors.torch.save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=r"stored as int32 .* quantized"):
        vitadel.load_model(
            model.record.name,
            weights=tmp_path / "w.safetensors",
            num_classes=model.record.num_classes,
            kwargs=model.record.kwargs,
            small_images=model.record.small_images or False,
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kwargs", 3),
        ("mean", "dark"),
        ("num_classes", "ten"),
        ("input_size", [10**12, 10**12]),
        ("name", None),
        ("notes", [1]),
        ("newer_field", 1),
    ],
)
def test_an_edited_record_names_the_field(tmp_path, field, value):
    model = vitadel.load_model("zoo:shapes-standard")
    record = json.loads(model.record.to_json()) | {field: value}
    weights = {key: each.clone() for key, each in model.backbone.state_dict().items()}
    safetensors.torch.save_file(weights, tmp_path / "w.safetensors", metadata={"vitadel": json.dumps(record)})
    with pytest.raises(UserError, match=field):
        vitadel.load_model(str(tmp_path / "w.safetensors"))


# Files that block or never end


@pytest.mark.parametrize(
    "words",
    [
        (*AUDIT, "--weights", "FILE"),
        (*AUDIT, "--tokens", "FILE"),
        (*AUDIT, "--data", "npz:FILE"),
        (*AUDIT, "--data", "parquet:FILE"),
        ("harden", "FILE"),
        ("recipes", "check", "FILE"),
        ("report", "FILE"),
    ],
    ids=lambda words: " ".join(words).replace("--no-precheck --device cpu", ""),
)
@pytest.mark.parametrize("special", ["pipe.yaml", "/dev/zero"])
def test_pipes_and_devices_are_refused(vitadel_ends, tmp_path, words, special):
    path = tmp_path / special
    if special == "pipe.yaml":
        os.mkfifo(path)
    vitadel_ends(*(str(word).replace("FILE", str(path)) for word in words))


def test_a_pipe_among_images_is_a_bad_sample(vitadel_ends, tmp_path):
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name / "1.png")
    os.mkfifo(tmp_path / "photos" / "a" / "2.png")
    message = vitadel_ends(*AUDIT, "--data", "folder:photos", "--head-classes", "0,1", writes=True)
    assert "not a regular file" in message


def test_links_back_to_a_folder_above_end(tmp_path):
    from vitadel.data.sources.folders import files_below

    Image.new("RGB", (8, 8)).save(tmp_path / "1.png")
    for name in ("x", "y"):
        (tmp_path / name).symlink_to(tmp_path)
    assert list(files_below(tmp_path)) == ["1.png"]


# Documents that grow


def alias_bomb() -> str:
    lines = ["about: x", "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    return "\n".join(lines)


def test_alias_bombs_end(vitadel_ends, tmp_path):
    (tmp_path / "bomb.yaml").write_text(alias_bomb())
    assert "aliases" in vitadel_ends("recipes", "check", "bomb.yaml")


def test_plain_aliases_still_work():
    from vitadel.training.recipes.yaml_files import read_yaml

    assert read_yaml("a: &x [1, 2]\nb: *x", "it") == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize(
    "words",
    [
        (*AUDIT, "--data", "shards:part-{0..99999999}.tar"),
        (*AUDIT, "--data", "shards:part-{0..9999}-{0..9999}.tar"),
        (*AUDIT, "--data", "parquet:" + "{a,b}" * 40 + ".parquet"),
        ("harden", "shapes/trades", ".".join(["a"] * 3000) + "=1"),
        ("harden", "shapes/trades", "train.epochs=" + "[" * 3000),
        (*AUDIT, "--batch-size", "9" * 5000),
        (*AUDIT, "--data", "npz:" + "x" * 300 + ".npz"),
        (*AUDIT, "--out", "x" * 300),
        (*AUDIT, "--weights", "x" * 300),
        ("harden", "x" * 300 + ".yaml"),
        ("report", "x" * 300),
        (*AUDIT, "--data", "folder:a\nb"),
        (*AUDIT, "--out", "a\nb"),
        (*AUDIT, "--out", os.fsdecode(b"caf\xe9")),
    ],
    ids=lambda words: " ".join(words)[-40:].encode("ascii", "replace").decode(),
)
def test_absurd_words_end_at_once(vitadel_ends, words):
    vitadel_ends(*words)


# Labels and arrays


@pytest.mark.parametrize("label", [2**40, 2**62])
def test_labels_that_are_hashes_are_refused(vitadel_ends, tmp_path, label):
    np.savez(tmp_path / "d.npz", images=np.zeros((2, 8, 8, 3), np.uint8), labels=np.array([0, label]))
    assert "must be numbered first" in vitadel_ends(*AUDIT, "--data", "npz:d.npz")
    images = [{"bytes": (tmp_path / "d.npz").read_bytes(), "path": None}] * 2
    pq.write_table(pa.table({"img": images, "label": [0, label]}), tmp_path / "d.parquet")
    assert "must be numbered first" in vitadel_ends(*AUDIT, "--data", "parquet:d.parquet")


@pytest.mark.parametrize("shape", ["(-1, 8, 8, 3)", "(2, 99999999999, 99999999999, 3)", "(2, 8, 8", "(2, 'a')"])
def test_malformed_array_headers_are_refused(vitadel_ends, tmp_path, shape):
    import zipfile

    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(384)
    labels = tmp_path / "labels.npy"
    np.save(labels, np.array([0, 1]))
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("images.npy", content)
        archive.write(labels, "labels.npy")
    vitadel_ends(*AUDIT, "--data", "npz:d.npz")


@pytest.mark.parametrize("name", [os.fsdecode(b"caf\xe9.png"), "a\nb.png"])
def test_names_of_files_that_cannot_be_written_are_refused_before_the_work(vitadel_ends, tmp_path, name):
    for folder in ("a", "b"):
        (tmp_path / "photos" / folder).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / folder / "1.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "a" / name)
    assert "Rename it" in vitadel_ends(*AUDIT, "--data", "folder:photos", "--head-classes", "0,1")


# Run folders


@pytest.mark.parametrize("opening", [{"mean": 5}, {"small_images": {}}, {"weights": 3}, {"data": []}])
def test_an_edited_opening_names_the_field(vitadel_ends, run, opening):
    edit(run / "command.json", lambda command: command["opening"].update(opening))
    message = vitadel_ends("study", "attention", run, "--device", "cpu")
    assert next(iter(opening)) in message


def test_deep_json_is_refused(vitadel_ends, run):
    (run / "results.json").write_text("[" * 100_000 + "]" * 100_000)
    vitadel_ends("report", run)


@pytest.mark.parametrize(
    "name", ["results.json", "samples.parquet", "examples.npz", "environment.json", "metrics.jsonl"]
)
@pytest.mark.parametrize("special", ["pipe", "device", "folder"])
def test_files_of_a_run_that_are_no_files_are_refused(vitadel_ends, run, name, special):
    (run / name).unlink(missing_ok=True)
    if special == "pipe":
        os.mkfifo(run / name)
    elif special == "device":
        (run / name).symlink_to("/dev/zero")
    else:
        (run / name).mkdir()
    vitadel_ends("report", run, "--out", "r.html")


def test_devices_are_not_replaced_by_reports(vitadel_ends, run, tmp_path):
    os.mkfifo(tmp_path / "pipe.html")
    (tmp_path / "link.html").symlink_to("pipe.html")
    for target in ("pipe.html", "link.html"):
        assert "a device or a pipe" in vitadel_ends("report", run, "--out", target)
    assert stat.S_ISFIFO((tmp_path / "pipe.html").stat().st_mode)


def test_a_link_to_a_file_stays_a_link(tmp_path):
    (tmp_path / "link.json").symlink_to("real.json")
    write_json(tmp_path / "link.json", {"a": 1})
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text()) == {"a": 1}


@pytest.mark.parametrize("content", ["[]", "3", '{"verb": 3, "settings": {}}', '{"verb": "audit", "settings": 3}', "{"])
def test_a_command_that_was_edited_is_no_run(tmp_path, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "command.json").write_text(content)
    with pytest.raises(UserError, match="not a run folder"):
        open_run(Command("audit", {}), "x", out=tmp_path / "run", resume=True)


def test_what_a_killed_process_left_is_removed(tmp_path):
    command, folder = Command("audit", {"a": 1}), tmp_path / "run"
    open_run(command, "x", out=folder, resume=False).unlock()
    left = [".results.json.abcd1234", ".recipe.yaml.zz_9876x"]
    for name in left:
        (folder / name).write_text("half")
    (folder / ".keep").write_text("a file of the user")
    write_json(folder / "results.json", {"complete": True})
    (folder / "partial" / "fgsm").mkdir(parents=True)
    assert open_run(command, "x", out=folder, resume=True) == RunFolder(folder)
    assert {file.name for file in folder.iterdir()} == {"command.json", "results.json", ".keep"}


def test_the_lock_comes_before_the_clean_up(tmp_path):
    import fcntl

    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".command.json.abcd1234").write_text("being written by another process")
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is working"):
            open_run(Command("audit", {}), "x", out=folder, resume=True)
    finally:
        os.close(handle)
    assert (folder / ".command.json.abcd1234").exists()


# Code that files name


def test_code_that_a_recipe_names_runs_only_if_trusted(vitadel_ends, tmp_path, monkeypatch):
    (tmp_path / "named_code.py").write_text("raise SystemExit('this code was run')")
    (tmp_path / "theirs.yaml").write_text("extends: shapes/trades\nmodel:\n  name: python:named_code:build\n")
    monkeypatch.delenv("VITADEL_TRUST_CODE", raising=False)
    words = ("harden", "theirs.yaml", "model.kwargs=null", "--device", "cpu")
    message = vitadel_ends(*words)
    assert "'python:named_code:build', which would be imported and run" in message
    assert "this code was run" in vitadel_ends(*words, "--trust-code")
    monkeypatch.delenv("VITADEL_TRUST_CODE")
    typed = ("harden", "shapes/trades", "model.name=python:named_code:build", *words[2:])
    assert "this code was run" in vitadel_ends(*typed), "what the user types is trusted"


@pytest.mark.parametrize(
    "named", [{"objective": {"use": "named.Code"}}, {"plugins": {"named.Code": {}}}, {"model": {"name": "python:a:b"}}]
)
def test_code_in_a_recipe_is_found(named):
    from vitadel.runtime.trusted_code import code_in_recipe

    plain = {"objective": {"use": "trades"}, "plugins": {"awp": {}}, "model": {"name": "deit.fb_in1k"}, "about": "a.b"}
    assert code_in_recipe(plain) == []
    assert len(code_in_recipe(plain | named)) == 1


def test_code_that_a_run_folder_names_runs_only_if_trusted(vitadel_ends, run, monkeypatch):
    monkeypatch.delenv("VITADEL_TRUST_CODE", raising=False)
    edit(run / "command.json", lambda command: command["opening"].update(model="python:os:getcwd"))
    edit(run / "command.json", lambda command: command["settings"].update(model="python:os:getcwd"))
    assert "'python:os:getcwd', which would be imported and run" in vitadel_ends("study", "attention", run)


# Standard error


class _Broken(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("stream", [_Broken(), None], ids=["reader gone", "closed from the start"])
def test_work_goes_on_when_standard_error_is_closed(monkeypatch, tmp_path, stream):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["vitadel", "attack", *AUDIT[1:6], "--device", "cpu", "--out", "run"])
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert json.loads((tmp_path / "run" / "results.json").read_text())["complete"]
