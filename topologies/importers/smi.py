"""`nvidia-smi topo -m`, as pasted, to a graph of links.

In: text holding the matrix, perhaps with lost tabs (blanks, or nothing at all between cells), colours,
wrapped lines, legends and prose around it. Out: a `networkx.Graph`: nodes `GPU0`, `mlx5_0`, ... with
`kind` ("gpu" or "nic"), `model` and `alias` where the paste says them; edges with `link`, one of

    NV#  # bonded NVLinks          PIX  at most one PCIe bridge      PXB  several PCIe bridges
    PHB  a PCIe host bridge        NODE host bridges of one socket   SYS  the link between sockets

Cells that are missing are read from the other half of the matrix. An unknown cell is a `TopologyError`
with line, column and the nearest legal one; so are two halves that contradict each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING

from ...planner.errors import TopologyError, did_you_mean
from .paste import Token, plain, tokens

if TYPE_CHECKING:
    import networkx as nx

PCIE_CLASSES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Nearest first."""
OLD_NAMES = {"SOC": "SYS", "PSB": "PIX"}
"""What drivers before 375 and a few virtual machines print."""
SELF = "X"
NV = re.compile(r"NV\d+")
CELL = re.compile(r"X|NV\d+|NODE|SYS|SOC|PHB|PXB|PIX|PSB")
GLUED_CELLS = re.compile(rf"((?:{CELL.pattern})+)(.*)")
GPU = re.compile(r"GPU\d+")
KNOWN_DEVICE = r"GPU\d+|NIC\d+|mlx\d+_bond_?\d+|mlx\d+_\d+|bnxt_re\d+|efa_\d+|hfi\d+_\d+|irdma\d+|cxi\d+"
GLUED_DEVICES = re.compile(rf"((?:{KNOWN_DEVICE}){{2,}})((?:CPU|NUMA).*)?|({KNOWN_DEVICE})((?:CPU|NUMA).*)")
GLUED_ROW = re.compile(rf"(?:{KNOWN_DEVICE})(?:{CELL.pattern})")
DEVICE = re.compile(r"[A-Za-z][\w.:-]*\d\w*")
HEADER_TAIL = re.compile(r"CPU|NUMA|Affinity|GPU$|\(")
ALIAS = re.compile(r"^\W*(NIC\d+)\s*:\s*([A-Za-z]\S*)", re.MULTILINE)
MODEL = re.compile(r"^\W*GPU (\d+): (.+?) \(UUID", re.MULTILINE)


@dataclass(slots=True)
class Row:
    """The cells of one device, as many as were found."""

    label: Token
    cells: list[Token] = field(default_factory=list)
    uncertain: set[int] = field(default_factory=set)
    """Cells whose digits may run on into the next column (`NV12` + `0-23` lost its tab)."""


def read_topo(text: str, *, origin: str = "the paste") -> nx.Graph:
    """The link graph of a paste; `origin` (a file name) is used in messages. Raises `TopologyError`."""
    lines = list(tokens(text))
    matrices = ((columns, _rows(lines[start:], columns)) for start, columns in _headers(lines))
    columns, rows = max(matrices, key=lambda matrix: len(matrix[1]))
    gpus = [name for name in columns if GPU.fullmatch(name)]
    if not gpus or not rows:
        raise TopologyError(
            f"{origin}: no matrix of `nvidia-smi topo -m` found; expected a header 'GPU0 GPU1 ...' "
            f"and a row for each device, such as 'GPU0 X NV12'"
        )
    _check_cells(rows, columns, origin)
    return _graph(rows, columns, text, origin)


def link_of(graph: nx.Graph, a: str, b: str) -> str:
    """The link class between two nodes."""
    return graph.edges[a, b]["link"]


def nodes_of(graph: nx.Graph, kind: str) -> tuple[str, ...]:
    """The nodes of one kind ("gpu" or "nic"), in numeric order of their names."""
    return tuple(sorted((n for n, k in graph.nodes(data="kind") if k == kind), key=natural))


