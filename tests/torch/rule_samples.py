"""Small real calls of every op that has a rule: `SAMPLES[rule name]` is a list of them.

A few cases each: broadcasting, axes of size one, negative dims, kept dims, masks, grouped heads.
Extents are even, and different where that tells axes apart, so that each dim can be cut in two.
"""

from __future__ import annotations

import torch

from .rule_simulation import Sample

A = torch.ops.aten
F64 = torch.float64


def x(*shape: int) -> torch.Tensor:
    """Random numbers in double precision, the same in every run."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(*shape, generator=generator, dtype=F64)


def positive(*shape: int) -> torch.Tensor:
    return x(*shape).abs() + 0.5


def unit(*shape: int) -> torch.Tensor:
    """Numbers between 0 and 1."""
    return torch.sigmoid(x(*shape))


def integers(high: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(high)
    return torch.randint(0, high, shape, generator=generator)


def booleans(*shape: int) -> torch.Tensor:
    return x(*shape) > 0


def call(op, *args, weights=(), fixed=(), graded=None, compared=None, **kwargs) -> Sample:
    return Sample(
        op=op, args=args, kwargs=kwargs, weights=weights, fixed=fixed, graded=graded, compared=compared
    )


SAMPLES: dict[str, list[Sample]] = {}


def samples(name: str, *calls: Sample) -> None:
    SAMPLES.setdefault(f"aten.{name}", []).extend(calls)


# ---------------------------------------------------------------------------------- pointwise

for name in (
    "abs",
    "exp",
    "expm1",
    "sin",
    "cos",
    "tanh",
    "sigmoid",
    "relu",
    "gelu",
    "silu",
    "mish",
    "softplus",
    "erf",
    "floor",
    "ceil",
    "round",
    "sign",
    "square",
    "leaky_relu",
    "elu",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "relu6",
    "isnan",
    "isinf",
    "nan_to_num",
    "neg",
    "clone",
    "contiguous",
    "alias",
    "detach",
    "lift_fresh_copy",
):
    samples(name, call(getattr(A, name).default, x(4, 1, 6)))
for name in ("log", "log1p", "sqrt", "rsqrt", "reciprocal"):
    samples(name, call(getattr(A, name).default, positive(4, 6)))
samples("relu_", call(A.relu_.default, x(4, 6)))
samples("silu_", call(A.silu_.default, x(4, 6)))
samples("log_sigmoid", call(A.log_sigmoid.default, x(4, 6)))
samples("bitwise_not", call(A.bitwise_not.default, integers(9, 4, 6)))
samples("logical_not", call(A.logical_not.default, booleans(4, 6)))
samples(
    "clamp",
    call(A.clamp.default, x(4, 6), -0.5, 0.5),
    call(A.clamp.Tensor, x(4, 6), -positive(6), positive(4, 1)),
)
samples("clamp_", call(A.clamp_.default, x(4, 6), -0.5))
samples("clamp_min", call(A.clamp_min.default, x(4, 6), 0.0), call(A.clamp_min.Tensor, x(4, 6), x(6)))
samples("clamp_max", call(A.clamp_max.default, x(4, 6), 0.0))
samples("threshold", call(A.threshold.default, x(4, 6), 0.1, 2.0))
samples(
    "pow",
    call(A.pow.Tensor_Scalar, x(4, 6), 2),
    call(A.pow.Tensor_Tensor, positive(4, 6), x(6)),
    call(A.pow.Scalar, 2.0, x(4)),
)
samples("pow_", call(A.pow_.Scalar, x(4, 6), 3))
samples("dropout", call(A.dropout.default, x(4, 6), 0.0, True), call(A.dropout.default, x(4, 6), 0.5, False))
samples("native_dropout", call(A.native_dropout.default, x(4, 6), 0.0, True, graded=(0,)))
samples("feature_dropout", call(A.feature_dropout.default, x(4, 6), 0.0, True))
samples("bernoulli", call(A.bernoulli.default, torch.ones(4, 6, dtype=F64)))
samples("bernoulli_", call(A.bernoulli_.float, x(4, 6), 1.0))
samples(
    "masked_fill",
    call(A.masked_fill.Scalar, x(4, 6), booleans(6), -1.0),
    call(A.masked_fill.Tensor, x(2, 4, 6), booleans(4, 1), torch.tensor(0.5, dtype=F64)),
)
samples("masked_fill_", call(A.masked_fill_.Scalar, x(4, 6), booleans(4, 6), 0.0))

for name in ("add", "sub"):
    op = getattr(A, name)
    samples(
        name,
        call(op.Tensor, x(4, 1, 6), x(2, 6)),
        call(op.Tensor, x(4, 6), x(4, 6), alpha=2),
        call(op.Scalar, x(4), 3.0),
        call(op.Tensor, x(4, 6), 3.0),
    )
    samples(f"{name}_", call(getattr(A, f"{name}_").Tensor, x(4, 6), x(6)))
samples("rsub", call(A.rsub.Scalar, x(4, 6), 1.0), call(A.rsub.Tensor, x(4, 6), x(6)))
samples(
    "mul",
    call(A.mul.Tensor, x(4, 1, 6), x(2, 6)),
    call(A.mul.Tensor, x(4, 6), 2.0),
    call(A.mul.Scalar, x(4), 2.0),
    call(A.mul.Tensor, x(4, 6), x(6), weights=(1,)),
    call(A.mul.Tensor, x(6), x(4, 6), weights=(0,)),
)
samples("mul_", call(A.mul_.Tensor, x(4, 6), x(6)))
samples(
    "div",
    call(A.div.Tensor, x(4, 6), positive(6)),
    call(A.div.Tensor, x(4, 6), 2.0),
    call(A.div.Tensor_mode, x(4, 6), positive(6), rounding_mode="floor"),
    call(A.div.Scalar_mode, x(4, 6), 0.3, rounding_mode="trunc"),
    call(A.div.Tensor, integers(9, 4, 6), 2),
)
samples(
    "div_",
    call(A.div_.Tensor, x(4, 6), positive(4, 1)),
    call(A.div_.Scalar_mode, x(4, 6), 0.3, rounding_mode="floor"),
)
samples(
    "floor_divide",
    call(A.floor_divide.default, x(4, 6), positive(6), fixed=(0, 1)),
    call(A.floor_divide.Scalar, integers(9, 4, 6), 2),
)
samples("xlogy", call(A.xlogy.Tensor, positive(4, 6), positive(6)))
for name in ("maximum", "minimum", "atan2", "logaddexp", "hypot", "fmin", "fmax"):
    samples(name, call(getattr(A, name).default, positive(4, 6), positive(6) + 0.01))
for name in ("remainder", "fmod"):
    samples(
        name,
        call(getattr(A, name).Tensor, x(4, 6), positive(4, 1)),
        call(getattr(A, name).Scalar, x(4, 6), 0.7),
    )
samples("min.other", call(A.min.other, x(4, 6), x(4, 1)))
samples("max.other", call(A.max.other, x(4, 6), x(6)))
for name in ("eq", "ne", "lt", "le", "gt", "ge"):
    op = getattr(A, name)
    samples(name, call(op.Tensor, integers(3, 4, 1), integers(3, 6)), call(op.Scalar, x(4, 6), 0.0))
for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__"):
    samples(name, call(getattr(A, name).Tensor, booleans(4, 1), booleans(1, 6)))
for name in ("logical_and", "logical_or"):
    samples(name, call(getattr(A, name).default, booleans(4, 1), booleans(6)))
samples("lerp", call(A.lerp.Tensor, x(4, 6), x(4, 6), unit(6)), call(A.lerp.Scalar, x(4, 6), x(6), 0.3))
samples("addcmul", call(A.addcmul.default, x(4, 6), x(6), x(4, 1)))
samples("addcdiv", call(A.addcdiv.default, x(4, 6), x(6), positive(4, 1)))
samples(
    "where",
    call(A.where.self, booleans(4, 1), x(4, 6), x(6)),
    call(A.where.ScalarOther, booleans(4, 6), x(4, 6), 0.0),
    call(A.where.ScalarSelf, booleans(4, 6), 0.0, x(6)),
)
samples("polar", call(A.polar.default, torch.ones(4, 6, dtype=F64), x(4, 6)))
samples("complex", call(A.complex.default, x(4, 6), x(4, 6)))
samples("copy", call(A.copy.default, x(4, 6), x(6), fixed=(0, 1)))
samples("copy_", call(A.copy_.default, x(4, 6), x(6)))
samples("fill_", call(A.fill_.Scalar, x(4, 6), 2.0))
samples(
    "type_as",
    call(A.type_as.default, x(4, 6), x(2)),
    call(A.type_as.default, x(4, 6), integers(3, 5)),
)
samples(
    "to",
    call(A.to.dtype, x(4, 6), torch.float64),
    call(A.to.dtype, integers(9, 4, 6), F64),
    call(A.to.dtype, x(4, 6), torch.int64),
)
samples("_to_copy", call(A._to_copy.default, integers(9, 4, 6), dtype=F64))

# ------------------------------------------------------------------------------ matrix products

samples(
    "linear",
    call(A.linear.default, x(2, 4, 6), x(8, 6), weights=(1,)),
    call(A.linear.default, x(4, 6), x(8, 6), x(8), weights=(1, 2)),
    call(A.linear.default, x(6), x(8, 6), weights=(1,)),
    call(A.linear.default, x(4, 6), x(1, 6), x(1), weights=(1, 2)),
)
samples("mm", call(A.mm.default, x(4, 6), x(6, 8)), call(A.mm.default, x(4, 6), x(6, 8), weights=(1,)))
samples("bmm", call(A.bmm.default, x(2, 4, 6), x(2, 6, 8)))
samples(
    "matmul",
    call(A.matmul.default, x(2, 4, 6, 8), x(4, 8, 10)),
    call(A.matmul.default, x(4, 6), x(6)),
    call(A.matmul.default, x(6), x(6, 4)),
    call(A.matmul.default, x(6), x(6)),
    call(A.matmul.default, x(2, 1, 4, 6), x(1, 8, 6, 10)),
    call(A.matmul.default, x(2, 4, 6), x(6, 8)),
)
samples(
    "addmm",
    call(A.addmm.default, x(8), x(4, 6), x(6, 8), weights=(0, 2)),
    call(A.addmm.default, x(4, 8), x(4, 6), x(6, 8)),
    call(A.addmm.default, x(8), x(4, 6), x(6, 8), beta=0.5, alpha=2),
)
samples(
    "baddbmm",
    call(A.baddbmm.default, x(2, 1, 8), x(2, 4, 6), x(2, 6, 8)),
    call(A.baddbmm.default, x(8), x(2, 4, 6), x(2, 6, 8), beta=0.0),
)
samples(
    "einsum",
    call(A.einsum.default, "bhid,bhjd->bhij", [x(2, 4, 6, 8), x(2, 4, 10, 8)]),
    call(A.einsum.default, "nhwpqc->nchpwq", [x(2, 2, 4, 2, 6, 8)]),
    call(A.einsum.default, "...i,oi->...o", [x(2, 4, 6), x(8, 6)]),
    call(A.einsum.default, "ij,jk", [x(4, 6), x(6, 8)]),
    call(A.einsum.default, "bi,bj,bk->ijk", [x(4, 2), x(4, 6), x(4, 8)]),
    call(A.einsum.default, "ij->", [x(4, 6)]),
    call(A.einsum.default, "ii->i", [x(4, 4)]),
    call(A.einsum.default, "b i, b -> b i", [x(4, 6), x(4)]),
    call(A.einsum.default, "bi,bi->bi", [x(4, 6), x(1, 6)]),
    call(A.einsum.default, "ij,kj->i", [x(4, 6), x(8, 6)]),
)

# ----------------------------------------------------------------------------------- attention

samples(
    "scaled_dot_product_attention",
    call(A.scaled_dot_product_attention.default, x(2, 4, 6, 8), x(2, 4, 10, 8), x(2, 4, 10, 12)),
    call(
        A.scaled_dot_product_attention.default,
        x(2, 8, 6, 4),
        x(2, 4, 6, 4),
        x(2, 4, 6, 4),
        None,
        0.0,
        False,
        enable_gqa=True,
    ),
    call(
        A.scaled_dot_product_attention.default,
        x(2, 8, 6, 4),
        x(2, 1, 6, 4),
        x(2, 1, 6, 4),
        None,
        0.0,
        False,
        enable_gqa=True,
    ),
    call(A.scaled_dot_product_attention.default, x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), x(6, 6)),
    call(A.scaled_dot_product_attention.default, x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 1, 6, 6)),
    call(
        A.scaled_dot_product_attention.default,
        x(2, 8, 6, 4),
        x(2, 4, 10, 4),
        x(2, 4, 10, 4),
        x(1, 8, 6, 10),
        enable_gqa=True,
    ),
    call(
        A.scaled_dot_product_attention.default,
        x(2, 4, 6, 8),
        x(2, 4, 6, 8),
        x(2, 4, 6, 8),
        booleans(2, 1, 1, 6) | True,
    ),
    call(
        A.scaled_dot_product_attention.default, x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), None, 0.0, True
    ),
    call(A.scaled_dot_product_attention.default, x(4, 6, 8), x(4, 10, 8), x(4, 10, 8)),
    call(A.scaled_dot_product_attention.default, x(2, 4, 6, 8), x(1, 4, 10, 8), x(1, 4, 10, 8)),
)

# ------------------------------------------------------------------------------------- lookups

samples(
    "embedding",
    call(A.embedding.default, x(8, 6), integers(8, 2, 4), weights=(0,)),
    call(A.embedding.default, x(8, 1), integers(8, 4), weights=(0,)),
    call(A.embedding.default, x(8, 6), integers(8, 4, 1), 3, weights=(0,)),
)
EQUAL_BAGS = (integers(8, 4), torch.arange(4)), (integers(8, 12), torch.arange(0, 12, 3))
UNEQUAL_BAGS = (integers(8, 10), torch.tensor([0, 4, 6, 7]))
for name in ("embedding_bag", "_embedding_bag"):
    op = A.embedding_bag.padding_idx if name == "embedding_bag" else A._embedding_bag.default
    tail = (False, None, False, None) if name == "embedding_bag" else (False, None, False)
    for ids, ends in (*EQUAL_BAGS, UNEQUAL_BAGS):
        bags = (x(8, 6), ids, ends, False)
        samples(
            name,
            *(call(op, *bags, mode, *tail, weights=(0,), graded=(0,), compared=(0,)) for mode in (0, 1, 2)),
        )
samples(
    "embedding_bag",
    call(
        A.embedding_bag.default,
        x(8, 6),
        *EQUAL_BAGS[0],
        False,
        0,
        False,
        x(4),
        weights=(0,),
        graded=(0,),
        compared=(0,),
    ),
)

# --------------------------------------------------------------------------------------- norms

samples(
    "layer_norm",
    call(A.layer_norm.default, x(2, 4, 6), [6], x(6), x(6), weights=(1, 2)),
    call(A.layer_norm.default, x(2, 4, 6), [4, 6]),
)
samples(
    "native_layer_norm",
    call(A.native_layer_norm.default, x(2, 4, 6), [6], x(6), x(6), 1e-5, weights=(1, 2), graded=(0,)),
)
samples("rms_norm", call(A.rms_norm.default, x(2, 4, 6), [6], x(6), weights=(1,)))
samples(
    "_fused_rms_norm", call(A._fused_rms_norm.default, x(2, 4, 6), [6], x(6), 1e-5, weights=(1,), graded=(0,))
)
for name in ("softmax", "log_softmax"):
    samples(name, call(getattr(A, name).int, x(2, 4, 6), -1), call(getattr(A, name).int, x(2, 1, 6), 0))
    samples(f"_{name}", call(getattr(A, f"_{name}").default, x(2, 4, 6), 1, False))
for name in ("cumsum", "logcumsumexp"):
    samples(name, call(getattr(A, name).default, x(2, 4, 6), -2))

# -------------------------------------------------------------------------------------- losses

samples(
    "cross_entropy_loss",
    call(A.cross_entropy_loss.default, x(8, 10), integers(10, 8)),
    call(A.cross_entropy_loss.default, x(8, 10), integers(10, 8), None, 2),
    call(A.cross_entropy_loss.default, x(8, 10), integers(10, 8), None, 0),
    call(A.cross_entropy_loss.default, x(2, 10, 6), integers(10, 2, 6)),
    call(A.cross_entropy_loss.default, x(8, 10), torch.softmax(x(8, 10), -1), fixed=(1,)),
    call(A.cross_entropy_loss.default, x(8, 10), integers(10, 8), positive(10), 2, fixed=(2,)),
)
samples(
    "nll_loss",
    call(A.nll_loss.default, x(8, 10), integers(10, 8)),
    call(A.nll_loss.default, x(8, 10), integers(10, 8), None, 2),
)
samples(
    "nll_loss_nd",
    call(A.nll_loss_nd.default, x(8, 10), integers(10, 8), None, 0),
    call(A.nll_loss_nd.default, x(2, 10, 6), integers(10, 2, 6)),
)
for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
    samples(name, *(call(getattr(A, name).default, x(4, 6), x(6, 4).T.contiguous(), r) for r in (0, 1, 2)))
samples("kl_div", call(A.kl_div.default, x(4, 6), unit(4, 6)), call(A.kl_div.default, x(4, 6), unit(4, 6), 0))
samples(
    "binary_cross_entropy",
    call(A.binary_cross_entropy.default, unit(4, 6), unit(6, 4).T.contiguous()),
    call(A.binary_cross_entropy.default, unit(4), unit(4), positive(4), 2, fixed=(2,)),
)
samples(
    "binary_cross_entropy_with_logits",
    call(A.binary_cross_entropy_with_logits.default, x(4, 6), unit(4, 6)),
    call(A.binary_cross_entropy_with_logits.default, x(4, 6), unit(4, 6), None, positive(6), 2, fixed=(2,)),
)

# ---------------------------------------------------------------------------------- reductions

samples(
    "sum",
    call(A.sum.default, x(4, 6)),
    call(A.sum.dim_IntList, x(2, 4, 6), [-1, 0]),
    call(A.sum.dim_IntList, x(2, 4, 6), [1], True),
    call(A.sum.dim_IntList, x(2, 1, 6), [1]),
    call(A.sum.default, integers(9, 4, 6)),
    call(A.sum.default, booleans(4, 6)),
)
samples(
    "mean",
    call(A.mean.default, x(4, 6)),
    call(A.mean.dim, x(2, 4, 6), [-1], True),
    call(A.mean.dim, x(2, 4, 6), [1, 2]),
)
samples("amax", call(A.amax.default, x(4, 6), [-1]), call(A.amax.default, x(4, 6), [0], True))
samples("amin", call(A.amin.default, x(4, 6), [1]), call(A.amin.default, x(4, 6)))
for name in ("max", "min"):
    op = getattr(A, name)
    samples(name, call(op.default, x(4, 6)))
    samples(f"{name}.dim", call(op.dim, x(4, 6), -1), call(op.dim, x(4, 6), 0, True))
for name in ("argmax", "argmin"):
    samples(
        name,
        call(getattr(A, name).default, x(4, 6), -1),
        call(getattr(A, name).default, x(4, 6)),
        call(getattr(A, name).default, x(4, 6), 0, True),
    )
for name in ("var", "std"):
    op, both = getattr(A, name), getattr(A, f"{name}_mean")
    samples(
        name,
        call(op.correction, x(2, 4, 6), [-1], correction=0, keepdim=True),
        call(op.default, x(4, 6)),
        call(op.dim, x(4, 6), [0], False),
    )
    samples(f"{name}_mean", call(both.correction, x(2, 4, 6), [0, 1], correction=1))
samples("prod", call(A.prod.default, x(4, 6)), call(A.prod.dim_int, x(4, 6), -1, True))
samples("norm", call(A.norm.Scalar, x(4, 6)), call(A.norm.ScalarOpt_dim, x(4, 6), 2, [-1], True))
samples(
    "linalg_vector_norm",
    call(A.linalg_vector_norm.default, x(4, 6), 2, [-1]),
    call(A.linalg_vector_norm.default, x(4, 6), 2),
)
samples(
    "logsumexp", call(A.logsumexp.default, x(2, 4, 6), [-1]), call(A.logsumexp.default, x(4, 6), [0], True)
)
for name in ("any", "all"):
    samples(
        name,
        call(getattr(A, name).default, booleans(4, 6)),
        call(getattr(A, name).dim, booleans(4, 6), -1, True),
    )
samples(
    "topk",
    call(A.topk.default, x(4, 6), 2),
    call(A.topk.default, x(4, 6), 2, 0),
    call(A.topk.default, x(4, 6), 1),
)
samples(
    "adaptive_avg_pool2d",
    call(A.adaptive_avg_pool2d.default, x(2, 4, 6, 6), [1, 1]),
    call(A.adaptive_avg_pool2d.default, x(4, 6, 6), [2, 3]),
    call(A.adaptive_avg_pool2d.default, x(2, 4, 6, 6), [6, 6]),
)

# --------------------------------------------------------------------------------- picking rows

samples("sort", call(A.sort.default, x(4, 6)), call(A.sort.default, x(4, 6), 0, True))
samples("sort.stable", call(A.sort.stable, x(4, 6), stable=True, dim=0))
samples("argsort", call(A.argsort.default, x(4, 6), -1))
samples("argsort.stable", call(A.argsort.stable, x(4, 6), stable=True))
samples("histc", call(A.histc.default, x(8), 4, -3, 3))
samples("bincount", call(A.bincount.default, integers(6, 8), None, 6))
samples(
    "index",
    call(A.index.Tensor, x(8, 6), [integers(8, 4)]),
    call(A.index.Tensor, x(8, 2, 6), [integers(8, 4, 2)]),
    call(A.index.Tensor, x(8, 6), [None, integers(6, 4)]),
    call(A.index.Tensor, x(8, 6), [integers(8, 4), integers(6, 4)]),
    call(A.index.Tensor, x(8, 4, 6), [integers(8, 2), None, integers(6, 2)]),
    call(A.index.Tensor, x(8, 6), [integers(8, 4, 1), integers(6, 2)]),
    call(A.index.Tensor, x(2, 4, 6), [None, integers(4, 2, 8)]),
)
samples(
    "gather",
    call(A.gather.default, x(4, 6), -1, integers(6, 4, 2)),
    call(A.gather.default, x(4, 6), 0, integers(4, 8, 2)),
    call(A.gather.default, x(4, 6), 1, integers(6, 4, 6)),
)
samples(
    "take_along_dim",
    call(A.take_along_dim.default, x(4, 6), integers(6, 4, 2), 1),
    call(A.take_along_dim.default, x(4, 6), integers(6, 1, 2), -1),
    call(A.take_along_dim.default, x(4, 6), integers(8, 8)),
)
samples(
    "index_add",
    call(A.index_add.default, x(4, 6), 0, integers(4, 8), x(8, 6)),
    call(A.index_add.default, x(4, 6), 1, integers(6, 8), x(4, 8)),
)
samples("index_add_", call(A.index_add_.default, x(4, 6), 0, integers(4, 8), x(8, 6)))
samples("index_copy", call(A.index_copy.default, x(4, 6), 1, torch.tensor([5, 2]), x(4, 2)))
samples("index_copy_", call(A.index_copy_.default, x(4, 6), 0, torch.tensor([3, 1]), x(2, 6)))
samples(
    "index_put",
    call(A.index_put.default, x(4, 6), [torch.tensor([3, 1])], x(2, 6)),
    call(A.index_put.default, x(4, 6), [integers(4, 8)], x(8, 6), True),
    call(A.index_put.default, x(4, 6), [None, torch.tensor([5, 2])], x(2)),
)
samples(
    "index_put_",
    call(A.index_put_.default, x(4, 6), [torch.tensor([3, 1])], x(6)),
    call(A.index_put_.default, x(4, 6), [booleans(4, 6)], torch.tensor(0.0, dtype=F64)),
)
for name in ("scatter", "scatter_"):
    op = getattr(A, name)
    samples(
        name,
        call(op.src, x(4, 6), 1, torch.stack([torch.randperm(6)[:2] for _ in range(4)]), x(4, 2)),
        call(op.value, x(4, 6), -1, integers(6, 4, 2), 1.0),
        call(op.src, x(4, 6), 0, integers(4, 1, 4), x(2, 6), fixed=(2,)),
    )
for name in ("scatter_add", "scatter_add_"):
    samples(name, call(getattr(A, name).default, x(4, 6), 1, integers(6, 4, 8), x(4, 8)))
samples("one_hot", call(A.one_hot.default, integers(6, 2, 4), 6))
samples(
    "searchsorted",
    call(A.searchsorted.Tensor, x(8).sort().values, x(4, 6)),
    call(A.searchsorted.Tensor, x(4, 8).sort().values, x(4, 6)),
)
samples("bucketize", call(A.bucketize.Tensor, x(4, 6), x(8).sort().values))

# --------------------------------------------------------------------------------------- views

samples(
    "view",
    call(A.view.default, x(4, 6), [24]),
    call(A.view.default, x(24), [4, -1]),
    call(A.view.default, x(2, 4, 6), [8, 2, 3]),
    call(A.view.default, x(4, 6), [1, 4, 1, 6]),
    call(A.view.default, x(6, 4), [8, 3]),
    call(A.view.dtype, x(4, 6), torch.int64),
)
samples(
    "reshape",
    call(A.reshape.default, x(2, 4, 6), [2, -1]),
    call(A.reshape.default, x(2, 12), [2, 2, 6]),
    call(A.reshape.default, x(1, 1), []),
)
samples("_unsafe_view", call(A._unsafe_view.default, x(2, 4, 6), [8, 6]))
samples("flatten", call(A.flatten.using_ints, x(2, 4, 6), 1, -1), call(A.flatten.using_ints, x(2, 4, 6)))
samples("unflatten", call(A.unflatten.int, x(4, 12), -1, [3, 4]), call(A.unflatten.int, x(4, 12), 0, [2, -1]))
samples(
    "squeeze",
    call(A.squeeze.dim, x(4, 1, 6), 1),
    call(A.squeeze.default, x(1, 4, 1)),
    call(A.squeeze.dims, x(1, 4, 1), [0, 2]),
    call(A.squeeze.dim, x(4, 6), 1),
)
samples("squeeze_", call(A.squeeze_.dim, x(4, 1), 1))
samples("unsqueeze", call(A.unsqueeze.default, x(4, 6), -1))
samples("unsqueeze_", call(A.unsqueeze_.default, x(4, 6), 1))
samples("view_as", call(A.view_as.default, x(24), x(4, 6)))
samples("reshape_as", call(A.reshape_as.default, x(4, 6), x(2, 12)))
samples("transpose", call(A.transpose.int, x(2, 4, 6), 1, -1))
samples("swapaxes", call(A.swapaxes.default, x(2, 4, 6), 0, 1))
samples("permute", call(A.permute.default, x(2, 4, 6), [2, 0, -2]))
samples("t", call(A.t.default, x(4, 6)), call(A.t.default, x(4)))
samples("numpy_T", call(A.numpy_T.default, x(4, 6)))
samples("mT", call(A.mT.default, x(2, 4, 6)))
samples(
    "movedim", call(A.movedim.int, x(2, 4, 6), 0, -1), call(A.movedim.intlist, x(2, 4, 6), [0, 1], [2, 0])
)
samples(
    "expand",
    call(A.expand.default, x(4, 1), [4, 6]),
    call(A.expand.default, x(4, 6), [2, -1, 6]),
    call(A.expand.default, x(1), [4]),
)
samples("expand_as", call(A.expand_as.default, x(4, 1), x(4, 6)))
samples("broadcast_to", call(A.broadcast_to.default, x(4, 1), [2, 4, 6]))
samples(
    "slice",
    call(A.slice.Tensor, x(4, 6), 1, 0, 3),
    call(A.slice.Tensor, x(4, 6), -1, 0, 9223372036854775807),
    call(A.slice.Tensor, x(4, 6), 0, -2),
    call(A.slice.Tensor, x(4, 6), 1, 1, 6, 2),
    call(A.slice.Tensor, x(4, 6), 0, 0, 1),
)
samples("select", call(A.select.int, x(2, 4, 6), 1, -1))
samples("unbind", call(A.unbind.int, x(2, 4, 6), -2), call(A.unbind.int, x(4)))
samples(
    "split",
    call(A.split.Tensor, x(4, 12), 4, -1),
    call(A.split.Tensor, x(4, 6), 4, 1),
    call(A.split.Tensor, x(4, 6), 6, 1),
    call(A.split.sizes, x(4, 6), [2, 4], 1),
)
samples(
    "split_with_sizes",
    call(A.split_with_sizes.default, x(4, 12), [4, 4, 4], -1),
    call(A.split_with_sizes.default, x(4, 12), [8, 4], 1),
)
samples("chunk", call(A.chunk.default, x(4, 12), 2, -1), call(A.chunk.default, x(4, 6), 4, 1))
samples(
    "tensor_split",
    call(A.tensor_split.sections, x(4, 12), 3, 1),
    call(A.tensor_split.indices, x(4, 12), [6], 1),
)
samples("unsafe_split", call(A.unsafe_split.Tensor, x(12, 4), 4))
for name in ("cat", "concat"):
    op = getattr(A, name).default
    samples(
        name,
        call(op, [x(4, 6), x(4, 6)], -1),
        call(op, [x(4, 2), x(4, 6)], 1),
        call(op, [x(4, 1), x(4, 1)], 1),
        call(op, [x(4, 6)], 0),
        call(op, [x(0), x(4)]),
    )
samples("stack", call(A.stack.default, [x(4, 6), x(4, 6)], -1), call(A.stack.default, [x(4), x(4), x(4)]))
samples(
    "pad",
    call(A.pad.default, x(4, 6), [0, 2]),
    call(A.pad.default, x(2, 4, 6), [1, 1], "reflect"),
    call(A.pad.default, x(4, 6), [1, -1]),
)
samples(
    "constant_pad_nd",
    call(A.constant_pad_nd.default, x(4, 6), [0, 0, 1, 1], 1.0),
    call(A.constant_pad_nd.default, x(4, 6), [1, -1]),
)
samples(
    "roll",
    call(A.roll.default, x(4, 6), [1], [-1]),
    call(A.roll.default, x(4, 6), [1]),
    call(A.roll.default, x(2, 4, 6), [1, 2], [0, 1]),
)
samples("flip", call(A.flip.default, x(4, 6), [-1]))
samples("triu", call(A.triu.default, x(2, 4, 6), 1))
samples("tril", call(A.tril.default, x(4, 6)))
samples(
    "diff",
    call(A.diff.default, x(4, 6)),
    call(A.diff.default, x(4, 6), 1, 0),
    call(A.diff.default, x(4, 6), 1, -1, x(4, 1)),
    call(A.diff.default, x(4, 6), 1, -1, x(4, 2), x(4, 1)),
)
samples("repeat", call(A.repeat.default, x(4, 6), [2, 1, 3]), call(A.repeat.default, x(4, 1), [1, 4]))
samples("tile", call(A.tile.default, x(4, 6), [2]), call(A.tile.default, x(4, 6), [2, 2, 2]))
samples(
    "repeat_interleave.self_int",
    call(A.repeat_interleave.self_int, x(4, 6), 2, -1),
    call(A.repeat_interleave.self_int, x(4), 3, 0),
    call(A.repeat_interleave.self_int, x(4, 6), 2),
)
samples(
    "soft_margin_loss",
    *(call(A.soft_margin_loss.default, x(4, 6), x(6, 4).T.sign(), r, fixed=(1,)) for r in (0, 1, 2)),
)
