"""Every command and every Python snippet of the docs runs as written, in a small world."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from docs_reading import REPOSITORY, Command, commands_in, inline_commands_in, pages, snippets_in
from docs_running import World, parsed, verb_in

TEXTS = {str(page.relative_to(REPOSITORY)): page.read_text(encoding="utf-8") for page in pages()}
COMMANDS = [command for name, text in TEXTS.items() for command in commands_in(text, name)]
INLINE = [command for name, text in TEXTS.items() for command in inline_commands_in(text, name)]
TYPED = list({command.words: command for command in reversed(COMMANDS)}.values())[
    ::-1
]  # each once, at its first occurrence
SNIPPETS = [snippet for name, text in TEXTS.items() for snippet in snippets_in(text, name)]


def title(command: Command) -> str:
    return f"{command.page}:{command.line} {command.text}"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield World(tmp_path_factory.mktemp("docs"), patch, COMMANDS, SNIPPETS)


@pytest.mark.slow
@pytest.mark.parametrize("command", TYPED, ids=title)
def test_command_runs(world, command):
    done = world.run(command.words)
    gated = any(word.startswith("--fail-") for word in command.words)  # four images may be too few to pass
    assert done.exit_code in ((0, 3) if gated else (0,)), f"{done.exception!r}\n{done.output}"


@pytest.mark.slow
@pytest.mark.parametrize("page", dict.fromkeys(snippet.page for snippet in SNIPPETS))
def test_snippets_run(world, page):
    assert world.execute(page) == sum(snippet.page == page for snippet in SNIPPETS)


@pytest.mark.slow
@pytest.mark.parametrize("command", INLINE, ids=title)
def test_inline_commands_parse(command):
    words = [word.strip("[]") for word in command.words[1:] if word.strip("[]") != "..."]
    name, verb, rest = verb_in(words)
    if rest:  # a verb alone may need more arguments than the sentence gives
        assert parsed(words).info_name == name
    else:
        assert verb.name == name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["audti"], "audti"),
        (["audit", "--atacks", "fgsm"], "--atacks"),
        (["audit", "--attacks", "pgdd-20"], "unknown attack"),
        (["audit", "--attacks", "pgd-20(restart=5)"], "restarts"),
        (["audit", "MODEL", "--data", "imagenett:DIR"], "unknown data"),
        (["audit", "deit_tinny_patch16_224", "--weights", "deit.safetensors"], "unknown model"),
        (["audit", "--suite", "lader"], "unknown suite"),
        (["audit", "--protocol", "robustbench-cifar"], "unknown protocol"),
        (["harden", "shapes/trade"], "shapes/trades"),
        (["harden", "shapes/trades", "train.epoch=3"], "epochs"),
        (["harden", "aas/table5", "--row", "trade+aas"], "trades+aas"),
        (["audit", "--data", "hf:somebody/photos"], "no stand-in"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_a_misspelled_command_fails(world, words, message):
    done = world.run(["vitadel", *words])
    assert done.exit_code != 0
    assert message in f"{done.exception}\n{done.output}"


@pytest.mark.slow
def test_the_workflow_of_the_docs_runs(world):
    (text,) = re.findall(r"```yaml\n(.*?)```", TEXTS["docs/pipeline.md"], re.DOTALL)
    (job,) = yaml.safe_load(text)["jobs"].values()
    (audit,) = [step["run"] for step in job["steps"] if step.get("name") == "Audit"]
    done = world.run(shlex.split(audit))
    assert done.exit_code in (0, 3), f"{done.exception!r}\n{done.output}"  # too few images for the gate here


def test_commands_are_extracted_from_pages():
    typed = "$ vitadel audit MODEL \\\n    --limit 5   # so many"
    text = f"```\n{typed}\nclean 95.2 %\npip install .\n```\n`vitadel list data`\n"
    (command,) = commands_in(text, "page")
    assert (command.line, command.words) == (2, ("vitadel", "audit", "MODEL", "--limit", "5"))
    (inline,) = inline_commands_in(text, "page")
    assert (inline.line, inline.text) == (7, "vitadel list data")


@pytest.mark.slow
@pytest.mark.parametrize("page", ["api.md", "checks.md", "commands.md", "recipe-keys.md"])
def test_generated_pages_are_up_to_date(page):
    spec = importlib.util.spec_from_file_location("make_docs", REPOSITORY / "scripts" / "make_docs.py")
    make_docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_docs)
    assert set(make_docs.PAGES) == {"api.md", "checks.md", "commands.md", "recipe-keys.md"}
    written = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    assert make_docs.PAGES[page]() == written, f"docs/{page} is out of date: run scripts/make_docs.py"


@pytest.mark.parametrize("page", TEXTS)
def test_links_exist(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", TEXTS[page]):
        if "://" not in target:
            assert (REPOSITORY / page).parent.joinpath(target).exists(), f"{page} links to {target}"


@pytest.mark.slow
def test_site_builds_strictly(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "tutorial" / "index.html").exists()
