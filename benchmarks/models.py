"""Trace and plan every model family at its published size, and write the table of docs/models.md.

    python -m benchmarks.models [--only NAME ...] [-o docs/models.md]

In: the table of families in `tests/torch/models.py`. Out: per family the seconds to trace, its ops, block
classes and their counts, parameters, forward FLOPs of one sample, the share of them under a sharding rule,
and the plans chosen for 8 and for 64 H100. Run from the root of the repository.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from tpplan.planner.coverage import by_target, covered_flops
from tpplan.planner.errors import TpplanError
from tpplan.planner.fold import build
from tpplan.planner.graph import Graph
from tpplan.planner.options import job_from_options
from tpplan.planner.plan import Infeasible
from tpplan.planner.planning import plan_graph
from tpplan.planner.trace import trace_source
from tpplan.report import words
from tpplan.topologies import load

from tests.torch.models import FAMILIES, Family

CLUSTERS = ("dgx-h100:1", "dgx-h100:8")
TIME_LIMIT_S = 5.0
"""Longest search for one plan, seconds; what is cut short is marked."""
CPU_LIMIT_S = 120.0
"""Longest planning for one cluster, seconds of CPU: one split that is hard to solve is not waited for."""
COLUMNS = (
    "family", "trace, s", "ops", "blocks", "parameters", "forward FLOPs a sample", "under a rule",
    "plan on 8 H100", "plan on 64 H100",
)  # fmt: skip
HEAD = """# Model families

Every family is built on the meta device at its published size, traced (bf16, training, loss included),
folded and planned; nothing is downloaded. Seconds are those of one run on one core, the import of torch
not included. *Ops* are those of one copy of each block. A plan names the mesh, the ZeRO stage
and the recompute mode; `+` marks a search that was ended after 5 s.

Parameters and FLOPs equal what the models themselves and `torch.utils.flop_counter` count, to 0.1 %
(`tests/torch/test_models.py`), with these conventions: of causal attention that is run as such one half
of the scores is counted here and all of them there; grouped expert products, which torch's counter does
not know, count two FLOPs a row and weight of the one expert it meets; norms, softmax and element-wise
ops are counted here and not there.

Written by `python -m benchmarks.models -o docs/models.md`.

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    family: str
    cells: tuple[str, ...]


def graph_of(family: Family) -> tuple[Graph, float]:
    """The graph at the published size, and the seconds it took."""
    with tempfile.TemporaryDirectory() as folder:
        if family.build is None:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(family.published()))
            source: str | nn.Module = str(path)
        else:
            with torch.device("meta"):
                source = partial(family.build, **family.full)()
        start = time.perf_counter()
        traced = trace_source(source, seq_len=family.seq_len, example_inputs=family.inputs)
        seconds = time.perf_counter() - start
    return build(traced), seconds


def plan_in_words(graph: Graph, cluster: str) -> str:
    """The plan on a bundled cluster."""
    topology = load(cluster)
    has_sequence = any(
        dim.name == "sequence" for block in graph.blocks.values() for op in block.ops for dim in op.dims
    )
    length = graph.seq_len if has_sequence else 1
    job = job_from_options(seq_len=length, devices=topology.devices, device=topology.device)
    try:
        with at_most(CPU_LIMIT_S):
            found = plan_graph(graph, topology, job, time_limit_s=TIME_LIMIT_S)
    except TimeoutError:
        return f"not within {CPU_LIMIT_S:g} s of CPU"
    except TpplanError as error:
        return f"none: {error}"
    if isinstance(found, Infeasible):
        return "does not fit"
    cut = "" if found.search.complete else " +"
    return f"{found.mesh}, ZeRO-{found.zero_stage}, {found.recompute}{cut}"


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` when the body takes more CPU time than that."""

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)  # one may still be on its way


def row_of(family: Family) -> Row:
    """Trace and plan one family."""
    graph, seconds = graph_of(family)
    flops = sum(group.flops for group in by_target(graph))
    blocks = ", ".join(
        name if block.count == 1 else f"{block.count} x {name}" for name, block in graph.blocks.items()
    )
    cells = (
        f"{seconds:.1f}",
        f"{sum(len(block.ops) for block in graph.blocks.values()):,}",
        blocks,
        words.count(graph.parameters),
        words.count(flops),
        f"{covered_flops(graph):.2%}",
        *(plan_in_words(graph, cluster) for cluster in CLUSTERS),
    )
    return Row(family=family.name, cells=cells)


def rows(names: list[str]) -> Iterator[Row]:
    """A row for every family whose package is there; progress on stderr."""
    for name, family in FAMILIES.items():
        if names and name not in names:
            continue
        if find_spec(family.package) is None:
            print(f"{name}: {family.package} is not installed", file=sys.stderr)
            continue
        print(name, file=sys.stderr)
        yield row_of(family)


def page(table: list[Row]) -> str:
    """The document."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join((row.family, *row.cells))} |" for row in table]
    return HEAD + "\n".join(lines) + "\n"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], choices=list(FAMILIES), metavar="NAME")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    table: list[Row] = []
    for row in rows(options.only):
        table.append(row)
        if options.output:  # a run takes minutes: what is done is kept
            options.output.write_text(page(table))
    if not options.output:
        print(page(table), end="")


if __name__ == "__main__":
    main()
