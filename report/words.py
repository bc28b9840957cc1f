"""Numbers and nouns as a reader wants them: SI values in, short ASCII text out.

Memory is shown in binary units (GiB), rates in decimal ones (GB/s); the two are never mixed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from ..planner.mesh import Mesh

BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
DECIMAL_UNITS = ("", "K", "M", "G", "T", "P")
MOST_DECIMALS = 6
TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
COUNT_SUFFIXES = ("", "K", "M", "B", "T")


def digits(value: float) -> str:
    """Three significant digits, never an exponent: 3.14, 31.4, 314, 3,140."""
    if not math.isfinite(value):
        return "unknown"
    exponent = int(f"{value:.2e}".split("e")[1])
    return f"{value:,.{min(max(0, 2 - exponent), MOST_DECIMALS)}f}"


def _scaled(value: float, step: float, units: Sequence[str]) -> str:
    """`value` in the largest of `units` (each `step` times the last) that leaves it at least 1."""
    if not math.isfinite(value):
        return "unknown"
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:
        value, power = value / step, power + 1
    return f"{digits(value)} {units[power]}".rstrip()


def size(size_bytes: float) -> str:
    """Bytes in binary units: `48.0 MiB`."""
    return _scaled(size_bytes, 1024.0, BINARY_UNITS)


def gib(size_bytes: float) -> str:
    """Bytes in GiB to one decimal, without the unit: `61.2`."""
    return f"{size_bytes / 2**30:,.1f}"


def rate(bytes_per_s: float) -> str:
    """Bytes per second in decimal units: `450 GB/s`."""
    return _scaled(bytes_per_s, 1000.0, [f"{prefix}B/s" for prefix in DECIMAL_UNITS])


def duration(seconds: float) -> str:
    """A time in the unit that leaves it at least 1: `812 ms`, `2.40 s`, `31.0 us`."""
    if seconds == 0 or not math.isfinite(seconds):
        return "unknown" if seconds else "0 s"
    scale, unit = next(((s, u) for s, u in TIME_UNITS if abs(seconds) >= s * 0.9995), TIME_UNITS[-1])
    return f"{digits(seconds / scale)} {unit}"


def milliseconds(seconds: float) -> str:
    """A time in ms with one decimal and no unit, so that columns add up: `1,234.5`."""
    return f"{seconds * 1e3:,.1f}" if math.isfinite(seconds) else "unknown"


def count(value: float) -> str:
    """A large count: `8.03B`, `512`."""
    return str(int(value)) if abs(value) < 1000 else _scaled(value, 1000.0, COUNT_SUFFIXES).replace(" ", "")


def percent(fraction: float) -> str:
    """A fraction as a percentage: `43.2 %`."""
    return f"{fraction:.1%}".replace("%", " %") if math.isfinite(fraction) else "unknown"


def percentage(part: float, whole: float) -> float:
    """`part` in percent of `whole` as a number, for widths in a page; 0 of nothing."""
    return round(100 * part / whole, 3) if whole > 0 else 0.0


def plural(number: int, one: str, many: str | None = None) -> str:
    """`1 stage`, `8 stages`; `many` is the plural where an s does not make it."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def listed(items: Iterable[str], *, limit: int = 4) -> str:
    """The first `limit` items, and how many more: `q, k, v and 2 more`."""
    items = list(items)
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


def ranks(group: Sequence[int]) -> str:
    """A rank group: `0-7` when contiguous, `0,8,..,120` when evenly spaced and long, else all."""
    steps = {b - a for a, b in pairwise(group)}
    if len(group) > 2 and steps == {1}:
        return f"{group[0]}-{group[-1]}"
    if len(group) > 4:
        return f"{group[0]},{group[1]},..,{group[-1]}"
    return ",".join(map(str, group))


def rank_formula(mesh: Mesh) -> str:
    """How a rank follows from its coordinates: `rank = 128 pp + 8 dp + tp`."""
    terms = [(mesh.stride(axis), axis) for axis in mesh.order if mesh.size(axis) > 1]
    return "rank = " + (" + ".join(axis if step == 1 else f"{step} {axis}" for step, axis in terms) or "0")


def zero(stage: int, shard_group: int | None = None) -> str:
    """A ZeRO stage: `no ZeRO`, `ZeRO-1`, `ZeRO-3 in groups of 8`."""
    group = f" in groups of {shard_group}" if shard_group else ""
    return f"ZeRO-{stage}{group}" if stage else "no ZeRO"


def batches(micro_batch: int, num_microbatches: int) -> str:
    """How the batch is cut: `16 microbatches of 1`."""
    return f"{plural(num_microbatches, 'microbatch', 'microbatches')} of {micro_batch}"


def recompute(mode: str) -> str:
    """A recompute mode: `no recompute`, `selective recompute`."""
    return "no recompute" if mode == "none" else f"{mode} recompute"


def schedule(name: str, virtual_stages: int) -> str:
    """A pipeline schedule: `1f1b`, `interleaved-1f1b with 4 virtual stages`."""
    return name if virtual_stages == 1 else f"{name} with {virtual_stages} virtual stages"
