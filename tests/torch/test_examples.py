"""The bundled examples: published sizes, a trace on meta, and small ones run for real."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tpplan.planner.trace import trace_source
from tpplan.planner.trace.source import python_file

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {
    "mlp": 784 * 4096 + 4096 + 4096 * 10 + 10,
    "gpt2": 124_439_808,
    "gpt3_175b": 174_615_846_912,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mixtral_8x7b": 46_702_792_704,
    "recommender": 205_127_205_761,
}
"""Parameters, tied ones once: those of the published checkpoints, GPT-3's vocabulary padded to 51,200."""
LAYERS = {
    "gpt2": 12,
    "gpt3_175b": 96,
    "llama3_8b": 32,
    "llama3_70b": 80,
    "llama3_405b": 126,
    "mixtral_8x7b": 32,
}
LIBRARIES = {"gpt", "llama"}
"""Files that hold a model for others, not one of their own."""


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SIZES) | LIBRARIES


@pytest.mark.parametrize("name", SIZES)
def test_examples_have_their_published_size_and_trace(name: str):
    graph = trace_source(str(EXAMPLES / f"{name}.py"), seq_len=128)
    assert graph.parameters == graph.trainable_parameters == SIZES[name]
    assert graph.warnings == ()
    assert graph.name == name
    assert [(repeat.traced, len(repeat.classes)) for repeat in graph.repeats] == (
        [(2, LAYERS[name])] if name in LAYERS else []
    )
    assert graph.values[graph.output].shape == ()


@pytest.mark.parametrize("name", sorted(set(SIZES) - {"mixtral_8x7b"}))  # grouped products are bf16 only
def test_examples_trace_in_single_precision_and_for_serving(name: str):
    graph = trace_source(str(EXAMPLES / f"{name}.py"), seq_len=64, batch=1, dtype="fp32", mode="serve")
    assert {value.dtype for value in graph.values.values() if value.kind == "parameter"} == {"float32"}


def test_the_largest_model_traces_in_little_memory():
    code = (
        "from tpplan.planner.trace import trace_source; import resource\n"
        f"trace_source({str(EXAMPLES / 'llama3_405b.py')!r}, seq_len=8192)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(ran.stdout) * 1024 < 1_000_000_000  # Linux counts in KiB


# ---------------------------------------------------------------------------- small ones, for real


def small_gpt() -> tuple[nn.Module, Callable, int]:
    """A small GPT-2, its loss and its vocabulary."""
    with python_file(EXAMPLES / "gpt.py") as gpt:
        config = gpt.Config(layers=2, hidden=64, heads=4, vocab=101, positions=16, dropout=0.1)
        return gpt.GPT(config), gpt.loss, 101


def small_llama() -> tuple[nn.Module, Callable, int]:
    """A small Llama, its loss and its vocabulary."""
    with python_file(EXAMPLES / "llama.py") as llama:
        config = llama.Config(layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=101)
        return llama.Llama(config), llama.loss, 101


def small_mixtral() -> tuple[nn.Module, Callable, int]:
    """A small Mixtral, its loss and its vocabulary."""
    with python_file(EXAMPLES / "mixtral_8x7b.py") as mixtral:
        config = mixtral.Config(layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=101, experts=4)
        return mixtral.Mixtral(config), mixtral.loss, 101


@pytest.mark.parametrize("make", [small_gpt, small_llama, small_mixtral])
def test_language_models_learn_a_sequence(make: Callable):
    torch.manual_seed(0)
    model, loss, vocab = make()
    tokens = torch.randint(0, vocab, (2, 16))
    for weight in model.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        losses.append(loss(model(tokens), (tokens,)))
        losses[-1].backward()
        optimizer.step()
    assert losses[0].item() == pytest.approx(math.log(vocab), rel=0.1)
    assert losses[-1] < 0.8 * losses[0]
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize("make", [small_gpt, small_llama, small_mixtral])
def test_language_models_do_not_look_ahead(make: Callable):
    torch.manual_seed(0)
    model, _, vocab = make()
    tokens = torch.randint(0, vocab, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % vocab
    with torch.no_grad():
        before, after = model.eval()(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_the_last_position_has_no_target():
    model, loss, vocab = small_llama()
    tokens = torch.randint(0, vocab, (2, 16))
    logits = model(tokens)
    by_hand = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss(logits, (tokens,)), by_hand)


def test_rotary_attention_depends_on_distance_only():
    with python_file(EXAMPLES / "llama.py") as llama:
        q, k = torch.randn(2, 1, 1, 1, 16).unbind(0)
        cos, sin = llama.rotary(torch.zeros(1, 12, 16), 16, 10_000.0)
        turned = [llama.rotate(x.expand(1, 1, 12, 16), cos, sin)[0, 0] for x in (q, k)]
    scores = turned[0] @ turned[1].T
    torch.testing.assert_close(scores.diagonal(2), scores[0, 2].expand(10))


def test_grouped_experts_are_each_experts_mlp_on_its_own_tokens():
    torch.manual_seed(0)
    with python_file(EXAMPLES / "mixtral_8x7b.py") as mixtral:
        moe = mixtral.MoE(mixtral.Config(hidden=32, ffn=48, experts=4))
    x = torch.randn(2, 8, 32)
    scores, chosen = moe.router(x).topk(2, dim=-1)
    weights = scores.softmax(-1)
    by_hand = torch.zeros_like(x)
    for b in range(2):
        for s in range(8):
            for weight, e in zip(weights[b, s], chosen[b, s], strict=True):
                hidden = F.silu(x[b, s] @ moe.gate[e]) * (x[b, s] @ moe.up[e])
                by_hand[b, s] += weight * (hidden @ moe.down[e])
    torch.testing.assert_close(moe(x), by_hand)


def test_a_small_recommender_trains():
    torch.manual_seed(0)
    with python_file(EXAMPLES / "recommender.py") as recommender:
        model = recommender.Recommender(tables=(50, 20, 5), dim=16, hidden=32)
        model.bottom = recommender.mlp(recommender.DENSE_FEATURES, 32, 16)
    dense, clicks = torch.randn(64, 13), torch.randint(0, 2, (64,)).float()
    ids = torch.stack([torch.randint(0, rows, (64,)) for rows in (50, 20, 5)], dim=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        losses.append(model(dense, ids, clicks))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


def test_the_user_table_exceeds_any_device():
    graph = trace_source(str(EXAMPLES / "recommender.py"), seq_len=1)
    table = max(
        (value for value in graph.values.values() if value.kind == "parameter"), key=lambda v: v.bytes
    )
    assert (table.fqn, table.shape, table.bytes) == ("tables.0.weight", (1_600_000_000, 128), 409_600_000_000)
