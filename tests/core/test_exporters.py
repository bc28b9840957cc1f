"""Exports say what the plan says, in each target's words; what a target lacks is stated or refused."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
from dataclasses import replace

import pytest
import yaml
from tpplan.planner.errors import OptionError, PlanError
from tpplan.planner.mesh import Mesh
from tpplan.planner.plan import ParameterPlacement, Plan
from tpplan.report.exporters import Exported, export, exporter, targets
from tpplan.report.exporters.facts import chunks, recompute_counts
from tpplan.report.exporters.megatron import layout
from tpplan.report.exporters.torchtitan import settings

from .sample_plan import ALL_PLANS, gpt3_175b, llama3_8b, mixtral_8x7b

TARGETS = [target.name for target in targets()]

TITAN_FIELDS = {
    "parallelism": {
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward",
        "tensor_parallel_degree", "enable_sequence_parallel", "pipeline_parallel_degree",
        "module_fqns_per_model_part", "pipeline_parallel_schedule", "num_pp_microbatches",
        "context_parallel_degree", "expert_parallel_degree",
    },
    "training": {
        "num_tokens_per_microbatch_per_dp_rank", "num_tokens_per_train_step", "max_context_length",
        "mixed_precision_param", "disable_cuda_graphs",
    },
}  # fmt: skip
"""Field names of torchtitan's ParallelismConfig and TrainingConfig (main, August 2026)."""


def gpt3() -> Plan:
    return replace(gpt3_175b(), schedule="interleaved")


def with_chunks(plan: Plan, *dealt: tuple[int, ...]) -> Plan:
    """The plan with its stages' layers dealt to virtual stages as given."""
    stages = tuple(
        replace(stage, chunk_layers=layers, layers=sum(layers))
        for stage, layers in zip(plan.stages, dealt, strict=True)
    )
    mesh = replace(plan.mesh, pp=len(dealt))
    return replace(plan, stages=stages, mesh=mesh, virtual_stages=len(dealt[0]))


def uneven() -> Plan:
    """Two pipeline ranks with three virtual stages each."""
    plan = gpt3()
    return with_chunks(replace(plan, stages=plan.stages[:2]), (6, 6, 5), (5, 5, 5))


def flags(script: str) -> dict[str, list[str]]:
    """The flags of the bash array in a script, with their values."""
    lines = [shlex.split(line) for line in script.split("=(\n", 1)[1].rstrip(")\n").splitlines()]
    return {line[0]: line[1:] for line in lines}


def megatron(plan: Plan) -> dict[str, list[str]]:
    return flags(export(plan, "megatron").files["megatron_args.sh"])


# --------------------------------------------------------------------------- the registry


def test_an_unknown_target_names_the_nearest():
    with pytest.raises(OptionError, match="--to megatro: unknown target; did you mean 'megatron'"):
        export(llama3_8b(), "megatro")


def test_a_second_exporter_of_a_name_is_refused():
    with pytest.raises(ValueError, match="two exporters are called 'vllm'"):
        exporter("vllm", "again")(lambda plan: Exported(files={}))


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", ALL_PLANS)
def test_every_target_exports_or_refuses_every_plan(to: str, name: str):
    try:
        exported = export(ALL_PLANS[name](), to)
    except OptionError as error:
        assert str(error).startswith(f"--to {to}: ")
        return
    assert exported.files and all(text.endswith("\n") for text in exported.files.values())
    assert exported == export(ALL_PLANS[name](), to)


@pytest.mark.parametrize("to", TARGETS)
def test_a_hostile_name_stays_in_its_comment(to: str):
    plan = llama3_8b()
    plan = replace(plan, model=replace(plan.model, name='x"""\nimport os; $(reboot) `id`\n'))
    for name, text in export(plan, to).files.items():
        if name.endswith(".py"):
            ast.parse(text)
        assert not any(line.startswith(("import os; $", "reboot")) for line in text.splitlines())


@pytest.mark.parametrize("to", ["megatron", "torchrun", "slurm", "vllm", "sglang", "torchtitan"])
def test_scripts_are_valid_bash(to: str):
    for name, text in export(gpt3(), to).files.items():
        if name.endswith((".sh", ".sbatch")):
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)


# --------------------------------------------------------------------------- layers of stages


