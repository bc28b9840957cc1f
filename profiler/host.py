"""What the host takes for one operation of a model, where nothing hides it.

An accelerator's host runs ahead of it. On a CPU the same core computes and runs Python, autograd and the
dispatcher, so that every operation costs their time too, and one on split tensors (DTensors) that of their
layouts. In: a `Session`. Out: measurements of a chain of operations too small to compute anything, forward
alone and with backward, whole and as DTensors that no rank splits (nothing is communicated):

    seconds of one operation = time of the chain / its operations, counted as the planner counts them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..runtime.ops import ShardedOps, run_in
from .compute import timed
from .session import Item, Session
from .settings import Sample

ROWS, WIDTH, HEADS = 8, 16, 2
LINKS = 8
OPERATIONS = 9 * LINKS
"""Of the chain: see `_Link`."""
PARTS = ("forward", "step", "split forward", "split step")


class _Link(nn.Module):
    """Nine operations: a norm, two products, a pointwise one, a residual, four views."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x is (1, rows, width)."""
        heads = self.up(self.norm(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return x + self.down(functional.gelu(heads.transpose(1, 2).flatten(2)))


def measure(session: Session) -> None:
    """Time the chain on every rank at once; nothing where the device is not the host's own."""
    world = session.world
    keys = [_key(part) for part in PARTS]
    if world.device.type != "cpu" or world.size == 1:
        return
    if all(key in session.journal.measurements for key in keys) or not session.in_time(len(keys)):
        return
    session.tell(f"the host's time for an operation: {len(keys)} chains")
    mesh = DeviceMesh("cpu", list(range(world.size)), mesh_dim_names=("tp",))
    with torch.enable_grad():
        chains = {"": _chain(None), "split ": _chain(mesh)}
    items = []
    for part in PARTS:
        chain = chains["split " if part.startswith("split") else ""]
        items.append(_item(session, part, chain, backward=part.endswith("step")))
    session.take(items, {item.key: session.warm_up(item) for item in items})


def _key(part: str) -> str:
    return f"host/{part}"


def _item(session: Session, part: str, chain: Callable[[bool], None], *, backward: bool) -> Item:
    share = session.world.ranks_per_core

    def run(count: int) -> float:
        with torch.enable_grad():
            return timed(lambda: chain(backward), count, session.world.device, ranks_per_core=share)

    return Item(key=_key(part), kind="host", facts={"operations": OPERATIONS}, run=run)


def _chain(mesh: DeviceMesh | None) -> Callable[[bool], None]:
    """A function that runs the chain forward and, if told so, backward."""
    model = nn.Sequential(*(_Link() for _ in range(LINKS)))
    x = torch.randn(1, ROWS, WIDTH)
    if mesh is not None:
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module.register_parameter(name, nn.Parameter(_whole_on(parameter.detach(), mesh)))
        x = _whole_on(x, mesh)
    forward = model.forward if mesh is None else run_in(partial(ShardedOps, mesh), model.forward)
    parameters = tuple(model.parameters())

    def run(backward: bool) -> None:
        out = forward(x)
        if backward:
            torch.autograd.grad(out, parameters, torch.ones_like(out))

    return run


def _whole_on(x: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def samples(session: Session) -> dict[str, Sample]:
    """What was measured, by part; empty where nothing was."""
    found = session.journal.measurements
    return {part: found[_key(part)].sample for part in PARTS if _key(part) in found}


def record(samples: Mapping[str, Sample]) -> dict[str, float]:
    """Microseconds of one operation, by pass; `samples` by part."""
    one = {part: samples[part].seconds / OPERATIONS * 1e6 for part in PARTS}
    times = {
        "forward_us": one["forward"],
        "backward_us": one["step"] - one["forward"],
        "split_forward_us": one["split forward"],
        "split_backward_us": one["split step"] - one["split forward"],
    }
    return {name: float(f"{max(us, 0.0):.4g}") for name, us in times.items()}
