"""How well the time between tokens of a served model is predicted, on published runs.

    python -m benchmarks.serving [RUNS.yaml] [--docs docs/serving.md] [--json]

Each row names a model, an engine, a replica (tp), how many tokens each sequence reads and makes, and how
many sequences are in flight. The model is built from its dims, the replica forced, the time between tokens
predicted; nothing is fitted on a row. `capacity` is how many whole sequences the cache is predicted to hold:
where more were in flight, the engine let some wait or dropped and read them again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from tpplan.planner.errors import UserError
from tpplan.planner.estimate import collectives
from tpplan.planner.estimate.engines import ENGINES, Engine
from tpplan.planner.fold import build
from tpplan.planner.graph import Graph
from tpplan.planner.mesh import Mesh
from tpplan.planner.serve.pricing import Pricer
from tpplan.planner.serve.search import ORDER, ServeProblem, price_mesh
from tpplan.topologies.load import load

from .row_models import Dims
from .row_setting import CLUSTERS
from .rows import read_dims

RUNS = Path(__file__).with_name("serving_runs.yaml")
TRACED_TOKENS = 1024
"""Length of the sequences that are traced; passes have their own."""
MS = 1e-3
WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One row and what is predicted of it. Times are seconds."""

    id: str
    model: str
    dtype: str
    tp: int
    prompt_len: int
    output_len: int
    concurrency: int
    capacity: int
    measured_s: float
    predicted_s: float
    decode_s: float
    prefill_s: float
    measured_first_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1


def read(path: Path) -> list[dict[str, Any]]:
    """The serving rows of a file; others are left out."""
    document = yaml.safe_load(path.read_text())
    rows = document if isinstance(document, list) else document["runs"]
    return [row for row in rows if row["kind"] == "serve"]


def predict(row: dict[str, Any], engine: Engine = ENGINES["vllm"]) -> Served:
    """Price the replica of one row."""
    given, asked = row["parallel"], row["derived"]
    dtype = "fp8" if str(given["precision"]).startswith("fp8") else "bf16"
    dims = replace(read_dims({**row["model"], "seq_len": TRACED_TOKENS}, []), seq_len=TRACED_TOKENS)
    cluster = load(CLUSTERS[row["hardware"]["gpu"]])
    mesh = Mesh(pp=int(given.get("pp") or 1), tp=int(given["tp"]), ep=int(given.get("ep") or 1), order=ORDER)
    model = collectives.model(cluster)
    graph = graph_of(dims)
    problem = ServeProblem(
        graph=graph,
        topology=cluster,
        engine=engine,
        prompt_len=asked["isl"],
        output_len=asked["osl"],
        concurrency=asked["concurrency"],
        dtype=dtype,
        objective="throughput",
        tp_sizes=(mesh.tp,),
        ep_sizes=(mesh.ep,),
    )
    pricer = Pricer(graph, cluster, engine, model, dtype)
    found = price_mesh(problem, mesh, asked["concurrency"], pricer, model.time)
    assert found is not None, f"{row['id']}: the model cannot be split over {mesh}"
    return Served(
        id=row["id"],
        model=f"{row['model']['arch']} {row['model']['params'] / 1e9:.0f}B",
        dtype=dtype,
        tp=mesh.tp,
        prompt_len=asked["isl"],
        output_len=asked["osl"],
        concurrency=asked["concurrency"],
        capacity=found.capacity,
        measured_s=row["measured"]["tpot_ms"] * MS,
        predicted_s=found.token_time_s,
        decode_s=found.decode_s,
        prefill_s=found.prefill_s,
        measured_first_s=row["measured"]["ttft_ms"] * MS,
    )


@cache
def graph_of(dims: Dims) -> Graph:
    """The graph of a model with these dims, without a loss."""
    from tpplan.planner.trace import trace_source

    from .row_models import build_model, example_inputs

    traced = trace_source(
        build_model(dims),
        seq_len=dims.seq_len,
        example_inputs=lambda batch, _: example_inputs(dims, batch),
        mode="serve",
    )
    return build(traced)


