"""A module on the meta device -> an exported program with the loss inside.

In: a module, its example inputs and a loss. Out: an `ExportedProgram` whose single user output is
the loss, not decomposed (`linear`, `scaled_dot_product_attention` and the like stay whole). Nothing is
allocated: all tensors are on meta.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import TraceError

LossFunction = Callable[[Any, Any], torch.Tensor]


class WithLoss(nn.Module):
    """The model followed by its loss, so that the loss is inside the graph."""

    def __init__(self, model: nn.Module, loss: LossFunction | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The scalar loss; without a loss function, the model's first output."""
        outputs = self.model(*args, **kwargs)
        if self.loss is None:
            return first_tensor(outputs)
        return self.loss(outputs, kwargs if kwargs else args)


def first_tensor(outputs: Any) -> torch.Tensor:
    """The first tensor of a model's outputs, whatever container they come in."""
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor):
            return leaf
    raise TraceError(f"the model returned no tensor but {type(outputs).__name__}")


def default_loss(outputs: Any, inputs: Any) -> torch.Tensor:
    """The model's own loss where its output has one, else the mean of its first output."""
    own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    first = first_tensor(outputs)
    return first if first.dim() == 0 else first.mean(dtype=torch.float32)


def export(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], *, strict: bool = False
) -> torch.export.ExportedProgram:
    """Run `torch.export`; `strict` goes through bytecode analysis, which is slow and bears other models.

    Raises:
        TraceError: it does not work; the message holds the reason and its line.
    """
    try:
        with silence():
            return torch.export.export(module, args, kwargs, strict=strict)
    except Exception as error:
        raise TraceError(f"the model cannot be traced: {describe(error)}") from None


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drop what the exporter prints: a failing export writes its whole partial graph."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def describe(error: BaseException) -> str:
    """One line for an exception: its type, the first line of its text, and where it was raised."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    place = None
    trace = error.__traceback__
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if is_user_file(filename):
            place = f"{Path(filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__}: {text}" + (f" ({place})" if place else "")


_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def is_user_file(filename: str) -> bool:
    """Whether a source file is neither torch's nor the tracer's own."""
    return not filename.startswith((*_LIBRARIES, "<"))
