"""Ops without a rule are named with their share, line and remedy; `trace` lists every op and module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tpplan.cli import main
from tpplan.planner.coverage import by_module, by_target, covered_flops, in_words, uncovered
from tpplan.planner.fold import build
from tpplan.planner.graph import Graph
from tpplan.planner.trace import trace_source
from tpplan.topologies import load

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        y = F.gelu(self.up(x))
        y = {op}
        return x + self.down(y)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.mean()

def build_model():
    return Model()

def example_inputs(batch, seq):
    return (torch.zeros(batch, seq, 64),)
"""
STRANGE = "torch.erfinv(torch.special.i1e(y))"
"""Two element-wise functions, one of which no model trains with and no rule describes."""
WITHOUT_RULE = "aten.special_i1e.default"
LINE = next(n for n, line in enumerate(MODEL.splitlines(), 1) if "{op}" in line)


def model_file(folder: Path, op: str = "y") -> str:
    path = folder / "model.py"
    path.write_text(MODEL.format(op=op))
    return str(path)


def graph(folder: Path, op: str = "y") -> Graph:
    return build(trace_source(model_file(folder, op), seq_len=16))


def test_ops_are_counted_over_the_whole_depth(tmp_path: Path):
    known = graph(tmp_path)
    linear = next(group for group in by_target(known) if group.key == "aten.linear.default")
    assert (linear.count, linear.kind) == (8, "gemm")
    assert linear.flops == 4 * 2 * (2 * 16 * 64 * 256)
    up = next(group for group in by_module(known) if group.key == "layers.*.up")
    assert (up.count, up.kind, up.flops) == (4, "Linear", 4 * 2 * 16 * 64 * 256)
    assert covered_flops(known) == 1.0


def test_an_op_without_a_rule_is_named_with_its_share_its_line_and_what_to_do(tmp_path: Path):
    strange = graph(tmp_path, STRANGE)
    assert strange.unknown == (f"{WITHOUT_RULE} at model.py:{LINE}",)
    assert 0.9 < covered_flops(strange) < 1.0
    (op,) = uncovered(strange, load("dgx-h100:1").device)
    assert (op.target, op.where, op.count) == (WITHOUT_RULE, f"model.py:{LINE}", 4)
    assert 0.0 < op.time_share < 1.0
    words = in_words(op)
    assert words.startswith(f"no sharding rule for {WITHOUT_RULE} at model.py:{LINE} ({op.time_share:.1%}")
    assert "@rule from tpplan.planner.rules" in words


def test_suggest_warns_and_strict_refuses(tmp_path: Path, capsys: pytest.CaptureFixture):
    file = model_file(tmp_path, STRANGE)
    common = ["suggest", file, "-t", "dgx-h100:1", "--seq-len", "16", "--global-batch", "8", "--no-cache"]
    assert main([*common, "--json"]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert any(f"{WITHOUT_RULE} at model.py:{LINE}" in warning for warning in warnings)
    assert main([*common, "--strict"]) == 2
    assert f"no sharding rule for {WITHOUT_RULE} at model.py:{LINE}" in capsys.readouterr().err


def test_trace_prints_ops_and_modules(tmp_path: Path, capsys: pytest.CaptureFixture):
    file = model_file(tmp_path, STRANGE)
    assert main(["trace", file, "--seq-len", "16", "--no-cache", "--ops"]) == 0
    text = capsys.readouterr().out
    for wanted in (
        "aten.linear.default",
        WITHOUT_RULE,
        "layers.*.down",
        f"model.py:{LINE}",
        "of the FLOPs lie",
    ):
        assert wanted in text
    assert main(["trace", file, "--seq-len", "16", "--no-cache", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {op["name"]: op["rule"] for op in document["ops"]}[WITHOUT_RULE] is False
    assert [block["count"] for block in document["blocks"]] == [4, 1]
    assert main(["trace", file, "--seq-len", "16", "--no-cache", "--strict"]) == 2
