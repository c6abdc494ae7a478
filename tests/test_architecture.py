"""The structure of the package: arrows between packages, sizes, names, words, and a light import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import vitadel

SOURCE = Path(vitadel.__file__).parent
DOCS = SOURCE.parents[1] / "docs"
# A package may import what stands before it. `reporting` reads run folders only, so it sees neither models nor data.
ORDER = ["", "runtime", "papers", "data", "corruptions", "backbones", "instrument", "adapters", "attacks", "evaluation"]
ORDER += ["training", "heads", "threat_levels", "diagnosis", "studies", "reproduce", "playground", "cli"]
FOR_REPORTING = {"", "runtime", "reporting", "evaluation"}
# Inside evaluation: the engine knows no benchmark, and of the benchmarks only the audit is used by others.
IN_EVALUATION = {"engine": {"engine"}, "audit": {"engine", "audit"}}
# Names that mean the same wherever they occur.
SHARED_NAMES = {"__init__", "run", "request"}
MOST_LINES, MOST_FUNCTION_LINES = 500, 80
AVOIDED = re.compile(r"\b(told|tells?|telling|anew|begun|gathered|whoever|nobody)\b", re.IGNORECASE)
MOST_AVOIDED = 30

FILES = sorted(SOURCE.rglob("*.py"))


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in FILES}


def where(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (SOURCE / parts[1]).is_dir() else ""


@cache
def imported(path: Path) -> set[str]:
    """Vitadel modules that a file imports, also inside functions; imports for type checkers do not count."""
    tree = trees()[path]
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
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("vitadel")}
    return names


def allowed(here: str) -> set[str]:
    if here == "reporting":
        return FOR_REPORTING
    return {*ORDER, "reporting"} if here == "cli" else set(ORDER[: ORDER.index(here) + 1])


def wrong_arrows() -> Iterator[str]:
    for path in FILES:
        parts, modules = path.relative_to(SOURCE).parts, imported(path)
        if len(parts) == 1:
            continue
        yield from (
            f"{where(path)} imports {module}" for module in modules if package_of(module) not in allowed(parts[0])
        )
        if parts[0] == "evaluation" and parts[1] in IN_EVALUATION:
            for module in modules:
                room = module.split(".")[2:3]
                if package_of(module) == "evaluation" and room and room[0] not in IN_EVALUATION[parts[1]]:
                    yield f"{where(path)} imports {module}"


def test_imports_point_one_way():
    assert not sorted(wrong_arrows())


def test_no_two_modules_import_each_other():
    names = {where(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in FILES}
    arrows = {
        (name, other.removeprefix("vitadel."))
        for name, path in names.items()
        for other in imported(path)
        if other.removeprefix("vitadel.") in names
    }
    assert not sorted((a, b) for a, b in arrows if a < b and (b, a) in arrows)


def test_every_file_says_what_it_is():
    assert not [where(path) for path, tree in trees().items() if not ast.get_docstring(tree)]


def test_files_and_functions_are_short():
    long = [
        f"{where(path)}: {count} lines" for path in FILES if (count := len(path.read_text().splitlines())) > MOST_LINES
    ]
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                count = node.end_lineno - node.lineno + 1
                if count > MOST_FUNCTION_LINES:
                    long.append(f"{where(path)}: {node.name} has {count} lines")
    assert not long


def test_a_file_name_means_one_thing():
    counts = Counter(
        path.stem for path in FILES if path.parent.name not in ("kinds", "studies") and path.parent != SOURCE / "cli"
    )
    assert not {name: count for name, count in counts.items() if count > 1 and name not in SHARED_NAMES}


def test_plain_words():
    """Private words for log, message, summary and the like; see the language rules in CONTRIBUTING.md."""
    texts = [*FILES, *SOURCE.rglob("*.yaml"), *SOURCE.rglob("*.html"), *SOURCE.rglob("*.md"), *DOCS.rglob("*.md")]
    root = SOURCE.parents[1]
    counts = Counter({str(path.relative_to(root)): len(AVOIDED.findall(path.read_text())) for path in texts})
    assert sum(counts.values()) < MOST_AVOIDED, counts.most_common(10)


def test_importing_vitadel_does_not_import_torch():
    code = "import sys, vitadel, vitadel.cli.main; sys.exit('torch' in sys.modules or 'timm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_reporting_does_not_import_torch():
    code = "import sys, vitadel.reporting.page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there_and_documented():
    assert not [name for name in vitadel.__all__ if name != "__version__" and not getattr(vitadel, name).__doc__]


def test_unknown_names_raise_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'hardenn'"):
        vitadel.hardenn  # noqa: B018
    assert "audit" in dir(vitadel)
