"""How long planning takes: whole-process wall seconds and peak memory of the `tpplan` command.

    python -m benchmarks.speed [--only NAME ...] [--growth] [--repeat N] [--json]

Each case runs `tpplan suggest` in a process of its own: once with an empty graph cache (cold), then
with the cache that this run left (warm). Wall time includes starting Python; peak memory is the
largest resident set that the kernel reports for the process. CPU seconds (all threads, user and
system) stand beside it: on a busy machine they tell waiting from work. Of several repeats the quickest
counts: others on the machine only ever add. The gap is the one that the plan certifies.
Targets stand beside the figures; the exit code is 1 when one is missed.

`--growth` instead plans one model in growing sizes, and tells by which power time grows from the smallest
to the largest: with layers (none is asked for: repeats are folded), devices and distinct ops.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
LIMIT_S = 300.0
"""A run that takes longer is ended and counts as failed, seconds."""
TARGET_PEAK_BYTES = 0.8e9
TARGET_GAP = 0.01
WIDTH = 100
"""Columns of the table where the terminal does not say, or is narrower."""
# What wait4 counts in: kibibytes on Linux, bytes on macOS (getrusage(2) of either system).
RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One command and its targets, in seconds; `warm_s` is None for a command without a cache."""

    name: str
    arguments: tuple[str, ...]
    cold_s: float | None = None
    warm_s: float | None = None


def suggest(model: str, topology: str, *, batch: int, seq: int) -> tuple[str, ...]:
    """Arguments of `tpplan suggest` for one of the bundled examples."""
    sizes = ("--global-batch", str(batch), "--seq-len", str(seq))
    return ("suggest", str(ROOT / "examples" / model), "--topology", topology, *sizes, "--json")