def natural(name: str) -> list[int | str]:
    """A sort key by which `mlx5_2` comes before `mlx5_10`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


# --------------------------------------------------------------------------- the header


def _headers(lines: list[list[Token]]) -> Iterator[tuple[int, list[str]]]:
    """Lines that may be the header: the line after each and its column names; last, the rows' own labels."""
    for i, line in enumerate(lines):
        names = _column_names(line)
        if names:
            end = i + 1
            while end < len(lines) and (more := _column_names(lines[end], first=False)):
                if set(more) & set(names):
                    break
                names += more  # a terminal wrapped the header
                end += 1
            yield end, list(dict.fromkeys(names))
    labels = [line[0].text for line in lines if _looks_like_row(line)]
    yield 0, list(dict.fromkeys(labels))


def _column_names(line: list[Token], *, first: bool = True) -> list[str]:
    """Device names of a header line, empty if it is none."""
    names: list[str] = []
    for word in _split_names(token.text for token in line):
        if HEADER_TAIL.match(word):
            break
        if CELL.fullmatch(word.upper()) or GLUED_ROW.match(word) or not DEVICE.fullmatch(word):
            return []
        names.append(word)
    if first and not (names and GPU.fullmatch(names[0])):
        return []
    return names


def _split_names(words: Iterable[str]) -> Iterator[str]:
    """Names that lost their tabs, `GPU0GPU1CPU Affinity`, one by one."""
    for word in words:
        match = GLUED_DEVICES.fullmatch(word)
        if match is None:
            yield word
            continue
        yield from (m[0] for m in re.finditer(KNOWN_DEVICE, match[1] or match[3]))
        if tail := match[2] or match[4]:
            yield tail


def _looks_like_row(line: list[Token]) -> bool:
    texts = [token.text for token in line]
    return bool(DEVICE.fullmatch(texts[0])) and SELF in texts and all(map(CELL.fullmatch, texts[1:2]))


# --------------------------------------------------------------------------- the rows


def _rows(lines: list[list[Token]], columns: list[str]) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    current: Row | None = None
    for line in lines:
        row = _start_row(line, columns)
        if row is not None:
            name = row.label.text
            if name in rows and len(rows[name].cells) >= len(columns):
                break  # prose after the matrix, or the matrix of another machine
            rows[name] = current = row
        elif current is not None and len(current.cells) < len(columns) and _all_cells(line):
            _extend(current, line, len(columns))
    return rows


def _start_row(line: list[Token], columns: list[str]) -> Row | None:
    """The row that `line` begins, or None if it is something else."""
    label, rest = _label(line, columns)
    if label is None:
        return None
    row = Row(label)
    _extend(row, rest, len(columns))
    own = columns.index(label.text)
    on_diagonal = len(row.cells) > own and row.cells[own].text.upper() == SELF
    legal = sum(bool(CELL.fullmatch(cell.text.upper())) for cell in row.cells)
    return row if on_diagonal or legal > len(columns) / 2 else None


def _label(line: list[Token], columns: list[str]) -> tuple[Token | None, list[Token]]:
    first, rest = line[0], line[1:]
    if first.text in columns:
        return first, rest
    for name in sorted(columns, key=len, reverse=True):
        tail = first.text[len(name) :]
        if first.text.startswith(name) and GLUED_CELLS.fullmatch(tail):
            glued = Token(tail, first.line, first.column + len(name))
            return Token(name, first.line, first.column), [glued, *rest]
    return None, rest


