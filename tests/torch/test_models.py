"""Every family traces, folds as it should, counts as torch counts, and gets a plan."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode
from tpplan.planner.fold import build
from tpplan.planner.graph import Graph
from tpplan.planner.graph_cache import TraceOptions
from tpplan.planner.plan import Plan
from tpplan.planner.suggest import suggest
from tpplan.planner.trace import trace_source
from tpplan.planner.trace.huggingface import from_config

from .models import FAMILIES, Family

BATCH = 2
QUICK_PLANS = ("Two towers", "DLRM", "MLP", "LSTM classifier", "BERT large", "OPT 6.7B")
"""Families whose whole planning is part of the quick tests; each of the others takes seconds."""


def _cases(quick: tuple[str, ...] | None = None) -> Iterator[Any]:
    for name, family in FAMILIES.items():
        slow = family.package == "diffusers" or (quick is not None and name not in quick)
        marks = [pytest.mark.slow] if slow else []
        yield pytest.param(family, id=name, marks=marks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configurations")


def skip_without(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def config_file(family: Family, folder: Path) -> str:
    path = folder / f"{family.name.replace(' ', '_').replace('/', '_')}.json"
    path.write_text(json.dumps(family.config))
    return str(path)


@cache
def module_of(name: str) -> torch.nn.Module:
    family = FAMILIES[name]
    assert family.build is not None
    with torch.device("meta"):
        return family.build()


@cache
def graph_of(name: str, folder: Path) -> Graph:
    family = FAMILIES[name]
    if family.config:
        return build(trace_source(config_file(family, folder), seq_len=family.seq_len, batch=BATCH))
    inputs = family.inputs
    return build(trace_source(module_of(name), seq_len=family.seq_len, example_inputs=inputs, batch=BATCH))


def run_under(counter: FlopCounterMode, family: Family, folder: Path) -> int:
    """Run the model's forward on the meta device under torch's counter; its own parameter count."""
    if family.config:
        options = TraceOptions(seq_len=family.seq_len, batch=BATCH)
        loaded = from_config(Path(config_file(family, folder)), options)
        module, inputs = loaded.module, loaded.kwargs
    else:
        assert family.inputs is not None
        module = module_of(family.name).to(torch.bfloat16)
        with torch.device("meta"):
            inputs = pytree.tree_map(_halved, family.inputs(BATCH, family.seq_len))
    with torch.no_grad(), counter, looking_at_no_values():
        module.train()(**inputs)
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def looking_at_no_values() -> Iterator[None]:
    """Let transformers think that it is exported: masks on meta have no values to decide by."""
    masks = sys.modules.get("transformers.masking_utils")
    with ExitStack() as stack:
        for name in ("is_tracing", "is_torchdynamo_exporting") if masks else ():
            stack.enter_context(patch.object(masks, name, lambda *_: True))
        stack.enter_context(patch.object(torch, "_check_tensor_all_with", lambda *_: None))
        yield


def _halved(leaf: Any) -> Any:
    return leaf.bfloat16() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def grouped_flops(
    a: tuple[int, ...], b: tuple[int, ...], *rest: Any, out_shape: Any = None, **more: Any
) -> int:
    """torch's counter does not know grouped products: every row meets one expert's matrix."""
    return 2 * math.prod(a) * b[-1]


def products_flops(graph: Graph) -> float:
    """Forward FLOPs of everything that torch's counter counts; it counts all of a causal attention."""
    return sum(
        factor * math.prod(op.size(label) for label in labels) * (2 if op.causal else 1)
        for name in graph.chain
        for op in graph.blocks[name].ops
        if op.gemm is not None or op.family in ("attention", "conv", "scan")
        for factor, labels in op.flops
    )


@pytest.mark.parametrize("family", list(_cases()))
def test_a_family_is_traced_folded_and_counted(family: Family, folder: Path):
    skip_without(family.package)
    graph = graph_of(family.name, folder)
    assert graph.unknown == ()
    assert bool(graph.warnings) == family.traced_whole
    assert sum(block.repeated for block in graph.blocks.values()) == family.classes
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped_flops})
    assert graph.parameters == run_under(counter, family, folder)
    assert products_flops(graph) == pytest.approx(counter.get_total_flops(), rel=1e-3)


@pytest.mark.parametrize("family", list(_cases(QUICK_PLANS)))
def test_a_family_gets_a_plan(family: Family, folder: Path):
    skip_without(family.package)
    nodes = 4 if family.name == "DeepSeek-V3" else 1  # its experts alone exceed eight devices
    options: dict[str, Any] = {
        "topology": f"dgx-h100:{nodes}",
        "seq_len": family.seq_len,
        "cache": False,
    }
    if family.config:
        plan = suggest(config_file(family, folder), **options)
    else:
        plan = suggest(module_of(family.name), family.inputs, **options)
    assert isinstance(plan, Plan)
    assert plan.mesh.devices == 8 * nodes
    assert plan.warnings == ()


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param(f, id=f.name) for f in FAMILIES.values() if f.config])
def test_a_published_configuration_is_folded_to_the_same_classes(family: Family, folder: Path):
    path = folder / f"full_{family.name.replace(' ', '_')}.json"
    path.write_text(json.dumps(family.published()))
    full, cut = build(trace_source(str(path), seq_len=family.seq_len)), graph_of(family.name, folder)
    assert {n: len(block.ops) for n, block in full.blocks.items()} == {
        n: len(block.ops) for n, block in cut.blocks.items()
    }
    assert len(full.chain) > len(cut.chain)
