"""The command line: its flags, its exit codes, what goes to which stream. The search is a stand-in."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tpplan
import typer
from tpplan import cli
from tpplan.cli.request import COMPARE_LIMIT_S
from tpplan.planner.cost import Recompute
from tpplan.planner.errors import SolverError
from tpplan.planner.estimate.frameworks import FRAMEWORKS
from tpplan.planner.mesh import Mesh
from tpplan.planner.options import DTYPES, MODES, OBJECTIVES, PIN_KEYS
from tpplan.planner.plan_file import load, save
from tpplan.planner.profile import OPTIMIZERS
from tpplan.planner.schedule import Schedule

from .sample_plan import llama3_8b, llama3_70b_on_rtx4090

Answer = Callable[..., Any]
DOCS = Path(__file__).parents[2] / "docs" / "cli.md"

FLAGS = {
    "suggest": {
        "--topology", "-t", "--nodes", "--global-batch", "--seq-len", "--output-len", "--mode", "--objective",
        "--set", "--pin",
        "--framework", "--dtype", "--optimizer", "--top", "--time-limit", "--strict", "--no-cache",
        "--output", "-o", "--report", "--sensitivity", "--pareto", "--json", "--quiet", "-q",
    },
    "report": {"--output", "-o", "--figures", "--trace", "--json", "--quiet", "-q"},
    "estimate": {
        "--topology", "-t", "--plan", "--from-args", "--nodes", "--global-batch", "--seq-len",
        "--output-len", "--mode",
        "--objective",
        "--set", "--pin", "--framework", "--dtype", "--optimizer", "--compare", "--no-compare", "--no-cache",
        "--output", "-o", "--report", "--json", "--quiet", "-q",
    },
    "trace": {"--seq-len", "--dtype", "--ops", "--strict", "--no-cache", "--json", "--quiet", "-q"},
    "explain": {"--json"},
    "compare": {"--json"},
    "verify": {"--ranks", "--json", "--quiet", "-q"},
    "bench": {"--steps", "--warmup", "--runs", "--json"},
    "run": {
        "--address", "--max-restarts", "--on-cpu", "--dry-run", "--to", "--output", "-o", "--quiet", "-q",
    },
    "why": {"--set", "--model", "--topology", "-t", "--json", "--quiet", "-q"},
    "export": {"--to", "--output", "-o", "--json", "--quiet", "-q"},
    "calibrate": {"--output", "-o", "--json", "--quiet", "-q"},
    "profile": {
        "--output", "-o", "--quick", "--resume", "--no-resume", "--budget", "--model",
        "--seq-len", "--redact",
        "--json", "--quiet",
        "-q",
    },
    "topology list": {"--json"},
    "topology show": {"--nodes", "--json"},
    "topology import": {"--device", "--nodes", "--nic-gbit", "--output", "-o", "--json"},
    "topology detect": {"--device", "--nodes", "--output", "-o", "--json"},
}  # fmt: skip


def test_the_flags_are_pinned():
    assert {path: flags for path, flags in _flags(typer.main.get_command(cli.app))} == FLAGS


def test_every_flag_and_choice_is_documented():
    text = DOCS.read_text()
    flags = set().union(*FLAGS.values())
    assert [flag for flag in sorted(flags - {"--compare"}) if f"`{flag}`" not in text] == []
    assert [key for key in PIN_KEYS if f"`{key}`" not in text] == []
    words = [*OPTIMIZERS, *FRAMEWORKS, *DTYPES, *MODES, *OBJECTIVES, *Schedule, *Recompute]
    assert [word for word in words if f"`{word}`" not in text] == []


def test_the_documented_error_is_real(search, capsys):
    search(lambda **_: llama3_8b())
    command, message = re.findall(r"\$ tpplan (.*)\n(tpplan: error: .*\n)", DOCS.read_text())[0]
    assert cli.main(command.split()) == 2
    assert capsys.readouterr().err == message


def _flags(command: Any, path: str = "") -> Iterator[tuple[str, set[str]]]:
    for name, child in getattr(command, "commands", {}).items():
        yield from _flags(child, f"{path} {name}".strip())
    if not hasattr(command, "commands"):
        options = [param for param in command.params if param.param_type_name == "option"]
        yield path, {flag for param in options for flag in (*param.opts, *param.secondary_opts)}


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[dict[str, Any]]]:
    """Put a stand-in in the search's place; returns the list of what it gets asked."""

    def install(answer: Answer) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def suggest(model: str, **options: Any) -> Any:
            asked.append({"model": model, **options})
            return answer(**options)

        stand_in = ModuleType("tpplan.planner.suggest")
        vars(stand_in)["suggest"] = suggest
        monkeypatch.setitem(sys.modules, "tpplan.planner.suggest", stand_in)
        return asked

    return install


