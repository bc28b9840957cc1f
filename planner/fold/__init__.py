"""`TracedGraph` -> `Graph`: block classes with named ops, and the edges inside and between them.

Folding: consecutive nodes of one layer form a segment; layers of one class share the ops of one
traced representative; edges are counted over the full depth, so that a cost per edge or per op
times its count is the cost of the whole model, whatever its depth.
"""

from __future__ import annotations

from ..graph import Graph, TracedGraph
from ..space import describe_all, names_of
from .blocks import make_blocks, sparse_tables, unknown_ops
from .edges import make_edges
from .fused import mark_fused
from .ops import make_op
from .saved import kept_by_maker
from .segments import cut_segments, full_chain


def build(traced: TracedGraph) -> Graph:
    """The planner's graph of a traced model."""
    space = describe_all(traced)
    names = names_of(space)
    segments = cut_segments(traced, space)
    chain = full_chain(traced, segments)
    segments = kept_by_maker(segments, chain)
    ops = {s.index: tuple(make_op(space, names, d) for d in s.nodes) for s in segments}
    fused = {index: mark_fused(block, space) for index, block in ops.items()}
    edges, boundary = make_edges(space, segments, chain, fused)
    blocks = make_blocks(traced, space, segments, chain, fused)
    return Graph(
        name=traced.name,
        content_hash=traced.content_hash,
        batch=traced.batch,
        seq_len=traced.seq_len,
        dtype=traced.dtype,
        blocks=blocks,
        chain=tuple(segments[i].name for i in chain),
        edges=edges,
        boundary=boundary,
        parameters=traced.parameters,
        trainable_parameters=traced.trainable_parameters,
        table_fqns=sparse_tables(traced, space),
        unknown=unknown_ops(space),
        warnings=traced.warnings,
    )
