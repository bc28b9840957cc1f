"""Small calls of convolutions, pooling, resizing, recurrent layers, complex numbers, products."""

from __future__ import annotations

import torch

from .rule_samples import A, call, samples, x

# ------------------------------------------------------------------------------- convolutions

W, WB = {"weights": (1,)}, {"weights": (1, 2)}
samples(
    "conv1d",
    call(A.conv1d.default, x(2, 4, 6), x(8, 4, 3), x(8), **WB),
    call(A.conv1d.padding, x(2, 4, 6), x(8, 4, 3), None, [1], "same", **W),
    call(A.conv1d.default, x(2, 6, 8), x(6, 1, 3), None, [1], [1], [1], 6, **W),
    call(A.conv1d.default, x(2, 4, 6), x(8, 4, 1), **W),
)
ONE = [1, 1]
samples(
    "conv2d",
    call(A.conv2d.default, x(2, 4, 6, 8), x(8, 4, 3, 3), x(8), [2, 2], ONE, **WB),
    call(A.conv2d.default, x(2, 8, 4, 4), x(12, 2, 3, 3), None, ONE, ONE, ONE, 4, **W),
    call(A.conv2d.default, x(4, 6, 6), x(8, 4, 3, 3), **W),
    call(A.conv2d.default, x(2, 4, 4, 6), x(8, 4, 1, 1), None, [2, 2], **W),
    call(A.conv2d.default, x(2, 4, 4, 6), x(8, 4, 1, 1), x(8), **WB),
    call(A.conv2d.default, x(2, 4, 4, 6), x(8, 1, 3, 3), None, ONE, ONE, ONE, 4, **W),
    call(A.conv2d.default, x(1, 4, 4, 6), x(8, 2, 3, 3), x(8), ONE, ONE, ONE, 2, **WB),
)
samples("conv3d", call(A.conv3d.default, x(2, 4, 4, 4, 4), x(8, 4, 2, 2, 2), x(8), [2, 2, 2], **WB))
samples(
    "conv_transpose1d",
    call(A.conv_transpose1d.default, x(2, 4, 6), x(4, 8, 3), x(8), [2], **WB),
    call(A.conv_transpose1d.default, x(2, 8, 6), x(8, 3, 3), None, [2], [1], [1], 4, **W),
    call(A.conv_transpose1d.default, x(2, 8, 6), x(8, 6, 1), x(12), [1], [0], [0], 2, **WB),
)
samples("conv_transpose2d", call(A.conv_transpose2d.input, x(2, 4, 4, 6), x(4, 6, 2, 2), None, [2, 2], **W))
samples(
    "conv_transpose3d",
    call(A.conv_transpose3d.input, x(2, 4, 4, 4, 2), x(4, 6, 2, 2, 2), None, [2, 2, 2], **W),
)
samples(
    "convolution",
    call(A.convolution.default, x(2, 4, 6), x(8, 4, 3), None, [1], [1], [1], False, [0], 1, **W),
    call(A.convolution.default, x(2, 4, 6), x(4, 4, 3), x(8), [2], [1], [1], True, [1], 2, **WB),
)

# --------------------------------------------------------------------------- pooling, resizing

for name in ("max_pool1d", "max_pool1d_with_indices"):
    samples(name, call(getattr(A, name).default, x(2, 4, 8), [2]))
for name in ("max_pool2d", "max_pool2d_with_indices"):
    samples(name, call(getattr(A, name).default, x(2, 4, 8, 8), [3, 3], [2, 2], [1, 1]))
for name in ("max_pool3d", "max_pool3d_with_indices"):
    samples(name, call(getattr(A, name).default, x(2, 4, 4, 4, 4), [2, 2, 2]))
samples("avg_pool1d", call(A.avg_pool1d.default, x(2, 4, 8), [2]))
samples(
    "avg_pool2d",
    call(A.avg_pool2d.default, x(2, 4, 8, 8), [2, 2]),
    call(A.avg_pool2d.default, x(4, 8, 8), [3, 3], [2, 2], [1, 1]),
)
samples("avg_pool3d", call(A.avg_pool3d.default, x(2, 4, 4, 4, 4), [2, 2, 2]))
for depth, kind in ((1, "linear"), (2, "bilinear"), (3, "trilinear")):
    image = x(2, 4, *(4,) * depth)
    op = getattr(A, f"adaptive_avg_pool{depth}d").default
    samples(f"adaptive_avg_pool{depth}d", call(op, image, [2] * depth), call(op, image, [1] * depth))
    samples(
        f"adaptive_max_pool{depth}d",
        call(getattr(A, f"adaptive_max_pool{depth}d").default, image, [2] * depth),
    )
    op = getattr(A, f"upsample_{kind}{depth}d")
    samples(
        f"upsample_{kind}{depth}d",
        call(op.default, image, [8] * depth, False),
        call(op.vec, image, None, False, [2.0] * depth),
    )
    op = getattr(A, f"upsample_nearest{depth}d")
    samples(
        f"upsample_nearest{depth}d",
        call(op.vec, image, None, [2.0] * depth),
        call(op.default, image, [6] * depth),
    )
    name = f"_upsample_nearest_exact{depth}d"
    samples(name, call(getattr(A, name).default, image, [6] * depth))
    for name in (f"reflection_pad{depth}d", f"replication_pad{depth}d"):
        samples(name, call(getattr(A, name).default, image, [1, 1] * depth))
