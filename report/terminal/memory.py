"""Memory of the fullest device of each stage against the device, by kind."""

from __future__ import annotations

from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from ...planner.plan import Plan, Stage
from .. import words
from .bars import Piece, StackedBar
from .tables import literal, number, table
from .tables import words as column

BAR_CELLS = 54
STAGES_SHOWN = 16
"""More stages than this are cut to the first, the last and the fullest ones."""

KINDS = {
    "parameters": ("P", "black on blue"),
    "gradients": ("G", "black on cyan"),
    "optimizer": ("O", "black on green"),
    "activations": ("A", "black on yellow"),
    "cache": ("K", "black on yellow"),
    "working": ("W", "black on magenta"),
    "logits": ("L", "black on bright_red"),
    "buffers": ("B", "black on bright_blue"),
    "reserve": ("R", "black on white"),
    "context": ("C", "black on bright_black"),
}
"""Letter and colour of each kind of memory."""
OTHER = ("X", "black on bright_white")
BAND = ("~", "dim")
"""From the sum of the kinds to the upper band, which is what must fit."""


def memory_bars(plan: Plan) -> RenderableType:
    """One bar a stage on a common scale, `|` marking its device's memory; then the letters."""
    has = [stage.device_memory_bytes or plan.predicted.device_memory_bytes for stage in plan.stages]
    total = max(*has, *(stage.peak_memory_bytes for stage in plan.stages))
    kinds = any(stage.device for stage in plan.stages)
    made = table(
        number("Stage"), column("Layers"), number("In flight"), Column(""), number("GiB"), number("Used"),
        *([column("Device")] if kinds else []),
    )  # fmt: skip
    for stage in _shown(plan.stages):
        device_bytes = has[stage.index]
        bar = StackedBar(pieces=_pieces(stage), total=total, limit=device_bytes, width=BAR_CELLS)
        over = "bold red" if stage.peak_memory_bytes > device_bytes else ""
        full = literal(words.percent(stage.peak_memory_bytes / device_bytes), over)
        made.add_row(
            str(stage.index),
            _layers(stage),
            str(stage.in_flight),
            bar,
            words.gib(stage.peak_memory_bytes),
            full,
            *([literal(stage.device)] if kinds else []),
        )
    hidden = len(plan.stages) - len(_shown(plan.stages))
    more = [literal(f"{words.plural(hidden, 'stage')} between, none fuller", "dim")] if hidden else []
    return Group(made, *more, _legend(plan))


def _shown(stages: Sequence[Stage]) -> list[Stage]:
    """All stages, or the first and last few with the fullest."""
    if len(stages) <= STAGES_SHOWN:
        return list(stages)
    half = STAGES_SHOWN // 2
    fullest = max(stages, key=lambda stage: stage.peak_memory_bytes)
    return [s for i, s in enumerate(stages) if i < half or i >= len(stages) - half + 1 or s is fullest]


def _pieces(stage: Stage) -> list[Piece]:
    parts = [Piece(*_letter(part.kind, part.bytes)) for part in stage.memory]
    band = stage.peak_memory_bytes - sum(part.bytes for part in stage.memory)
    return [*parts, Piece(BAND[0], max(0.0, band), BAND[1])]


def _letter(kind: str, size_bytes: float) -> tuple[str, float, str]:
    letter, style = KINDS.get(kind, OTHER)
    return letter, size_bytes, style


def _layers(stage: Stage) -> Text:
    """Which repeated layers, counted over the whole model; of several pieces only how many: `17 in 3`."""
    if stage.chunk_layers:
        return literal(f"{stage.layers} in {len(stage.chunk_layers)}")
    last = stage.first_layer + stage.layers - 1
    span = f"{stage.first_layer}-{last}" if stage.layers > 1 else str(last) if stage.layers else "none"
    return literal(span)


def _legend(plan: Plan) -> RenderableType:
    """Letters, kinds and GiB on the fullest device."""
    kinds = plan.predicted.memory_by_kind_bytes.items()
    band_bytes = plan.predicted.peak_memory_bytes - sum(size_bytes for _, size_bytes in kinds)
    entries = [_entry(*KINDS.get(kind, OTHER), kind, size_bytes) for kind, size_bytes in kinds]
    entries.append(_entry(*BAND, "to upper band", max(0.0, band_bytes)))
    entries.append(_entry("|", "bold red", "device", plan.predicted.device_memory_bytes))
    return Group(literal("On the fullest device, GiB:", "dim"), Columns(entries, padding=(0, 3), equal=True))


def _entry(letter: str, style: str, name: str, size_bytes: float) -> Text:
    return Text().append(letter, style).append_text(literal(f" {name} {words.gib(size_bytes)}"))
