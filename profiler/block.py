"""A block of the user's own model, forward and backward on the device, against what the planner predicts.

In: a model. Out: a measurement of one of its layers with random weights and inputs (one sample), and the
scale that it tells: measured over predicted, for the frameworks that run the user's own module as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..planner.errors import ModelError
from ..planner.estimate import collectives, compute
from ..planner.estimate.as_run import as_run
from ..planner.estimate.frameworks import FRAMEWORKS
from ..planner.fit_scales import Case, fit_scales
from ..planner.fold import build
from ..planner.graph import Graph
from ..planner.mesh import Mesh
from ..planner.solve.intra_op import IntraOp, Prices
from ..planner.topology import Topology
from ..planner.trace import trace_source
from ..planner.trace.layer import Layer, first_layer
from .compute import main_dtype, timed
from .session import Item, Session
from .settings import Measurement

BATCH = 1
"""Samples in the block: a microbatch of the plans that are short of memory."""
AS_THE_USER_RUNS_IT = ("tpplan", "torch")
"""Frameworks whose kernels are those of the user's module."""
WEIGHT_STD = 0.02
"""Of random weights, as transformers start: numbers of a usual size, for denormal ones are slow."""


def measure(session: Session, model: str, seq_len: int | None) -> None:
    """Time one layer of `model` on every rank at once. Raises `ModelError` where there is none."""
    world, dtype = session.world, main_dtype(session.world.device)
    layer = first_layer(model, batch=BATCH, seq_len=seq_len, dtype=dtype)
    key = f"block/{Path(model).name}/{layer.path}/sequence={layer.seq_len}"
    if key in session.journal.measurements or not session.in_time():
        return
    facts = {"model": model, "list": layer.list_path, "seq_len": layer.seq_len, "dtype": dtype}
    session.tell(key)
    with torch.enable_grad():
        step = step_of(layer, world.device)

    def run(count: int) -> float:
        with torch.enable_grad():
            return timed(step, count, world.device, ranks_per_core=world.ranks_per_core)

    item = Item(key=key, kind="block", facts=facts, run=run)
    session.take([item], {key: session.warm_up(item)})


def step_of(layer: Layer, device: torch.device) -> Callable[[], object]:
    """Forward and backward of the layer: gradients of all its parameters and floating-point inputs."""
    module = layer.module.to_empty(device=device).train()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            _fill(tensor)
    args, kwargs = pytree.tree_map(lambda leaf: _real(leaf, device), (layer.args, layer.kwargs))
    wanted = [t for t in (*module.parameters(), *pytree.tree_leaves((args, kwargs))) if _trainable(t)]

    def step() -> object:
        out = _first_tensor(module(*args, **kwargs))
        return torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)

    return step


def _trainable(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _real(leaf: Any, device: torch.device) -> Any:
    """A tensor of a layer's call on the device; anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    made = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    _fill(made, std=1.0)
    return made.requires_grad_(made.is_floating_point())


def _fill(tensor: Tensor, *, std: float = WEIGHT_STD) -> None:
    if tensor.is_floating_point():
        tensor.normal_(std=std)
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.zero_()


def _first_tensor(out: Any) -> Tensor:
    found = next((leaf for leaf in pytree.tree_leaves(out) if _trainable(leaf)), None)
    if found is None:
        raise ModelError("the block's output does not depend on its parameters: nothing to run backward")
    return found


# --------------------------------------------------------------------------- the scale


def scales(found: list[Measurement], topology: Topology, *, source: str) -> list[dict[str, Any]]:
    """The entries of the file's `scales`; none where no block was measured."""
    return [entry for one in found if one.kind == "block" for entry in _entries(one, topology, source)]


def _entries(one: Measurement, topology: Topology, source: str) -> Iterator[dict[str, Any]]:
    facts = one.facts
    traced = trace_source(facts["model"], seq_len=facts["seq_len"], batch=BATCH, dtype=facts["dtype"])
    graph = build(traced)
    for framework in AS_THE_USER_RUNS_IT:
        predicted_s = predict(graph, topology, framework, module=f"{facts['list']}.*", dtype=facts["dtype"])
        case = Case(
            name=one.key,
            step_s=one.sample.seconds,
            memory_bytes=None,
            predict=lambda scales, s=predicted_s: s * scales.get("kernels", 1.0),
            allocated_bytes=0.0,
        )
        where = f"one block of {Path(facts['model']).name}, forward and backward, {source}"
        for scale in fit_scales([case], framework=framework, source=where).scales:
            yield asdict(scale)


def predict(graph: Graph, topology: Topology, framework: str, *, module: str, dtype: str) -> float:
    """Forward and backward of the block class at `module` on one device, seconds, without any scale."""
    profile = FRAMEWORKS[framework]
    run = as_run(graph, profile, precision=dtype)
    prices = Prices(kernel_time=compute.kernel_time, collective_time=collectives.model(topology).time)
    solution = IntraOp(run, topology, profile, prices)(Mesh(pp=1, dp=1, cp=1, ep=1, tp=1), BATCH)[0]
    names = [name for name, block in run.blocks.items() if block.repeated and block.module == module]
    if not names:
        raise ModelError(f"planning sees no block at {module}: its layers differ too much")
    return solution.blocks[names[0]].forward_s + solution.blocks[names[0]].backward_s
