"""Run a command of the docs in the small world: provide the files and run folders it expects, then call the program."""

from __future__ import annotations

import gc
import os
import re
import socket
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
import typer
from safetensors.torch import save_file
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner, Result

import vitadel
from docs_reading import Command, Snippet
from docs_world import FLAGS, IN_SNIPPETS, KEPT_FLAGS, LISTED, MOST, NAMES, TINY, shrink
from vitadel.adapters.adapted_model import open_model, options_for_features
from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens, token_width
from vitadel.adapters.tokens.token_files import save_tokens
from vitadel.backbones.checkpoints import save_classifier
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.load import load_model
from vitadel.backbones.published import find_published
from vitadel.backbones.timm_models import create_backbone
from vitadel.cli.main import app
from vitadel.errors import UserError
from vitadel.training.recipes.compose import compose, source
from vitadel.training.recipes.yaml_files import shipped_recipes

__all__ = ["World", "WronglyTyped", "parsed", "verb_in"]

ANY_RUN = ("vitadel", "harden", "shapes/standard", "--out", "run")
"""Makes the stand-in for run folders that no command of the docs makes; it is also a MODEL."""
ELLIPSIS = {"harden": ("shapes/trades",)}
"""Replacement for `...` where a verb needs an argument; elsewhere it is dropped."""
_RUNS = ("runs/", "RUN")


class WronglyTyped(Exception):
    """An unknown verb, or flags that its verb does not take."""


def verb_in(words: Sequence[str]) -> tuple[str, Any, list[str]]:
    """The verb's name, its typer command, and the words after it; a group if no verb of it is named."""
    command: Any = typer.main.get_command(app)
    rest, name = list(words), "vitadel"
    while hasattr(command, "commands") and rest:
        if rest[0] not in command.commands:
            raise WronglyTyped(f"no verb {rest[0]!r}")
        context = command.make_context(name, [], resilient_parsing=True)
        name, command, rest = command.resolve_command(context, rest)  # `audit --suite X` is the verb X
    return name, command, rest


def parsed(words: Sequence[str]) -> typer.Context:
    """The context of a verb with parsed flags."""
    name, command, rest = verb_in(words)
    try:
        context: typer.Context = command.make_context(name, rest)
    except Exception as complaint:
        if not hasattr(complaint, "format_message"):  # typer has click's exceptions, or click of its own
            raise
        raise WronglyTyped(complaint.format_message()) from None
    return context


