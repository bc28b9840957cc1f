"""What a device, cluster, curve or efficiency file may contain. Used at the file boundary only.

In: a `Document`. Out: a checked model in the file's own units (GB/s, GiB, microseconds), or a
`TopologyError` that names file, line, field, the value found and the nearest legal one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..planner.errors import TopologyError, did_you_mean
from .document import Document, FieldPath, spell

MAX_GB_PER_S = 1e5
"""Above any link or memory; catches bytes written where GB were meant."""
MAX_GIB = 1e5
MAX_US = 1e9
MAX_TFLOPS = 1e6
MAX_DEVICES = 1_000_000
"""Children of one level; larger is a slip, not a cluster."""
SHOWN_ERRORS = 5

Text = Annotated[str, Field(min_length=1)]
Architecture = Literal[
    "volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna2", "cdna3", "cdna4", "cpu", "other"
]
LinkKind = Literal[
    "nvlink",
    "pcie",
    "xgmi",
    "shared-memory",
    "infiniband",
    "roce",
    "efa",
    "slingshot",
    "ethernet",
    "tcp",
    "ici",
]
Dtype = Literal["bf16", "fp16", "tf32", "fp32", "fp8"]
Family = Literal[
    "gemm", "attention", "attention_backward", "grouped_gemm", "memory", "optimizer",
    "gemm/bf16", "gemm/fp16", "gemm/tf32", "gemm/fp32", "gemm/fp8",
]  # fmt: skip
"""A kernel family, or its kernels of one dtype where these have a curve of their own."""
CollectiveName = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send/recv"]
GbPerS = Annotated[float, Field(gt=0, le=MAX_GB_PER_S)]
Microseconds = Annotated[float, Field(gt=0, le=MAX_US)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Pair = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=2, max_length=2)]
Pairs = Annotated[list[Pair], Field(min_length=1)]


class Model(BaseModel):
    """Strict: no unknown fields, no text where a number belongs, no infinities."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class EfficiencyEntry(Model):
    """How much of peak one kernel family reaches, by size."""

    origin: Literal["measured", "interpolated", "modelled"]
    source: Text
    curve: Pairs


class DeviceSources(Model):
    """Where each number of a device was read."""

    memory_gib: Text
    memory_bandwidth_gb_per_s: Text
    peak_tflops: Text
    kernel_latency_us: Text


class DeviceFile(Model):
    """`devices/NAME.yaml`."""

    name: Text
    description: str = ""
    vendor: Text
    architecture: Architecture
    memory_gib: Annotated[float, Field(gt=0, le=MAX_GIB)]
    memory_bandwidth_gb_per_s: GbPerS
    peak_tflops: Annotated[dict[Dtype, Annotated[float, Field(gt=0, le=MAX_TFLOPS)]], Field(min_length=1)]
    kernel_latency_us: Microseconds
    sources: DeviceSources | None = None
    efficiency: dict[Family, EfficiencyEntry] | None = None
    """This device's own curves; families it lacks come from its architecture's."""


class CurveEntry(Model):
    """One collective among one number of ranks."""

    collective: CollectiveName
    ranks: Annotated[int, Field(gt=1, le=MAX_DEVICES)]
    bytes_us: Pairs


class MeasuredCurve(CurveEntry):
    """A curve in a cluster file itself, as the profiler writes it."""

    inside: list[Annotated[int, Field(gt=0, le=MAX_DEVICES)]] | None = None
    """Members in one unit of each level below, innermost first; absent: all of them are full."""
    spread: list[Annotated[float, Field(ge=0)]] | None = None
    """Half the interquartile range over the median, for each point."""
    source: Text


class LevelSources(Model):
    """Where each number of a level was read."""

    gb_per_s: Text
    latency_us: Text
    efficiency: Text
    partial_efficiency: Text = ""


class LevelFile(Model):
    """One entry of a cluster's `levels`."""

    name: Text
    size: Annotated[int, Field(gt=0, le=MAX_DEVICES)]
    kind: LinkKind
    gb_per_s: GbPerS
    latency_us: Microseconds
    efficiency: Fraction
    partial_efficiency: Fraction | None = None
    """Of groups with several, but not all, devices of each unit below."""
    curves: Text | None = None
    measured: list[MeasuredCurve] | None = None
    """Curves measured on this very cluster; they win over `curves`."""
    sources: LevelSources | None = None


