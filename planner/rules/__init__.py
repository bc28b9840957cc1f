"""Rules: which dims of an op may be split. One family a file; importing this fills the table."""

from . import (
    attention,
    channel_norm,
    convolution,
    embedding,
    fourier,
    index,
    matmul,
    norm,
    patches,
    pointwise,
    pooling,
    recurrent,
    reduction,
    routing,
    scatter,
    shift,
    view,
    whole,
)
from .factory import is_factory
from .registry import describe, find, opaque, registered, rule
from .spec import Call, InnerSpec, Spec

__all__ = ["Call", "InnerSpec", "Spec", "describe", "find", "is_factory", "opaque", "registered", "rule"]
