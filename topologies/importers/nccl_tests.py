"""nccl-tests (and rccl-tests) logs to measured curves.

In: a log of `all_reduce_perf`, `all_gather_perf`, ..., several one after another if need be, or a table by
node count (`nodes time_us algbw busbw`). Out: `CollectiveCurve`s, one per collective and rank count, with
the out-of-place times. Rows that report wrong results are left out, with a note.

The rank count is read from the log's `# Rank` lines, else from `-g` and the bandwidths themselves:
busbw / algbw = 2 (n - 1) / n for all-reduce and (n - 1) / n for gathers (nccl-tests doc/PERFORMANCE.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from ...planner.errors import TopologyError
from ...planner.topology import CollectiveCurve
from .paste import plain

MICRO = 1e-6
PROGRAMS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "sendrecv": "send/recv",
}
PROGRAM = re.compile(rf"\b({'|'.join(PROGRAMS)})(?:_perf)?\b")
RANK = re.compile(r"#\s*Rank\s+(\d+)\b")
PER_NODE = re.compile(r"\b(\d+)\s*x\s*\S+ per node|-g\s+(\d+)")
DTYPE = r"(?:float|half|double|bfloat16|u?int\d*|fp8\w*|f8\w*)"
ROW = re.compile(rf"(?:^|[\s>:])(\d+)\s+(\d+)\s+{DTYPE}\s+(.*)$")
TABLE_HEADER = re.compile(r"#?\s*nodes\s+time_us\b", re.IGNORECASE)
TABLE_ROW = re.compile(r"^\s*(\d+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s*$")
BYTES = re.compile(r"\b([\d.]+)\s*([KMG])i?B\b")
UNIT_BYTES = {"K": 2**10, "M": 2**20, "G": 2**30}
DOUBLE = ("all-reduce",)
"""Collectives whose bus factor is 2 (n - 1) / n."""
UNSCALED = ("broadcast", "send/recv")
"""Collectives whose bus factor is 1 for any n: it tells no rank count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement: bytes, microseconds, GB/s as printed, wrong elements."""

    line: int
    nbytes: int
    time_us: float
    algbw: float
    busbw: float
    wrong: int


@dataclass(slots=True)
class Section:
    """One program's run in a log."""

    collective: str
    ranks: set[int] = field(default_factory=set)
    """The rank numbers that the log lists."""
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The curves of a log and what was left out of it."""

    curves: tuple[CollectiveCurve, ...]
    notes: tuple[str, ...]


def is_log(text: str) -> bool:
    """Whether a text looks like a log of nccl-tests rather than a link matrix."""
    lines = plain(text).splitlines()
    return any(TABLE_HEADER.match(line) for line in lines) or any(map(ROW.search, lines))


def read_log(text: str, *, origin: str = "the log") -> Log:
    """The curves of a log. Raises `TopologyError` where it has no rows or does not say how many ranks."""
    clean = plain(text)
    table = _table(clean, origin)
    if table is not None:
        return table
    sections = [section for section in _sections(clean, origin) if section.rows]
    if not sections:
        raise TopologyError(
            f"{origin}: no rows of nccl-tests found; expected 'size count type redop root time algbw busbw'"
        )
    wrong = [row for section in sections for row in section.rows if row.wrong]
    notes = [f"line {row.line}: {row.wrong} wrong elements, row left out" for row in wrong]
    curves = _merge([_curve(section, origin) for section in sections])
    return Log(curves=curves, notes=tuple(notes))


def _sections(text: str, origin: str) -> Iterator[Section]:
    """The runs of a log; a list of ranks, or sizes that start over, begin a new one."""
    current = Section(_collective(text, default="all-reduce"))
    for number, line in enumerate(text.splitlines(), start=1):
        program, rank, row = PROGRAM.search(line), RANK.search(line), ROW.search(line)
        starts_over = row and current.rows and int(row[1]) < current.rows[-1].nbytes
        if (program or rank or starts_over) and current.rows:
            yield current
            current = Section(current.collective, set() if rank else set(current.ranks))
        if program:
            current.collective = PROGRAMS[program[1]]
        if rank:
            current.ranks.add(int(rank[1]))
        if row:
            current.rows.append(_row(row, number, origin))
    yield current


def _collective(text: str, *, default: str) -> str:
    found = PROGRAM.search(text)
    return PROGRAMS[found[1]] if found else default


def _row(match: re.Match[str], line: int, origin: str) -> Row:
    """Out-of-place columns of one row: [redop] [root] time algbw busbw [wrong] ..."""
    words = match[3].split()
    if words and not _is_number(words[0]):
        words = words[1:]
    if words and re.fullmatch(r"-?\d+", words[0]):
        words = words[1:]
    if len(words) < 3 or not all(map(_is_number, words[:3])):
        raise TopologyError(
            f"{origin}:{line}: found {match[3].strip()[:40]!r}, expected time, algbw and busbw as numbers"
        )
    time_us, algbw, busbw = map(float, words[:3])
    if time_us <= 0.0:
        raise TopologyError(f"{origin}:{line}: found a time of {words[0]} us, must be greater than 0")
    wrong = int(float(words[3])) if len(words) > 3 and _is_number(words[3]) else 0
    return Row(line=line, nbytes=int(match[1]), time_us=time_us, algbw=algbw, busbw=busbw, wrong=wrong)


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d*)?([eE][+-]?\d+)?", word) is not None


def _curve(section: Section, origin: str) -> CollectiveCurve:
    right = sorted((row.nbytes, row.time_us * MICRO) for row in section.rows if not row.wrong and row.nbytes)
    if not right:
        raise TopologyError(f"{origin}: every row of {section.collective} reports wrong results")
    ranks = max(section.ranks) + 1 if section.ranks else ranks_of(section.collective, section.rows, origin)
    sizes = dict(right)
    return CollectiveCurve(
        collective=section.collective,
        ranks=ranks,
        points=tuple(zip(sizes, accumulate(sizes.values(), max), strict=True)),
        source=f"nccl-tests log {Path(origin).name}",
    )


def ranks_of(collective: str, rows: Sequence[Row], origin: str) -> int:
    """The rank count by which the two bandwidths of the largest messages differ."""
    largest = max(rows, key=lambda row: (row.algbw, row.nbytes))
    if collective in UNSCALED or largest.algbw <= 0.0:
        raise TopologyError(f"{origin}: the log does not say over how many ranks {collective} ran")
    factor = largest.busbw / largest.algbw / (2.0 if collective in DOUBLE else 1.0)
    if not 0.0 < factor < 1.0:
        raise TopologyError(
            f"{origin}:{largest.line}: busbw {largest.busbw:g} and algbw {largest.algbw:g} fit no number of "
            f"ranks of {collective}"
        )
    return max(round(1.0 / (1.0 - factor)), 2)


def _merge(curves: Sequence[CollectiveCurve]) -> tuple[CollectiveCurve, ...]:
    """One curve for each collective and rank count: of repeated runs, the first."""
    found: dict[tuple[str, int], CollectiveCurve] = {}
    for curve in curves:
        found.setdefault((curve.collective, curve.ranks), curve)
    return tuple(found.values())


# --------------------------------------------------------------------------- tables by node count


def _table(text: str, origin: str) -> Log | None:
    """`nodes time_us algbw busbw` rows of one message size, which a comment names; None if it is none."""
    lines = text.splitlines()
    if not any(TABLE_HEADER.match(line) for line in lines):
        return None
    nbytes, collective = _message(text, origin), _collective(text, default="all-reduce")
    curves = []
    for number, line in enumerate(lines, start=1):
        match = TABLE_ROW.match(line)
        if match is None:
            continue
        time_us, algbw, busbw = float(match[2]), float(match[3]), float(match[4])
        row = Row(line=number, nbytes=nbytes, time_us=time_us, algbw=algbw, busbw=busbw, wrong=0)
        curve = CollectiveCurve(
            collective=collective,
            ranks=_table_ranks(text, int(match[1]), collective, row, origin),
            points=((nbytes, time_us * MICRO),),
            source=f"nccl-tests table {Path(origin).name}",
        )
        curves.append(curve)
    if not curves:
        raise TopologyError(f"{origin}: a header 'nodes time_us ...' but no rows of four numbers")
    return Log(curves=_merge(curves), notes=())


def _table_ranks(text: str, nodes: int, collective: str, row: Row, origin: str) -> int:
    per_node = PER_NODE.search(text)
    if per_node:
        return nodes * int(per_node[1] or per_node[2])
    return ranks_of(collective, [row], origin)


def _message(text: str, origin: str) -> int:
    found = BYTES.search(text)
    if found is None:
        raise TopologyError(f"{origin}: the table does not name its message size, such as '1 GiB'")
    return round(float(found[1]) * UNIT_BYTES[found[2]])