SUGGEST = ["suggest", "model.py", "-t", "dgx-h100:8"]


# --------------------------------------------------------------------------- what is asked


def test_what_is_not_given_is_left_to_the_planner(search, capsys):
    asked = search(lambda **_: llama3_8b())
    assert cli.main(SUGGEST) == 0
    [call] = asked
    assert call.pop("topology").devices == 64
    assert call.pop("cache_dir").is_dir()
    assert call == {
        "model": "model.py", "pins": None, "progress": None, "dtype": "bf16", "top": 5, "cache": True,
    }  # fmt: skip


def test_everything_that_is_given_arrives(search, capsys):
    asked = search(lambda **_: llama3_8b())
    words = "--nodes 8 --global-batch 96 --seq-len 2048 --mode train --objective throughput --set tp=8,pp=4"
    more = (
        "--set zero=1 --framework megatron --dtype fp16 --optimizer sgd --top 3 --time-limit 2.5 --no-cache"
    )
    assert cli.main(["suggest", "m.py:small", "-t", "dgx-h100", *words.split(), *more.split()]) == 0
    [call] = asked
    assert call.pop("topology").nodes == 8
    call.pop("cache_dir")
    assert call == {
        "model": "m.py:small", "pins": {"tp": 8, "pp": 4, "zero": 1}, "progress": None,
        "global_batch": 96, "seq_len": 2048, "mode": "train", "objective": "throughput",
        "framework": "megatron", "dtype": "fp16", "optimizer": "sgd", "top": 3, "time_limit_s": 2.5,
        "cache": False,
    }  # fmt: skip


def test_the_cache_directory_comes_from_the_environment(search, capsys, monkeypatch, tmp_path):
    asked = search(lambda **_: llama3_8b())
    monkeypatch.setenv("TPPLAN_CACHE_DIR", str(tmp_path / "mine"))
    cli.main(SUGGEST)
    monkeypatch.delenv("TPPLAN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    cli.main(SUGGEST)
    assert [call["cache_dir"] for call in asked] == [tmp_path / "mine", tmp_path / "xdg" / "tpplan"]


# --------------------------------------------------------------------------- what comes back


def test_json_is_all_of_stdout_even_if_the_model_prints(search, capfd):
    def noisy(**_: Any) -> Any:
        print("loading weights ...")
        subprocess.run(["echo", "from below Python"], check=True)
        return llama3_8b()

    search(noisy)
    assert cli.main([*SUGGEST, "--json"]) == 0
    out, err = capfd.readouterr()
    document = json.loads(out)
    assert document["plan"]["mesh"] == llama3_8b().mesh.sizes
    assert document["search"]["wall_s"] > 0
    assert "loading weights" in err and "from below Python" in err


def test_a_report_goes_to_stdout(search, capsys):
    search(lambda **_: llama3_8b())
    assert cli.main(SUGGEST) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) > 20 and err == ""
    assert "\x1b" not in out and max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_infeasible_is_exit_code_3(search, capsys, tmp_path: Path, flags: list[str]):
    search(lambda **_: llama3_70b_on_rtx4090())
    file = tmp_path / "plan.yaml"
    assert cli.main([*SUGGEST, *flags, "-o", str(file)]) == 3
    out, _ = capsys.readouterr()
    assert not file.exists()
    if flags:
        assert set(json.loads(out)["infeasible"]) >= {"reason", "short_by_bytes", "nearest_fix"}
    else:
        assert "GiB" in out