samples("_adaptive_avg_pool2d", call(A._adaptive_avg_pool2d.default, x(2, 4, 4, 4), [2, 2]))
samples("_adaptive_avg_pool3d", call(A._adaptive_avg_pool3d.default, x(2, 4, 4, 4, 4), [2, 2, 2]))
samples("upsample_bicubic2d", call(A.upsample_bicubic2d.default, x(2, 4, 4, 4), [8, 8], False))
for name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
    samples(name, call(getattr(A, name).default, x(2, 4, 4, 4), [8, 8], False))
for name in ("grid_sampler", "grid_sampler_2d"):
    samples(name, call(getattr(A, name).default, x(2, 4, 6, 8), torch.tanh(x(2, 4, 6, 2)), 0, 0, False))
samples(
    "grid_sampler_3d",
    call(A.grid_sampler_3d.default, x(2, 4, 4, 4, 4), torch.tanh(x(2, 4, 2, 6, 3)), 0, 0, False),
)
samples("unfold", call(A.unfold.default, x(4, 8), 1, 2, 2), call(A.unfold.default, x(8, 4), -2, 3, 1))
samples(
    "im2col",
    call(A.im2col.default, x(2, 4, 6, 6), [2, 2], [1, 1], [0, 0], [2, 2]),
    call(A.im2col.default, x(4, 6, 6), [3, 3], [1, 1], [1, 1], [1, 1]),
)
samples("col2im", call(A.col2im.default, x(2, 16, 9), [6, 6], [2, 2], [1, 1], [0, 0], [2, 2]))
samples("pixel_shuffle", call(A.pixel_shuffle.default, x(2, 16, 4, 6), 2))
samples("pixel_unshuffle", call(A.pixel_unshuffle.default, x(2, 4, 4, 8), 2))
samples("channel_shuffle", call(A.channel_shuffle.default, x(2, 8, 4, 4), 4))
samples("native_channel_shuffle", call(A.native_channel_shuffle.default, x(2, 8, 4, 4), 4, fixed=(0,)))

# ------------------------------------------------------------------------------ recurrent layers


def cell(gates: int, inputs: int, hidden: int) -> list[torch.Tensor]:
    """Weights of one layer and direction, small enough that gates do not saturate."""
    shapes = (gates * hidden, inputs), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,)
    return [0.1 * x(*shape) + 0.01 * i for i, shape in enumerate(shapes)]


ONE_LAYER = (True, 1, 0.0, True, False)
BOTH = [*cell(4, 6, 4), *cell(4, 6, 4), *cell(4, 8, 4), *cell(4, 8, 4)]
samples(
    "lstm.input",
    call(
        A.lstm.input,
        x(6, 4, 6),
        [x(1, 4, 4), x(1, 4, 4)],
        cell(4, 6, 4),
        *ONE_LAYER,
        False,
        weights=(3, 4, 5, 6),
    ),
    call(
        A.lstm.input,
        x(4, 6, 6),
        [x(4, 4, 4), x(4, 4, 4)],
        BOTH,
        True,
        2,
        0.0,
        True,
        True,
        True,
        weights=(*range(3, 19),),
    ),
)
samples(
    "gru.input",
    call(A.gru.input, x(6, 4, 6), x(1, 4, 4), cell(3, 6, 4), *ONE_LAYER, False, weights=(2, 3, 4, 5)),
)
for name in ("rnn_tanh", "rnn_relu"):
    op = getattr(A, name).input
    samples(
        f"{name}.input",
        call(op, x(4, 6, 6), x(1, 4, 4), cell(1, 6, 4), *ONE_LAYER, True, weights=(2, 3, 4, 5)),
    )

# --------------------------------------------------------------------- complex numbers, products

PAIRS = torch.complex(x(4, 6), x(4, 6) + 1)
samples("view_as_complex", call(A.view_as_complex.default, x(4, 6, 2)))
for name in ("view_as_real", "real", "imag", "_conj", "conj", "resolve_conj", "resolve_neg"):
    samples(name, call(getattr(A, name).default, PAIRS))
for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    given = (x(4, 6) if kind in ("rfft", "ihfft") else PAIRS).repeat(2, 1, 1)
    for depth, dims in (("", -1), ("2", [-2, -1]), ("n", [1])):
        if hasattr(A, f"fft_{kind}{depth}"):
            samples(f"fft_{kind}{depth}", call(getattr(A, f"fft_{kind}{depth}").default, given, None, dims))
samples("mv", call(A.mv.default, x(4, 6), x(6)))
samples("dot", call(A.dot.default, x(6), x(6)))
for name in ("outer", "ger"):
    samples(name, call(getattr(A, name).default, x(4), x(6)))
samples("cdist", call(A.cdist.default, x(2, 4, 6), x(2, 8, 6)), call(A.cdist.default, x(4, 6), x(2, 8, 6)))
samples("_cdist_forward", call(A._cdist_forward.default, x(2, 4, 6), x(2, 8, 6), 2.0, None))
