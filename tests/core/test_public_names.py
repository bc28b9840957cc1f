"""The public names are one pinned list; using them is what imports their homes."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tpplan

ROOT = Path(__file__).parents[2]
PUBLIC = [
    "Checkpoints",
    "Infeasible",
    "Mesh",
    "Plan",
    "Topology",
    "TpplanError",
    "UserError",
    "__version__",
    "auto_parallelize",
    "load_plan",
    "load_topology",
    "save_plan",
    "suggest",
]


def test_the_list_is_pinned():
    assert sorted(tpplan.__all__) == PUBLIC
    assert dir(tpplan) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_can_be_used(name: str):
    assert getattr(tpplan, name) is getattr(tpplan, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'sugest'"):
        tpplan.sugest  # noqa: B018


def test_static_tools_see_the_same_names():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name: f".{node.module}:{alias.name}"
        for node in guard.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == tpplan._HOMES


def test_the_version_is_said_twice_alike():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == tpplan.__version__


def test_the_version_is_in_the_changelog():
    assert f"## [{tpplan.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, tpplan; print(sorted({'torch', 'pulp', 'pydantic', 'numpy', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