def test_the_plan_is_written(search, capsys, tmp_path: Path):
    search(lambda **_: llama3_8b())
    file = tmp_path / "plan.yaml"
    assert cli.main([*SUGGEST, "-o", str(file)]) == 0
    assert load(file) == llama3_8b()
    assert capsys.readouterr().err == f"tpplan: wrote {file}\n"
    assert cli.main([*SUGGEST, "-q", "-o", str(file)]) == 0
    assert capsys.readouterr().err == ""


# --------------------------------------------------------------------------- estimate


def slower() -> Any:
    plan = llama3_8b()
    predicted = replace(plan.predicted, step_time_s=2 * plan.predicted.step_time_s)
    return replace(plan, predicted=predicted, mesh=Mesh(dp=64))


def test_estimate_compares_with_the_best_plan(search, capsys):
    asked = search(lambda pins, **_: slower() if pins else llama3_8b())
    command = ["estimate", *SUGGEST[1:], "--set", "tp=1,pp=1,dp=64"]
    assert cli.main(command) == 0
    assert "yours takes 100.0% longer" in capsys.readouterr().out
    assert [call["pins"] for call in asked] == [{"tp": 1, "pp": 1, "dp": 64}, None]
    assert asked[1]["time_limit_s"] == COMPARE_LIMIT_S
    assert cli.main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["mesh"]["dp"] == 64
    assert document["best"]["step_time_s"] == llama3_8b().predicted.step_time_s


def test_estimate_alone(search, capsys):
    asked = search(lambda **_: slower())
    assert cli.main(["estimate", *SUGGEST[1:], "--set", "dp=64", "--no-compare", "--json"]) == 0
    assert "best" not in json.loads(capsys.readouterr().out)
    assert len(asked) == 1


def test_estimate_says_what_would_fit(search, capsys):
    search(lambda pins, **_: llama3_70b_on_rtx4090() if pins else llama3_8b())
    assert cli.main(["estimate", *SUGGEST[1:], "--set", "dp=64"]) == 3
    assert "A plan that fits: " in capsys.readouterr().out


def test_estimate_takes_choices_and_job_from_a_plan(search, capsys, tmp_path: Path):
    asked = search(lambda **_: llama3_8b())
    plan, file = llama3_8b(), tmp_path / "plan.yaml"
    save(plan, file)
    command = ["estimate", "model.py", "-t", f"dgx-h100:{plan.cluster.nodes}", "--plan", str(file)]
    assert cli.main([*command, "--optimizer", "sgd"]) == 0
    assert "No better plan was found." in capsys.readouterr().out
    mine = asked[0]
    assert {axis: mine["pins"][axis] for axis in plan.mesh.sizes} == plan.mesh.sizes
    assert (mine["global_batch"], mine["seq_len"]) == (plan.job.global_batch, plan.job.seq_len)
    assert (mine["framework"], mine["optimizer"]) == (plan.job.framework, "sgd")


def test_a_plan_for_another_model_is_refused(search, capsys, tmp_path: Path):
    plan, file = llama3_8b(), tmp_path / "plan.yaml"
    save(plan, file)
    search(lambda **_: replace(plan, model=replace(plan.model, parameters=12, source="other.py")))
    command = ["estimate", "other.py", "-t", f"dgx-h100:{plan.cluster.nodes}", "--plan", str(file)]
    assert cli.main(command) == 2
    assert f"{plan.model.parameters:,} parameters, but other.py has 12" in capsys.readouterr().err


# --------------------------------------------------------------------------- topology


def test_topology_list(capsys):
    assert cli.main(["topology", "list"]) == 0
    out = capsys.readouterr().out
    assert "dgx-h100 " in out and "nvlink 450 GB/s" in out
    assert max(map(len, out.splitlines())) <= 100
    assert cli.main(["topology", "list", "--json"]) == 0
    clusters = json.loads(capsys.readouterr().out)["topologies"]
    assert {"dgx-a100-80", "cpu-gloo"} <= {cluster["name"] for cluster in clusters}
    assert all(cluster["links"] and cluster["device"] for cluster in clusters)


