"""Writes the pages that are made from the code itself: docs/api.md, docs/checks.md and docs/commands.md.

python scripts/make_docs.py             # write them
python scripts/make_docs.py --check     # only tell which are out of date
"""

from __future__ import annotations

import argparse
import ast
import enum
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

from vitadel.cli.main import app

REPOSITORY = Path(__file__).parents[1]
_MADE = "<!-- Made by scripts/make_docs.py from the code: change it there. -->"

PUBLIC = {
    "The front door": ["vitadel"],
    "Models and data": ["vitadel.backbones", "vitadel.adapters.open_model", "vitadel.data"],
    "Looking inside": ["vitadel.instrument"],
    "Attacks": ["vitadel.attacks", "vitadel.attacks.goals", "vitadel.attacks.losses", "vitadel.attacks.steppers"],
    "Evaluation": [
        "vitadel.evaluation.audit.audit",
        "vitadel.evaluation.audit.protocols",
        "vitadel.evaluation.corruptions.run",
        "vitadel.evaluation.trade_off.candidates",
        "vitadel.evaluation.trade_off.run",
        "vitadel.corruptions",
    ],
    "Hardening": [
        "vitadel.training.recipes.documents",
        "vitadel.training.protocols",
        "vitadel.adapters.tora.tora_files",
    ],
    "Analyses of the papers": ["vitadel.studies"],
    "The doctor": ["vitadel.diagnosis.runner", "vitadel.diagnosis.finding", "vitadel.diagnosis.broken_defenses"],
    "Shapes and errors": ["vitadel.types", "vitadel.errors"],
}
"""Modules that people call, by subject; of each, what its `__all__` names."""


