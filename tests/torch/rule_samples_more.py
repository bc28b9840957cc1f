"""More small calls: the rest of the pointwise ops, reductions, normalisations, writes and views."""

from __future__ import annotations

import torch

from .rule_samples import A, booleans, call, integers, positive, samples, unit, x

# ---------------------------------------------------------------------------------- pointwise

for name in (
    "tan",
    "atan",
    "asinh",
    "cosh",
    "sinh",
    "exp2",
    "erfc",
    "trunc",
    "frac",
    "sgn",
    "selu",
    "celu",
    "hardshrink",
    "softshrink",
    "isfinite",
    "angle",
):
    samples(name, call(getattr(A, name).default, x(4, 6)))
for name in ("acos", "asin", "atanh", "erfinv", "logit", "log2", "log10"):
    samples(name, call(getattr(A, name).default, unit(4, 6)))
samples("acosh", call(A.acosh.default, positive(4, 6) + 1))
for name in (
    "exp_",
    "sigmoid_",
    "tanh_",
    "neg_",
    "abs_",
    "round_",
    "floor_",
    "zero_",
    "gelu_",
    "elu_",
    "leaky_relu_",
    "hardtanh_",
    "hardswish_",
    "hardsigmoid_",
    "relu6_",
    "selu_",
):
    samples(name, call(getattr(A, name).default, x(4, 6)))
for name in ("sqrt_", "rsqrt_"):
    samples(name, call(getattr(A, name).default, positive(4, 6)))
samples("rrelu", call(A.rrelu.default, x(4, 6), 0.2, 0.2, True))
samples(
    "float_power",
    call(A.float_power.Tensor_Scalar, positive(4, 6), 1.5),
    call(A.float_power.Tensor_Tensor, positive(4, 6), x(6)),
)
samples("alpha_dropout", call(A.alpha_dropout.default, x(4, 6), 0.0, True))
samples("dropout_", call(A.dropout_.default, x(4, 6), 0.0, True))
samples("clamp_min_", call(A.clamp_min_.default, x(4, 6), 0.0))
samples("clamp_max_", call(A.clamp_max_.default, x(4, 6), 0.0))
samples("normal_", call(A.normal_.default, x(4, 6), 1.0, 0.0))
samples("uniform_", call(A.uniform_.default, x(4, 6), 1.0, 1.0))
samples("logical_xor", call(A.logical_xor.default, booleans(4, 1), booleans(6)))
samples("isclose", call(A.isclose.default, x(4, 6), x(6)))
samples("heaviside", call(A.heaviside.default, x(4, 6), x(6), fixed=(0, 1)))
for name in ("bitwise_left_shift", "bitwise_right_shift"):
    samples(name, call(getattr(A, name).Tensor, integers(9, 4, 6), integers(3, 6)))
for name in ("__lshift__", "__rshift__"):
    samples(name, call(getattr(A, name).Scalar, integers(9, 4, 6), 2))
samples("lerp_", call(A.lerp_.Scalar, x(4, 6), x(6), 0.3))
samples("addcmul_", call(A.addcmul_.default, x(4, 6), x(6), x(4, 1)))
samples("addcdiv_", call(A.addcdiv_.default, x(4, 6), x(6), positive(4, 1)))

# ---------------------------------------------------------------------------------- reductions

samples("median", call(A.median.dim, x(4, 6), -1), call(A.median.default, x(4, 6)))
samples("nanmedian", call(A.nanmedian.dim, x(4, 6), 0, True))
samples("mode", call(A.mode.default, integers(3, 4, 6)), call(A.mode.default, x(4, 6), 0))
samples("kthvalue", call(A.kthvalue.default, x(4, 6), 2, 0), call(A.kthvalue.default, x(4, 6), 2, -1, True))
samples("aminmax", call(A.aminmax.default, x(4, 6), dim=1), call(A.aminmax.default, x(4, 6)))
samples("nansum", call(A.nansum.default, x(4, 6), [0]))
samples("nanmean", call(A.nanmean.default, x(4, 6), [-1], True))
samples(
    "count_nonzero",
    call(A.count_nonzero.dim_IntList, integers(3, 4, 6), [1]),
    call(A.count_nonzero.default, integers(3, 4, 6)),
)
samples("_is_all_true", call(A._is_all_true.default, booleans(4, 6)))
samples("_is_any_true", call(A._is_any_true.default, booleans(4, 6)))

