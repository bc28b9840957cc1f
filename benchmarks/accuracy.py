"""Predicted against measured, on published runs nobody tuned to.

    python -m benchmarks.accuracy ROWS.yaml [--json] [--source NAME ...] [--framework NAME ...]
                                            [--fit] [--docs FILE.md]

In: a file of published runs (`rows.py`). Out: predicted and measured per row, then mean absolute
percentage error (MAPE), median, p90, largest error, bias and Kendall's tau by source. No row is
dropped: one that cannot be predicted is listed with its error. Beside the predictions under the
committed scale of each device and framework stand those without any scale and those under a scale
fitted without the row's own source. `--fit` writes the scales anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tpplan.planner.errors import UserError
from tpplan.planner.estimate.calibration import FILE

from .calibrate import HIGH, LOW, Priced, data_file, left_out
from .predict import memory_like, predict
from .rows import load_documents, read_row, source_of
from .scores import Scores, percent, relative, scores

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
    uncalibrated_s: float | None = None
    left_out_s: float | None = None
    """Under the scale fitted without this row's source."""
    measured_s: float | None = None
    predicted_tokens_per_s_per_gpu: float | None = None
    measured_tokens_per_s_per_gpu: float | None = None
    predicted_memory_bytes: float | None = None
    measured_memory_bytes: float | None = None
    measured_reserved_bytes: float | None = None
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


def evaluate(document: dict[str, Any]) -> tuple[Result, Priced | None]:
    """One document of a row file, predicted; a row that cannot be is returned with its error."""
    names = {"id": document["id"], "tier": document["tier"], "kind": document["kind"]}
    names["source"] = source_of(document)
    try:
        row = read_row(document)
        low, high, predicted = predict(row, scale=LOW), predict(row, scale=HIGH), predict(row)
    except (ValueError, KeyError, TypeError, UserError) as error:
        return Result(**names, error=f"{type(error).__name__}: {error}"), None
    result = Result(
        **names,
        predicted_s=predicted.step_s,
        uncalibrated_s=low.step_s,
        measured_s=row.measured_s,
        predicted_tokens_per_s_per_gpu=row.tokens / row.gpus / predicted.step_s,
        measured_tokens_per_s_per_gpu=row.measured_tokens_per_s_per_gpu,
        predicted_memory_bytes=memory_like(predicted.memory_bytes, row.source),
        measured_memory_bytes=row.measured_memory_bytes,
        measured_reserved_bytes=row.measured_reserved_bytes,
        interval_s=predicted.interval_s,
        framework=predicted.framework,
        device=predicted.device,
        assumed=row.assumed,
        parts_s=predicted.parts_s,
        memory_by_kind_bytes=predicted.memory_bytes,
    )
    if row.measured_s is None:
        return result, None
    return result, Priced(
        id=row.id,
        source=row.source,
        framework=predicted.framework,
        device=predicted.device,
        measured_s=row.measured_s,
        low_s=low.step_s,
        high_s=high.step_s,
    )


def summarise(results: Sequence[Result]) -> dict[str, Scores]:
    """Scores by source and by tier, and of all rows."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        for name in (result.source, result.tier, "all"):
            groups.setdefault(name, []).append(result)
    return {name: scores([(r.predicted_s, r.measured_s) for r in group]) for name, group in groups.items()}


def mape(results: Sequence[Result], attribute: str) -> float | None:
    """Mean absolute relative error of another prediction of the same rows."""
    return scores([(getattr(r, attribute), r.measured_s) for r in results]).mape


def coverage(results: Sequence[Result]) -> float | None:
    """Share of the measured runs that lie in their predicted interval."""
    held = [
        r.interval_s[0] <= r.measured_s <= r.interval_s[1] for r in results if r.interval_s and r.measured_s
    ]
    return sum(held) / len(held) if held else None


def show(results: Sequence[Result], console: Console) -> None:
    """The table of rows and the table of sources."""
    rows = Table(title="Step time, seconds", box=None)
    for heading in ("row", "tier", "predicted", "measured", "error %"):
        rows.add_column(heading, justify="left" if heading in ("row", "tier") else "right", no_wrap=True)
    for r in results:
        if r.error is not None:
            rows.add_row(r.id, r.tier, "-", "-", r.error)
            continue
        rows.add_row(r.id, r.tier, _number(r.predicted_s), _number(r.measured_s), percent(r.relative_error))
    console.print(rows)
    totals = Table(title="By source", box=None)
    for heading in HEADINGS:
        totals.add_column(heading, justify="left" if heading == "source" else "right")
    for line in summary_lines(results):
        totals.add_row(*line)
    console.print(totals)


HEADINGS = (
    "source",
    "rows",
    "failed",
    "MAPE %",
    "median",
    "p90",
    "max",
    "bias",
    "tau",
    "left out",
    "no scale",
)


def summary_lines(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """The table of sources and tiers, as text."""
    lines = []
    for name, s in summarise(results).items():
        members = [r for r in results if name in (r.source, r.tier, "all")]
        values = (s.mape, s.median, s.p90, s.largest, s.bias)
        tau = "-" if s.kendall_tau is None else f"{s.kendall_tau:.2f}"
        others = (mape(members, "left_out_s"), mape(members, "uncalibrated_s"))
        cells = (*map(percent, values), tau, *map(percent, others))
        lines.append((name, str(s.rows), str(s.failed), *cells))
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def document_of(results: Sequence[Result]) -> dict[str, Any]:
    """The JSON document."""
    summary: dict[str, Any] = {}
    for name, s in summarise(results).items():
        members = [r for r in results if name in (r.source, r.tier, "all")]
        summary[name] = asdict(s) | {
            "left_out_mape": mape(members, "left_out_s"),
            "uncalibrated_mape": mape(members, "uncalibrated_s"),
            "interval_coverage": coverage(members),
        }
    return {"rows": [asdict(result) for result in results], "summary": summary}


def run(
    documents: Iterable[dict[str, Any]], progress: Console | None = None
) -> tuple[list[Result], list[Priced]]:
    """Predict every training row."""
    results, priced = [], []
    chosen = [d for d in documents if d["kind"] == KIND]
    for i, document in enumerate(chosen):
        result, at_scales = evaluate(document)
        results.append(result)
        priced += [at_scales] if at_scales else []
        if progress is not None and progress.is_terminal:
            progress.print(f"{i + 1}/{len(chosen)} {document['id']}", end="\r")
    unseen = left_out(priced)
    return [replace(r, left_out_s=unseen.get(r.id)) for r in results], priced


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("rows", type=Path, help="a YAML file of published runs")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--source", action="append", help="only rows of this source; may be repeated")
    parser.add_argument("--framework", action="append", help="only rows of this framework; may be repeated")
    parser.add_argument("--fit", action="store_true", help="write the planner's calibration file")
    parser.add_argument("--docs", type=Path, help="write the report and its plot here")
    options = parser.parse_args(arguments)
    documents = load_documents(options.rows)
    if options.source:
        documents = [d for d in documents if source_of(d) in options.source]
    results, priced = run(documents, Console(stderr=True))
    if options.framework:
        results = [r for r in results if r.framework in options.framework]
    if options.fit:
        FILE.write_text(data_file(priced, date.today()), "utf-8")
    if options.docs:
        from .accuracy_report import write

        write(results, options.docs)
    if options.json:
        json.dump(document_of(results), sys.stdout, indent=1)
    else:
        console = Console()
        show(results, console if console.is_terminal else Console(width=WIDTH))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