def test_layers_of_virtual_stages_are_in_model_order():
    assert chunks(uneven()) == (6, 5, 6, 5, 5, 5)
    assert chunks(replace(with_chunks(uneven(), (6, 1), (5, 2)), schedule="zbv")) == (6, 5, 2, 1)
    assert chunks(gpt3()) == (3,) * 32


def test_layers_that_are_not_dealt_are_an_error():
    with pytest.raises(PlanError, match="does not say how a stage's 12 layers are dealt"):
        chunks(replace(gpt3(), virtual_stages=5))


def test_recompute_modes_are_counted_over_layers_alone():
    assert recompute_counts(gpt3()) == {"selective": 64, "none": 32}


# --------------------------------------------------------------------------- Megatron


def test_megatron_sizes_multiply_to_the_world():
    given = megatron(gpt3())
    sizes = [
        int(given[f"--{axis}-parallel-size"][0]) for axis in ("tensor-model", "pipeline-model", "context")
    ]
    assert sizes == [8, 8, 1]
    assert given["--global-batch-size"] == ["1536"]
    assert given["--num-virtual-stages-per-pipeline-rank"] == ["4"]
    assert {"--sequence-parallel", "--use-distributed-optimizer", "--bf16"} <= set(given)


def test_megatron_refuses_another_world_size():
    script = export(llama3_8b(), "megatron").files["megatron_args.sh"]
    run = subprocess.run(["bash"], input=script, env={"NNODES": "4"}, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (2, "this plan is for 64 processes, not 32\n")


def test_uneven_stages_become_a_layout():
    given = megatron(uneven())
    assert given["--pipeline-model-parallel-layout"] == ["Et*6|t*5|t*6|t*5|t*5|t*5L"]
    assert "--num-virtual-stages-per-pipeline-rank" not in given


def test_a_layout_names_embedding_and_loss_once():
    assert layout((1, 0, 3)) == "Et||t*3L"
    assert layout((4,)) == "Et*4L"


def test_zero_3_is_megatron_fsdp():
    given = megatron(replace(llama3_8b(), zero_stage=3))
    assert given["--data-parallel-sharding-strategy"] == ["optim_grads_params"]
    assert given["--ckpt-format"] == ["fsdp_dtensor"]


def test_padding_of_the_vocabulary_is_stated():
    exported = export(gpt3(), "megatron")
    assert any("128,256 is padded to 129,024" in deviation for deviation in exported.deviations)


def test_mixed_recompute_is_stated_with_its_cost():
    """64 of 96 layers recompute in 0.61 s: all of them would in 0.915 s."""
    deviations = export(gpt3(), "megatron").deviations
    assert any("64 of 96 layers" in d and "305 ms more a step" in d for d in deviations)


def test_another_order_of_axes_is_stated():
    plan = replace(llama3_8b(), mesh=Mesh(dp=32, tp=2, order=("tp", "pp", "dp", "cp", "ep")))
    assert any("other links than planned" in deviation for deviation in export(plan, "megatron").deviations)
    inside = replace(gpt3(), mesh=Mesh(dp=16, pp=8, tp=8, order=("dp", "cp", "ep", "pp", "tp")))
    assert "--use-tp-pp-dp-mapping" in megatron(inside)


def test_expert_parallelism_is_named():
    assert megatron(mixtral_8x7b())["--expert-model-parallel-size"] == ["8"]


def test_norms_split_over_the_batch_become_sequence_parallelism():
    plan = llama3_8b()
    splits = tuple(
        replace(split, dim="batch") if split.axis == "tp" and split.dim == "sequence" else split
        for split in plan.splits
    )
    plan = replace(plan, sequence_parallel=False, splits=splits)
    exported = export(plan, "megatron")
    assert "--sequence-parallel" in exported.files["megatron_args.sh"]
    assert any(
        "split over the batch; Megatron splits them over the sequence" in d for d in exported.deviations
    )


def test_an_embedding_split_over_hidden_is_stated():
    plan = llama3_8b()
    splits = tuple(replace(s, dim="hidden") if s.op == "embedding" else s for s in plan.splits)
    for to in ("megatron", "torchtitan", "nanotron"):
        deviations = export(replace(plan, splits=splits), to).deviations
        assert any("the embedding is split over hidden" in d for d in deviations)


# --------------------------------------------------------------------------- torchtitan


@pytest.mark.parametrize("name", ALL_PLANS)
def test_torchtitan_fields_exist(name: str):
    plan = ALL_PLANS[name]()
    for field, value in settings(replace(plan, schedule="interleaved") if plan.mesh.pp > 1 else plan):
        section, _, key = field.partition(".")
        assert section == "activation_checkpoint" or key in TITAN_FIELDS[section]
        assert section == "activation_checkpoint" or ast.literal_eval(value) is not None


def test_torchtitan_splits_modules_as_planned():
    parts = ast.literal_eval(dict(settings(uneven()))["parallelism.module_fqns_per_model_part"])
    assert [sum(name.startswith("layers.") for name in part) for part in parts] == [6, 5, 6, 5, 5, 5]
    assert (parts[0][0], parts[-1][-2:], parts[1][0]) == ("tok_embeddings", ["norm", "lm_head"], "layers.6")


def test_torchtitan_counts_tokens():
    given = dict(settings(llama3_8b()))
    assert given["training.num_tokens_per_train_step"] == str(128 * 8192)
    assert given["parallelism.data_parallel_shard_degree"] == "32"


# --------------------------------------------------------------------------- the others


def test_deepspeed_batches_multiply():
    plan = replace(llama3_8b(), mesh=Mesh(dp=64), num_microbatches=2)
    config = json.loads(export(plan, "deepspeed").files["ds_config.json"])
    product = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 64
    assert config["train_batch_size"] == product == 128


@pytest.mark.parametrize(
    ("plan", "to", "says"),
    [
        (gpt3(), "accelerate", "pp=8"),
        (gpt3(), "deepspeed", "no pipeline with tensor parallelism"),
        (replace(llama3_8b(), zero_stage=3), "deepspeed", "ZeRO-3"),
        (replace(llama3_8b(), mesh=Mesh(dp=64)), "hf", "the plan has tp=1"),
        (mixtral_8x7b(), "accelerate", "ep=8"),
        (replace(llama3_8b(), job=replace(llama3_8b().job, optimizer="adafactor")), "megatron", "adafactor"),
        (replace(llama3_8b(), job=replace(llama3_8b().job, dtype="fp16")), "torchtitan", "fp16"),
    ],
)
def test_what_cannot_be_run_is_refused(plan: Plan, to: str, says: str):
    with pytest.raises(OptionError, match=says):
        export(plan, to)


def test_a_tp_plan_follows_the_placements():
    plan = llama3_8b()
    head = ParameterPlacement(
        fqn="lm_head.weight",
        shape=(128256, 4096),
        dims=("vocab", "hidden"),
        placements=(("tp", "S(vocab)@0"),),
    )
    exported = export(replace(plan, parameters=(*plan.parameters, head)), "hf")
    assert json.loads(exported.files["tp_plan.json"]) == {
        "embed": "embedding_rowwise",
        "layers.*.attn.q": "colwise",
        "layers.*.mlp.down": "rowwise",
        "norm": "sequence_parallel",
        "lm_head": "colwise_gather_output",
    }


def test_nanotron_states_the_zero_stage_it_lacks():
    exported = export(replace(llama3_8b(), zero_stage=3), "nanotron")
    assert yaml.safe_load(exported.files["nanotron.yaml"])["optimizer"]["zero_stage"] == 1
    assert any("ZeRO-3" in d and "GiB more a device" in d for d in exported.deviations)


def test_another_schedule_is_stated_with_its_cost():
    assert any("ms more a step" in d for d in export(gpt3(), "nanotron").deviations if "interleaved" in d)


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_servers_say_that_this_is_a_training_plan(to: str):
    exported = export(mixtral_8x7b(), to)
    assert exported.deviations[0].startswith("this is a training plan")
    assert "8" in next(iter(flags(next(iter(exported.files.values()))).values())) or to == "vllm"


def test_cluster_wrappers_ask_for_the_plans_nodes():
    batch = export(gpt3(), "slurm").files["job.sbatch"]
    assert "#SBATCH --nodes=128\n" in batch and "#SBATCH --gpus-per-node=8\n" in batch
    job = yaml.safe_load(export(gpt3(), "kubernetes").files["pytorchjob.yaml"])
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert (replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == (1, 127)
