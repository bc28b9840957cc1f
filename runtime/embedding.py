"""Lookups in a table whose rows are split over `tp`.

In: `F.embedding` of ids with a table sharded along its rows. Out: this rank's term of the result: its
own rows' vectors, zero elsewhere; the sum over the axis is the lookup (Shoeybi et al. 2019,
arXiv:1909.08053, section 3). DTensor's own term can be added up only once, which is too few where a
residual reads it twice or a layer is recomputed.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .operands import whole_on


def split_lookup(
    ids: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Any:  # fmt: skip
    """`F.embedding`; NotImplemented leaves other layouts, and rarer options, to DTensor."""
    unusual = padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse
    if unusual or not isinstance(weight, DTensor):
        return NotImplemented
    mesh = weight.device_mesh
    cuts = [axis for axis, placed in enumerate(weight.placements) if placed == Shard(0)]
    others = [placed for placed in weight.placements if placed != Shard(0)]
    if len(cuts) != 1 or any(not placed.is_replicate() for placed in others):
        return NotImplemented
    (at,) = cuts
    ids = whole_on(ids, mesh)
    term: list[Placement] = [
        Partial() if axis == at else placed for axis, placed in enumerate(ids.placements)
    ]
    gradient = [
        Shard(0) if axis == at else Replicate() if placed.is_replicate() else Partial()
        for axis, placed in enumerate(ids.placements)
    ]
    rows, local = weight.to_local(grad_placements=gradient), ids.to_local()
    own = local - mesh.get_local_rank(at) * rows.shape[0]
    here = (own >= 0) & (own < rows.shape[0])
    vectors = F.embedding(own.where(here, 0), rows) * here.unsqueeze(-1)
    return DTensor.from_local(vectors, mesh, term, run_check=False)
