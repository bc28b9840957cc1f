"""The same jobs as other planners: CPU seconds, and their answers priced by this project's estimator.

    python -m benchmarks.peers [--write]

In: `benchmarks/peers.yaml`, what each peer answered and took, recorded once with its conditions. Each job is
planned here in a process of its own with an empty graph cache (its CPU seconds and peak memory), and a peer's
plan is priced by pinning its choices. Out: a table, or with `--write` the page `docs/peers.md`. The exit code
is 1 when a recorded plan is predicted faster than ours, or lies outside the space that is searched.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
RECORDED = Path(__file__).with_name("peers.yaml")
PAGE = ROOT / "docs" / "peers.md"
INTRODUCTION = """\
The same jobs given to other planners. What they took and answered was recorded once, with the conditions
below; this project's side is measured when `python -m benchmarks.peers --write` writes the page, in a
process of its own that starts without a cached graph. Their plans are priced by this project's estimator:
the comparison says which search looks further, not which estimate is right."""
FASTER = 1e-6
"""Shares of a step by which two searches over the same plans may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """What this project answers and takes."""

    step_s: float
    gap: float
    plan: str
    cpu_s: float
    peak_gb: float


def options(peer: dict[str, Any], pins: dict[str, Any]) -> list[str]:
    """Arguments of `tpplan suggest` for a peer's job under these choices."""
    sets = ",".join(f"{key}={value}" for key, value in pins.items())
    return [
        "suggest", str(ROOT / "examples" / peer["model"]), "--topology", peer["topology"],
        "--framework", peer["framework"], "--global-batch", str(peer["global_batch"]),
        "--seq-len", str(peer["seq_len"]), "--json", *(["--set", sets] if sets else []),
    ]  # fmt: skip


def ask(arguments: list[str], cache: str) -> tuple[dict[str, Any], float, float]:
    """The document of one command, its CPU seconds and its peak gigabytes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [str(Path(sys.executable).with_name("tpplan")), *arguments]
    environment = {**os.environ, "TPPLAN_CACHE_DIR": cache}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"exit {done.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout), cpu_s, after.ru_maxrss * 1024 / 1e9


def in_words(document: dict[str, Any]) -> str:
    """`pp8 x dp2 x tp4, interleaved with 6, ZeRO-1, microbatch 1`."""
    plan = document["plan"]
    mesh = " x ".join(f"{axis}{size}" for axis, size in plan["mesh"].items() if size > 1)
    virtual = f" with {plan['virtual_stages']}" if plan["virtual_stages"] > 1 else ""
    schedule = f", {plan['schedule']}{virtual}" if plan["mesh"]["pp"] > 1 else ""
    return f"{mesh}{schedule}, ZeRO-{plan['zero_stage']}, microbatch {plan['micro_batch']}"


def compare(peer: dict[str, Any]) -> tuple[Ours, float | None]:
    """Our answer to a peer's job, and the step of its plan by our estimator (None: not recorded)."""
    with tempfile.TemporaryDirectory() as cache:
        document, cpu_s, peak_gb = ask(options(peer, peer["pins"]), cache)
        theirs = None
        if peer["plan"] is not None:
            priced, _, _ = ask(options(peer, peer["plan"]), cache)
            theirs = priced["predicted"]["step_time_s"]
    ours = Ours(
        step_s=document["predicted"]["step_time_s"],
        gap=document["search"]["gap"],
        plan=in_words(document),
        cpu_s=cpu_s,
        peak_gb=peak_gb,
    )
    return ours, theirs


def page(rows: list[tuple[dict[str, Any], Ours, float | None]]) -> str:
    """`docs/peers.md`."""
    return "\n".join(_lines(rows)) + "\n"


def _lines(rows: list[tuple[dict[str, Any], Ours, float | None]]) -> Iterator[str]:
    yield "# Peers"
    yield ""
    yield from INTRODUCTION.splitlines()
    yield ""
    yield "| peer | job | its CPU s | its GB | CPU s here | GB here | its plan by our estimator | ours |"
    yield "|---|---|---|---|---|---|---|---|"
    for peer, ours, theirs in rows:
        step = "see below" if theirs is None else f"{theirs:.4g} s"
        took = [f"{peer[key]:.4g}" if peer[key] else "not recorded" for key in ("cpu_s", "peak_gb")]
        yield (
            f"| {peer['name']} | {peer['job']} | {took[0]} | {took[1]} | "
            f"{ours.cpu_s:.3g} | {ours.peak_gb:.2g} | {step} | {ours.step_s:.4g} s ({ours.plan}) |"
        )
    for peer, ours, theirs in rows:
        yield ""
        yield f"## {peer['name']}"
        yield ""
        yield f"[{peer['name']}]({peer['source']}), {peer['version']}. {peer['job']}."
        yield ""
        yield from (f"- {' '.join(condition.split())}" for condition in peer["conditions"])
        yield f"- here: `tpplan {' '.join(options(peer, peer['pins'])).replace(str(ROOT) + '/', '')}`"
        if peer["cpu_s"]:
            yield f"- {peer['cpu_s'] / ours.cpu_s:.3g} times as many CPU seconds as here"
        yield f"- the gap of our answer: {ours.gap:.2%}"
        if theirs is not None:
            pins = ", ".join(f"{key}={value}" for key, value in peer["plan"].items())
            yield f"- its plan: {pins}; ours takes {1 - ours.step_s / theirs:.1%} less time a step"
        if peer.get("plan_note"):
            yield ""
            yield str(peer["plan_note"]).strip()


def main() -> int:
    """Compare, print or write."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/peers.md")
    write = parser.parse_args().write
    rows = [(peer, *compare(peer)) for peer in yaml.safe_load(RECORDED.read_text())]
    text = page(rows)
    if write:
        PAGE.write_text(text)
    else:
        print(text)
    worse = [peer["name"] for peer, ours, theirs in rows if theirs and ours.step_s > theirs * (1 + FASTER)]
    for name in worse:
        print(f"{name}: its plan is predicted faster than ours", file=sys.stderr)
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