@dataclass
class World:
    """Runs each command once; commands that make run folders for others are found in `all_commands`."""

    root: Path
    patch: pytest.MonkeyPatch
    all_commands: Sequence[Command] = ()
    all_snippets: Sequence[Snippet] = ()
    _done: dict[tuple[str, ...], tuple[Result, Path]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shrink(self.root, self.patch)
        self.patch.setattr(socket.socket, "connect", _no_network)
        self.patch.setattr("vitadel.cli.ui.threading", SimpleNamespace(Event=_Impatient))

    def run(self, words: Sequence[str]) -> Result:
        """Run a command as written, once, however often it occurs in the docs."""
        return self._run(tuple(words))[0]

    def _run(self, words: tuple[str, ...]) -> tuple[Result, Path]:
        if words not in self._done:
            place = self.root / f"{zlib.crc32(repr(words).encode()):08x}"
            place.mkdir(exist_ok=True)
            with chdir(place):
                self._done[words] = self._called(words), place
        return self._done[words]

    def execute(self, page: str) -> int:
        """Run the snippets of a page in order with shared names; return how many finished."""
        finished = 0
        my_module = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=32, patch_size=8).eval()
        x = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        y = my_module(x).argmax(1)
        known = ("tabby", "tench", *map("class {}".format, range(8)))  # with those of the folder's stand-in
        model = Classifier(my_module, replace(vitadel.wrap(my_module).record, classes=known, classes_from="the test"))
        names = {"vitadel": vitadel, "model": model, "my_module": my_module, "x": x, "y": y}
        place = self.root / "snippets" / page
        place.mkdir(parents=True)
        with chdir(place):
            for snippet in self.all_snippets:
                if snippet.page == page:
                    for name, path in re.findall(r'load_model\(\s*"([^"]+)",\s*weights="([^"]+)"', snippet.code):
                        _write_weights(name, {"weights": path})
                    self._bring_runs(re.findall(r'(?<!out=)"(runs/[^"]+)"', snippet.code))
                    code = snippet.code
                    for pattern, written in IN_SNIPPETS.items():
                        code = re.sub(pattern, written, code)
                    exec(compile("\n" * (snippet.line - 1) + code, page, "exec"), names)
                    finished += 1
        return finished

    def _called(self, words: tuple[str, ...]) -> Result:
        typed = self._substituted(_for_one_process(words))
        self._bring_runs(typed)
        try:
            context = parsed(typed)
            typed = [*typed, *_sizes(context)]
            self._bring_files(context)
        except (WronglyTyped, UserError):
            pass  # the program itself reports the error below
        self.patch.setattr(sys, "argv", ["vitadel", *typed])
        with _collected() if typed[:1] == ["ui"] else nullcontext():
            return CliRunner().invoke(app, typed)

    def _substituted(self, words: Sequence[str]) -> list[str]:
        """Remove the marks of optional words and apply NAMES."""
        plain = [word if "=[" in word or not word else word.strip("[]") or "..." for word in words]
        typed = [NAMES.get(word, word) for word in plain if word != "..."]
        if "..." in plain and len(typed) == 1:
            typed += ELLIPSIS.get(typed[0], ())
        return [f"{word[:-3]}parquet:{word[:-4]}.parquet" if word.endswith("=...") else word for word in typed]

    def _bring_runs(self, words: Sequence[str]) -> None:
        """Provide run folders that the command reads, made by another command of the docs or by ANY_RUN."""
        makers = {command.out: command.words for command in self.all_commands if command.out is not None}
        for before, word in zip(["", *words], words, strict=False):
            path = word.partition("=")[2] or word
            if before in ("--out", "--export") or not path.startswith(_RUNS):
                continue
            name = "/".join(Path(path).parts[: 2 if path.startswith("runs/") else 1])
            made, folder = self._run(makers.get(name, ANY_RUN))
            assert made.exit_code == 0, f"{name} could not be made: {made.output}"
            if name not in makers:
                _link(Path(name), folder / ANY_RUN[-1])
            for made_too in (folder / "runs").glob("*"):  # a run may start from another one
                _link(Path("runs") / made_too.name, made_too)

    def _bring_files(self, context: typer.Context) -> None:
        """Provide models, weights, tokens, recipes and lists that are named and missing."""
        given = dict(context.params)
        if str(given.get("recipe", "")).endswith((".yaml", ".yml")):
            Path(given["recipe"]).write_text(source("shapes/trades"))
        if context.info_name == "plan" and str(given.get("model")).endswith(".yaml"):
            Path(given["model"]).write_text(source("shapes/trades"))
            return
        for path in given.get("names") or ():
            if path.endswith((".yaml", ".yml")):
                Path(path).write_text(source("shapes/trades"))
        if context.info_name in ("harden", "probe"):
            model = compose(given["recipe"], given["row"], given["overrides"] or ())["model"]
            given |= {"model": model["name"], "weights": model.get("weights"), "input_size": model.get("input_size")}
        named = [given.get("model"), *(given.get("models") or ()), *(given.get("runs") or ())]
        for model in (str(each) for each in named if each is not None):
            if model == "MODEL":
                _write_model(Path("MODEL"), given.get("data") or "")
            elif model.startswith("python:"):
                self._write_factory(model.split(":")[1])
            else:
                _write_weights(model, given)
        if "list=" in str(given.get("data")):
            listed = given["data"].partition("list=")[2].partition(")")[0].partition(",")[0]
            Path(listed).write_text("\n".join(LISTED))
        for flag in ("tokens", "surrogates", "bank"):
            for path in str(given.get(flag) or "").split(","):
                if path.endswith(".safetensors") and not Path(path).exists():
                    _write_tokens(Path(path), given)

    def _write_factory(self, module: str) -> None:
        """Write the user's module as a page shows it, in the snippet that starts with its file name."""
        shown = [snippet.code for snippet in self.all_snippets if snippet.code.startswith(f"# {module}.py\n")]
        assert shown, f"no page shows {module}.py"
        Path(f"{module}.py").write_text(shown[0])
        sys.modules.pop(module, None)


