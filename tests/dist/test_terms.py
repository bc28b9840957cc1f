"""What hands terms of a gradient on does so on real ranks: nothing is communicated, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import RankPool
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from tpplan.planner.terms import PASSED_ON

SHAPE, RANKS = (2, 4, 8), 2

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(2, 1, 4, 8),
    "reshape": lambda x: x.reshape(8, 8),
    "unflatten": lambda x: x.unflatten(-1, (2, 4)),
    "flatten": lambda x: x.flatten(1),
    "squeeze": lambda x: x.view(2, 1, 4, 8).squeeze(1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "transpose": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "slice": lambda x: x[..., 1::2],
    "split": lambda x: torch.mul(*x.split(4, -1)),
    "split_with_sizes": lambda x: _product(*x.split([3, 5], -1)),
    "chunk": lambda x: torch.mul(*x.chunk(2, -1)),
    "cat": lambda x: torch.cat([x, x], -1),
    "neg": lambda x: -x,
    "add": lambda x: x + x.square().mean(-1, keepdim=True),
    "sub": lambda x: x - 2 * x,
    "mul": lambda x: x * x.pow(3),
    "pow": lambda x: x.pow(2),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "rsqrt": lambda x: torch.rsqrt(x.pow(2) + 1),
    "to": lambda x: x.to(torch.float64),
    "_to_copy": lambda x: torch.ops.aten._to_copy(x, dtype=torch.float64),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "clone": lambda x: x.clone(),
    "alias": lambda x: torch.ops.aten.alias(x),
    "rms_norm": lambda x: torch.nn.functional.rms_norm(x, SHAPE[-1:], x[0, 0]),
}


def _product(left: Tensor, right: Tensor) -> Tensor:
    return left.sum(-1) * right.sum(-1)


def backward_of_terms(name: str) -> tuple[str, int, float]:
    """On one rank: how the gradient of the input lies, collectives, and how far off its sum is."""
    mesh = init_device_mesh("cpu", (RANKS,))
    op, generator = OPS[name], torch.Generator().manual_seed(0)
    whole = torch.randn(SHAPE, generator=generator).requires_grad_()
    expected = op(whole)
    terms = torch.randn(RANKS, *expected.shape, generator=generator).to(expected.dtype)
    (wanted,) = torch.autograd.grad(expected, whole, terms.sum(0))

    x = DTensor.from_local(whole.detach(), mesh, [Replicate()], run_check=False).requires_grad_()
    term = DTensor.from_local(terms[mesh.get_rank()], mesh, [Partial()], run_check=False)
    y: Any = op(x)
    with CommDebugMode() as communicated:
        (found,) = torch.autograd.grad(y, x, term)
    assert isinstance(found, DTensor)
    error = (found.full_tensor() - wanted).abs().max() / wanted.abs().max()
    return str(found.placements[0]), communicated.get_total_counts(), error.item()


@pytest.mark.parametrize("name", sorted(OPS))
def test_an_op_hands_on_terms_of_its_gradient(name: str, ranks: Callable[[int], RankPool]) -> None:
    for placed, communicated, error in ranks(RANKS).run(backward_of_terms, name):
        assert placed == str(Partial())
        assert communicated == 0
        assert error < 1e-5


def test_these_are_the_ops_that_the_planner_counts_on() -> None:
    assert {f"aten.{name}" for name in OPS} == PASSED_ON
