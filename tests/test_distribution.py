"""The wheel and the sdist: complete, nothing besides, and working from another folder after an installation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "src" / "vitadel"


def build(source: Path, target: Path, *kinds: str) -> None:
    """Build with the installed hatchling: nothing is downloaded."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(target), *kinds]
    subprocess.run(command, cwd=source, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": ""})


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The wheel and the sdist."""
    folder = tmp_path_factory.mktemp("built")
    build(REPOSITORY, folder)
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, archive


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_is_the_package_and_nothing_else(built):
    found = content(built[0])
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    expected = {str(path.relative_to(PACKAGE.parent)): path.read_bytes() for path in files}
    about = {name for name in found if ".dist-info/" in name}
    assert {name: found[name] for name in found.keys() - about} == expected
    assert {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "LICENSE"} == {Path(name).name for name in about}
    assert {"vitadel/zoo/SHA256SUMS", "vitadel/backbones/published.yaml", "vitadel/py.typed"} <= expected.keys()


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    wheel, archive = built
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert {"LICENSE", "README.md", "SECURITY.md", "pyproject.toml", "src", "tests"} <= {
        each.name for each in source.iterdir()
    }
    unwanted = {".git", ".venv", "runs", "build", "dist", "__pycache__", ".mypy_cache"}
    assert not [path for path in source.rglob("*") if path.name in unwanted]
    build(source, tmp_path / "again", "--target", "wheel")
    assert content(next((tmp_path / "again").glob("*.whl"))) == content(wheel)


def test_the_installed_wheel_works_in_another_folder(built, tmp_path):
    """In a new environment, which finds the dependencies of this one but not the package in it."""
    home, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    elsewhere.mkdir()
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", str(built[0])]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    site = home / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    dependencies = [path for path in sys.path if path.endswith("site-packages")]  # as lines they read no .pth files
    (site / "dependencies.pth").write_text("\n".join(dependencies))
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*words: str) -> str:
        done = subprocess.run(
            [str(home / "bin" / words[0]), *words[1:]],
            cwd=elsewhere,
            env={**environment, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("python", "-c", "import vitadel; print(vitadel.__file__)").startswith(str(site))
    assert run("vitadel", "selftest").strip().endswith("all checks passed")
    words = ("--limit", "16", "--attacks", "fgsm", "--no-precheck")  # which needs no further file of the package
    folder = Path(run("vitadel", "audit", *words).splitlines()[-1])
    assert json.loads((elsewhere / folder / "results.json").read_text())["complete"]
    assert (elsewhere / folder / "report.html").is_file()