class KernelRecord(Model):
    """One kernel as the profiler timed it."""

    name: Text
    dtype: Dtype
    shape: dict[Text, int]
    flops: Annotated[float, Field(ge=0)]
    bytes: Annotated[float, Field(gt=0)]
    time_us: Annotated[float, Field(gt=0)]
    spread: Annotated[float, Field(ge=0)]


class OverlapRecord(Model):
    """A collective and computation side by side: time of both over the longer of the two alone."""

    sigma: Annotated[float, Field(ge=1)]
    compute_us: Annotated[float, Field(gt=0)]
    collective_us: Annotated[float, Field(gt=0)]
    both_us: Annotated[float, Field(gt=0)]


class HostRecord(Model):
    """What the host takes for one operation of a model, where devices are its own cores."""

    forward_us: Annotated[float, Field(ge=0)]
    backward_us: Annotated[float, Field(ge=0)]
    split_forward_us: Annotated[float, Field(ge=0)]
    """On split tensors."""
    split_backward_us: Annotated[float, Field(ge=0)]


class CheckRecord(Model):
    """How well the curves predict sizes that were held back from them."""

    sizes: Annotated[int, Field(gt=0)]
    """How many were held back."""
    median_error: Annotated[float, Field(ge=0)]
    """Of the predicted over the measured time, without sign."""
    p90_error: Annotated[float, Field(ge=0)]


class ProfileRecord(Model):
    """How the measurements of a cluster file were made."""

    version: Literal[1]
    tpplan: Text
    torch: Text
    date: Text
    backend: Text
    hosts: list[Text]
    ranks: Annotated[int, Field(gt=0, le=MAX_DEVICES)]
    seed: int
    quick: bool
    measured_s: Annotated[float, Field(ge=0)]
    check: dict[Literal["collectives", "kernels"], CheckRecord] = {}
    overlap: OverlapRecord | None = None
    host: HostRecord | None = None
    kernels: list[KernelRecord] = []
    warnings: list[Text] = []


class ScaleEntry(Model):
    """One scale that runs on this cluster told."""

    name: Literal["kernels", "collectives", "memory"]
    framework: Text
    value: Annotated[float, Field(gt=0)]
    uncertainty: Annotated[float, Field(ge=0)]
    """Four in five runs lie between value / (1 + uncertainty) and value * (1 + uncertainty)."""
    runs: Annotated[int, Field(gt=0)]
    source: Text


class ClusterFile(Model):
    """`clusters/NAME.yaml`, or a user's own topology."""

    name: Text
    description: str = ""
    device: Text
    usd_per_device_hour: Annotated[float, Field(gt=0)] | None = None
    price_source: str = ""
    notes: list[Text] | None = None
    """What whoever wrote the file, such as an importer, wants its reader to know."""
    nearest_nics: dict[Text, list[Text]] | None = None
    """For each device of a node, its closest NICs."""
    measured_device: DeviceFile | None = None
    """What was measured on this cluster's devices; it stands in for the file that `device` names."""
    profile: ProfileRecord | None = None
    """How the measurements were made."""
    scales: list[ScaleEntry] = []
    """What `tpplan calibrate` or `profile --model` found; they hold for this cluster."""
    levels: Annotated[list[LevelFile], Field(min_length=1)]


class KindEntry(Model):
    """One kind of nodes of a cluster that has several."""

    topology: Text
    nodes: Annotated[int, Field(gt=0, le=MAX_DEVICES)]


class LinkFile(Model):
    """What joins nodes of different kinds."""

    kind: LinkKind
    gb_per_s: GbPerS
    latency_us: Microseconds
    efficiency: Fraction
    source: str = ""


class MixedFile(Model):
    """A cluster of several kinds of nodes."""

    name: Text
    description: str = ""
    kinds: Annotated[list[KindEntry], Field(min_length=2)]
    link: LinkFile


class CurveFile(Model):
    """`curves/nccl-*.yaml`."""

    name: Text
    device: Text
    library: Text
    link: Text
    source: Text
    caveat: str = ""
    curves: Annotated[list[CurveEntry], Field(min_length=1)]


