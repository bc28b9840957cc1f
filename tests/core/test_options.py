"""Options and pins: what is accepted, what is filled in, and that every rejection helps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tpplan.planner.errors import OptionError
from tpplan.planner.options import (
    PIN_KEYS,
    check_pins,
    choose_dtype,
    default_global_batch,
    job_from_options,
    parse_set,
    pins_of,
)
from tpplan.planner.topology import Device

from .sample_plan import llama3_8b


def device(*dtypes: str) -> Device:
    return Device(
        name="X1",
        vendor="acme",
        memory_bytes=2**34,
        memory_bytes_per_s=1e12,
        peak_flops=dict.fromkeys(dtypes, 1e14),
        efficiency={},
        kernel_latency_s=1e-6,
        sources={},
    )


# --------------------------------------------------------------------------- the job


def test_what_is_given_is_kept():
    job = job_from_options(
        global_batch=96, seq_len=2048, dtype="fp16", optimizer="sgd", framework="megatron", devices=8
    )
    assert (job.global_batch, job.seq_len, job.dtype) == (96, 2048, "fp16")
    assert (job.mode, job.objective, job.optimizer, job.framework) == (
        "train",
        "throughput",
        "sgd",
        "megatron",
    )


def test_what_is_not_given_is_filled_in():
    job = job_from_options(devices=8)
    assert (job.seq_len, job.global_batch, job.dtype) == (4096, 1024, "bf16")
    assert job_from_options(devices=8, device=device("fp16")).dtype == "fp16"


@pytest.mark.parametrize(
    ("seq_len", "devices", "batch"),
    [
        (4096, 8, 1024),  # 4 Mi tokens
        (4096, 96, 1056),  # 1,024 rounded up to a multiple of 96
        (8192, 16_384, 512),  # fewer samples than devices: left alone
        (2**23, 8, 1),  # one sample is already too many tokens
        (1, 8, 8192),  # no sequence: 1,024 each
    ],
)
def test_a_batch_is_chosen_when_none_is_given(seq_len: int, devices: int, batch: int):
    assert default_global_batch(seq_len=seq_len, devices=devices) == batch


def test_the_dtype_follows_the_device():
    assert choose_dtype(None, device("fp32", "bf16", "fp16")) == "bf16"
    assert choose_dtype(None, device("fp32", "fp16")) == "fp16"
    with pytest.raises(OptionError, match=r"'bf16': X1 has no units for it; it computes in fp16, fp32"):
        choose_dtype("bf16", device("fp32", "fp16"))


BAD_JOBS = [
    ({"global_batch": 0}, "global batch 0: expected a whole number of samples, at least 1"),
    ({"global_batch": -8}, "global batch -8"),
    ({"global_batch": 2.5}, "global batch 2.5"),
    ({"global_batch": True}, "global batch True"),
    ({"seq_len": 0}, "sequence length 0: expected a whole number of tokens"),
    ({"seq_len": -1}, "sequence length -1"),
    ({"dtype": "bfloat16"}, "unknown dtype 'bfloat16'; did you mean 'bf16'?; known: bf16, fp16, fp32"),
    ({"dtype": "int4"}, "unknown dtype 'int4'"),
    ({"optimizer": "adam"}, "unknown optimizer 'adam'; did you mean 'adamw'"),
    ({"framework": "megaton"}, "unknown framework 'megaton'; did you mean 'megatron'"),
    ({"mode": "server"}, "unknown mode 'server'; did you mean 'serve'?; known: train, serve"),
    ({"mode": "trian"}, "unknown mode 'trian'; did you mean 'train'"),
    ({"objective": "speed"}, "unknown objective 'speed'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_JOBS)
def test_a_bad_option_is_named(options: dict, message: str):
    with pytest.raises(OptionError) as caught:
        job_from_options(devices=8, **options)
    assert message in str(caught.value)


# --------------------------------------------------------------------------- pins


def test_parse_set():
    text = "tp=8, pp=4,zero=0,recompute=full,micro_batch=2"
    assert parse_set(text) == {"tp": 8, "pp": 4, "zero": 0, "recompute": "full", "micro_batch": 2}


BAD_SETS = [
    ("", "'' is not key=value"),
    ("tp8", "'tp8' is not key=value"),
    ("tp=8,,pp=2", "'' is not key=value"),
    ("tp=", "'tp=' is not key=value"),
    ("=8", "'=8' is not key=value"),
    ("tp=8,tp=4", "'tp' is given twice (8 and 4)"),
    ("tpp=8", "unknown choice 'tpp'; did you mean 'tp'?; known: " + ", ".join(PIN_KEYS)),
    ("zero_stage=1", "unknown choice 'zero_stage'"),
    ("tp=eight", "tp=eight: expected a whole number, at least 1"),
    ("tp=0", "tp=0"),
    ("dp=-2", "dp=-2"),
    ("tp=2.0", "tp=2.0"),
    ("pp=--5", "pp=--5"),
    ("zero=4", "zero=4: allowed: 0, 1, 2, 3"),
    ("zero=one", "zero=one"),
    ("recompute=ful", "recompute=ful; did you mean 'full'?; allowed: none, selective, full"),
    ("micro_batch=0", "micro_batch=0"),
    ("schedule=2f2b", "allowed: gpipe, 1f1b, interleaved, zb-h1, zbv, dualpipev"),
]


@pytest.mark.parametrize(("text", "message"), BAD_SETS)
def test_a_bad_set_is_named(text: str, message: str):
    with pytest.raises(OptionError) as caught:
        parse_set(text)
    assert message in str(caught.value)


def test_no_pins_leave_everything_free():
    assert check_pins(None, devices=64) == {}


def test_free_axes_need_only_a_divisor():
    assert check_pins({"tp": 8, "zero": 3}, devices=64) == {"tp": 8, "zero": 3}


def test_pp_dp_and_tp_leave_nothing_to_cp_and_ep():
    assert check_pins({"tp": 8, "pp": 4, "dp": 2}, devices=64) == {
        "pp": 4,
        "dp": 2,
        "cp": 1,
        "ep": 1,
        "tp": 8,
    }
    assert check_pins({"tp": 4, "pp": 4, "dp": 2, "ep": 2}, devices=64)["ep"] == 2


PRODUCTS = [
    ({"tp": 8, "pp": 4, "dp": 3}, "tp=8,pp=4,dp=3 makes 96 devices, dgx has 64: dp=2 would fit"),
    (
        {"tp": 8, "pp": 4, "dp": 1},
        "tp=8,pp=4,dp=1 makes 32 devices, dgx has 64: tp=16 or pp=8 or dp=2 would fit",
    ),
    ({"tp": 1, "pp": 1, "dp": 1}, "makes 1 device, dgx has 64: tp=64 or pp=64 or dp=64 would fit"),
    ({"tp": 3, "pp": 5, "dp": 7}, "makes 105 devices, dgx has 64: tp=2,pp=4,dp=8 would fit"),
    ({"tp": 3}, "tp=3 makes 3 devices, dgx has 64: tp=4 would fit"),
    ({"tp": 128}, "tp=128 makes 128 devices, dgx has 64: tp=64 would fit"),
    ({"pp": 1, "dp": 32, "cp": 1, "tp": 1}, "dgx has 64: pp=2 or dp=64 or tp=2 would fit"),
    ({"tp": 16, "pp": 8}, "tp=16,pp=8 makes 128 devices, dgx has 64: tp=8 or pp=4 would fit"),
]


@pytest.mark.parametrize(("pins", "message"), PRODUCTS)
def test_a_wrong_product_says_which_would_be_right(pins: dict, message: str):
    with pytest.raises(OptionError) as caught:
        check_pins(pins, devices=64, cluster="dgx")
    assert message in str(caught.value)


sizes = st.integers(1, 24)


@given(pins=st.dictionaries(st.sampled_from(["pp", "dp", "ep", "tp"]), sizes), devices=st.integers(1, 200))
def test_every_change_that_is_offered_is_accepted(pins: dict[str, int], devices: int):
    try:
        assert devices % math.prod(check_pins(pins, devices=devices).get(axis, 1) for axis in pins) == 0
    except OptionError as error:
        offered = str(error).split(": ")[-1].removesuffix(" would fit")
        for change in offered.split(" or "):
            check_pins(pins | parse_set(change), devices=devices)


@pytest.mark.parametrize(
    ("pins", "facts", "message"),
    [
        ({"dp": 8}, {"global_batch": 100}, "global batch 100 does not divide by dp=8; 96 or 104 would"),
        ({"dp": 8, "micro_batch": 4}, {"global_batch": 16}, "dp=8 x micro_batch=4 = 32; 32 would"),
        ({"dp": 4, "ep": 2}, {"global_batch": 12}, "dp=4 x ep=2 = 8; 8 or 16 would"),
        ({"micro_batch": 3}, {"global_batch": 64}, "micro_batch=3"),
        ({"pp": 64}, {"layers": 32}, "pp=64: the model has 32 layers to pipeline; at most pp=32"),
    ],
)
def test_pins_must_agree_with_the_model_and_the_batch(pins: dict, facts: dict, message: str):
    with pytest.raises(OptionError) as caught:
        check_pins(pins, devices=64, **facts)
    assert message in str(caught.value)


def test_a_plans_own_choices_are_its_pins():
    plan = llama3_8b()
    pins = pins_of(plan)
    assert check_pins(pins, devices=plan.cluster.devices, global_batch=plan.job.global_batch) == pins
    assert pins["zero"] == plan.zero_stage and pins["tp"] == plan.mesh.tp