CASES = (
    Case(name="help", arguments=("--help",), cold_s=0.4),
    Case(
        name="llama3-8b on 64 H100",
        arguments=suggest("llama3_8b.py", "dgx-h100:8", batch=512, seq=8192),
        cold_s=6,
        warm_s=1.5,
    ),
    Case(
        name="gpt3-175b on 1,024 A100",
        arguments=suggest("gpt3_175b.py", "dgx-a100-80:128", batch=1536, seq=2048),
        cold_s=7,
        warm_s=2,
    ),
    Case(
        name="llama3-405b on 16,384 H100",
        arguments=suggest("llama3_405b.py", "dgx-h100:2048", batch=2048, seq=8192),
        cold_s=8,
        warm_s=3,
    ),
    Case(
        name="deepseek-v3 on 2,048 H800",
        arguments=suggest("deepseek_v3/config.json", "hgx-h800:256", batch=15360, seq=4096),
        cold_s=12,
        warm_s=4,
    ),
    Case(
        name="mixtral-8x7b on 128 H100",
        arguments=suggest("mixtral_8x7b.py", "dgx-h100:16", batch=1024, seq=4096),
    ),
    Case(
        name="recommender on 64 A100",
        arguments=suggest("recommender.py", "dgx-a100-80:8", batch=65536, seq=1),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One process: wall seconds, CPU seconds of all its threads, peak resident bytes, the plan's gap."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    gap: float | None = None
    """Of the plan's certificate; None for a command that makes no plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A case's quickest runs, or the error output of the run that failed."""

    case: Case
    cold: Run | None = None
    warm: Run | None = None
    error: str | None = None

    @property
    def missed(self) -> bool:
        """Whether a target was missed, or there is no figure at all."""
        figures = ((self.cold, self.case.cold_s), (self.warm, self.case.warm_s))
        late = any(run and limit and run.wall_s > limit for run, limit in figures)
        large = any(run and run.peak_bytes > TARGET_PEAK_BYTES for run, _ in figures)
        loose = any(run and run.gap is not None and run.gap > TARGET_GAP for run, _ in figures)
        return late or large or loose or self.error is not None


def measure(arguments: tuple[str, ...], cache: Path) -> Run:
    """Run `tpplan` once; raises `RuntimeError` with its error output when it fails."""
    environment = {**os.environ, "TPPLAN_CACHE_DIR": str(cache)}
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as printed:
        started = time.perf_counter()
        command = (Path(sys.executable).with_name("tpplan"), *arguments)
        process = subprocess.Popen(command, stdout=printed, stderr=errors, env=environment)
        watchdog = threading.Timer(LIMIT_S, process.kill)
        watchdog.start()
        _, status, usage = os.wait4(process.pid, 0)
        watchdog.cancel()
        wall_s = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()
            raise RuntimeError(said or f"exit {process.returncode} after {wall_s:.0f} s")
        printed.seek(0)
        gap = json.load(printed)["search"]["gap"] if "--json" in arguments else None
    cpu_s = usage.ru_utime + usage.ru_stime
    return Run(wall_s=wall_s, cpu_s=cpu_s, peak_bytes=usage.ru_maxrss * RSS_UNIT_BYTES, gap=gap)


def quickest(runs: list[Run]) -> Run:
    """The least times and the largest peak of several runs."""
    return Run(
        wall_s=min(run.wall_s for run in runs),
        cpu_s=min(run.cpu_s for run in runs),
        peak_bytes=max(run.peak_bytes for run in runs),
        gap=runs[0].gap,
    )


def time_case(case: Case, *, repeat: int) -> Result:
    """All runs of one case."""
    has_cache = case.arguments[0] == "suggest"
    cold, warm = [], []
    try:
        for _ in range(repeat):
            with tempfile.TemporaryDirectory() as cache:
                cold.append(measure(case.arguments, Path(cache)))
                if has_cache:
                    warm.append(measure(case.arguments, Path(cache)))
    except RuntimeError as error:
        return Result(case=case, error=str(error))
    return Result(case=case, cold=quickest(cold), warm=quickest(warm) if warm else None)


def table(results: list[Result]) -> Table:
    """The figures with their targets beside them."""
    view = Table(title=f"planning time, whole process ({os.cpu_count()} cores)")
    view.add_column("case", no_wrap=True)
    for heading in ("cold s", "cpu s", "target", "warm s", "cpu s", "target", "peak GB", "target", "gap"):
        view.add_column(heading, justify="right")
    for result in results:
        view.add_row(result.case.name, *cells(result))
    return view


def cells(result: Result) -> tuple[str, ...]:
    """One row of the table after its name."""
    if result.cold is None:
        return ("failed",)
    peak_bytes = max(run.peak_bytes for run in (result.cold, result.warm) if run)
    times = (*timing(result.cold, result.case.cold_s), *timing(result.warm, result.case.warm_s))
    gap = result.cold.gap
    told = "" if gap is None else f"{gap:.2%}"
    return (*times, f"{peak_bytes / 1e9:.2f}", f"{TARGET_PEAK_BYTES / 1e9:g}", told)


def timing(run: Run | None, target_s: float | None) -> tuple[str, str, str]:
    """Wall seconds, CPU seconds and target, empty where there are none."""
    target = f"{target_s:g}" if target_s else ""
    return (f"{run.wall_s:.2f}", f"{run.cpu_s:.2f}", target) if run else ("", "", target)


# --------------------------------------------------------------------------- growth


DEEP = """\
import sys
sys.path.insert(0, {examples!r})
from llama import Config, Llama
from llama3_8b import example_inputs, loss
def build_model():
    return Llama(Config(layers={size}, hidden=4096, heads=32, kv_heads=8, ffn=14_336))
"""
"""Llama-3-8B with so many layers."""
WIDE = """\
import torch
from torch import nn
def build_model():
    widths = [1024 + 64 * i for i in range({size} + 1)]
    pairs = zip(widths, widths[1:])
    return nn.Sequential(*(layer for a, b in pairs for layer in (nn.Linear(a, b), nn.ReLU())))
def example_inputs(batch, seq):
    return (torch.zeros(batch, 1024),)
"""
"""So many layers of which no two are alike: nothing folds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """One model or cluster in growing sizes."""

    name: str
    sizes: tuple[int, ...]
    source: str | None
    """Text of the model file; None: the bundled Llama-3-8B."""
    topology: str
    batch: int
    seq: int


GROWTHS = (
    Growth(name="layers", sizes=(16, 64, 256), source=DEEP, topology="dgx-h100:8", batch=512, seq=8192),
    Growth(name="nodes", sizes=(8, 64, 512), source=None, topology="dgx-h100:{size}", batch=4096, seq=8192),
    Growth(name="distinct layers", sizes=(8, 32, 128), source=WIDE, topology="dgx-h100:1", batch=64, seq=1),
)


def grown(growth: Growth, *, repeat: int) -> Iterator[tuple[int, Run]]:
    """(size, warm run) of each size; the cold run before it fills the cache."""
    for size in growth.sizes:
        with tempfile.TemporaryDirectory() as folder:
            model = ROOT / "examples" / "llama3_8b.py"
            if growth.source is not None:
                model = Path(folder) / "model.py"
                model.write_text(growth.source.format(size=size, examples=str(ROOT / "examples")))
            sizes = ("--global-batch", str(growth.batch), "--seq-len", str(growth.seq))
            where = growth.topology.format(size=size)
            arguments = ("suggest", str(model), "--topology", where, *sizes, "--json")
            runs = [measure(arguments, Path(folder)) for _ in range(repeat + 1)]
            yield size, quickest(runs[1:])


def power(first: tuple[int, Run], last: tuple[int, Run]) -> float:
    """p where CPU time grows as size to the power p between the two: 0 flat, 1 in proportion."""
    return math.log(last[1].cpu_s / first[1].cpu_s) / math.log(last[0] / first[0])


def print_growth(*, repeat: int, as_json: bool) -> int:
    """Measure and print every growth."""
    found = {growth.name: list(grown(growth, repeat=repeat)) for growth in GROWTHS}
    if as_json:
        rows = {name: [{"size": size, **asdict(run)} for size, run in runs] for name, runs in found.items()}
        print(json.dumps({"cpu_count": os.cpu_count(), "growth": rows}))
        return 0
    view = Table(title="growth of warm planning time, whole process, CPU seconds")
    for heading in ("with", "sizes", "cpu s", "power"):
        view.add_column(heading)
    for name, runs in found.items():
        sizes = " / ".join(f"{size:,}" for size, _ in runs)
        times = " / ".join(f"{run.cpu_s:.2f}" for _, run in runs)
        view.add_row(name, sizes, times, f"{power(runs[0], runs[-1]):.2f}")
    Console(width=max(Console().width, WIDTH)).print(view)
    return 0


def main() -> int:
    """Measure, print, and say by the exit code whether every target was met."""
    parser = argparse.ArgumentParser(prog="benchmarks.speed", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose name contains one of these")
    parser.add_argument("--repeat", type=int, default=1, help="runs per case, the quickest counts")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    parser.add_argument("--growth", action="store_true", help="how time grows with layers, devices and ops")
    options = parser.parse_args()
    if options.growth:
        return print_growth(repeat=options.repeat, as_json=options.json)
    for part in options.only or ():
        if not any(part in case.name for case in CASES):
            parser.error(f"no case is called {part!r}: {', '.join(case.name for case in CASES)}")
    wanted = [case for case in CASES if not options.only or any(part in case.name for part in options.only)]
    with tempfile.TemporaryDirectory() as cache:
        measure(("--help",), Path(cache))  # byte-code is compiled once, before anything is timed
    results = [time_case(case, repeat=options.repeat) for case in wanted]
    if options.json:
        print(json.dumps({"cpu_count": os.cpu_count(), "cases": [asdict(result) for result in results]}))
    else:
        Console(width=max(Console().width, WIDTH)).print(table(results))
    for result in results:
        if result.error:
            print(f"{result.case.name}: {result.error}", file=sys.stderr)
    return int(any(result.missed for result in results))


if __name__ == "__main__":
    sys.exit(main())