def _link(here: Path, there: Path) -> None:
    if not here.exists():
        here.parent.mkdir(parents=True, exist_ok=True)
        here.symlink_to(there.resolve())


def _for_one_process(words: Sequence[str]) -> list[str]:
    """The words after `vitadel`; for torchrun, whose own flags are only parsed, what each process would run."""
    if words[0] == "torchrun":
        parsed_words = get_args_parser().parse_args(list(words[1:]))
        assert (parsed_words.module, parsed_words.training_script) == (True, "vitadel"), "torchrun runs `-m vitadel`"
        return list(parsed_words.training_script_args)
    assert words[0] == "vitadel", f"no rule for running {words[0]}"
    return list(words[1:])


def _sizes(context: typer.Context) -> list[str]:
    """Flags that make a command small: those of FLAGS, and integers above MOST."""
    model = str(context.params.get("model"))
    if context.info_name == "plan" and (model in shipped_recipes() or model.endswith(".yaml")):
        return []  # the recipe sets the sizes
    added = []
    for option in context.command.params:
        if option.param_type_name != "option" or option.name in KEPT_FLAGS:
            continue
        if option.name == "limit" and context.params.get("protocol"):
            continue
        value = context.params.get(option.name)
        if option.name == "within" and value is None:  # a kind of audit, not a size that every audit has
            continue
        if option.name == "severities" and context.params.get("augmix"):  # has none
            continue
        most: Any = FLAGS.get(f"{context.info_name}.{option.name}", FLAGS.get(option.name))
        if most is None and type(value) is int and value > MOST:
            most = MOST
        is_files = isinstance(value, str) and not value.isdigit() and option.name in ("surrogates", "bank")
        if option.name == "eps" and "," in str(value) and "," not in str(context.params.get("norm")):
            most = value.partition(",")[0]
        if most is not None and not is_files:
            added += [option.opts[0], str(most)]
    return added


def _write_model(folder: Path, data: str) -> None:
    """Write the stand-in for MODEL: a ViT for 1000 classes at 224 px, or for 10 or 2 at 32 px, as the data require."""
    few = 2 if data.startswith("folder") else 10
    classes, size, patch = (1000, 224, 32) if data.startswith("imagenet") else (few, 32, 8)
    shape = {**TINY["vit"], "img_size": size, "patch_size": patch}
    classifier = load_model("vit_tiny_patch16_224", weights="random", num_classes=classes, kwargs=shape)
    save_classifier(classifier, folder / "weights" / "best.safetensors")


def _write_weights(model: str, given: dict[str, Any]) -> None:
    path = given.get("weights")
    if path in (None, "random", "pretrained") or Path(path).exists():
        return
    published = model.startswith("published:")
    backbone = load_model(model, weights="random").backbone if published else create_backbone(model, None, {})
    weights = backbone.state_dict()
    if path.endswith("/"):  # RobustBench's cache
        entry = find_published(model.removeprefix("published:"))
        path = f"{path}{entry.dataset}/{entry.norm.capitalize()}/{entry.name}.pt"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if path.endswith(".safetensors"):
        save_file(weights, path)
    else:
        torch.save(weights, path)


def _write_tokens(path: Path, given: dict[str, Any]) -> None:
    """Write three tokens for the named model, different ones in every file."""
    options = {key: given[key] for key in ("weights", "num_classes", "input_size") if given.get(key)}
    classifier = open_model(given["model"], options_for_features(given["model"], options))
    tokens = fresh_tokens(token_width(classifier), 3, seed=zlib.crc32(path.name.encode()))
    save_tokens(TokenClassifier(classifier, tokens), path, {})


@contextmanager
def _collected() -> Iterator[None]:
    """Collect what gradio leaves to the garbage collector, which would warn here or in a later test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


class _Impatient:
    """An event that is interrupted as by Ctrl-C as soon as it is waited for."""

    def wait(self) -> None:
        raise KeyboardInterrupt


def _no_network(self: socket.socket, address: Any) -> None:
    if self.family == getattr(socket, "AF_UNIX", None) or address[0] in ("127.0.0.1", "localhost", "::1"):
        return _CONNECT(self, address)
    raise AssertionError(f"the docs' commands have no network here; something asked for {address}: add a rule for it")


_CONNECT = socket.socket.connect
os.environ.setdefault("COLUMNS", "200")
