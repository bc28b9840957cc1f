"""What our rules call legal, DTensor calls legal: same layouts out, and no collective of its own.

Run on a fake process group of two ranks, where collectives are counted and move nothing. The splits
that DTensor refuses, or answers by gathering, are listed with what it does.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from tpplan.planner import layout
from tpplan.planner.graph import Op
from tpplan.planner.rules.choices import Choice

from . import rule_samples_layers  # noqa: F401 - it fills the table
from .rule_samples import SAMPLES
from .rule_simulation import DEGREE, Sample, _base, all_choices, cut_of, one_op, outputs_of, place

OPS = (
    "linear", "mm", "bmm", "matmul", "addmm", "einsum", "embedding", "layer_norm", "softmax", "sum", "mean",
    "gelu", "add", "mul", "where", "view", "transpose", "permute", "expand", "select", "cat", "split", "topk",
    "gather", "index", "conv2d", "scaled_dot_product_attention",
)  # fmt: skip
OURS_ALONE = {
    ("conv2d", "c"): "the sum over input channels is forgotten: the result is marked whole",
    ("conv2d", "o"): "the result is marked whole",
    ("conv2d", "g"): "groups are not divided",
    ("conv2d", "t0"): "a kernel of one point is treated as any other",
    ("conv2d", "t1"): "a kernel of one point is treated as any other",
    ("scaled_dot_product_attention", None): "the kernel on CPU has no rule",
    ("matmul", "b1"): "a batch dim that one factor broadcasts is gathered",
    ("index", "h0"): "a table split by rows is gathered",
    ("expand", "d0"): "copies along a new dim stay whole",
    ("expand", "d1"): "copies along a new dim stay whole",
    ("split", "inner"): "an axis that is cut into pieces is gathered",
}
"""(op, label, None for any) -> what DTensor does. Splits of inner factors are compared by value only."""


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=DEGREE)
    yield init_device_mesh("cpu", (DEGREE,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", OPS)
@pytest.mark.filterwarnings("ignore")
def test_dtensor_agrees(mesh: DeviceMesh, name: str):
    problems = []
    for sample in SAMPLES[f"aten.{name}"]:
        op = one_op(sample)
        for choice in all_choices(op):
            if choice.inner or choice.kind != "split" or is_strided(op, choice):
                continue
            if (name, choice.label) not in OURS_ALONE and (name, None) not in OURS_ALONE:
                problems += disagreement(mesh, sample, op, choice)
    assert not problems, "\n".join(problems)


def is_strided(op: Op, choice: Choice) -> bool:
    """Whether an inner factor of some axis is cut."""
    pairs = zip((*op.reads, *op.writes), (*choice.reads, *choice.writes), strict=True)
    return any(
        isinstance(p, layout.Shard) and cut_of(op, operand, choice.label or "").outer > 1
        for operand, p in pairs
    )


def disagreement(mesh: DeviceMesh, sample: Sample, op: Op, choice: Choice) -> list[str]:
    """What DTensor does differently, in words."""
    args, kwargs = on_mesh(mesh, sample, op, choice)
    with CommDebugMode() as counted:
        outputs = outputs_of(sample.op(*args, **kwargs))
    found = ["P" if y.placements[0].is_partial() else str(y.placements[0]) for y in outputs]  # type: ignore[attr-defined]
    stated = ["P" if isinstance(p, layout.Partial) else str(placement(p)) for p in choice.writes]
    where = f"{op.target} split {choice.label}"
    if counted.get_total_counts():
        return [f"{where}: communicates"]
    return [f"{where}: {found}, we say {stated}"] if found != stated else []


def on_mesh(mesh: DeviceMesh, sample: Sample, op: Op, choice: Choice) -> tuple[tuple, dict]:
    """The call's arguments in the layouts that the choice states."""
    reads = {_base(read.tensor): (read, p) for read, p in zip(op.reads, choice.reads, strict=True)}
    names = {id(tensor): f"t{i}" for i, tensor in enumerate(sample.tensors())}

    def distributed(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        read, p = reads[names[id(leaf)]]
        local = place(op, read, leaf, p, choice)[0]
        return DTensor.from_local(local, mesh, [placement(p)], run_check=False)

    return pytree.tree_map(distributed, (sample.args, sample.kwargs))


def placement(p: layout.Placement) -> Shard | Replicate | Partial:
    if isinstance(p, layout.Shard):
        return Shard(p.axis)
    return Replicate() if isinstance(p, layout.Replicate) else Partial()
