"""Forward FLOPs that rules state, against torch's own counter; recurrent layers by hand."""

from __future__ import annotations

import math

import pytest
from torch.utils.flop_counter import FlopCounterMode
from tpplan.planner.graph import Op

from . import rule_samples_layers  # noqa: F401 - it fills the table
from .rule_samples import SAMPLES
from .rule_simulation import one_op, run

PRODUCTS = (
    "linear", "mm", "bmm", "matmul", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "convolution",
)  # fmt: skip


def stated(op: Op) -> float:
    return sum(factor * math.prod(op.size(label) for label in labels) for factor, labels in op.flops)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_count_as_torch_does(name: str):
    for sample in SAMPLES[f"aten.{name}"]:
        with FlopCounterMode(display=False) as counter:
            run(sample, sample.args, sample.kwargs)
        counted = counter.get_total_flops()
        assert counted in (0, stated(one_op(sample))), sample  # products of vectors are not counted


def test_a_recurrent_layer_multiplies_its_weights_in_every_step():
    """6 steps of 4 samples: 4 gates of 4 numbers from 6 inputs and 4 states, 2 FLOPs each."""
    assert stated(one_op(SAMPLES["aten.lstm.input"][0])) == 2 * 6 * 4 * (16 * 6 + 16 * 4)
    assert stated(one_op(SAMPLES["aten.gru.input"][0])) == 2 * 6 * 4 * (12 * 6 + 12 * 4)
