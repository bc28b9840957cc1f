"""The targets' own parsers take the exports, where they are installed."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tpplan.planner.mesh import Mesh
from tpplan.planner.plan import ParameterPlacement
from tpplan.report.exporters import export

SAMPLES = Path(__file__).parents[1] / "core" / "sample_plan.py"


def samples() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sample_plan", SAMPLES)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weight(fqn: str, cut: int) -> ParameterPlacement:
    return ParameterPlacement(
        fqn=f"layers.*.{fqn}.weight", shape=(64, 64), dims=("a", "b"), placements=(("tp", f"S(x)@{cut}"),)
    )


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_accelerate_reads_its_yaml(zero_stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.parallelism_config import ParallelismConfig

    file = tmp_path / "accelerate.yaml"
    file.write_text(
        export(replace(samples().llama3_8b(), zero_stage=zero_stage), "accelerate").files[file.name]
    )
    config: Any = load_config_from_file(str(file))
    assert (config.num_processes, config.num_machines, config.mixed_precision) == (64, 8, "bf16")
    assert config.fsdp_config["fsdp_reshard_after_forward"] is (zero_stage == 3)
    sizes = {name.removeprefix("parallelism_config_"): n for name, n in config.parallelism_config.items()}
    assert ParallelismConfig(**sizes).total_size == 64


def test_accelerate_launch_understands_it(tmp_path: Path):
    pytest.importorskip("accelerate")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    file = tmp_path / "accelerate.yaml"
    file.write_text(export(replace(samples().llama3_8b(), zero_stage=3), "accelerate").files[file.name])
    args = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    args = _validate_launch_command(args)[0]
    assert (args.fsdp_version, str(args.parallelism_config_tp_size)) == (2, "2")


def test_transformers_knows_every_style():
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    names = {"q": "self_attn.q_proj", "o": "self_attn.o_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    cuts = {"q": 0, "o": 1, "up": 0, "down": 1}
    plan = samples().llama3_8b()
    styles = json.loads(
        export(
            replace(plan, parameters=tuple(weight(names[key], cut) for key, cut in cuts.items())), "hf"
        ).files["tp_plan.json"]
    )
    assert set(styles.values()) <= set(ALL_PARALLEL_STYLES.keys())
    assert styles.items() <= (LlamaConfig.base_model_tp_plan or {}).items()


def test_deepspeed_reads_its_json():
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    plan = samples().llama3_8b()
    alone = replace(
        plan, mesh=Mesh(), zero_stage=3, num_microbatches=2, job=replace(plan.job, global_batch=2)
    )
    config = DeepSpeedConfig(json.loads(export(alone, "deepspeed").files["ds_config.json"]))
    assert (config.zero_optimization_stage, config.gradient_accumulation_steps) == (3, 2)
