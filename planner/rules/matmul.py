"""Matrix products: linear, matmul, mm, bmm, addmm, baddbmm, einsum, grouped matmul.

All are sums over a contraction `k`, so splitting `k` leaves partial sums and the op is linear in
each operand. FLOPs are 2 m n k; the backward pass has one product per operand that needs a
gradient.
"""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any

from ..graph import Value
from .registry import rule
from .spec import Axis, Call, Spec


def _axes(labels: list[str], shape: tuple[int, ...]) -> tuple[Axis, ...]:
    return tuple((label,) if size > 1 else () for label, size in zip(labels, shape, strict=True))


def _product(m: list[str], n: list[str], k: list[str], batch: list[str]) -> dict[str, Any]:
    present = tuple(m), tuple(n), tuple(k), tuple(batch)
    return {
        "family": "gemm",
        "gemm": present,
        "flops": ((2.0, (*batch, *m, *n, *k)),),
        "sums": frozenset(k),
    }


def _real(labels: list[str], *sized: tuple[Axis, ...]) -> list[str]:
    """The labels that occur on some axis (axes of size one have none)."""
    present = {label for axes in sized for axis in axes for label in axis}
    return [label for label in labels if label in present]


@rule("aten.linear")
def linear(call: Call) -> Spec:
    """`x[.., k] w[n, k] (+ bias[n]) -> y[.., n]`."""
    x, w = call.inputs[:2]
    rows = [f"m{i}" for i in range(len(x.shape) - 1)]
    xa, wa = _axes([*rows, "k"], x.shape), _axes(["n", "k"], w.shape)
    ya = _axes([*rows, "n"], call.outputs[0].shape)
    bias = tuple(_axes(["n"], b.shape) for b in call.inputs[2:])
    product = _product(_real(rows, xa), _real(["n"], wa), _real(["k"], wa), [])
    return Spec(inputs=(xa, wa, *bias), outputs=(ya,), linear=() if bias else (0,), **product)


@rule("aten.mm", "aten.bmm", "aten.matmul")
def matmul(call: Call) -> Spec:
    """`a[batch.., m, k] b[batch.., k, n]`, batch dims broadcast, vectors allowed."""
    a, b = call.inputs
    left = ["m", "k"] if len(a.shape) > 1 else ["k"]
    right = ["k", "n"] if len(b.shape) > 1 else ["k"]
    depth = max(len(a.shape) - len(left), len(b.shape) - len(right))
    batch = [f"b{i}" for i in range(depth)]
    aa = _axes([*batch[depth - len(a.shape) + len(left) :], *left], a.shape)
    ba = _axes([*batch[depth - len(b.shape) + len(right) :], *right], b.shape)
    tail = [label for label in (*left, *right) if label != "k"]
    ya = _axes([*batch, *tail], call.outputs[0].shape)
    shared = [label for label in _real(batch, aa) if label in _real(batch, ba)]
    rows = [label for label in _real(batch, aa) if label not in shared] + _real(["m"], aa)
    cols = [label for label in _real(batch, ba) if label not in shared] + _real(["n"], ba)
    return Spec(inputs=(aa, ba), outputs=(ya,), linear=(0,), **_product(rows, cols, _real(["k"], aa), shared))


@rule("aten.addmm")
def addmm(call: Call) -> Spec:
    """`bias[n] + x[m, k] w[k, n]`."""
    bias, x, w = call.inputs
    ba = tuple((("m", "n")[2 - len(bias.shape) + i],) if s > 1 else () for i, s in enumerate(bias.shape))
    xa, wa, ya = (
        _axes(["m", "k"], x.shape),
        _axes(["k", "n"], w.shape),
        _axes(["m", "n"], call.outputs[0].shape),
    )
    product = _product(_real(["m"], xa), _real(["n"], wa), _real(["k"], xa), [])
    return Spec(inputs=(ba, xa, wa), outputs=(ya,), **product)


@rule("aten.baddbmm")
def baddbmm(call: Call) -> Spec:
    """`bias[b, m, n] + x[b, m, k] w[b, k, n]`, bias broadcast."""
    bias, x, w = call.inputs
    xa, wa = _axes(["b", "m", "k"], x.shape), _axes(["b", "k", "n"], w.shape)
    ya = _axes(["b", "m", "n"], call.outputs[0].shape)
    names = ["b", "m", "n"][3 - len(bias.shape) :]
    product = _product(_real(["m"], xa), _real(["n"], wa), _real(["k"], xa), _real(["b"], xa))
    return Spec(inputs=(_axes(names, bias.shape), xa, wa), outputs=(ya,), **product)


