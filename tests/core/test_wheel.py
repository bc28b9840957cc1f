"""The wheel holds the package's rooms, whole, and nothing else; installed alone it works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("cli", "planner", "profiler", "runtime", "report", "topologies")
NOT_COPIED = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed; its error output is shown when it does not."""
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def rooms_of(root: Path) -> set[str]:
    """What the wheel must hold, by the name it has there."""
    files = [*root.glob("*.py")]
    for room in ROOMS:
        files += [file for kind in ("*.py", "*.yaml", "page.*") for file in (root / room).rglob(kind)]
    return {f"tpplan/{file.relative_to(root).as_posix()}" for file in files}


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with none of its build leftovers, but with things that must not be packed."""
    copy = tmp_path_factory.mktemp("wheel") / "source"
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    (copy / ".venv" / "lib").mkdir(parents=True)
    (copy / ".venv" / "lib" / "stray.py").write_text("")
    (copy / "examples").mkdir(exist_ok=True)
    (copy / "examples" / "stray.py").write_text("")
    return copy


@pytest.fixture(scope="session")
def wheel(source: Path) -> Path:
    """The wheel built from that copy."""
    run(
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        source.parent,
        source,
        cwd=source,
    )
    return next(source.parent.glob("tpplan-*.whl"))


def test_the_wheel_holds_the_rooms_and_nothing_else(source: Path, wheel: Path):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = rooms_of(source)
    assert {"tpplan/__init__.py", "tpplan/cli/main.py", "tpplan/planner/plan.py"} <= expected
    assert sorted(expected - packed) == [], "in the tree, not in the wheel: see packages in pyproject.toml"
    assert sorted(packed - expected) == [], "in the wheel, not in the tree"


def test_the_wheel_brings_its_licence(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_installed_wheel_works_in_a_clean_environment(wheel: Path, tmp_path: Path):
    """Dependencies come from this environment, so that no network is needed; `tpplan` from the wheel."""
    venv.create(tmp_path / "venv", symlinks=True)
    python, command = (tmp_path / "venv" / "bin" / name for name in ("python", "tpplan"))
    site = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    )
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + os.linesep)
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel, cwd=tmp_path)
    assert Path(
        run(python, "-c", "import tpplan; print(tpplan.__file__)", cwd=tmp_path).strip()
    ).is_relative_to(site)
    assert "suggest" in run(command, "--help", cwd=tmp_path)
    assert "dgx-h100" in run(command, "topology", "list", cwd=tmp_path)