def test_topology_show_names_levels_facts_and_sources(capsys):
    assert cli.main(["topology", "show", "dgx-h100:4"]) == 0
    out = capsys.readouterr().out
    for fact in ("32 x h100", "4 nodes", "450 GB/s", "infiniband", "bf16 peak", "989 TFLOP/s", "data sheet"):
        assert fact in out, fact
    assert max(map(len, out.splitlines())) <= 100


def test_topology_show_as_json(capsys):
    assert cli.main(["topology", "show", "dgx-h100", "--nodes", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["devices"], document["nodes"]) == (32, 4)
    assert document["device"]["peak_flops"]["bf16"] == 989e12
    assert [level["size"] for level in document["levels"]] == [8, 4]


# --------------------------------------------------------------------------- how it ends


def fails_with(error: BaseException) -> Answer:
    def answer(**_: Any) -> Any:
        raise error

    return answer


def test_a_bug_is_called_one_and_its_traceback_kept(search, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    search(fails_with(KeyError("tp")))
    assert cli.main(SUGGEST) == 1
    out, err = capsys.readouterr()
    [file] = tmp_path.glob("tpplan-*.txt")
    assert out == "" and "Traceback" not in err
    assert "this is a bug in tpplan: KeyError: 'tp'" in err and str(file) in err
    assert file.read_text().startswith("tpplan suggest model.py -t dgx-h100:8\n")
    assert "Traceback" in file.read_text()


def test_debug_shows_the_traceback(search, capsys):
    search(fails_with(KeyError("tp")))
    assert cli.main(["--debug", *SUGGEST]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_failed_solver_is_no_bug(search, capsys):
    search(fails_with(SolverError("highs: unbounded")))
    assert cli.main(SUGGEST) == 1
    assert capsys.readouterr().err == "tpplan: error: highs: unbounded\n"


def test_an_interrupt_is_quiet(search, capsys):
    search(fails_with(KeyboardInterrupt()))
    assert cli.main(SUGGEST) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tpplan {tpplan.__version__}\n"


COMMANDS = [[], ["suggest"], ["estimate"], ["topology", "list"], ["topology", "show"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_ends_with_an_example(capsys, command: list[str]):
    assert cli.main([*command, "--help"]) == 0
    below_the_last_box = capsys.readouterr().out.rpartition("\u2570")[2]
    assert f"tpplan {' '.join(command)}" in below_the_last_box


# --------------------------------------------------------------------------- as a process


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tpplan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from tpplan.cli import main; main(['--help']); "
        "print(sorted({'torch', 'numpy', 'pulp', 'pydantic', 'yaml', 'networkx'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_help_takes_a_moment():
    """At most twice the processor time of an empty typer command whose help is as rich."""
    empty = "import typer; app = typer.Typer(rich_markup_mode='rich'); app.command()(lambda: None); app()"
    commands = ([sys.executable, "-c", empty, "--help"], [sys.executable, "-m", "tpplan", "--help"])
    taken_s = [min(processor_s(command) for _ in range(3)) for command in commands]
    assert taken_s[1] <= 2 * taken_s[0], taken_s


def processor_s(command: list[str]) -> float:
    """Of the whole process; what else the machine does is not counted."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def test_topology_commands_load_no_torch():
    code = (
        "import sys; from tpplan.cli import main; main(['topology', 'show', 'dgx-h100']); "
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"


def test_a_closed_pipe_is_no_bug():
    command = f"{sys.executable} -m tpplan topology show dgx-h100 | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.stderr == ""


SLEEPING = """
import sys, time, types
from tpplan import cli
from tpplan.cli.request import COMPARE_LIMIT_S
stand_in = types.ModuleType("tpplan.planner.suggest")
stand_in.suggest = lambda *_, **__: (print("searching", flush=True), time.sleep(60))
sys.modules["tpplan.planner.suggest"] = stand_in
sys.argv = ["tpplan", "suggest", "model.py", "-t", "dgx-h100"]
sys.exit(cli.main())
"""


def test_control_c_ends_quietly():
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr and process.stderr.readline() == "searching\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (130, "", "")
