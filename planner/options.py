"""From what a user asks for to a checked `Job` and checked pins. No torch, no solver.

In: raw option values (command line or keyword arguments), the topology, and the few facts of the
model they must agree with. Out: a `profile.Job`, and *pins*: a dict of the choices that the user
made for the planner (`{"tp": 8, "pp": 4, "zero": 1, "recompute": "full", "micro_batch": 2}`).
Every rejection is an `OptionError` that names the value found, what is allowed and, where there is
one, the nearest value that would be right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from .cost import Recompute
from .errors import OptionError, did_you_mean
from .estimate.engines import ENGINES
from .estimate.frameworks import FRAMEWORKS, OWN_FRAMEWORK
from .graph_cache import DEFAULT_SEQ_LEN
from .mesh import AXES
from .plan import Plan
from .profile import OPTIMIZERS, Job
from .schedule import Schedule
from .topology import Cluster, Device, Topology

MODES = ("train", "serve")
DEFAULT_ENGINE = "vllm"
OBJECTIVES = ("throughput", "latency", "memory", "cost")
"""What is best: the fastest step (twice: at a fixed batch the two are one), the fewest devices that
fit, the cheapest tokens."""
DTYPES = ("bf16", "fp16", "fp32")
"""Data types of parameters and activations, the preferred first."""
SERVE_DTYPES = (*DTYPES, "fp8")
"""When serving, the weights of layers may be 8 bit; activations and cache are then 16 bit."""
ZERO_STAGES = (0, 1, 2, 3)
CONTEXT = "cp"
"""Never proposed as a way to use up devices: few models can be split so."""
SERVING_AXES = ("pp", "dp", "ep", "tp")
WORD_PINS = {"recompute": tuple(map(str, Recompute)), "schedule": tuple(map(str, Schedule))}
"""Pins whose values are words, and which."""
PIN_KEYS = (*AXES, "zero", "shard_group", "micro_batch", "recompute", "schedule", "virtual_stages")

DEFAULT_STEP_TOKENS = 4 * 2**20
"""Tokens per optimizer step when no batch is given: the 4M of Llama 2 (arXiv:2307.09288, sec. 2.2)."""
DEFAULT_PROMPT_TOKENS = 1024
DEFAULT_OUTPUT_TOKENS = 256
"""Tokens read and made by a served sequence when nothing is said. A convention."""
DEFAULT_SAMPLES_PER_DEVICE = 1024
"""Samples per device and step for models without a sequence, when no batch is given. A convention."""

Pins = dict[str, int | str]


# --------------------------------------------------------------------------- the job


def job_from_options(
    *,
    mode: str = "train",
    objective: str = "throughput",
    global_batch: int | None = None,
    seq_len: int | None = None,
    output_len: int | None = None,
    dtype: str | None = None,
    optimizer: str = "adamw",
    framework: str | None = None,
    devices: int,
    device: Device | None = None,
) -> Job:
    """A checked job; what was not given is filled in.

    `devices` is the cluster's size, `device` its accelerator (for `dtype`); a `seq_len` of 1 means
    that the model has no sequence. Raises `OptionError`.
    """
    check_names(mode=mode, objective=objective, dtype=dtype, optimizer=optimizer, framework=framework)
    check_sizes(global_batch=global_batch, seq_len=seq_len, output_len=output_len)
    length = seq_len or DEFAULT_SEQ_LEN
    if mode == "serve":
        return _serve_job(objective, global_batch, seq_len, output_len, dtype, framework, device)
    return Job(
        mode=mode,
        objective=objective,
        global_batch=global_batch or default_global_batch(seq_len=length, devices=devices),
        seq_len=length,
        dtype=choose_dtype(dtype, device) if device else dtype or DTYPES[0],
        optimizer=optimizer,
        framework=framework or OWN_FRAMEWORK,
    )


def _serve_job(
    objective: str,
    concurrency: int | None,
    prompt_len: int | None,
    output_len: int | None,
    dtype: str | None,
    engine: str | None,
    device: Device | None,
) -> Job:
    """A job without gradients; its batch is the sequences in flight, one when nothing but latency counts."""
    return Job(
        mode="serve",
        objective=objective,
        global_batch=concurrency or 1,
        seq_len=prompt_len or DEFAULT_PROMPT_TOKENS,
        output_len=output_len or DEFAULT_OUTPUT_TOKENS,
        dtype=choose_dtype(dtype, device, mode="serve") if device else dtype or DTYPES[0],
        optimizer="none",
        framework=engine or DEFAULT_ENGINE,
    )


def default_global_batch(*, seq_len: int, devices: int) -> int:
    """Samples per step when the user gives none: `DEFAULT_STEP_TOKENS`, and a multiple of the devices.

    Models without a sequence (`seq_len` 1) get `DEFAULT_SAMPLES_PER_DEVICE` for each device. On a
    cluster with more devices than samples the batch is left as it is: pipeline and tensor groups
    then share samples.
    """
    if seq_len == 1:
        return DEFAULT_SAMPLES_PER_DEVICE * devices
    samples = max(1, DEFAULT_STEP_TOKENS // seq_len)
    return samples if devices > samples else math.ceil(samples / devices) * devices


def choose_dtype(dtype: str | None, device: Device, *, mode: str = "train") -> str:
    """`dtype` if the device can compute in it; without one, the first of `DTYPES` that it can."""
    usable = [name for name in dtypes_of(mode) if name in device.peak_flops]
    if dtype is None and usable:
        return usable[0]
    if dtype not in usable:
        allowed = ", ".join(usable) or "none of " + ", ".join(dtypes_of(mode))
        raise OptionError(f"dtype {dtype!r}: {device.name} has no units for it; it computes in {allowed}")
    return dtype


def common_dtype(dtype: str | None, cluster: Cluster, *, mode: str = "train") -> str:
    """`choose_dtype` for a cluster: one that all its kinds of devices compute in."""
    if isinstance(cluster, Topology):
        return choose_dtype(dtype, cluster.device, mode=mode)
    devices = [part.device for part in cluster.parts]
    if dtype is None:
        shared = [name for name in DTYPES if all(name in device.peak_flops for device in devices)]
        dtype = shared[0] if shared else None
    return {choose_dtype(dtype, device) for device in devices}.pop()


def dtypes_of(mode: str) -> tuple[str, ...]:
    """Data types that a mode can have."""
    return SERVE_DTYPES if mode == "serve" else DTYPES


def check_names(
    *,
    mode: str = "train",
    objective: str = "throughput",
    dtype: str | None = None,
    optimizer: str = "adamw",
    framework: str | None = None,
) -> None:
    """Raise `OptionError` for a word that no such option knows, or not yet."""
    _one_of("mode", mode, MODES)
    _one_of("objective", objective, OBJECTIVES)
    _one_of("optimizer", optimizer, OPTIMIZERS)
    if framework is not None and mode == "serve":
        _one_of("engine", framework, ENGINES)
    elif framework is not None:
        _one_of("framework", framework, FRAMEWORKS)
    if dtype is not None:
        _one_of("dtype", dtype, dtypes_of(mode))


def check_sizes(
    *,
    global_batch: int | None = None,
    seq_len: int | None = None,
    output_len: int | None = None,
    nodes: int | None = None,
    top: int | None = None,
    time_limit_s: float | None = None,
) -> None:
    """Raise `OptionError` for a count that is not a whole number of at least one; None is fine."""
    _whole("global batch", global_batch, unit="samples")
    _whole("sequence length", seq_len, unit="tokens")
    _whole("output length", output_len, unit="tokens")
    _whole("nodes", nodes, unit="nodes")
    _whole("top", top, unit="plans to list")
    if time_limit_s is not None and not time_limit_s > 0:
        raise OptionError(f"time limit {time_limit_s:g}: expected a number of seconds above 0, e.g. 30")


def _one_of(what: str, value: str, allowed: Iterable[str]) -> None:
    if value in allowed:
        return
    names = ", ".join(allowed)
    raise OptionError(f"unknown {what} {value!r}{did_you_mean(str(value), allowed)}; known: {names}")


def _whole(what: str, value: object, *, unit: str) -> None:
    if value is None or (_is_int(value) and int(value) >= 1):  # type: ignore[call-overload]
        return
    raise OptionError(f"{what} {value}: expected a whole number of {unit}, at least 1")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --------------------------------------------------------------------------- pins


def parse_set(text: str) -> Pins:
    """`"tp=8,pp=4,zero=1,recompute=full"` as a dict of checked single values.

    Raises `OptionError` for a part that is not `key=value`, an unknown or repeated key, or a value
    that the key cannot have.
    """
    pins: Pins = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise OptionError(f"--set {text!r}: {part.strip()!r} is not key=value, as in tp=8,pp=4")
        if key in pins:
            raise OptionError(f"--set {text!r}: {key!r} is given twice ({pins[key]} and {value})")
        pins[key] = _pin_value(key, value)
    return pins


def check_pins(
    pins: Mapping[str, int | str] | None,
    *,
    devices: int,
    global_batch: int | None = None,
    layers: int | None = None,
    cluster: str = "the cluster",
) -> Pins:
    """Check pins against each other, the cluster and the model; returns them normalised.

    When pp, dp and tp are all given, cp and ep are 1 unless given too, and the product must be the
    device count; else it must divide it. Facts left None are not checked. Raises `OptionError`.
    """
    checked = pin_values(pins)
    sizes = {axis: int(size) for axis, size in checked.items() if axis in AXES}
    complete = {"pp", "dp", "tp"} <= sizes.keys()
    _check_product(sizes, devices=devices, complete=complete, cluster=cluster)
    if complete:
        checked = {"cp": 1, "ep": 1, **checked}
    if layers is not None and sizes.get("pp", 1) > (most := max(1, layers)):
        raise OptionError(f"pp={sizes['pp']}: the model has {layers} layers to pipeline; at most pp={most}")
    if global_batch is not None:
        _check_batch(sizes, micro_batch=int(checked.get("micro_batch", 1)), global_batch=global_batch)
    return {key: checked[key] for key in PIN_KEYS if key in checked}


def check_serving_pins(pins: Mapping[str, int | str] | None) -> Pins:
    """Pins of a plan for serving: the axes of a replica, and how many there are."""
    checked = pin_values(pins)
    for key in checked:
        if key not in SERVING_AXES:
            raise OptionError(f"{key}={checked[key]}: serving has only {', '.join(SERVING_AXES)} to fix")
    return checked


def pin_values(pins: Mapping[str, int | str] | None) -> Pins:
    """Pins, each with a value that its key can have; raises `OptionError` for others."""
    return {key: _pin_value(key, value) for key, value in (pins or {}).items()}


def pins_of(plan: Plan) -> Pins:
    """The choices of a plan as pins; recompute that differs between blocks is left free."""
    if plan.serving:
        return {axis: plan.mesh.size(axis) for axis in SERVING_AXES}
    pins: Pins = {**plan.mesh.sizes, "zero": plan.zero_stage, "micro_batch": plan.micro_batch}
    if plan.zero_stage == 3 or plan.shard_group:
        pins["shard_group"] = plan.shard_group or plan.mesh.dp * plan.mesh.cp * plan.mesh.ep
    if plan.recompute in WORD_PINS["recompute"]:
        pins["recompute"] = plan.recompute
    if plan.schedule in WORD_PINS["schedule"]:
        pins |= {"schedule": plan.schedule, "virtual_stages": plan.virtual_stages}
    return pins


def _pin_value(key: str, value: object) -> int | str:
    if key not in PIN_KEYS:
        known = ", ".join(PIN_KEYS)
        raise OptionError(f"unknown choice {key!r}{did_you_mean(key, PIN_KEYS)}; known: {known}")
    if key in WORD_PINS:
        return _pin_word(key, str(value))
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if key == "zero":
        if not _is_int(number) or number not in ZERO_STAGES:
            raise OptionError(f"zero={value}: allowed: {', '.join(map(str, ZERO_STAGES))}")
    elif not _is_int(number) or number < 1:  # type: ignore[operator]
        raise OptionError(f"{key}={value}: expected a whole number, at least 1")
    return number  # type: ignore[return-value]


def _pin_word(key: str, value: str) -> str:
    allowed = WORD_PINS[key]
    if value not in allowed:
        raise OptionError(f"{key}={value}{did_you_mean(value, allowed)}; allowed: {', '.join(allowed)}")
    return value


def _check_product(sizes: Mapping[str, int], *, devices: int, complete: bool, cluster: str) -> None:
    product = math.prod(sizes.values())
    if product == devices or (not complete and devices % product == 0):
        return
    plural = "" if product == 1 else "s"
    total = f"{_spell(sizes)} makes {product} device{plural}, {cluster} has {devices}"
    movable = {axis: size for axis, size in sizes.items() if axis != CONTEXT}
    fixes = list(_single_fixes(movable, devices=devices, complete=complete))
    if not fixes:
        fixes = [_spell(_nearest_sizes(movable, devices=devices, complete=complete))]
    raise OptionError(f"{total}: {' or '.join(fixes)} would fit")


def _single_fixes(sizes: Mapping[str, int], *, devices: int, complete: bool) -> Iterator[str]:
    """Changes of one axis that make the product right, e.g. `dp=2`."""
    for axis, size in sizes.items():
        rest = math.prod(sizes.values()) // size
        if devices % rest == 0:
            room = devices // rest
            yield f"{axis}={room if complete else _nearest_divisor(size, room)}"


def _nearest_sizes(sizes: Mapping[str, int], *, devices: int, complete: bool) -> dict[str, int]:
    """The sizes, all axes free to change, that fit the devices and are nearest in ratio."""
    candidates = _factorings(tuple(sizes), devices, complete=complete)
    return min(candidates, key=lambda c: (_ratio_distance(c, sizes), tuple(-c[axis] for axis in c)))


def _factorings(axes: tuple[str, ...], devices: int, *, complete: bool) -> Iterator[dict[str, int]]:
    if not axes:
        if devices == 1 or not complete:
            yield {}
        return
    for size in _divisors(devices):
        for rest in _factorings(axes[1:], devices // size, complete=complete):
            yield {axes[0]: size, **rest}


def _ratio_distance(left: Mapping[str, int], right: Mapping[str, int]) -> float:
    return sum(abs(math.log(left[axis] / right[axis])) for axis in left)


def _check_batch(sizes: Mapping[str, int], *, micro_batch: int, global_batch: int) -> None:
    parts = {"dp": sizes.get("dp", 1), "ep": sizes.get("ep", 1), "micro_batch": micro_batch}
    unit = math.prod(parts.values())
    if global_batch % unit == 0:
        return
    below, above = global_batch // unit * unit, math.ceil(global_batch / unit) * unit
    nearest = f"{below} or {above}" if below else f"{above}"
    factors = [f"{key}={size}" for key, size in parts.items() if size > 1]
    words = " x ".join(factors) + (f" = {unit}" if len(factors) > 1 else "")
    raise OptionError(f"global batch {global_batch} does not divide by {words}; {nearest} would")


def _nearest_divisor(size: int, number: int) -> int:
    return min(_divisors(number), key=lambda d: (abs(math.log(d / size)), -d))


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _spell(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())
