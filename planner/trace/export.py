"""A module on the meta device -> the ATen ops that its forward pass runs.

In: a module, its example inputs and a loss. Out: an `ExportedProgram` whose single user output is
the loss, not decomposed (`linear`, `scaled_dot_product_attention` and the like stay whole), and from
it the `Value`s and `Node`s of `planner.graph`. Nothing is allocated: all tensors are on meta.
"""

from __future__ import annotations

import contextlib
import io
import logging
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import TraceError
from ..graph import Node, Ref, Value

LossFunction = Callable[[Any, Any], torch.Tensor]
WRAPPED = "model"
"""Attribute that holds the user's model inside `WithLoss`; stripped from every path."""

PLACE_ARGUMENTS = frozenset({"device", "pin_memory", "layout"})
"""Keyword arguments that say where a tensor lives: always meta here, so they are left out."""


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
    return first if first.dim() == 0 else first.float().mean()


def export(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    """Run `torch.export`, first non-strict, then through bytecode analysis.

    Raises:
        TraceError: neither way works; the message holds the first reason and its line.
    """
    try:
        return _quiet_export(module, args, kwargs, strict=False)
    except Exception as first:
        try:
            return _quiet_export(module, args, kwargs, strict=True)
        except Exception:
            raise TraceError(f"the model cannot be traced: {describe(first)}") from None


def _quiet_export(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], *, strict: bool
) -> torch.export.ExportedProgram:
    with silence():
        return torch.export.export(module, args, kwargs, strict=strict)


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
        if _is_user_file(filename):
            place = f"{Path(filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__}: {text}" + (f" ({place})" if place else "")


# ----------------------------------------------------------------------- program -> values, nodes


def read_program(program: torch.export.ExportedProgram) -> tuple[dict[str, Value], tuple[Node, ...], str]:
    """The values, nodes and output name of an exported program.

    Tied weights become one value, `operator.getitem` is folded into its producer's outputs, and an
    in-place op makes a new value that later uses refer to.
    """
    reader = _Reader(program)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            reader.placeholder(node)
        elif node.op == "call_function":
            reader.call(node)
    return reader.values, tuple(reader.nodes), reader.alias(program.graph_signature.user_outputs[0])


class _Reader:
    """Walks an exported graph once, in order; `names` maps its names to ours."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self.program = program
        self.signature = program.graph_signature
        self.values: dict[str, Value] = {}
        self.nodes: list[Node] = []
        self.names: dict[str, str] = {}
        self.by_tensor: dict[int, str] = {}

    def alias(self, name: Any) -> str:
        """Our name for an exporter's name."""
        return self.names.get(str(name), str(name))

    def placeholder(self, node: torch.fx.Node) -> None:
        """Record an input, parameter, buffer or lifted constant."""
        tensor = node.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            return
        kind, fqn = self._kind(node.name)
        trainable = False
        if fqn is not None:
            held = self._held(fqn)
            first = self.by_tensor.setdefault(id(held), node.name)
            if first != node.name:
                self.names[node.name] = first
                return
            trainable = isinstance(held, nn.Parameter) and held.requires_grad
        self._add(node.name, tensor, kind=kind, fqn=fqn and strip(fqn), trainable=trainable)

    def _kind(self, name: str) -> tuple[str, str | None]:
        signature = self.signature
        if name in signature.inputs_to_parameters:
            return "parameter", signature.inputs_to_parameters[name]
        if name in signature.inputs_to_buffers:
            return "buffer", signature.inputs_to_buffers[name]
        return ("constant" if name in signature.inputs_to_lifted_tensor_constants else "input"), None

    def _held(self, fqn: str) -> torch.Tensor:
        state = self.program.state_dict
        return state[fqn] if fqn in state else self.program.constants[fqn]

    def call(self, node: torch.fx.Node) -> None:
        """Record one op, unless it makes no tensor."""
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, torch.fx.Node)
            self.names[node.name] = self.alias(f"{source.name}.{index}")
            return
        results = node.meta.get("val")
        tensors = list(results) if isinstance(results, tuple | list) else [results]
        if not any(isinstance(tensor, torch.Tensor) for tensor in tensors):
            return
        named = tuple((key, arg) for key, arg in node.kwargs.items() if key not in PLACE_ARGUMENTS)
        args, kwargs = self._literal(node.args, node), self._literal(named, node)
        outputs = self._outputs(node, tensors, several=isinstance(results, tuple | list))
        self._rename_mutated(node)
        module, module_class = module_of(node)
        self.nodes.append(
            Node(
                name=node.name,
                target=target_name(node.target),
                args=args,
                kwargs=kwargs,
                outputs=outputs,
                module=module,
                module_class=module_class,
                source=source_of(node),
            )
        )

    def _outputs(self, node: torch.fx.Node, tensors: list[Any], *, several: bool) -> tuple[str, ...]:
        names = []
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                continue
            name = f"{node.name}.{index}" if several else node.name
            self._add(name, tensor, kind="activation")
            names.append(name)
        return tuple(names)

    def _rename_mutated(self, node: torch.fx.Node) -> None:
        schema = getattr(node.target, "_schema", None)
        for argument, value in zip(schema.arguments if schema else (), node.args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, torch.fx.Node):
                old = self.alias(value.name)
                self.names |= {name: node.name for name, ours in self.names.items() if ours == old}
                self.names[value.name] = node.name

    def _add(self, name: str, tensor: torch.Tensor, *, kind: str, **more: Any) -> None:
        if not all(isinstance(size, int) for size in tensor.shape):
            raise TraceError(f"value {name} has a shape that depends on data: {tuple(tensor.shape)}")
        self.values[name] = Value(
            name=name, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype), kind=kind, **more
        )

    def _literal(self, arg: Any, node: torch.fx.Node) -> Any:
        if isinstance(arg, torch.fx.Node):
            return Ref(self.alias(arg.name))
        if isinstance(arg, tuple | list):
            return tuple(self._literal(item, node) for item in arg)
        if isinstance(arg, torch.dtype):
            return dtype_name(arg)
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        if isinstance(arg, torch.device | torch.layout | torch.memory_format):
            return str(arg)
        raise TraceError(
            f"op {target_name(node.target)} at {source_of(node) or 'an unknown line'} has an argument "
            f"of type {type(arg).__name__}"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def target_name(target: Any) -> str:
    """`aten.linear.default` for the overload `torch.ops.aten.linear.default`."""
    return (
        str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    )


def strip(path: str) -> str:
    """A module path or FQN as the user knows it, without the wrapper."""
    return "" if path == WRAPPED else path.removeprefix(f"{WRAPPED}.")


def module_of(node: torch.fx.Node) -> tuple[str, str]:
    """Path and class name of the innermost module that ran a node."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return "", ""
    path, cls = list(stack.values())[-1]
    if not path:
        return "", ""
    name = cls if isinstance(cls, str) else cls.__qualname__
    return strip(path), name.rpartition(".")[2]


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def source_of(node: torch.fx.Node) -> str:
    """`file.py:line` of the innermost frame in the user's code, or an empty string."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for filename, line in reversed(frames):
        if _is_user_file(filename):
            return f"{Path(filename).name}:{line}"
    return ""


_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def _is_user_file(filename: str) -> bool:
    return not filename.startswith((*_LIBRARIES, "<"))
