"""The page in a real browser: figures are drawn, nothing complains, nothing is wider than the screen."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tpplan.planner.plan import Plan
from tpplan.planner.timeline import plan_timeline
from tpplan.report.html import render

from .sample_plan import gpt3_175b, llama3_8b, mixtral_8x7b

pytest.importorskip("plotly")
pytest.importorskip("jinja2")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome"),
]

PLANS = {
    "llama3_8b": llama3_8b(),
    "gpt3_175b": replace(gpt3_175b(), schedule="interleaved"),
    "gpt3_175b_1f1b": replace(gpt3_175b(), schedule="1f1b", virtual_stages=1, num_microbatches=16),
    "mixtral_8x7b": mixtral_8x7b(),
}
USE = """<script>
  document.querySelector('[data-rank="3"]').click();
  document.querySelector('button.axis')?.click();
  document.getElementById('theme').click();
  const lost = {points: [{customdata: ['a', 'b', 'it lost']}]};
  document.getElementById('plot-explored')?.emit('plotly_click', lost);
  document.querySelectorAll('button.window').forEach((button) => button.click());
  const root = document.documentElement;
  parent.postMessage(JSON.stringify({
    overflow: root.scrollWidth - root.clientWidth,
    width: innerWidth,
    theme: root.dataset.theme,
    plots: [...document.querySelectorAll('.plot')].map((plot) => plot.querySelector('.main-svg') !== null),
    device: document.getElementById('device').textContent,
    lost: document.getElementById('lost')?.textContent,
  }), '*');
</script></body>"""
"""What a reader does with the page, and how it came out, told to the page around it."""
FRAME = """<!doctype html><pre id="told"></pre>
<iframe src="report.html" width="{width}" height="900"></iframe>
<script>addEventListener('message', (event) => { told.textContent = event.data; });</script>"""
"""A page around the page: a browser's own window cannot be as narrow as a phone."""
CALM = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")


def browse(page: Path) -> tuple[dict[str, Any], str]:
    """(what the page in the frame tells, what the browser's console said)."""
    run = subprocess.run(
        [
            str(BROWSER), *CALM, f"--user-data-dir={page.parent / 'profile'}", "--window-size=1600,1000",
            "--virtual-time-budget=8000", "--enable-logging=stderr", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    [told] = re.findall(r'<pre id="told">(.*?)</pre>', run.stdout, re.DOTALL)
    console = [line for line in run.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(html.unescape(told)), "\n".join(console)


@pytest.mark.parametrize(("name", "width"), [*((name, 390) for name in PLANS), ("gpt3_175b", 1440)])
def test_the_page_works(name: str, width: int, tmp_path: Path):
    plan: Plan = PLANS[name]
    page = render(plan, timeline=plan_timeline(plan))
    (tmp_path / "report.html").write_text(page.replace("</body>", USE))
    (tmp_path / "frame.html").write_text(FRAME.replace("{width}", str(width)))
    told, console = browse(tmp_path / "frame.html")
    assert console == ""
    assert told["width"] == width and told["overflow"] == 0
    assert told["plots"] == [True] * (3 if plan.mesh.pp > 1 else 1)
    assert told["device"].startswith("Rank 3: ") and told["lost"].endswith("it lost")
    assert told["theme"] in ("dark", "light")