@rule("aten.einsum")
def einsum(call: Call) -> Spec:
    """Any einsum; an ellipsis becomes leading dims.

    Blocked: a letter twice in one operand (a diagonal), and a summed letter that some operand lacks
    (the gradient of that operand would be a partial sum).
    """
    terms, output = _einsum_terms(str(call.args[0]), call.inputs)
    inputs = tuple(_axes(term, value.shape) for term, value in zip(terms, call.inputs, strict=True))
    outputs = (_axes(output, call.outputs[0].shape),)
    present = _real(sorted({label for term in terms for label in term}), *inputs)
    sums = [label for label in present if label not in output]
    shared = [label for label in present if label in output and all(label in term for term in terms)]
    rows = [label for label in present if label in output and label not in shared and label in terms[0]]
    cols = [label for label in present if label in output and label not in (*shared, *rows)]
    twice = {label for term in terms for label in term if term.count(label) > 1}
    missing = {label for label in sums if not all(label in _real([label], axes) for axes in inputs)}
    product = _product(rows, cols, sums, shared)
    return Spec(inputs=inputs, outputs=outputs, linear=(0,), blocked=frozenset(twice | missing), **product)


def _einsum_terms(equation: str, inputs: tuple[Value, ...]) -> tuple[list[list[str]], list[str]]:
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = [
        _expand(term, len(value.shape) - len(term.replace("...", "")))
        for term, value in zip(left.split(","), inputs, strict=True)
    ]
    letters = [label for term in terms for label in term]
    if arrow:
        depth = max(sum(label not in string.ascii_letters for label in term) for term in terms)
        return terms, _expand(right, depth)
    return terms, sorted(label for label in set(letters) if letters.count(label) == 1)


def _expand(term: str, dots: int) -> list[str]:
    head, ellipsis, tail = term.partition("...")
    return [*head, *([f"e{i}" for i in range(dots)] if ellipsis else ()), *tail]


@rule("aten.mv", "aten.dot", "aten.outer", "aten.ger")
def vectors(call: Call) -> Spec:
    """Products with vectors."""
    left, right, out = {
        "mv": ("mk", "k", "m"),
        "dot": ("k", "k", ""),
        "outer": ("m", "n", "mn"),
        "ger": ("m", "n", "mn"),
    }[call.node.target.split(".")[1]]
    a, b = call.inputs
    aa, ba, ya = (
        _axes(list(left), a.shape),
        _axes(list(right), b.shape),
        _axes(list(out), call.outputs[0].shape),
    )
    product = _product(_real(["m"], aa), _real(["n"], ba), _real(["k"], aa), [])
    return Spec(inputs=(aa, ba), outputs=(ya,), linear=(0,), **product)


@rule("aten.cdist", "aten._cdist_forward")
def cdist(call: Call) -> Spec:
    """Distances `a[.., m, k], b[.., n, k] -> y[.., m, n]`; `k` is under a root, so it is blocked."""
    a, b = call.inputs
    batch = [f"b{i}" for i in range(len(call.outputs[0].shape) - 2)]
    aa = _axes([*batch[len(batch) - len(a.shape) + 2 :], "m", "k"], a.shape)
    ba = _axes([*batch[len(batch) - len(b.shape) + 2 :], "n", "k"], b.shape)
    ya = _axes([*batch, "m", "n"], call.outputs[0].shape)
    shared = _real(batch, ya)
    product = _product(_real(["m"], aa), _real(["n"], ba), _real(["k"], aa), shared)
    spec = Spec(inputs=(aa, ba), outputs=(ya,), blocked=frozenset({"k"}), **product)
    return replace(spec, sums=frozenset())


@rule("aten._grouped_mm", "transformers.grouped_mm_fallback")
def grouped_mm(call: Call) -> Spec:
    """`x[r, k]`, rows grouped by expert, times `w[e, k, n]` -> `y[r, n]`; `offs[e]` ends the groups."""
    x, w, *rest = call.inputs
    xa, wa = _axes(["r", "k"], x.shape), _axes(["e", "k", "n"], w.shape)
    offs = tuple(
        _axes(["e"], value.shape) if len(value.shape) == 1 else ((),) * len(value.shape) for value in rest
    )
    return Spec(
        family="grouped_gemm",
        inputs=(xa, wa, *offs),
        outputs=(_axes(["r", "n"], call.outputs[0].shape),),
        sums=frozenset({"k"}),
        blocked=frozenset({"e"}),
        gemm=(("r",), ("n",), ("k",), ("e",)),
        flops=((2.0, ("r", "n", "k")),),
        experts="e",
        names={"e": "experts"},
        sort="keep",
    )
