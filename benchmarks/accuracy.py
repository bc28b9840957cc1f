"""Predicted against measured, on published runs nobody tuned to.

    python -m benchmarks.accuracy ROWS.yaml [--json] [--source NAME ...] [--framework NAME ...] [--raw]

In: a file of published runs (`rows.py`). Out: predicted and measured per row, then mean absolute
percentage error (MAPE), median, p90, largest error, bias and Kendall's tau by source. No row is
dropped: one that cannot be predicted is listed with its error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tpplan.planner.errors import UserError

from .predict import predict
from .rows import load_documents, read_row
from .scores import Scores, relative, scores

KIND = "train"
WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row, predicted; sizes in bytes, times in seconds. Names are the JSON's."""

    id: str
    tier: str
    kind: str
    source: str
    predicted_s: float | None = None
    measured_s: float | None = None
    predicted_tokens_per_s_per_gpu: float | None = None
    measured_tokens_per_s_per_gpu: float | None = None
    predicted_memory_bytes: float | None = None
    measured_memory_bytes: float | None = None
    interval_s: tuple[float, float] | None = None
    framework: str | None = None
    device: str | None = None
    assumed: tuple[str, ...] = ()
    parts_s: dict[str, float] | None = None
    memory_by_kind_bytes: dict[str, float] | None = None
    error: str | None = None

    @property
    def relative_error(self) -> float | None:
        """Predicted over measured step time, less one."""
        return relative(self.predicted_s, self.measured_s)


def evaluate(document: dict[str, Any]) -> Result:
    """One document of a row file, predicted; a row that cannot be is returned with its error."""
    names = {"id": document["id"], "tier": document["tier"], "kind": document["kind"]}
    names["source"] = str(document["id"]).split("_")[0]
    try:
        row = read_row(document)
        predicted = predict(row)
    except (ValueError, KeyError, TypeError, UserError) as error:
        return Result(**names, error=f"{type(error).__name__}: {error}")
    return Result(
        **names,
        predicted_s=predicted.step_s,
        measured_s=row.measured_s,
        predicted_tokens_per_s_per_gpu=row.tokens / row.gpus / predicted.step_s,
        measured_tokens_per_s_per_gpu=row.measured_tokens_per_s_per_gpu,
        predicted_memory_bytes=sum(predicted.memory_bytes.values()),
        measured_memory_bytes=row.measured_memory_bytes,
        interval_s=predicted.interval_s,
        framework=predicted.framework,
        device=predicted.device,
        assumed=row.assumed,
        parts_s=predicted.parts_s,
        memory_by_kind_bytes=predicted.memory_bytes,
    )


def summarise(results: Sequence[Result]) -> dict[str, Scores]:
    """Scores by source and by tier, and of all rows."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        for name in (result.source, result.tier, "all"):
            groups.setdefault(name, []).append(result)
    return {name: scores([(r.predicted_s, r.measured_s) for r in group]) for name, group in groups.items()}


def show(results: Sequence[Result], console: Console) -> None:
    """The table of rows and the table of sources."""
    rows = Table(title="Step time, seconds", box=None)
    for heading in ("row", "tier", "predicted", "measured", "error %"):
        rows.add_column(heading, justify="left" if heading in ("row", "tier") else "right", no_wrap=True)
    for r in results:
        if r.error is not None:
            rows.add_row(r.id, r.tier, "-", "-", r.error)
            continue
        rows.add_row(r.id, r.tier, _number(r.predicted_s), _number(r.measured_s), _percent(r.relative_error))
    console.print(rows)
    totals = Table(title="By source", box=None)
    for heading in ("source", "rows", "failed", "MAPE %", "median", "p90", "max", "bias", "tau"):
        totals.add_column(heading, justify="left" if heading == "source" else "right")
    for name, s in summarise(results).items():
        values = (s.mape, s.median, s.p90, s.largest, s.bias)
        tau = "-" if s.kendall_tau is None else f"{s.kendall_tau:.2f}"
        totals.add_row(name, str(s.rows), str(s.failed), *(_percent(v) for v in values), tau)
    console.print(totals)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def document_of(results: Sequence[Result]) -> dict[str, Any]:
    """The JSON document."""
    summary = {name: asdict(s) for name, s in summarise(results).items()}
    return {"rows": [asdict(result) for result in results], "summary": summary}


def run(documents: Iterable[dict[str, Any]], progress: Console | None = None) -> list[Result]:
    """Predict every training row."""
    results = []
    chosen = [d for d in documents if d["kind"] == KIND]
    for i, document in enumerate(chosen):
        results.append(evaluate(document))
        if progress is not None and progress.is_terminal:
            progress.print(f"{i + 1}/{len(chosen)} {document['id']}", end="\r")
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("rows", type=Path, help="a YAML file of published runs")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--source", action="append", help="only rows of this source; may be repeated")
    options = parser.parse_args(arguments)
    documents = load_documents(options.rows)
    if options.source:
        documents = [d for d in documents if str(d["id"]).split("_")[0] in options.source]
    results = run(documents, Console(stderr=True))
    if options.json:
        json.dump(document_of(results), sys.stdout, indent=1)
    else:
        console = Console()
        show(results, console if console.is_terminal else Console(width=WIDTH))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
