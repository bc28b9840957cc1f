"""The report as one HTML file: offline, light and dark, for screen, phone and paper.

In: a `Plan`, the `Timeline` of its pipeline if there is one, the name of its plan file. Out: the
text of a page that loads nothing: style, script and plotly.js are inside. Numbers are formatted by
`report.words`, as in the terminal; every name is escaped, in markup, in JSON and in plotly's labels.
Needs the extra `[report]` (plotly, jinja2).
"""

from __future__ import annotations

from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from ...planner.errors import UserError
from ...planner.plan import Plan
from ...planner.schedule import Timeline
from . import figures, links, sections, tree
from .mesh_picture import mesh_picture

NEEDS = ("jinja2", "plotly")


def require() -> None:
    """Raise UserError if what the page is made with is not installed."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise UserError(f"the HTML report needs {' and '.join(missing)}: pip install tpplan[report]")


def render(plan: Plan, *, timeline: Timeline | None = None, plan_file: str = "plan.yaml") -> str:
    """The page. Raises UserError if plotly or jinja2 is not installed."""
    require()
    import jinja2
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(_text("page.html.j2"))
    return page.render(
        **_content(plan, timeline, plan_file),
        style=_text("page.css"),
        script=_text("page.js"),
        plotly=get_plotlyjs(),
    )


def _text(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _content(plan: Plan, timeline: Timeline | None, plan_file: str) -> dict[str, Any]:
    """Everything that the page shows, by section."""
    return {
        "title": sections.title(plan),
        "verdict": sections.verdict(plan),
        "mesh": mesh_picture(plan),
        "waterfall": sections.waterfall(plan),
        "memory": sections.memory(plan),
        "splits": tree.split_tree(plan),
        "any_split": bool(plan.splits),
        "parameters": tree.parameter_rows(plan),
        "links": links.links(plan),
        "communications": sections.communications(plan),
        "explored": sections.explored(plan),
        "changes": sections.changes(plan),
        "assumptions": sections.assumptions(plan),
        "commands": sections.commands(plan, plan_file),
        "warnings": plan.warnings,
        "figures": figures.all_figures(plan, timeline),
    }
