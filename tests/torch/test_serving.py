"""Serving plans: published runs, reported cases, and what must hold whatever the numbers."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tpplan import cli
from tpplan.planner.errors import ModelError, OptionError
from tpplan.planner.estimate import collectives
from tpplan.planner.estimate.engines import ENGINES
from tpplan.planner.graph import Graph
from tpplan.planner.mesh import Mesh
from tpplan.planner.options import job_from_options
from tpplan.planner.plan import Infeasible, Plan
from tpplan.planner.plan_file import from_yaml, to_yaml
from tpplan.planner.serve import plan_serving
from tpplan.planner.serve.phases import decoding, in_phase
from tpplan.planner.serve.pricing import Pricer
from tpplan.planner.serve.replica import spans
from tpplan.planner.serve.search import ORDER, Served, ServeProblem, price_mesh
from tpplan.planner.topology import Topology
from tpplan.topologies import load

from benchmarks import serving as benchmark
from benchmarks.row_models import Dims

GIB = 2.0**30
REMAKE = "run python -m benchmarks.serving --docs docs/serving.md"
COMMON = {"positions": "rotary", "layer_norm": False, "bias": False, "tied": False, "gated": True,
          "seq_len": 1024}  # fmt: skip
LLAMA_8B = Dims(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256, **COMMON
)  # fmt: skip
MISTRAL_7B = replace(LLAMA_8B, vocab=32000)
CODE_34B = replace(LLAMA_8B, layers=48, hidden=8192, heads=64, ffn=22016, vocab=32000)
MIXTRAL = replace(MISTRAL_7B, experts=8, experts_per_token=2, expert_ffn=14336)


def plan(dims: Dims, cluster: str, *, engine: str = "vllm", concurrency: int | None = None, **asked) -> Plan:
    topology = load(cluster)
    found = plan_serving(
        benchmark.graph_of(dims),
        topology,
        job(topology, engine=engine, concurrency=concurrency, **asked),
        concurrency=concurrency,
    )
    assert isinstance(found, Plan), found
    return found


def job(topology: Topology, *, engine: str, concurrency: int | None, **asked):
    return job_from_options(
        mode="serve",
        framework=engine,
        global_batch=concurrency,
        devices=topology.devices,
        device=topology.device,
        **asked,
    )


# --------------------------------------------------------------------------- what was measured


def test_published_runs_are_predicted():
    served = [benchmark.predict(row) for row in benchmark.read(benchmark.RUNS)]
    found = benchmark.summary(served)
    assert found["rows"] == 26
    assert found["median"] < 0.06 and found["mean"] < 0.10, found
    order = [
        (a, b) for a, b in itertools.combinations(served, 2) if a.model == b.model and a.dtype == b.dtype
    ]
    agree = sum((a.measured_s < b.measured_s) == (a.predicted_s < b.predicted_s) for a, b in order)
    assert agree > 0.9 * len(order)


@pytest.mark.slow
def test_the_committed_page_is_what_the_benchmark_writes():
    served = [benchmark.predict(row) for row in benchmark.read(benchmark.RUNS)]
    page = Path(benchmark.__file__).parents[1] / "docs" / "serving.md"
    assert page.read_text() == benchmark.markdown(served), (
        "run python -m benchmarks.serving --docs docs/serving.md"
    )


@pytest.mark.parametrize(("length", "cache_gib", "tokens"), [(29_000, 2.89, 23_648), (20_000, 3.81, 31_232)])
def test_the_cache_that_an_8b_model_leaves_on_24_gib(length: int, cache_gib: float, tokens: int):
    """vllm-project/vllm issue 10517: Llama-3.1-8B on an RTX 3090 of 23.58 GiB, prompts not cut."""
    topology = load("8x-rtx4090")
    topology = replace(topology, device=replace(topology.device, memory_bytes=int(23.58 * GIB)))
    engine = replace(ENGINES["vllm"], chunk_tokens=length)
    served = on_one_mesh(LLAMA_8B, topology, Mesh(dp=8, order=ORDER), 1, engine=engine, prompt_len=length)
    held = served.holdings[0]
    assert held.cache_bytes_per_token == 131_072
    assert held.cache_budget_bytes / GIB == pytest.approx(cache_gib, rel=0.02)
    assert held.cache_budget_bytes / held.cache_bytes_per_token == pytest.approx(tokens, rel=0.02)
    assert (held.sequences(length) >= 1) == (length == 20_000)


def on_one_mesh(dims: Dims, topology: Topology, mesh: Mesh, sequences: int, **asked) -> Served:
    engine, dtype = asked.pop("engine", ENGINES["vllm"]), asked.pop("dtype", "bf16")
    graph = benchmark.graph_of(dims)
    model = collectives.model(topology)
    problem = ServeProblem(
        graph=graph,
        topology=topology,
        engine=engine,
        prompt_len=asked.get("prompt_len", 1024),
        output_len=asked.get("output_len", 1),
        concurrency=sequences,
        dtype=dtype,
        objective="throughput",
        tp_sizes=(mesh.tp,),
        ep_sizes=(1,),
    )
    served = price_mesh(problem, mesh, sequences, Pricer(graph, topology, engine, model, dtype), model.time)
    assert served is not None
    return served


def test_throughput_wants_one_device_a_replica_when_the_model_fits_one():
    """vllm-project/vllm issue 1888: Mistral-7B made more tokens a second on one A100 than on eight."""
    assert plan(MISTRAL_7B, "dgx-a100-80").mesh.dp == 8


@pytest.mark.parametrize(("cluster", "fastest"), [("dgx-a100-80", 2), ("dgx-h100", 1)])
def test_where_the_host_launches_every_kernel_latency_wants_few_devices(cluster: str, fastest: int):
    """text-generation-inference issue 1315, tp 1, 2, 4: A100 46.8, 29.4, 32.1 ms, H100 28.0, 28.0, 31.8."""
    topology = load(cluster)
    times = [
        on_one_mesh(
            CODE_34B, topology, Mesh(tp=tp, order=ORDER), 1, engine=ENGINES["tgi"], output_len=64
        ).decode_s
        for tp in (1, 2, 4)
    ]
    assert (1, 2, 4)[times.index(min(times))] == fastest, times


# --------------------------------------------------------------------------- what must hold


@given(st.lists(st.integers(1, 50), min_size=2, max_size=8), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_the_cut_into_stages_is_the_best(times: list[int], stages: int):
    stages = min(stages, len(times))
    cuts = spans([float(t) for t in times], stages)
    assert [c.first for c in cuts[1:]] == [c.stop for c in cuts[:-1]] and cuts[-1].stop == len(times)
    slowest = max(sum(times[c.first : c.stop]) for c in cuts)
    every = itertools.combinations(range(1, len(times)), stages - 1)
    edges = [(0, *middle, len(times)) for middle in every]
    assert slowest == min(max(sum(times[a:b]) for a, b in itertools.pairwise(e)) for e in edges)


def test_decoding_reads_every_weight_and_the_whole_cache():
    graph = in_phase(benchmark.graph_of(LLAMA_8B), decoding(cached=4096, sequences=8), dtype="bf16")
    attention = next(op for op in graph.blocks["layer"].ops if op.family == "attention")
    sizes = {dim.label: dim.size for dim in attention.dims}
    assert sizes["t"] == 4096 and all(d.size == 1 for d in attention.dims if d.label == "s")
    assert attention.causal == ()
    assert not any(read.grad for block in graph.blocks.values() for op in block.ops for read in op.reads)


def test_more_sequences_make_more_tokens_and_longer_waits():
    times = [
        on_one_mesh(LLAMA_8B, load("dgx-h100"), Mesh(dp=8, order=ORDER), n, output_len=256)
        for n in (1, 16, 128)
    ]
    assert times[0].token_time_s < times[1].token_time_s < times[2].token_time_s
    assert times[0].tokens_per_s < times[1].tokens_per_s < times[2].tokens_per_s


def test_experts_spread_over_devices_and_weights_are_stored_once():
    found = plan(MIXTRAL, "dgx-h100", concurrency=64)
    assert found.mesh.ep * found.mesh.tp == 8
    weights = found.predicted.memory_by_kind_bytes["parameters"]
    assert weights < 1.35 * 2 * found.model.parameters / 8, "experts are not split"


def test_no_candidate_beats_the_plan():
    found = plan(LLAMA_8B, "dgx-h100")
    assert found.serving is not None
    for other in found.alternatives:
        assert other.tokens_per_s is not None and other.tokens_per_s <= found.serving.tokens_per_s
        sequences = other.micro_batch * other.num_microbatches * other.mesh.dp
        assert other.tokens_per_s == pytest.approx(sequences / other.step_time_s)


def test_a_serving_plan_survives_its_file():
    found = plan(LLAMA_8B, "dgx-h100", concurrency=64, objective="latency")
    assert from_yaml(to_yaml(found), source="plan.yaml") == found
    assert sum(part.seconds for part in found.predicted.waterfall) == pytest.approx(
        found.predicted.step_time_s
    )
    for stage in found.stages:
        assert stage.peak_memory_bytes <= found.cluster.device_memory_bytes


def test_eight_bit_weights_halve_what_layers_store():
    half, whole = (
        on_one_mesh(CODE_34B, load("dgx-h100"), Mesh(dp=4, tp=2, order=ORDER), 8, dtype=dtype)
        for dtype in ("fp8", "bf16")
    )
    assert 0.5 < half.holdings[0].weights_bytes / whole.holdings[0].weights_bytes < 0.55
    assert half.decode_s < whole.decode_s


def test_sequences_that_nobody_asked_for_make_no_tokens():
    """Four sequences keep four of eight small replicas busy: larger ones make more tokens."""
    few = plan(LLAMA_8B, "dgx-h100", concurrency=4)
    assert few.serving is not None and few.serving.concurrency == 4 and few.mesh.dp <= 4
    assert few.serving.tokens_per_s == pytest.approx(4 / few.serving.token_time_s)


def test_latency_is_that_of_one_sequence_unless_more_are_asked_for():
    alone, some = (plan(LLAMA_8B, "dgx-h100", objective="latency", concurrency=n).serving for n in (None, 16))
    assert alone is not None and some is not None
    assert (alone.concurrency, some.concurrency) == (1, 16)
    assert alone.token_time_s < some.token_time_s


def test_what_cannot_be_served_is_said():
    topology = load("8x-rtx4090")
    found = plan_serving(
        benchmark.graph_of(replace(CODE_34B, ffn=20 * CODE_34B.ffn)),
        topology,
        job(topology, engine="vllm", concurrency=None),
        concurrency=None,
    )
    assert isinstance(found, Infeasible) and found.short_by_bytes > 0
    with pytest.raises(OptionError, match="zero"):
        plan_serving(
            benchmark.graph_of(LLAMA_8B),
            topology,
            job(topology, engine="vllm", concurrency=1),
            concurrency=1,
            pins={"zero": 1},
        )


def test_a_model_that_does_not_decode_is_refused():
    graph = benchmark.graph_of(LLAMA_8B)
    topology = load("dgx-h100")
    with pytest.raises(ModelError, match="no causal attention"):
        plan_serving(
            without_attention(graph), topology, job(topology, engine="vllm", concurrency=1), concurrency=1
        )


def without_attention(graph: Graph) -> Graph:
    blocks = {
        name: replace(block, ops=tuple(op for op in block.ops if op.family != "attention"))
        for name, block in graph.blocks.items()
    }
    return replace(graph, blocks=blocks)


def test_the_command_line_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "plan.yaml"
    example = str(Path(benchmark.__file__).parents[1] / "examples" / "llama3_8b.py")
    command = [
        "suggest",
        example,
        "-t",
        "dgx-h100",
        "--mode",
        "serve",
        "--global-batch",
        "64",
        "-o",
        str(file),
    ]
    assert cli.main(command) == 0
    assert "tokens/s" in capsys.readouterr().out
    assert cli.main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["serving"]["concurrency"] == 64
    assert cli.main(["report", str(file)]) == 0
    assert "Time between two tokens" in capsys.readouterr().out
    for asked in (["explain"], ["compare", str(file)], ["why", "--set", "tp=8"]):
        assert cli.main([asked[0], str(file), *asked[1:]]) == 0
        out = capsys.readouterr().out
        assert "optimizer" not in out and "backward" not in out, asked
    assert cli.main(["estimate", example, "-t", "dgx-h100", "--plan", str(file), "--no-compare"]) == 0
    assert "tokens/s" in capsys.readouterr().out
    assert cli.main(["export", str(file), "--to", "megatron"]) == 2
    assert "for serving" in capsys.readouterr().err
    assert cli.main(["export", str(file), "--to", "vllm"]) == 0
    out, err = capsys.readouterr()
    assert "--tensor-parallel-size" in out and "training plan" not in err