Efficiencies = dict[str, dict[Family, EfficiencyEntry]]
"""`curves/efficiency.yaml`: architecture -> family -> entry."""

M = TypeVar("M", bound=Model)


def check(document: Document, model: type[M]) -> M:
    """Validate a document. Raises `TopologyError` listing the first few problems, one a line."""
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        raise _explain(document, model, error) from error


def check_efficiencies(document: Document) -> Efficiencies:
    """Validate the efficiency file; errors as `check`."""
    from pydantic import TypeAdapter

    try:
        return TypeAdapter(Efficiencies).validate_python(document.data)
    except ValidationError as error:
        raise _explain(document, EfficiencyEntry, error) from error


def _explain(document: Document, model: type[Model], error: ValidationError) -> TopologyError:
    found = sorted(error.errors(include_url=False), key=lambda e: document.line(e["loc"]))
    lines = [
        f"{document.path}:{document.line(e['loc'])}: {spell(_path(e['loc']))}{_problem(model, e)}"
        for e in found[:SHOWN_ERRORS]
    ]
    if len(found) > SHOWN_ERRORS:
        lines.append(f"... and {len(found) - SHOWN_ERRORS} more")
    return TopologyError("\n".join(lines))


def _path(location: FieldPath) -> FieldPath:
    """Pydantic marks a bad mapping key with a last part `[key]`; the reader needs none."""
    return location[:-1] if location and location[-1] == "[key]" else location


def _problem(model: type[Model], error: Any) -> str:
    """What is wrong with one value, what is allowed, and the nearest legal value."""
    value, context, location = error["input"], error.get("ctx", {}), _path(error["loc"])
    match error["type"]:
        case "extra_forbidden":
            return _unknown_field(str(location[-1]), _fields(model, location[:-1]))
        case "missing":
            return f"missing; required by the {_name(model, location[:-1])}"
        case "literal_error":
            return _unknown_choice(value, context["expected"])
        case "greater_than":
            near = f"; did you mean {-value:g}?" if value < 0 else ""
            return f"found {value}, must be greater than {context['gt']:g}{near}"
        case "less_than_equal":
            return f"found {value}, must be at most {context['le']:g}; nearest legal value: {context['le']:g}"
        case "float_type" | "int_type":
            return _not_a_number(value, whole=error["type"] == "int_type")
        case _:
            return f"found {_short(value)}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _unknown_field(name: str, allowed: list[str]) -> str:
    near = did_you_mean(name, allowed)
    return f"unknown field {name!r}{near or '; allowed: ' + ', '.join(allowed)}"


def _unknown_choice(value: object, expected: str) -> str:
    allowed = expected.replace("'", "").replace(" or ", ", ").split(", ")
    return f"found {_short(value)}{did_you_mean(str(value), allowed)} (allowed: {', '.join(allowed)})"


def _not_a_number(value: object, *, whole: bool) -> str:
    """YAML reads `1e3` and `"8"` as text: say which number was probably meant."""
    kind = "a whole number" if whole else "a number"
    try:
        number = float(value) if isinstance(value, str | float) else None
    except ValueError:
        number = None
    if number is None or number != number or abs(number) == float("inf"):
        return f"found {_short(value)}, expected {kind}"
    return (
        f"found {_short(value)}, expected {kind}; did you mean {max(round(number), 1) if whole else number}?"
    )


def _short(value: object) -> str:
    """A value as it may stand in a message."""
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _fields(model: type[Model], location: FieldPath) -> list[str]:
    return list(_model_at(model, location).model_fields)


def _name(model: type[Model], location: FieldPath) -> str:
    """`device`, `level sources`: the reader's word for the model at `location`."""
    name = _model_at(model, location).__name__.removesuffix("File").removesuffix("Entry")
    return "".join(f" {c.lower()}" if c.isupper() else c for c in name).strip()


def _model_at(model: type[Model], location: FieldPath) -> type[Model]:
    """The model that describes the mapping at `location`."""
    for part in location:
        if part in model.model_fields:
            model = _inner_model(model.model_fields[str(part)].annotation) or model
    return model


def _inner_model(annotation: Any) -> type[Model] | None:
    """The model inside an annotation such as `list[LevelFile]` or `LevelSources | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Model):
        return annotation
    return next((found for a in get_args(annotation) if (found := _inner_model(a))), None)
