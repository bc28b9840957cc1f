"""Commands about clusters: `topology list|show|import|detect` and `profile`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..planner.errors import OptionError
from .exits import FAILED
from .options import (
    GROUP,
    Budget,
    DeviceName,
    Json,
    ModelToProfile,
    NicGbit,
    Nodes,
    Pastes,
    ProfileOutput,
    Quick,
    Quiet,
    Redact,
    Resume,
    SeqLen,
    TopologyOutput,
    TopologyShown,
)
from .output import check_output
from .request import load_topology
from .streams import console, print_json, say_error

if TYPE_CHECKING:
    from ..topologies.importers.read import Imported

commands = typer.Typer()
topologies = typer.Typer(help="List, show, import and detect the clusters that can be planned for.", **GROUP)
commands.add_typer(topologies, name="topology")


@topologies.command("list", epilog="Example:  tpplan topology list --json")
def topology_list(json_: Json = False) -> None:
    """List the bundled clusters."""
    from ..report.hardware import render_list, summary
    from ..topologies.load import list_topologies

    clusters = list_topologies()
    if json_:
        print_json({"topologies": [summary(cluster) for cluster in clusters]})
    else:
        console().print(render_list(clusters))


@topologies.command("show", epilog="Example:  tpplan topology show dgx-h100:4")
def topology_show(topology: TopologyShown, nodes: Nodes = None, json_: Json = False) -> None:
    """Draw a cluster: its levels, its links, its device, and where each number comes from."""
    from ..planner.topology import MixedTopology
    from ..report.hardware import document, render

    cluster = load_topology(topology, nodes)
    parts = cluster.parts if isinstance(cluster, MixedTopology) else (cluster,)
    if json_:
        documents = [document(part) for part in parts]
        print_json(documents[0] if len(documents) == 1 else {"name": cluster.name, "kinds": documents})
    else:
        for part in parts:
            console().print(render(part))


@topologies.command(
    "import",
    epilog="Example:  nvidia-smi topo -m > topo.txt; tpplan topology import topo.txt -o cluster.yaml",
)
def topology_import(
    files: Pastes,
    device: DeviceName = None,
    nodes: Nodes = None,
    nic_gbit: NicGbit = None,
    output: TopologyOutput = None,
    json_: Json = False,
) -> None:
    """Make a topology of an `nvidia-smi topo -m` paste and nccl-tests logs, or curves of the logs alone."""
    from ..planner.options import check_sizes
    from ..topologies.importers.read import import_files

    check_sizes(nodes=nodes)
    if nic_gbit is not None and not nic_gbit > 0.0:
        raise OptionError(f"--nic-gbit {nic_gbit:g}: must be greater than 0")
    check_output(output)
    found = import_files(files, device=device, nodes=nodes or 1, nic_gbit=nic_gbit)
    _write_imported(found, output, json_=json_)


@topologies.command("detect", epilog="Example:  tpplan topology detect -o here.yaml")
def topology_detect(
    device: DeviceName = None, nodes: Nodes = None, output: TopologyOutput = None, json_: Json = False
) -> None:
    """Look at this machine: its devices, links and network ports, without measuring anything."""
    from ..planner.options import check_sizes
    from ..topologies.importers.detect import detect

    check_sizes(nodes=nodes)
    check_output(output)
    _write_imported(detect(device=device, nodes=nodes or 1), output, json_=json_)


def _write_imported(found: Imported, output: Path | None, *, json_: bool) -> None:
    from ..topologies.importers.draft import to_yaml
    from ..topologies.importers.read import document
    from ..topologies.write import write_text

    for note in found.notes:
        print(f"tpplan: note: {note}", file=sys.stderr)
    text = to_yaml(found.data)
    if output:
        write_text(output, text)
        print(f"tpplan: wrote {output}", file=sys.stderr)
    if json_:
        print_json(document(found))
    elif not output:
        print(text, end="")


@commands.command(
    epilog="""Examples:

    tpplan profile --quick -o cluster.yaml

    tpplan profile --quick --model model.py --seq-len 4096

    torchrun --nnodes 2 --nproc-per-node 8 ... -m tpplan profile -o cluster.yaml"""
)
def profile(
    output: ProfileOutput = Path("cluster.yaml"),
    quick: Quick = False,
    resume: Resume = True,
    budget: Budget = None,
    model: ModelToProfile = None,
    seq_len: SeqLen = None,
    redact: Redact = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure this cluster (one process, or every rank under torchrun) and write it as a topology."""
    from ..planner.errors import ProfileError

    if budget is not None and not budget > 0.0:
        raise OptionError(f"--budget {budget:g}: must be greater than 0")
    check_output(output)
    from ..profiler.run import profile as measure
    from ..profiler.settings import FULL, QUICK

    settings = QUICK if quick else FULL
    if budget is not None:
        settings = replace(settings, budget_s=budget)
    try:
        wrote = measure(
            output,
            settings,
            resume=resume,
            redact=redact,
            model=model,
            seq_len=seq_len,
            say=_say_on_first_rank(quiet),
        )
    except ProfileError as error:
        say_error(str(error), code=FAILED)
        os._exit(FAILED)  # a thread may be stuck in a collective for ever
    if wrote:
        _show_profile(output, json_=json_)


def _say_on_first_rank(quiet: bool) -> Callable[[str], None]:
    silent = quiet or os.environ.get("RANK", "0") != "0"
    return lambda text: None if silent else print(f"tpplan: {text}", file=sys.stderr, flush=True)


def _show_profile(path: Path, *, json_: bool) -> None:
    from ..report.hardware import document, render
    from ..topologies.load import load_file

    if json_:
        print_json(document(load_file(path)))
    else:
        console().print(render(load_file(path)))
    print(f"tpplan: wrote {path}", file=sys.stderr)