# --------------------------------------------------------------------------------------- norms

samples("cumsum_", call(A.cumsum_.default, x(4, 6), 0))
for name in ("cumprod", "cummax", "cummin"):
    samples(name, call(getattr(A, name).default, x(4, 6), 1))
samples("_safe_softmax", call(A._safe_softmax.default, x(4, 6), -1))
samples(
    "cosine_similarity",
    call(A.cosine_similarity.default, x(4, 6), x(4, 6), -1),
    call(A.cosine_similarity.default, x(4, 1, 6), x(1, 8, 6), -1),
)
RUNNING = (x(6), positive(6))
BATCH_NORM = {"weights": (1, 2), "fixed": (3, 4)}
samples(
    "batch_norm",
    call(A.batch_norm.default, x(4, 6, 2), x(6), x(6) + 1, *RUNNING, False, 0.1, 1e-5, False, **BATCH_NORM),
    call(A.batch_norm.default, x(4, 6, 2, 8), x(6), x(6) + 1, *RUNNING, True, 0.1, 1e-5, False, **BATCH_NORM),
    call(A.batch_norm.default, x(4, 6), None, None, None, None, True, 0.1, 1e-5, False),
)
NATIVE = {"graded": (0,), "compared": (0,)}
samples(
    "native_batch_norm",
    call(
        A.native_batch_norm.default,
        x(4, 6, 2),
        x(6),
        x(6) + 1,
        *RUNNING,
        False,
        0.1,
        1e-5,
        **BATCH_NORM,
        **NATIVE,
    ),
)
samples(
    "group_norm",
    call(A.group_norm.default, x(2, 12, 4, 6), 4, x(12), x(12) + 1, weights=(1, 2)),
    call(A.group_norm.default, x(2, 12), 4),
    call(A.group_norm.default, x(2, 12, 4), 12),
    call(A.group_norm.default, x(2, 12, 4), 1),
)
samples(
    "native_group_norm",
    call(
        A.native_group_norm.default,
        x(2, 12, 4),
        x(12),
        x(12) + 1,
        2,
        12,
        4,
        4,
        1e-5,
        weights=(1, 2),
        graded=(0,),
    ),
)
samples(
    "instance_norm",
    call(
        A.instance_norm.default,
        x(2, 4, 6),
        x(4),
        x(4) + 1,
        None,
        None,
        True,
        0.1,
        1e-5,
        False,
        weights=(1, 2),
    ),
    call(
        A.instance_norm.default,
        x(2, 4, 6),
        None,
        None,
        x(4),
        positive(4),
        False,
        0.1,
        1e-5,
        False,
        fixed=(1, 2),
    ),
    call(
        A.instance_norm.default,
        x(2, 4, 6),
        None,
        None,
        x(4),
        positive(4),
        True,
        0.1,
        1e-5,
        False,
        fixed=(1, 2),
    ),
)
samples(
    "_weight_norm",
    call(A._weight_norm.default, x(4, 6, 2), positive(4, 1, 1)),
    call(A._weight_norm.default, x(4, 6), positive(1, 6), 1),
)
samples(
    "_weight_norm_interface", call(A._weight_norm_interface.default, x(4, 6), positive(4, 1), graded=(0,))
)

# ---------------------------------------------------------------------------- reads and writes

