"""An exported program -> the values and nodes of `planner.graph`.

Regions that the exporter wraps (gradients off, autocast) are inlined first. Then one walk over the
graph names every tensor: tied weights become one value, `operator.getitem` is folded into its
producer's outputs, an in-place op makes a new value that later uses refer to (and, when it wrote into
a slice, a new value of the sliced tensor), and nodes that make no tensor are dropped.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from ..errors import TraceError
from ..graph import Node, Ref, Value
from .export import is_user_file

PLACE_ARGUMENTS = frozenset({"device", "pin_memory", "layout"})
"""Keyword arguments that say where a tensor lives: always meta here, so they are left out."""
WRAPPER = "model"
"""The attribute of `WithLoss` that holds the user's model; stripped from paths and names."""
SCATTERS: dict[object, str] = {
    torch.ops.aten.slice.Tensor: "aten.slice_scatter.default",
    torch.ops.aten.select.int: "aten.select_scatter.default",
}
"""Views of a part of a tensor, and the op that puts such a part back."""
WRITE_BACK = ".into."
"""Between an in-place op's name and a number: the nodes that put what it wrote into the tensors it viewed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """An exported program as one flat graph."""

    module: fx.GraphModule
    signature: torch.export.ExportGraphSignature
    tensors: dict[str, Any]
    """Parameters, buffers and constants by name."""
    output: str
    """Name of the node whose value is the first user output."""
    prefix: str
    """What stands before the user's own names, e.g. `model.`."""

    def held(self, placeholder: str) -> tuple[str, str | None, Any]:
        """Kind, name and tensor behind a placeholder; an input has neither name nor tensor."""
        signature = self.signature
        for kind, names in (
            ("parameter", signature.inputs_to_parameters),
            ("buffer", signature.inputs_to_buffers),
            ("constant", signature.inputs_to_lifted_tensor_constants),
        ):
            if placeholder in names:
                return kind, names[placeholder], self.tensors[names[placeholder]]
        return "input", None, None


# ------------------------------------------------------------------------------------- inlining


def flatten(exported: torch.export.ExportedProgram, *, wrapped: bool = True) -> Program:
    """Inline the wrapped regions of a program; `wrapped` if it is `WithLoss` around the model."""
    graph = fx.Graph()
    outputs = _inline(exported.graph_module, graph, {})
    graph.output(outputs)
    kinds = [spec.kind for spec in exported.graph_signature.output_specs]
    output = outputs[kinds.index(torch.export.graph_signature.OutputKind.USER_OUTPUT)]
    return Program(
        module=fx.GraphModule(exported.graph_module, graph),
        signature=exported.graph_signature,
        tensors={**exported.constants, **exported.state_dict},
        output=output.name,
        prefix=f"{WRAPPER}." if wrapped else "",
    )


def _inline(source: fx.GraphModule, graph: fx.Graph, made: dict[fx.Node, Any]) -> Any:
    """Copy a graph into another; `made` maps placeholders that are there already. Returns its outputs."""
    for node in source.graph.nodes:
        if node.op == "output":
            return map_arg(node.args[0], made.__getitem__)
        if node in made:
            continue
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            made[node] = _inline_region(source, node, graph, made)
        elif node.target is operator.getitem and isinstance(made[node.args[0]], tuple | list):
            made[node] = made[node.args[0]][node.args[1]]
        elif not (node.op == "get_attr" and isinstance(getattr(source, node.target, None), nn.Module)):
            made[node] = graph.node_copy(node, made.__getitem__)
    raise AssertionError("a graph ends in its output")


