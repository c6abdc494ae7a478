"""The walls of the house: imports point one way, the front door is light, public names exist."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vitadel

SOURCE = Path(vitadel.__file__).parent
# A folder may import what stands before it. `reporting` reads run folders only, so it sees neither models nor data.
ORDER = ["", "runtime", "data", "corruptions", "backbones", "instrument", "adapters", "attacks", "evaluation"]
ORDER += ["training", "heads", "threat_levels", "diagnosis", "studies", "playground", "cli"]
FOR_REPORTING = {"", "runtime", "reporting", "evaluation"}


def folder_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (SOURCE / parts[1]).is_dir() else ""


def imported(path: Path) -> set[str]:
    """Vitadel modules that a file imports, also inside functions; what is only for type checkers does not count."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.walk(node)
    }
    names = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vitadel"):
            names.add(node.module)
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("vitadel")}
    return names


FILES = [path for path in SOURCE.rglob("*.py") if path.parent != SOURCE]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    here = path.relative_to(SOURCE).parts[0]
    there = {folder_of(name) for name in imported(path)}
    if here == "reporting":
        assert there <= FOR_REPORTING
    elif here == "cli":
        assert there <= {*ORDER, "reporting"}
    else:
        assert there <= set(ORDER[: ORDER.index(here) + 1])


def test_the_front_door_is_light():
    code = "import sys, vitadel, vitadel.cli.main; sys.exit('torch' in sys.modules or 'timm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", [name for name in vitadel.__all__ if name != "__version__"])
def test_every_public_name_is_there_and_documented(name):
    assert getattr(vitadel, name).__doc__


def test_unknown_names_are_told_as_python_does():
    with pytest.raises(AttributeError, match="no attribute 'hardenn'"):
        vitadel.hardenn  # noqa: B018
    assert "audit" in dir(vitadel)


@pytest.mark.parametrize("path", list(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_file_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))
