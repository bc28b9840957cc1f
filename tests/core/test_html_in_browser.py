"""The page in a real browser: it is drawn, it answers, nothing complains or is wider than the screen."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tpplan.planner.mesh import Mesh
from tpplan.planner.plan import Change, Plan
from tpplan.planner.timeline import plan_timeline
from tpplan.report.html import render

from .sample_plan import gpt3_175b, llama3_8b, mixtral_8x7b

pytest.importorskip("plotly")
pytest.importorskip("jinja2")
playwright = pytest.importorskip("playwright.sync_api")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome")

MOST_BYTES = 6e6
MOST_SECONDS = 3.0
PATIENCE_MS = 120_000
"""How long an action may take on a busy machine."""
POLL_MS = 50
SECTIONS = [
    "verdict",
    "mesh",
    "time",
    "memory",
    "splits",
    "communication",
    "explored",
    "changes",
    "trust",
    "run",
]
WIDTHS = (390, 1440)


def largest() -> Plan:
    """GPT-3 on 16,384 devices: the sample's stages in more replicas, many microbatches, many changes."""
    plan = replace(gpt3_175b(), schedule="interleaved", mesh=Mesh(pp=8, dp=256, tp=8))
    cluster = replace(plan.cluster, devices=16_384, nodes=2_048)
    return replace(
        plan,
        cluster=cluster,
        changes=(Change(what="memory", value=0.1, sentence="With 8 GiB more, pp=4."),),
        alternatives=plan.alternatives * 10,
    )


PLANS = {
    "llama3_8b": llama3_8b(),
    "gpt3_175b_1f1b": replace(gpt3_175b(), schedule="1f1b", virtual_stages=1, num_microbatches=16),
    "mixtral_8x7b": mixtral_8x7b(),
    "16384_devices": largest(),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


class Visit:
    """A page that is open, and what it has complained about or asked the network for."""

    def __init__(self, browser: Any, file: Path, **context: Any) -> None:
        self.page = browser.new_page(**context)
        self.page.set_default_timeout(PATIENCE_MS)
        self.console: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.session = self.page.context.new_cdp_session(self.page)
        self.session.send("Performance.enable", {"timeDomain": "threadTicks"})
        self.page.goto(file.as_uri())

    def main_thread_s(self) -> float:
        """Seconds of a core that the page's own thread has used: what a busy machine does not stretch."""
        metrics = self.session.send("Performance.getMetrics")["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def fits(self, width: int) -> None:
        """Waits until nothing is wider than a screen of `width` pixels (figures follow with a delay)."""
        self.page.set_viewport_size({"width": width, "height": 900})
        self.until(
            f"innerWidth === {width} && "
            "document.documentElement.scrollWidth === document.documentElement.clientWidth"
        )

    def until(self, condition: str) -> None:
        """Asks the page until a condition holds; the page's own policy forbids it to evaluate text."""
        for _ in range(PATIENCE_MS // POLL_MS):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(POLL_MS)
        raise AssertionError(f"never true: {condition}")


@pytest.mark.parametrize("name", PLANS)
def test_the_page_works(name: str, browser: Any, tmp_path: Path):
    plan = PLANS[name]
    file = tmp_path / "report.html"
    file.write_text(render(plan, timeline=plan_timeline(plan)))
    assert file.stat().st_size < MOST_BYTES
    visit = Visit(browser, file, viewport={"width": WIDTHS[1], "height": 900}, color_scheme="light")
    page = visit.page
    page.wait_for_selector("html[data-ready]")
    assert visit.main_thread_s() < MOST_SECONDS
    hovers(visit, plan)
    assert [part for part in SECTIONS if not page.locator(f"#{part}").is_visible()] == []
    assert page.locator(".plot .main-svg").first.is_visible()
    selects_a_plan(visit, plan)
    if plan.mesh.pp > 1:
        zooms_and_stacks(visit)
    for width in WIDTHS:
        visit.fits(width)
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert visit.console == [] and visit.requests == [file.as_uri()]
    page.close()


def hovers(visit: Visit, plan: Plan) -> None:
    """Pointing at a device tells its place, its stage, its bytes and its links."""
    visit.page.hover('[data-rank="3"]')
    told = visit.text("#device")
    assert told.startswith("Rank 3: ") and "GiB at the peak" in told and "talks over" in told
    assert plan.stages[0].blocks[0][0] in told
    visit.page.click("button.axis >> nth=-1")
    assert visit.page.locator("[data-rank].peer").count() > 0


def selects_a_plan(visit: Visit, plan: Plan) -> None:
    """A click on a point of the scatter tells why that plan lost; hovering over it names it."""
    point = visit.page.locator("#plot-explored .scatterlayer .points path.point").first
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    at = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    visit.page.mouse.move(*at)
    visit.page.wait_for_selector("#plot-explored .hoverlayer .hovertext")
    visit.page.mouse.click(*at)
    visit.until("!document.getElementById('lost').textContent.startsWith('Select')")
    told = visit.text("#lost")
    assert any(a.reason in told and str(a.mesh) in told for a in plan.alternatives)


def zooms_and_stacks(visit: Visit) -> None:
    """Dragging over the timeline zooms it, a button shows all of it; memory over the step has kinds."""
    shown = "document.getElementById('plot-timeline').layout.xaxis.range.map(Math.round)"
    visit.page.click("button.window[data-window=whole]")
    visit.until(f"{shown}[0] === 0")
    whole = visit.page.evaluate(shown)
    area = visit.page.locator("#plot-timeline .nsewdrag")
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    visit.page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 20)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 20, steps=4)
    visit.page.mouse.up()
    visit.until(f"{shown}[1] < {0.7 * whole[1]}")
    visit.page.click("button.window[data-window=whole]")
    visit.until(f"{shown}[1] === {whole[1]}")
    visit.page.click("button.stage >> nth=1")
    names = visit.page.evaluate("document.getElementById('plot-memory-time').data.map((trace) => trace.name)")
    assert {"parameters", "activations"} <= set(names)


def test_on_paper_everything_is_open_and_light(browser: Any, tmp_path: Path):
    file = tmp_path / "report.html"
    file.write_text(render(PLANS["llama3_8b"]))
    visit = Visit(browser, file, color_scheme="dark")
    visit.page.wait_for_selector("html[data-ready]")
    assert visit.page.pdf().startswith(b"%PDF")
    assert visit.page.evaluate("[...document.querySelectorAll('details')].every((item) => item.open)")
    visit.page.close()
