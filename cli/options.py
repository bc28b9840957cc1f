"""The arguments and options of the commands, each described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..planner.errors import OptionError
from . import complete

GROUP: dict[str, Any] = {
    "no_args_is_help": True,
    "rich_markup_mode": "rich",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
"""How every group of commands behaves."""


def option(names: str, metavar: str | None, help: str, **settings: Any) -> Any:
    """An option under one or several names; metavar None: a flag."""
    return typer.Option(*names.split("/"), metavar=metavar, help=help, show_default=False, **settings)


def number(name: str, metavar: str, help: str, kind: type[int] | type[float] = int) -> Any:
    """An option with a number; unlike typer's own, its error names the value found."""

    def parse(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise OptionError(f"{name} {text}: expected {what}") from None

    return option(name, metavar, help, parser=parse)


MODEL_HELP = "model.py or model.py:factory, a Hugging Face config.json or its folder, or a .pt2 export."
TOPOLOGY_HELP = "A bundled name, name:NODES, or a YAML file."
SET_HELP = (
    "Fix some of pp, dp, cp, ep, tp, zero, shard_group, micro_batch, recompute, schedule, virtual_stages."
)
BATCH_HELP = (
    "Samples per step (default about 4 Mi tokens); serving: sequences at once (default: all that fit)."
)
SEQ_HELP = "Tokens per sample (default: what the model says); serving: of a prompt (default 1024)."
PASTE_HELP = "A paste of `nvidia-smi topo -m`, logs of nccl-tests; - is the standard input."
DTYPE_HELP = "bf16 (default where the device has it), fp16, fp32; serving also fp8."

Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
TopologySpec = Annotated[str, option("--topology/-t", "T", TOPOLOGY_HELP, autocompletion=complete.topologies)]
TopologyShown = Annotated[
    str,
    typer.Argument(metavar="T", help=TOPOLOGY_HELP, show_default=False, autocompletion=complete.topologies),
]
Nodes = Annotated[int | None, number("--nodes", "N", "Number of nodes.")]
GlobalBatch = Annotated[int | None, number("--global-batch", "N", BATCH_HELP)]
SeqLen = Annotated[int | None, number("--seq-len", "N", SEQ_HELP)]
OutputLen = Annotated[
    int | None, number("--output-len", "N", "Serving: tokens made for each prompt (default 256).")
]
Mode = Annotated[
    str | None, option("--mode", "M", "train (default) or serve.", autocompletion=complete.names("mode"))
]
Objective = Annotated[
    str | None,
    option(
        "--objective",
        "O",
        "throughput (default), latency, memory, cost.",
        autocompletion=complete.names("objective"),
    ),
]
Sets = Annotated[list[str] | None, option("--set", "K=V,...", SET_HELP, autocompletion=complete.sets)]
FrameworkName = Annotated[
    str | None,
    option(
        "--framework",
        "F",
        "tpplan (default), torch, megatron, deepspeed; serving: vllm (default), tgi.",
        autocompletion=complete.names("framework"),
    ),
]
Dtype = Annotated[str | None, option("--dtype", "D", DTYPE_HELP, autocompletion=complete.names("dtype"))]
OptimizerName = Annotated[
    str | None,
    option(
        "--optimizer",
        "O",
        "adamw (default), sgd, adagrad, adafactor, none.",
        autocompletion=complete.names("optimizer"),
    ),
]
Top = Annotated[int, number("--top", "K", "How many runner-ups to list (default 5).")]
TimeLimit = Annotated[float | None, number("--time-limit", "S", "Seconds to search at most.", float)]
PlanFile = Annotated[Path | None, option("--plan", "FILE", "A plan file whose choices to check.")]
FROM_ARGS_HELP = "The launch line of a Megatron-LM, torchtitan, DeepSpeed or vLLM run whose choices to check."
FromArgs = Annotated[str | None, option("--from-args", "LINE", FROM_ARGS_HELP)]
Compare = Annotated[
    bool, typer.Option("--compare/--no-compare", help="Also search for a better plan, briefly.")
]
Sensitivity = Annotated[
    bool, option("--sensitivity", None, "Also tell what would change the plan (a few more searches).")
]
Pareto = Annotated[
    bool,
    option("--pareto", None, "Also plan for less memory and fewer devices (a dozen more searches)."),
]
SplitPins = Annotated[
    list[str] | None,
    option("--pin", "NAME=Shard(DIM)@AXIS", "Fix how a module's or parameter's weights are split."),
]
Strict = Annotated[bool, option("--strict", None, "An op without a sharding rule is an error.")]
Ops = Annotated[bool, option("--ops", None, "List the ops by kind and by module.")]
NoCache = Annotated[bool, option("--no-cache", None, "Trace the model again and keep no graph.")]
Output = Annotated[Path | None, option("--output/-o", "FILE", "Write the plan (YAML) to this file.")]
ProfileOutput = Annotated[
    Path, option("--output/-o", "FILE", "Write the measured topology here (default cluster.yaml).")
]
Quick = Annotated[bool, option("--quick", None, "Fewer sizes and repetitions: under two minutes.")]
Resume = Annotated[
    bool, typer.Option("--resume/--no-resume", help="Go on from FILE.partial if it is there (default).")
]
Budget = Annotated[float | None, number("--budget", "S", "Seconds to measure at most.", float)]
ModelToProfile = Annotated[
    str | None, option("--model", "MODEL", "Also measure a block of this model, for a scale of its own.")
]
Redact = Annotated[bool, option("--redact", None, "Keep host names out of the file.")]
TopologyOutput = Annotated[Path | None, option("--output/-o", "FILE", "Write the topology to this file.")]
Pastes = Annotated[list[Path], typer.Argument(metavar="FILE...", help=PASTE_HELP, show_default=False)]
DeviceName = Annotated[str | None, option("--device", "NAME", "The device, where the paste does not say.")]
NicGbit = Annotated[float | None, number("--nic-gbit", "G", "What one NIC carries, Gb/s.", float)]
Report = Annotated[Path | None, option("--report", "FILE", "Write the report as one HTML page to this file.")]
Page = Annotated[Path | None, option("--output/-o", "FILE", "Write one HTML page to this file.")]
Trace = Annotated[Path | None, option("--trace", "FILE", "Write the pipeline's timeline, for Perfetto.")]
Figures = Annotated[
    Path | None, option("--figures", "DIR", "Write the main figures into this directory, as SVG and PNG.")
]
Json = Annotated[bool, option("--json", None, "Print one JSON document instead of a report.")]
Quiet = Annotated[bool, option("--quiet/-q", None, "No progress and no notes on stderr.")]
SavedPlan = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)]
OtherPlan = Annotated[Path, typer.Argument(metavar="OTHER", help="Another plan file.", show_default=False)]
ModelOfPlan = Annotated[
    str | None, option("--model", "MODEL", "Where the model is; without it, where the plan says.")
]
TopologyOfPlan = Annotated[
    str | None,
    option(
        "--topology/-t",
        "T",
        "The cluster; without it, the bundled one of the plan's name.",
        autocompletion=complete.topologies,
    ),
]
Target = Annotated[
    str,
    option(
        "--to", "X", "megatron, torchtitan, deepspeed, accelerate, hf, ...", autocompletion=complete.targets
    ),
]
Directory = Annotated[Path | None, option("--output/-o", "DIR", "Write the files into this directory.")]
Ranks = Annotated[int | None, number("--ranks", "N", "Run on fewer data-parallel ranks, N in all.")]
Debug = Annotated[bool, option("--debug", None, "Show the traceback of an internal error.")]
Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="Your training script.", show_default=False)]
ScriptArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ARGS]...", help="What the script is given.", show_default=False),
]
Address = Annotated[
    str | None, option("--address", "HOST[:PORT]", "The first node, for plans of several nodes.")
]
MaxRestarts = Annotated[int, number("--max-restarts", "N", "Start again so often (default 3).")]
OnCpu = Annotated[bool, option("--on-cpu", None, "Rehearse: all ranks on the CPUs of this machine.")]
DryRun = Annotated[bool, option("--dry-run", None, "Print the torchrun line and stop.")]
BatchSystem = Annotated[str | None, option("--to", "X", "Write launch files instead: slurm or kubernetes.")]
Steps = Annotated[int, number("--steps", "N", "Steps to time (default 10).")]
Warmup = Annotated[int, number("--warmup", "N", "Steps to run before, besides the first (default 2).")]
Runs = Annotated[Path | None, option("--runs", "FILE", "Add the result to this file, for `calibrate`.")]
