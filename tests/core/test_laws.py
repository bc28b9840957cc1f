"""The three import laws, and that they are really checked.

1. Nouns import no verbs, and of the nouns only those earlier in `NOUNS`.
2. torch and transformers are imported only where a model is traced, measured or run.
3. `report/` and `runtime/` see only nouns of `planner/`.
And: inside the package every import is relative, and nobody but `__main__` imports the command line.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("cli", "planner", "profiler", "runtime", "report", "topologies")
NOUNS = (
    "errors", "mesh", "layout", "graph", "topology", "profile", "cost",
    "pipeline_paths",  # the arithmetic of `schedule`, a leaf
    "schedule", "plan",
    "codec", "plan_file",  # the written form of a plan: whoever sees a plan may read and write one
    "problem",
)  # fmt: skip
SEES_ONLY_NOUNS = ("report", "runtime")
HEAVY = {"torch", "transformers"}
TYPE_ONLY = ("import torch", "from torch import")
MAY_IMPORT_HEAVY = ("planner.trace", "profiler", "runtime")


def package_sources() -> dict[str, str]:
    """Source text of every module of the package by dotted name; packages end in `.__init__`."""
    files = [*ROOT.glob("*.py"), *(file for room in ROOMS for file in (ROOT / room).rglob("*.py"))]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file.read_text() for file in files}


def imports(module: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, target) of every import; relative targets are resolved and written with a leading dot."""
    parts = module.split(".")
    for node in ast.walk(without_type_only_torch(ast.parse(source))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level] if node.level else []
            stem = "." * bool(node.level) + ".".join([*base, *filter(None, [node.module])])
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)


def without_type_only_torch(tree: ast.Module) -> ast.Module:
    """Drop `import torch` under `if TYPE_CHECKING:`, which never runs and loads nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [line for line in node.body if not ast.unparse(line).startswith(TYPE_ONLY)]
    return tree


def inside(target: str, *places: str) -> bool:
    """Whether a dotted name is one of `places` or lies under one."""
    return any(target == place or target.startswith(place + ".") for place in places)


def broken_laws(module: str, source: str) -> list[str]:
    """One sentence for every import of `module` that breaks a law."""
    return [
        f"{module}:{line}: {complaint} ({target})"
        for line, target in imports(module, source)
        for complaint in complaints(module, target)
    ]


def complaints(module: str, target: str) -> Iterator[str]:
    """Which laws the import of `target` by `module` breaks."""
    relative, local = target.startswith("."), target.lstrip(".")
    noun_modules = [f"planner.{noun}" for noun in NOUNS]
    if module in noun_modules and relative:
        earlier = noun_modules[: noun_modules.index(module)]
        if not inside(local, *earlier):
            yield "a noun may import only earlier nouns"
    if local.split(".")[0] in HEAVY and not relative and not inside(module, *MAY_IMPORT_HEAVY):
        yield "torch belongs to planner/trace, profiler/ and runtime/"
    is_verb = relative and inside(local, "planner") and not inside(local, *noun_modules)
    if inside(module, *SEES_ONLY_NOUNS) and is_verb:
        yield "report/ and runtime/ see only nouns"
    if not relative and local.split(".")[0] in (*ROOMS, "tpplan"):
        yield "imports inside the package are relative"
    if relative and inside(local, "cli") and module.split(".")[0] not in ("__main__", "cli"):
        yield "nobody imports the command line"


def test_the_tree_obeys_the_laws():
    sources = package_sources()
    assert {"__init__", "planner.plan", "planner.errors"} <= set(sources)
    assert [noun for noun in NOUNS if f"planner.{noun}" not in sources] == []
    assert [line for module, source in sorted(sources.items()) for line in broken_laws(module, source)] == []


BROKEN = [
    ("planner.mesh", "from .solve.search import search", "earlier nouns"),
    ("planner.mesh", "from . import suggest", "earlier nouns"),
    ("planner.mesh", "from .plan import Plan", "earlier nouns"),
    ("planner.plan", "from ..topologies.load import load", "earlier nouns"),
    ("planner.plan", "def late():\n    from .simulate import simulate", "earlier nouns"),
    ("planner.solve.search", "import torch", "torch belongs"),
    ("planner.solve.search", "import torch.nn as nn", "torch belongs"),
    ("planner.tracer", "from torch import nn", "torch belongs"),
    ("planner.suggest", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch", "torch belongs"),
    ("planner.plan", "if TYPE_CHECKING:\n    from .simulate import simulate", "earlier nouns"),
    ("report.terminal", "import transformers", "torch belongs"),
    ("report.terminal", "from ..planner.solve.search import search", "only nouns"),
    ("report.__init__", "from ..planner import suggest", "only nouns"),
    ("runtime.apply", "from ..planner.estimate import memory", "only nouns"),
    ("planner.suggest", "from tpplan.planner.plan import Plan", "relative"),
    ("planner.suggest", "import report.terminal", "relative"),
    ("planner.suggest", "from ..cli import main", "nobody imports"),
    ("__init__", "from . import cli", "nobody imports"),
]


@pytest.mark.parametrize(("module", "source", "complaint"), BROKEN)
def test_a_broken_law_is_noticed(module: str, source: str, complaint: str):
    found = broken_laws(module, source)
    assert len(found) == 1 and complaint in found[0], found


KEPT = [
    ("planner.plan", "from .cost import Origin\nfrom .errors import PlanError"),
    ("planner.trace", "import torch\nfrom transformers import AutoConfig"),
    ("planner.trace.fold", "from torch import nn\nfrom ..graph import Node"),
    ("planner.solve.__init__", "from .search import search"),
    ("report.terminal", "import rich\nfrom ..planner.plan import Plan\nfrom .json import document"),
    ("report.terminal", "from ..planner import plan"),
    ("planner.suggest", "if TYPE_CHECKING:\n    from torch import nn"),
    ("__main__", "from .cli import main"),
    ("__init__", "from .planner.suggest import suggest"),
]


@pytest.mark.parametrize(("module", "source"), KEPT)
def test_a_kept_law_is_left_in_peace(module: str, source: str):
    assert broken_laws(module, source) == []


@pytest.mark.parametrize("module", ["tpplan.cli", "tpplan.planner.suggest", "tpplan.report.terminal"])
def test_planning_starts_without_torch(module: str):
    code = f"import {module}, sys; print(sorted({HEAVY} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