def _inline_region(source: fx.GraphModule, node: fx.Node, graph: fx.Graph, made: dict[fx.Node, Any]) -> Any:
    name = node.target.name()  # type: ignore[union-attr]
    if name not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
        raise TraceError(f"op {name} at {source_of(node) or 'an unknown line'} is not supported")
    at = next(i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg.op == "get_attr")
    region = getattr(source, node.args[at].target)  # type: ignore[union-attr]
    inputs = (made[arg] if isinstance(arg, fx.Node) else arg for arg in node.args[at + 1 :])
    inside = dict(zip(region.graph.find_nodes(op="placeholder"), inputs, strict=True))
    if name == "wrap_with_autocast":
        return _inline(region, graph, inside)
    graph.call_function(torch._C._set_grad_enabled, (node.args[0],))
    outputs = _inline(region, graph, inside)
    graph.call_function(torch._C._set_grad_enabled, (not node.args[0],))
    return outputs


# -------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a program's graph holds."""

    values: dict[str, Value]
    nodes: tuple[Node, ...]
    output: str
    view_writes: frozenset[str]
    """In-place ops on a view other than a slice: readers of the viewed tensor are not linked to them."""


def read(program: Program) -> Recorded:
    """The values and nodes of a program, in order."""
    reader = _Reader(program)
    for node in program.module.graph.nodes:
        if node.op == "placeholder":
            reader.placeholder(node)
        elif node.op == "call_function":
            reader.call(node)
    return Recorded(
        values=reader.values,
        nodes=tuple(reader.nodes),
        output=reader.ours(program.output),
        view_writes=frozenset(reader.view_writes),
    )


class _Reader:
    """Walks a flat graph once, in order; `names` maps the exporter's names to ours."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values: dict[str, Value] = {}
        self.nodes: list[Node] = []
        self.names: dict[str, str] = {}
        self.by_tensor: dict[int, str] = {}
        self.view_writes: set[str] = set()

    def ours(self, name: str) -> str:
        """Our name for an exporter's name."""
        return self.names.get(name, name)

    def placeholder(self, node: fx.Node) -> None:
        """Record an input, parameter, buffer or lifted constant."""
        tensor = node.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            return
        kind, fqn, held = self.program.held(node.name)
        if fqn is None:
            self._add(node.name, tensor, kind=kind)
            return
        first = self.by_tensor.setdefault(id(held), node.name)
        if first != node.name:
            self.names[node.name] = first
            return
        trainable = isinstance(held, nn.Parameter) and held.requires_grad
        name = fqn.removeprefix(self.program.prefix)
        self._add(node.name, tensor, kind=kind, fqn=name, trainable=trainable)

    def call(self, node: fx.Node) -> None:
        """Record one op, unless it makes no tensor."""
        if node.target is operator.getitem:
            source, index = node.args
            self.names[node.name] = self.ours(f"{source}.{index}")
            return
        results = node.meta.get("val")
        several = isinstance(results, tuple | list)
        tensors = list(results) if several else [results]
        if not any(isinstance(tensor, torch.Tensor) for tensor in tensors):
            return
        kept = tuple((key, arg) for key, arg in node.kwargs.items() if key not in PLACE_ARGUMENTS)
        args, kwargs = self._literal(node.args, node), self._literal(kept, node)
        outputs = self._outputs(node, tensors, several=several)
        written = self._rename_mutated(node)
        module, module_class = module_of(node, self.program.prefix)
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
        if written is not None:
            self._write_back(self.nodes[-1], written)

    def _outputs(self, node: fx.Node, tensors: list[Any], *, several: bool) -> tuple[str, ...]:
        names = []
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, torch.Tensor):
                names.append(output_name(node.name, index, several=several))
                self._add(names[-1], tensor, kind="activation")
        return tuple(names)

    def _rename_mutated(self, node: fx.Node) -> fx.Node | None:
        """Later readers of what an in-place op wrote read its result; returns what it wrote if a view."""
        schema = getattr(node.target, "_schema", None)
        for argument, value in zip(schema.arguments if schema else (), node.args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, fx.Node):
                self._rename(value.name, node.name)
                return value if _is_view(value) else None
        return None

    def _rename(self, name: str, to: str) -> None:
        old = self.ours(name)
        self.names |= {theirs: to for theirs, ours in self.names.items() if ours == old}
        self.names[name] = to

    def _write_back(self, writer: Node, view: fx.Node) -> None:
        """Put what was written into a slice back into the tensor that was sliced, level by level."""
        part, level = writer.outputs[0], 0
        while _is_view(view):
            base = view.args[0]
            scatter = SCATTERS.get(view.target)
            if scatter is None or not isinstance(base, fx.Node):
                self.view_writes.add(writer.name)
                return
            whole, name = self.values[self.ours(base.name)], f"{writer.name}{WRITE_BACK}{level}"
            self.values[name] = replace(whole, name=name, kind="activation", fqn=None, trainable=False)
            self.nodes.append(
                replace(
                    writer,
                    name=name,
                    target=scatter,
                    args=(Ref(whole.name), Ref(part), *self._literal(view.args[1:], view)),
                    kwargs=(),
                    outputs=(name,),
                )
            )
            self._rename(base.name, name)
            part, view, level = name, base, level + 1

    def _add(self, name: str, tensor: torch.Tensor, *, kind: str, **more: Any) -> None:
        if not all(isinstance(size, int) for size in tensor.shape):
            raise TraceError(f"the shape of {name} depends on data or is dynamic: {tuple(tensor.shape)}")
        self.values[name] = Value(
            name=name, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype), kind=kind, **more
        )

    def _literal(self, arg: Any, node: fx.Node) -> Any:
        if isinstance(arg, fx.Node):
            return Ref(self.ours(arg.name))
        if isinstance(arg, tuple | list):
            return tuple(self._literal(item, node) for item in arg)
        if isinstance(arg, torch.dtype):
            return dtype_name(arg)
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        if isinstance(arg, torch.device | torch.layout | torch.memory_format):
            return str(arg)
        raise TraceError(
            f"op {target_name(node.target)} at {source_of(node) or 'an unknown line'} has an argument of "
            f"type {type(arg).__name__}"
        )


