"""Pointwise ops with broadcasting: every output dim is free.

Sums and differences of partial sums stay partial; so do multiples of one by something whole.
"""

from __future__ import annotations

from .registry import rule
from .spec import Axis, Call, Spec

ADDITIVE = ("add", "sub", "add_", "sub_", "rsub")
SCALING = (
    "mul",
    "mul_",
    "div",
    "div_",
    "neg",
    "to",
    "_to_copy",
    "type_as",
    "clone",
    "contiguous",
    "alias",
    "lift_fresh_copy",
)

UNARY = (
    "abs", "neg", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "relu",
    "relu_", "gelu", "silu", "silu_", "mish", "softplus", "erf", "floor", "ceil", "round", "sign",
    "reciprocal", "square", "leaky_relu", "elu", "hardtanh", "hardswish", "hardsigmoid", "relu6",
    "log_sigmoid", "bitwise_not", "logical_not", "isnan", "isinf", "nan_to_num", "clamp", "clamp_",
    "clamp_min", "clamp_max", "dropout", "native_dropout", "bernoulli_", "bernoulli", "feature_dropout",
    "masked_fill", "masked_fill_", "threshold", "pow", "pow_", "acos", "acosh", "asin", "asinh", "atan",
    "atanh", "cosh", "sinh", "tan", "exp2", "log2", "log10", "erfc", "erfinv", "trunc", "frac", "sgn",
    "logit", "selu", "celu", "rrelu", "hardshrink", "softshrink", "isfinite", "angle", "float_power",
    "alpha_dropout", "exp_", "sqrt_", "rsqrt_", "sigmoid_", "tanh_", "neg_", "abs_", "round_", "floor_",
    "zero_", "gelu_", "elu_", "leaky_relu_", "hardtanh_", "hardswish_", "hardsigmoid_", "relu6_", "selu_",
    "dropout_", "clamp_min_", "clamp_max_", "normal_", "uniform_",
)  # fmt: skip
BINARY = (
    "add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_", "floor_divide", "remainder", "fmod",
    "maximum", "minimum", "min.other", "max.other", "eq", "ne", "lt", "le", "gt", "ge", "__and__", "__or__",
    "__xor__", "bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or", "atan2", "lerp",
    "addcmul", "addcdiv", "where", "polar", "complex", "copy_", "copy", "fill_", "type_as", "logical_xor",
    "xlogy", "logaddexp", "hypot", "isclose", "heaviside", "bitwise_left_shift", "bitwise_right_shift",
    "__lshift__", "__rshift__", "lerp_", "addcmul_", "addcdiv_", "fmin", "fmax",
)  # fmt: skip
COPIES = ("to", "_to_copy", "clone", "contiguous", "alias", "detach", "lift_fresh_copy")


@rule(*sorted({f"aten.{name}" for name in (*UNARY, *BINARY, *COPIES)}))
def pointwise(call: Call) -> Spec:
    """Labels run over the output's axes; an input axis of size one is broadcast."""
    shape = call.outputs[0].shape
    output = tuple((f"d{i}",) if size > 1 else () for i, size in enumerate(shape))
    inputs = tuple(
        None if i and call.node.target.startswith("aten.type_as") else aligned(value.shape, shape, output)
        for i, value in enumerate(call.inputs)
    )
    return Spec(
        family="view" if moves_nothing(call) else "pointwise",
        inputs=inputs,
        outputs=tuple(aligned(value.shape, shape, output) for value in call.outputs),
        linear=_linear(call),
        flops=() if moves_nothing(call) else ((1.0, tuple(label for axis in output for label in axis)),),
        sort="keep",
    )


def aligned(shape: tuple[int, ...], full: tuple[int, ...], labels: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Labels of a tensor that broadcasts to `full`, aligned from the right."""
    offset = len(full) - len(shape)
    return tuple(labels[offset + i] if size == full[offset + i] else () for i, size in enumerate(shape))


def moves_nothing(call: Call) -> bool:
    """Aliases, no-op casts and no-op copies touch no memory."""
    name = call.node.target.split(".")[1]
    if name not in COPIES or name == "clone":
        return False
    return call.inputs[0].dtype == call.outputs[0].dtype and name != "_to_copy"


def _linear(call: Call) -> tuple[int, ...]:
    name = call.node.target.split(".")[1]
    if name in ADDITIVE:
        return tuple(range(len(call.inputs))) if len(call.inputs) > 1 else ()
    if call.node.target.endswith("_mode") and call.kwargs.get("rounding_mode") is not None:
        return ()
    if name not in SCALING or not call.outputs[0].dtype.startswith(("float", "bfloat", "complex")):
        return ()
    swapped = len(call.inputs) == 2 and call.inputs[0].kind != "activation" and name in ("mul", "mul_")
    return (1,) if swapped else (0,)
