"""Write the report of `make demo` into the README, between its two markers.

python docs/update_readme.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLUMNS = 100
REGION = re.compile(r"(<!-- report: begin[^\n]*-->\n).*?(<!-- report: end -->)", re.DOTALL)


def demo_command() -> list[str]:
    """The words of the `tpplan` command under `demo:` in the Makefile."""
    recipe = re.search(r"^demo:.*\n\t@\$\(BIN\)/tpplan (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe, "the Makefile has no demo"
    return recipe.group(1).split()


def demo_report() -> str:
    """What that command prints when its output is piped; raises `CalledProcessError` when it fails."""
    command = (Path(sys.executable).with_name("tpplan"), *demo_command())
    environment = {**os.environ, "COLUMNS": str(COLUMNS)}
    result = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return "\n".join(line.rstrip() for line in result.stdout.strip("\n").splitlines())


def with_report(readme: str, report: str) -> str:
    """The README's text with `report` in the marked region."""
    written, count = REGION.subn(lambda match: f"{match[1]}```text\n{report}\n```\n{match[2]}", readme)
    assert count == 1, "the README has no marked region"
    return written


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_report(readme.read_text(), demo_report()))