def writes_in_place(node: fx.Node) -> bool:
    """Whether a node's first argument is written."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write


def _is_view(node: fx.Node) -> bool:
    """Whether a node's result is a view of its input."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return _is_view(node.args[0])
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    aliases = [result.alias_info for result in returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def output_name(node: str, index: int, *, several: bool) -> str:
    """Name of a node's value: the node's own, or with its index if the node makes several."""
    return f"{node}.{index}" if several else node


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def target_name(target: Any) -> str:
    """`aten.linear.default` for the overload `torch.ops.aten.linear.default`."""
    is_op = isinstance(target, torch._ops.OpOverload)
    return str(target) if is_op else getattr(target, "__name__", str(target))


def module_of(node: fx.Node, prefix: str = "") -> tuple[str, str]:
    """Path and class name of the innermost module that ran a node; the loss belongs to none."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return "", ""
    path, cls = list(stack.values())[-1]
    if prefix and not f"{path}.".startswith(prefix):
        return "", ""
    name = cls if isinstance(cls, str) else cls.__qualname__
    return f"{path}.".removeprefix(prefix).removesuffix("."), name.rpartition(".")[2]


_CUSTOM = re.compile(r'^.*?\.apply\([^\n]*\n(?=  File "[^"]+", line \d+, in forward\n)', re.DOTALL)


def custom_function_of(node: fx.Node) -> str:
    """Where the autograd function of the user's own that ran a node was applied, or an empty string."""
    found = _CUSTOM.match(node.meta.get("stack_trace") or "")
    return f"{module_of(node)[0]} {found[0]}" if found else ""


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def source_of(node: fx.Node) -> str:
    """`file.py:line` of the innermost frame in the user's code, or an empty string."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for filename, line in reversed(frames):
        if is_user_file(filename):
            return f"{Path(filename).name}:{line}"
    return ""