def api() -> str:
    """Every public name with its signature and the first paragraph of its docstring, read from the sources."""
    parts = [
        "# Names for Python",
        _MADE,
        "What `import vitadel` gives, and the modules below it that are meant to be called. Nothing is imported before "
        "it is used. Shapes: images are (batch, 3, height, width), pixels in [0, 1].",
    ]
    for target, modules in PUBLIC.items():
        parts.append(f"## {target}")
        for name in modules:
            tree = _tree(name)
            parts += [f"### {name}", _first_paragraph(ast.get_docstring(tree)), "\n".join(_entries(name, tree))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _file(module: str) -> Path:
    base = REPOSITORY / "src" / Path(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_file(module).read_text(encoding="utf-8"))


def _entries(module: str, tree: ast.Module) -> Iterator[str]:
    for name in sorted(_listed(tree), key=str.lower):
        if name.startswith("__"):
            continue
        home, found, about = _defined(name, module)
        source = f"../{_file(home).relative_to(REPOSITORY).as_posix()}"
        if found is None and any(home in modules for modules in PUBLIC.values()):
            yield f"- `{name}`: see [{home}](#{home.replace('.', '')})"
        else:
            called = "" if found is None else _signature(found)
            yield f"- `{name}{called}` ([source]({source})){f': {about}' if about else ''}"


def _listed(tree: ast.Module) -> list[str]:
    """`__all__`, also where it is added to."""
    found: list[str] = []
    for each in tree.body:
        if isinstance(each, (ast.Assign, ast.AugAssign)) and "__all__" in _names(each):
            found += ast.literal_eval(each.value)
    return found


def _defined(name: str, module: str) -> tuple[str, ast.stmt | None, str]:
    """The module that defines a name, its statement, and what is said about it; no statement if it is a module."""
    body = _tree(module).body
    for place, each in enumerate(body):
        if isinstance(each, (ast.FunctionDef, ast.ClassDef)) and each.name == name:
            return module, each, _first_paragraph(ast.get_docstring(each))
        if isinstance(each, (ast.Assign, ast.AnnAssign)) and name in _names(each):
            after = body[place + 1] if place + 1 < len(body) else None
            return module, each, _first_paragraph(_text(after))
    below = f"{module}.{name}"
    if _file(below).exists():
        return below, None, _first_paragraph(ast.get_docstring(_tree(below)))
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
            return _defined(name, node.module)
    raise LookupError(f"{module} names {name} in __all__ and neither defines nor imports it")


def _names(statement: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _text(statement: ast.stmt | None) -> str | None:
    """What stands below a constant, if it is a string."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value if isinstance(statement.value.value, str) else None
    return None


def _signature(statement: ast.stmt) -> str:
    """As it is called, with annotations and defaults as they are written; nothing for constants and protocols."""
    if isinstance(statement, ast.FunctionDef):
        returned = f" -> {ast.unparse(statement.returns)}" if statement.returns else ""
        return f"({ast.unparse(statement.args)}){returned}"
    if not isinstance(statement, ast.ClassDef) or any("Protocol" in ast.unparse(base) for base in statement.bases):
        return ""
    if any("dataclass" in ast.unparse(decorator) for decorator in statement.decorator_list):
        fields = [each for each in statement.body if isinstance(each, ast.AnnAssign)]
        return f"({', '.join(_field(each) for each in fields)})"
    for each in statement.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return f"({ast.unparse(each.args).removeprefix('self').removeprefix(', ')})"
    return ""


def _field(statement: ast.AnnAssign) -> str:
    written = ast.unparse(statement.annotation)
    default = "" if statement.value is None else ast.unparse(statement.value)
    default = "..." if default.startswith("field(") else default
    return f"{ast.unparse(statement.target)}: {written}{f' = {default}' if default else ''}"


def _first_paragraph(text: str | None) -> str:
    return " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())


def checks() -> str:
    """The doctor's checks, in the words of their docstrings."""
    from vitadel.diagnosis.writing import checks_in_words  # torch comes with it, and the page of commands needs none

    about = (
        "Every check of `vitadel diagnose`: when it is raised, why that matters, what to do. How to read verdicts, "
        "what a visit costs and which liars are caught by which check is in [doctor.md](doctor.md)."
    )
    return "\n\n".join(["# The checks of the doctor", _MADE, about, checks_in_words()]) + "\n"


def commands() -> str:
    """Every verb of the command line with its arguments and flags."""
    parts = [
        "# Commands",
        _MADE,
        "Every verb with its arguments and flags, as `--help` tells them. Fractions such as `8/255` are read "
        "everywhere a number is. Exit codes: 0 done, 2 your mistake, 130 interrupted (`--resume` goes on), 1 our "
        "fault. The last line printed is the run folder.",
    ]
    for name, verb in _verbs(typer.main.get_command(app), ""):
        parts += [f"## {name}", " ".join((verb.help or "").split()), *_tables(verb)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verbs(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, below in command.commands.items():
        yield from _verbs(below, f"{name} {word}".strip())


def _tables(verb: Any) -> Iterator[str]:
    """One table for the arguments and common flags, and one for each panel of further flags."""
    panels: dict[str, list[str]] = {}
    for parameter in verb.params:
        panel = str(getattr(parameter, "rich_help_panel", None) or "")
        panels.setdefault(panel, []).append(_row(parameter))
    for panel, rows in panels.items():
        head = ["| flag | default | meaning |", "|---|---|---|"]
        yield "\n".join([*([f"**{panel}**", ""] if panel else []), *head, *rows])


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        written = parameter.metavar or parameter.name.upper()
    else:
        written = ", ".join([*parameter.opts, *parameter.secondary_opts])
    default = parameter.default() if callable(parameter.default) else parameter.default
    if isinstance(default, enum.Enum):
        default = default.value
    nothing = default is None or default is False or default in ("", ())
    told = "required" if parameter.required else "" if nothing else f"`{default}`"
    meaning = " ".join((parameter.help or "").split()).replace("|", "\\|")
    return f"| `{written}` | {told} | {meaning} |"


PAGES: dict[str, Callable[[], str]] = {"api.md": api, "checks.md": checks, "commands.md": commands}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if a page is out of date")
    parser.add_argument("pages", nargs="*", help="only these, e.g. api.md")
    told = parser.parse_args()
    only_check = told.check
    late = False
    for name, make in PAGES.items():
        if told.pages and name not in told.pages:
            continue
        page, text = REPOSITORY / "docs" / name, make()
        if page.exists() and page.read_text(encoding="utf-8") == text:
            continue
        late = True
        if not only_check:
            page.write_text(text, encoding="utf-8")
        print(f"docs/{name} {'is out of date' if only_check else 'written'}")
    raise SystemExit(1 if late and only_check else 0)


if __name__ == "__main__":
    main()