def summary(served: Sequence[Served]) -> dict[str, float]:
    """Mean, median and largest absolute error, and the mean error, as shares."""
    errors = [row.error for row in served]
    sizes = sorted(map(abs, errors))
    return {
        "rows": len(errors),
        "mean": statistics.mean(sizes),
        "median": statistics.median(sizes),
        "p90": sizes[int(0.9 * (len(sizes) - 1))],
        "largest": sizes[-1],
        "bias": statistics.mean(errors),
    }


def main(argv: list[str] | None = None) -> int:
    """Predict all rows; exit code 2 for a file that cannot be read."""
    told = str(__doc__).split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=told)
    parser.add_argument("runs", nargs="?", type=Path, default=RUNS)
    parser.add_argument("--docs", type=Path, help="write the table as Markdown to this file")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    try:
        served = [predict(row) for row in read(options.runs)]
    except (OSError, yaml.YAMLError, KeyError, UserError) as error:
        print(f"{options.runs}: {error}", file=sys.stderr)
        return 2
    if options.docs:
        options.docs.write_text(markdown(served))
    if options.json:
        print(json.dumps({"summary": summary(served), "rows": [asdict(row) for row in served]}, indent=2))
    else:
        show(served)
    return 0


def show(served: Sequence[Served]) -> None:
    """A table on the terminal."""
    table = Table(*HEADINGS)
    for row in served:
        table.add_row(*cells(row))
    console = Console(width=max(WIDTH, Console().width))
    console.print(table)
    console.print(sentence(served))


COUNTS = ("Reads", "Makes", "At once", "Room")
HEADINGS = ("Model", "dtype", "tp", *COUNTS, "Measured ms", "Predicted ms", "Error")


def cells(row: Served) -> tuple[str, ...]:
    """One row in words."""
    return (
        row.model,
        row.dtype,
        str(row.tp),
        str(row.prompt_len),
        str(row.output_len),
        str(row.concurrency),
        str(row.capacity),
        f"{row.measured_s / MS:.1f}",
        f"{row.predicted_s / MS:.1f}",
        f"{row.error:+.0%}",
    )


def sentence(served: Sequence[Served]) -> str:
    """The errors in a sentence."""
    found = summary(served)
    return (
        f"{found['rows']:.0f} runs: mean error {found['mean']:.1%}, median {found['median']:.1%}, "
        f"90th percentile {found['p90']:.1%}, largest {found['largest']:.0%}, bias {found['bias']:+.1%}."
    )


def markdown(served: Sequence[Served]) -> str:
    """The page of docs."""
    lines = [INTRODUCTION, sentence(served), "", _line(HEADINGS), _line(["---"] * len(HEADINGS))]
    return "\n".join([*lines, *(_line(cells(row)) for row in served), "", CONCLUSION])


def _line(words: Sequence[str]) -> str:
    return f"| {' | '.join(words)} |"


INTRODUCTION = """# Serving: predicted against measured

`tpplan suggest MODEL -t CLUSTER --mode serve` chooses how many replicas of a decoder a cluster runs and how
each is split. [How it decides](how-it-decides.md#serving) has the formulas. This page is written by

    python -m benchmarks.serving --docs docs/serving.md

Time between two tokens of one sequence, under continuous batching, on H100 with vLLM (published by
ai-dynamo/aiconfigurator). *Room* is how many whole sequences the cache is predicted to hold. One number is
fitted on these rows, the time from kernel to kernel in a replayed CUDA graph; utilisation curves, memory
bandwidth and collectives are the device's and the cluster's, as for training.
"""
CONCLUSION = """## What the errors are

- The largest error, a 32B model in 8 bit on one device at 24 sequences, is a row that contradicts the
  device: weights and cache are more bytes than its memory delivers in the time measured. Its concurrency is
  probably not what its source says. It is kept.
- Rows with short outputs are over-predicted: the engine reads prompts in chunks that share a pass with
  decoding, and the two overlap better than one after the other.
- Where more sequences were in flight than the cache holds (*At once* above *Room*), the engine drops and
  reads some again, which is not modelled.
- The time to the first token is predicted only for a prompt that does not wait; queues are not modelled.
- Engines other than vLLM, devices other than H100, and mixtures of experts have no measured row here.
"""

if __name__ == "__main__":
    sys.exit(main())
