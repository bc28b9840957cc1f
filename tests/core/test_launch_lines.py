"""Launch lines of other frameworks become choices to check."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tpplan.planner.errors import OptionError
from tpplan.planner.launch_lines import read
from tpplan.planner.launch_lines.megatron import layout_cells
from tpplan.planner.options import check_pins, pins_of
from tpplan.planner.plan import Plan
from tpplan.report.exporters import export

from .sample_plan import gpt3_175b, llama3_8b, mixtral_8x7b

MEGATRON = """torchrun --nnodes 8 --nproc-per-node=8 pretrain_gpt.py \\
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 \\
    --num-layers 32 --micro-batch-size 1 --global-batch-size 128 --seq-length 8192 \\
    --sequence-parallel --use-distributed-optimizer --bf16 --recompute-activations"""


def test_a_megatron_line():
    line = read(MEGATRON)
    assert line.dialect == "megatron"
    assert line.pins == {
        "pp": 4, "cp": 1, "ep": 1, "tp": 8, "dp": 2, "zero": 1, "micro_batch": 1,
        "recompute": "selective", "schedule": "1f1b", "virtual_stages": 1,
    }  # fmt: skip
    assert line.options == {
        "global_batch": 128, "seq_len": 8192, "dtype": "bf16", "optimizer": "adamw", "framework": "megatron",
    }  # fmt: skip
    assert line.notes == ()


@pytest.mark.parametrize("plan", [llama3_8b(), replace(gpt3_175b(), schedule="interleaved"), mixtral_8x7b()])
def test_what_is_exported_to_megatron_reads_back(plan: Plan):
    script = export(plan, "megatron").files["megatron_args.sh"]
    flags = script.split("=(\n")[1].rstrip(")\n")
    nodes = plan.cluster.nodes
    line = read(f"torchrun --nnodes {nodes} --nproc-per-node 8 pretrain_gpt.py {flags}")
    pins = pins_of(plan)
    assert {key: line.pins[key] for key in pins if key != "recompute"} == {
        key: value for key, value in pins.items() if key != "recompute"
    }
    assert line.options["global_batch"] == plan.job.global_batch
    check_pins(line.pins, devices=plan.cluster.devices, global_batch=plan.job.global_batch)


@pytest.mark.parametrize(
    ("flags", "virtual"),
    [
        ("--num-virtual-stages-per-pipeline-rank 4", 4),
        ("--num-layers 32 --num-layers-per-virtual-pipeline-stage 2", 4),
        ("--pipeline-model-parallel-layout 'Et*3|(tt|)*6L'", 2),
        ("", 1),
    ],
)
def test_three_ways_to_say_virtual_stages(flags: str, virtual: int):
    assert read(f"--pipeline-model-parallel-size 4 {flags}").pins["virtual_stages"] == virtual


@pytest.mark.parametrize(
    ("layout", "cells"), [("Et*3|(tt|)*29,m|L", 32), ("Et|t|tL", 3), ("EtL", 1), ("(t|)*2(tt|)*3L", 6)]
)
def test_stages_of_a_layout(layout: str, cells: int):
    assert layout_cells(layout) == cells


def test_megatron_fsdp_is_zero():
    line = "--micro-batch-size 1 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads"
    assert read(line).pins["zero"] == 2
    assert read("--micro-batch-size 1 --use-torch-fsdp2").pins["zero"] == 3


def test_a_torchtitan_line():
    line = read(
        "torchrun --nproc_per_node=8 --nnodes=4 -m torchtitan.train --module llama3 --config llama3_8b "
        "--parallelism.tensor_parallel_degree 4 --parallelism.pipeline_parallel_degree=2 "
        "--parallelism.pipeline_parallel_schedule Interleaved1F1B --training.max_context_length 8192 "
        "--training.num_tokens_per_microbatch_per_dp_rank 16384 --training.num_tokens_per_train_step 524288"
    )
    assert line.dialect == "torchtitan"
    assert line.pins == {
        "pp": 2, "cp": 1, "ep": 1, "tp": 4, "dp": 4, "zero": 2, "micro_batch": 2, "schedule": "interleaved",
    }  # fmt: skip
    assert line.options == {"global_batch": 64, "seq_len": 8192, "framework": "torch"}
    assert line.notes == (
        "what is recomputed is chosen here: the line does not name none, selective or full",
    )


@pytest.mark.parametrize("words", ["activation_checkpoint:full", "--activation_checkpoint.mode full"])
def test_torchtitans_recomputation_is_a_subcommand_or_a_flag(words: str):
    assert read(f"--parallelism.tensor_parallel_degree 2 {words}").pins["recompute"] == "full"


def test_torchtitans_experts_live_on_its_data_parallel_ranks():
    line = read("--parallelism.data_parallel_shard_degree 16 --parallelism.expert_parallel_degree 8")
    assert (line.pins["dp"], line.pins["ep"], line.pins["zero"]) == (2, 8, 3)


def test_a_deepspeed_line(tmp_path: Path):
    config = {
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }  # fmt: skip
    (tmp_path / "ds.json").write_text(json.dumps(config))
    line = read(f"deepspeed --num_nodes 2 --num_gpus 8 train.py --deepspeed_config {tmp_path / 'ds.json'}")
    assert line.pins == {"pp": 1, "cp": 1, "ep": 1, "tp": 1, "dp": 16, "zero": 3}
    assert line.options == {"global_batch": 64, "dtype": "bf16", "framework": "deepspeed"}
    assert any("offload_optimizer to cpu is not modelled" in note for note in line.notes)


def test_a_vllm_line():
    line = read("vllm serve meta-llama/Llama-3.1-70B -tp 8 --pipeline-parallel-size 2 --dtype bfloat16")
    assert line.pins == {"pp": 2, "dp": 1, "tp": 8}
    assert line.options == {"dtype": "bf16"}
    assert "serving line" in line.notes[0]


def test_a_launcher_that_says_no_number_pins_no_dp():
    for count in ("auto", "$GPUS"):
        assert "dp" not in read(f"torchrun --nproc-per-node {count} x.py --micro-batch-size 1").pins


def test_choices_that_are_not_carried_over_are_said():
    notes = " ".join(
        read(
            "--tensor-model-parallel-size 2 --use-tp-pp-dp-mapping --recompute-granularity full "
            "--recompute-method block --recompute-num-layers 4 --decoder-first-pipeline-num-layers 3 "
            "--expert-tensor-parallel-size 4"
        ).notes
    )
    for word in ("--sequence-parallel", "tp-pp-dp", "block", "which layers", "--expert-tensor-parallel-size"):
        assert word in notes


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "the launch line is empty"),
        ("echo 'half", "No closing quotation"),
        ("python train.py --lr 1e-4", "no launch line of megatron, torchtitan, deepspeed, vllm"),
        ("--tensor-model-parallel-size eight", "--tensor-model-parallel-size eight: expected a whole number"),
        ("--tensor-model-parallel-size", "(nothing): expected a whole number"),
        (
            "torchrun --nproc-per-node 8 x.py --tensor-model-parallel-size 3",
            "8 processes do not divide by tp=3",
        ),
        ("--micro-batch-size 1 --optimizer lion", "--optimizer lion: expected one of adam"),
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout EtL", "pp=4 does not divide"),
        (
            "--pipeline-model-parallel-size 4 --num-layers 30 --num-layers-per-virtual-pipeline-stage 2",
            "--num-layers 30 does not divide by pp=4 x",
        ),
        ("deepspeed x.py --deepspeed_config nowhere.json", "nowhere.json"),
        ("--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule X", "schedule X"),
    ],
)
def test_bad_lines_name_what_is_wrong(line: str, says: str):
    with pytest.raises(OptionError, match="--from-args") as error:
        read(line)
    assert says in str(error.value)