def _extend(row: Row, line: list[Token], wanted: int) -> None:
    """Add cells of `line`, taking glued ones apart, until there are `wanted`."""
    for token in line:
        match = GLUED_CELLS.fullmatch(token.text.upper())
        parts = list(CELL.finditer(match[1])) if match else []
        if not match or (len(parts) == 1 and not match[2]):
            parts_found = [token]
        elif len(parts) == 1 and not match[2][0].isdigit() and match[2][0] not in "-,":
            parts_found = [token]  # a word that merely begins like a cell: an unknown cell
        else:
            parts_found = [Token(m[0], token.line, token.column + m.start()) for m in parts]
        for part in parts_found:
            if len(row.cells) == wanted:
                return
            row.cells.append(part)
        if match and match[2] and NV.fullmatch(row.cells[-1].text):
            row.uncertain.add(len(row.cells) - 1)


def _all_cells(line: list[Token]) -> bool:
    """Whether a line that begins no row goes on with one that a terminal wrapped."""
    return bool(GLUED_CELLS.match(line[0].text.upper())) and CELL.match(line[0].text.upper()) is not None


# --------------------------------------------------------------------------- checks and the graph


def _check_cells(rows: dict[str, Row], columns: list[str], origin: str) -> None:
    for name, row in rows.items():
        for column, cell in zip(columns, row.cells, strict=False):
            text = cell.text.upper()
            if (text == SELF) == (name == column) and CELL.fullmatch(text):
                continue
            where = f"{origin}:{cell.line}:{cell.column}: found {cell.text!r} for {name} to {column}"
            if name == column:
                raise TopologyError(f"{where}, expected 'X': a device and itself")
            raise TopologyError(f"{where}{_nearest(text)}")


def _nearest(text: str) -> str:
    digits = "".join({"I": "1", "L": "1", "O": "0"}.get(c, c) for c in text[2:])
    if re.match(r"N[VU]|VN", text) and digits.isdigit():
        return f"; did you mean 'NV{int(digits)}'?"
    allowed = ", ".join((*PCIE_CLASSES, "NV#"))
    near = did_you_mean(text, PCIE_CLASSES) or did_you_mean(text, (f"NV{n}" for n in range(1, 19)))
    return f"{near} (allowed: {allowed})"


def _graph(rows: dict[str, Row], columns: list[str], text: str, origin: str) -> nx.Graph:
    import networkx as nx

    graph = nx.Graph()
    clean = plain(text)
    aliases, models = dict(ALIAS.findall(clean)), {f"GPU{i}": name for i, name in MODEL.findall(clean)}
    for name in columns:
        kind = "gpu" if GPU.fullmatch(name) else "nic"
        named = {"alias": aliases.get(name), "model": models.get(name)}
        graph.add_node(name, kind=kind, **{key: value for key, value in named.items() if value})
    for a, b in combinations(columns, 2):
        link = _link(rows, columns, a, b, origin)
        if link is not None:
            graph.add_edge(a, b, link=link)
    return graph


def _link(rows: dict[str, Row], columns: list[str], a: str, b: str, origin: str) -> str | None:
    """What both halves of the matrix say of a pair; None where two NICs are not compared."""
    one, other = _cell(rows, columns, a, b), _cell(rows, columns, b, a)
    cell = one or other
    if cell is None:
        if GPU.fullmatch(a) or GPU.fullmatch(b):
            raise TopologyError(
                f"{origin}: the matrix does not say how {a} and {b} are linked (a cut paste?)"
            )
        return None
    if one is None or other is None:
        return _normal(cell.text)
    here, there = _normal(one.text), _normal(other.text)
    if here == there:
        return here
    if columns.index(b) in rows[a].uncertain and here.startswith(there):
        return there
    if columns.index(a) in rows[b].uncertain and there.startswith(here):
        return here
    raise TopologyError(
        f"{origin}:{other.line}:{other.column}: {b} to {a} is {other.text!r}, but {a} to {b} is "
        f"{one.text!r} (line {one.line}, column {one.column}): a link is the same both ways"
    )


def _cell(rows: dict[str, Row], columns: list[str], a: str, b: str) -> Token | None:
    j = columns.index(b)
    return rows[a].cells[j] if a in rows and j < len(rows[a].cells) else None


def _normal(text: str) -> str:
    return OLD_NAMES.get(text.upper(), text.upper())
