"""A described node -> an `Op`: its labels with names and sizes, and what each operand reads by them."""

from __future__ import annotations

from ..graph import Dim, Gemm, Inner, Op, Operand
from ..layout import Collective
from ..rules.spec import Axis, Spec
from ..space import Described, Space
from .saved import saved_tensors


def make_op(space: Space, names: dict[int, str], described: Described) -> Op:
    """The op of a node: the labels of its rule, expanded to the named dims they consist of."""
    spec, node = described.spec, described.node
    expanded = _expand_labels(space, names, described)
    dims = tuple(dim for group in expanded.values() for dim in group)
    if spec.reshape:
        reads_axes, writes_axes, dims = _reshape_axes(space, names, described)
    else:
        reads_axes = tuple(_resolve(axes, expanded) for axes in spec.inputs if axes is not None)
        writes_axes = tuple(_resolve(axes, expanded) for axes in spec.outputs)
    reads = tuple(_operand(space, name, axes) for name, axes in zip(described.reads, reads_axes, strict=True))
    writes = tuple(_operand(space, name, axes) for name, axes in zip(node.outputs, writes_axes, strict=True))
    blocked = frozenset(d.label for d in dims) if not described.factored else _labels(spec.blocked, expanded)
    return Op(
        name=node.name,
        target=node.target,
        family=spec.family,
        dims=dims,
        reads=reads,
        writes=writes,
        sums=_labels(spec.sums, expanded),
        local=_labels(spec.local, expanded),
        blocked=blocked,
        linear=spec.linear if _may_pass_partial(spec.linear, reads) else (),
        inner=tuple(
            Inner(
                label=label,
                collective=Collective(inner.collective),
                forward_labels=_flat(inner.labels, expanded),
                element_bytes=inner.element_bytes,
                count=inner.count,
                backward_count=inner.backward_count,
            )
            for inner in spec.inner
            for label in _flat((inner.label,), expanded)
        ),
        gemm=_gemm(spec, expanded),
        flops=tuple((factor, _flat(labels, expanded)) for factor, labels in spec.flops),
        backward_flops=spec.backward_flops,
        experts=_flat((spec.experts,), expanded)[0] if spec.experts else None,
        table=_flat((spec.table,), expanded)[0] if spec.table else None,
        sort=spec.sort if any(name in space.routed for name in (*described.reads, *node.outputs)) else "",
        causal=_flat(spec.causal, expanded),
        fused_reads=frozenset(),
        fused_writes=frozenset(),
        saved=saved_tensors(space, described, reads, writes, dims),
        module=node.module,
        module_class=node.module_class,
        source=node.source,
    )


def _gemm(spec: Spec, expanded: dict[str, tuple[Dim, ...]]) -> Gemm | None:
    if spec.gemm is None:
        return None
    m, n, k, batch = (_flat(group, expanded) for group in spec.gemm)
    return Gemm(m=m, n=n, k=k, batch=batch)


def _expand_labels(space: Space, names: dict[int, str], described: Described) -> dict[str, tuple[Dim, ...]]:
    result = {}
    for label, atoms in described.labels.items():
        leaves = space.atoms.leaves(atoms)
        parts = [label] if len(leaves) == 1 else [f"{label}.{i}" for i in range(len(leaves))]
        result[label] = tuple(
            Dim(label=part, name=names[leaf], size=space.atoms.size(leaf))
            for part, leaf in zip(parts, leaves, strict=True)
        )
    return result


def _reshape_axes(
    space: Space, names: dict[int, str], described: Described
) -> tuple[tuple[tuple[Axis, ...], ...], tuple[tuple[Axis, ...], ...], tuple[Dim, ...]]:
    """Labels by position in the flat order that both sides of a reshape share."""
    dims: list[Dim] = []

    def walk(name: str, prefix: str, record: bool) -> tuple[Axis, ...]:
        axes, position = [], 0
        for axis in space.axes[name]:
            labels = []
            for leaf in space.atoms.leaves(axis):
                labels.append(f"{prefix}{position}")
                if record:
                    dims.append(Dim(label=labels[-1], name=names[leaf], size=space.atoms.size(leaf)))
                position += 1
            axes.append(tuple(labels))
        return tuple(axes)

    source, target = described.reads[0], described.node.outputs[0]
    first = walk(source, "f", True)
    second = walk(target, "f" if described.factored else "u", not described.factored)
    return (first,), (second,), tuple(dims)


def _resolve(axes: tuple[Axis, ...], expanded: dict[str, tuple[Dim, ...]]) -> tuple[Axis, ...]:
    return tuple(tuple(dim.label for label in axis for dim in expanded[label]) for axis in axes)


def _flat(labels: tuple[str, ...], expanded: dict[str, tuple[Dim, ...]]) -> tuple[str, ...]:
    return tuple(dim.label for label in labels for dim in expanded.get(label, ()))


def _labels(labels: frozenset[str], expanded: dict[str, tuple[Dim, ...]]) -> frozenset[str]:
    return frozenset(_flat(tuple(sorted(labels)), expanded))


def _operand(space: Space, name: str, axes: tuple[Axis, ...]) -> Operand:
    value = space.traced.values[name]
    kind = value.kind
    if name in space.weights:
        kind = "parameter"
    elif name not in space.data:
        kind = "constant"
    return Operand(
        tensor=name,
        axes=axes,
        dtype=value.dtype,
        kind=kind,
        grad=name in space.grads,
        fqn=value.fqn,
        sorted_by_expert=name in space.routed,
    )


def _may_pass_partial(linear: tuple[int, ...], reads: tuple[Operand, ...]) -> bool:
    """Partial sums pass only if no other operand needs a gradient (it would be partial too)."""
    if not linear or any(reads[i].kind != "activation" for i in linear):
        return False
    return not any(r.grad for i, r in enumerate(reads) if i not in linear)
