"""Hooks of the documentation site: the package as a folder, and the list of decisions.

In: `pyproject.toml`'s list of packages, the files in `decisions/`. Out: `build/package/tpplan`, links
to the source tree (the repository's root is the package, so a tool that reads source needs a folder of
its name that holds the package and nothing else), and the links on the page of decisions.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def on_startup(**_: Any) -> None:
    """Called by mkdocs before anything else."""
    link_package(ROOT, ROOT / "build" / "package")


def on_page_markdown(text: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with each page: that of the decisions lists them."""
    return f"{text}\n{decisions()}" if page.file.src_uri == "decisions/index.md" else text


def decisions() -> str:
    """A link to each decision, by its own title."""
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    titles = (page.read_text().splitlines()[0].removeprefix("# ") for page in pages)
    return "".join(f"- [{title}]({page.name})\n" for page, title in zip(pages, titles, strict=True))


def link_package(root: Path, into: Path) -> None:
    """Make `into/tpplan`: the root's modules, and the rooms that `pyproject.toml` packs."""
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    rooms = sorted({name.split(".")[1] for name in listed if "." in name})
    package = into / "tpplan"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for source in (*root.glob("*.py"), *(root / room for room in rooms)):
        (package / source.name).symlink_to(source)
