"""Rules: which dims of an op may be split. One family a file; importing this fills the table."""

from . import attention, embedding, matmul, norm, pointwise, reduction, routing, view  # noqa: F401
from .factory import is_factory
from .registry import describe, find, opaque, registered, rule
from .spec import Call, InnerSpec, Spec

__all__ = ["Call", "InnerSpec", "Spec", "describe", "find", "is_factory", "opaque", "registered", "rule"]