samples(
    "index_select",
    call(A.index_select.default, x(8, 6), 0, integers(8, 4)),
    call(A.index_select.default, x(4, 8, 6), -2, integers(8, 2)),
)
samples("scatter_add", call(A.scatter_add.default, x(4, 6), 0, integers(4, 8, 6), x(8, 6)))
samples("scatter_reduce", call(A.scatter_reduce.two, x(4, 6), 1, integers(6, 4, 8), x(4, 8), "amax"))
samples("_unsafe_index_put", call(A._unsafe_index_put.default, x(4, 6), [torch.tensor([3, 1])], x(2, 6)))
HALF = torch.tensor([True, False, True, False, False, True])
for name in ("masked_scatter", "masked_scatter_"):
    samples(
        name,
        call(getattr(A, name).default, x(4, 6), HALF.expand(4, 6).contiguous(), x(12)),
        call(getattr(A, name).default, x(2, 6, 4), HALF[:, None].expand(2, 6, 4).contiguous(), x(6, 4)),
        call(getattr(A, name).default, x(4, 6), booleans(4, 6), x(25)),
    )

# --------------------------------------------------------------------------------------- views

samples("ravel", call(A.ravel.default, x(4, 6)))
samples("transpose_", call(A.transpose_.default, x(4, 6), 0, 1))
samples("swapdims", call(A.swapdims.default, x(2, 4, 6), 0, 1))
samples("moveaxis", call(A.moveaxis.int, x(2, 4, 6), 0, -1))
samples("mH", call(A.mH.default, x(2, 4, 6)))
samples("adjoint", call(A.adjoint.default, x(2, 4, 6)))
samples("narrow", call(A.narrow.default, x(4, 6), 1, 2, 2), call(A.narrow.default, x(4, 6), 0, 0, 3))
samples("unsafe_chunk", call(A.unsafe_chunk.default, x(4, 12), 2, 1))
samples("fliplr", call(A.fliplr.default, x(4, 6, 2)))
samples("flipud", call(A.flipud.default, x(4, 6)))
samples("rot90", call(A.rot90.default, x(4, 6, 2)))
samples("triu_", call(A.triu_.default, x(2, 4, 6)))
samples("tril_", call(A.tril_.default, x(4, 6)))
samples("glu", call(A.glu.default, x(4, 12)), call(A.glu.default, x(12, 4), 0), call(A.glu.default, x(4, 2)))
samples("prelu", call(A.prelu.default, x(4, 6, 2), x(6), weights=(1,)), call(A.prelu.default, x(4, 6), x(1)))
samples("broadcast_tensors", call(A.broadcast_tensors.default, [x(4, 1), x(6)]))
samples(
    "meshgrid",
    call(A.meshgrid.indexing, [x(4), x(6)], indexing="ij"),
    call(A.meshgrid.indexing, [x(4), x(6), x(2)], indexing="xy"),
)
samples("select_scatter", call(A.select_scatter.default, x(2, 4, 6), x(2, 6), 1, 2))
samples("slice_scatter", call(A.slice_scatter.default, x(4, 6), x(4, 2), 1, 2, 4))
samples("diagonal", call(A.diagonal.default, x(2, 4, 4), 0, -2, -1), call(A.diagonal.default, x(4, 6, 2)))
samples("as_strided", call(A.as_strided.default, x(4, 6), [6, 4], [1, 6]))
samples("as_strided_", call(A.as_strided_.default, x(4, 6), [6, 4], [1, 6], fixed=(0,)))
samples("as_strided_scatter", call(A.as_strided_scatter.default, x(4, 6), x(2, 2), [2, 2], [6, 1]))
samples("take", call(A.take.default, x(4, 6), integers(24, 8)))
samples("put", call(A.put.default, x(4, 6), integers(24, 8), x(8)))
samples("trace", call(A.trace.default, x(4, 4)))
samples("kron", call(A.kron.default, x(4, 6), x(2, 2)))
samples("block_diag", call(A.block_diag.default, [x(4, 6), x(2, 2)]))
samples("cartesian_prod", call(A.cartesian_prod.default, [x(4), x(6)]))
samples("combinations", call(A.combinations.default, x(4)))
LOGITS = torch.log_softmax(x(8, 2, 6), -1)
samples("ctc_loss", call(A.ctc_loss.IntList, LOGITS, integers(5, 2, 4) + 1, [8, 8], [4, 4]))
samples("histogram", call(A.histogram.bin_ct, x(8), 4, fixed=(0,)))
