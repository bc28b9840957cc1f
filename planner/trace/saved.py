"""Which tensors autograd keeps from each op's forward for its backward.

The exported graph is run once, node by node, on fake CPU tensors: nothing is computed or allocated,
but autograd records its graph and announces through `saved_tensors_hooks` every tensor it keeps. Each
storage is counted once, at the first node that keeps it; parameters and buffers are not counted, as
they are alive anyway. Fake CPU tensors, not meta ones: on meta attention decomposes into matrices
that no fused kernel keeps.

Some ops keep something else on an accelerator than on a CPU. `KERNELS` runs them as accelerators do:
fused attention keeps queries, keys, values, output and one log-sum-exp a row, with dropout too; dropout
keeps a mask of bytes; RMSNorm keeps its input and one fp32 number a row; recurrent layers keep gates and
states of every step, not oneDNN's workspace. An autograd function of the user's
own is exported as the ops of its forward, of which autograd keeps nothing: it is taken to keep its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from ..graph import Node, Saved, Value
from .export import silence
from .read import WRITE_BACK, Program, custom_function_of, dtype_name, output_name, writes_in_place

aten = torch.ops.aten


class _FusedRMSNorm(torch.autograd.Function):
    """RMSNorm as one kernel."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: list[int], weight: torch.Tensor | None) -> torch.Tensor:
        """A tensor like x; keeps x, the weight and the reciprocal root mean square of each row."""
        rows = x.shape[: x.dim() - len(shape)]
        ctx.save_for_backward(x, weight, x.new_empty(rows, dtype=torch.float32))
        return torch.empty_like(x)


def _rms_norm(x: torch.Tensor, shape: list[int], weight: Any = None, eps: Any = None) -> torch.Tensor:
    return _FusedRMSNorm.apply(x, shape, weight)  # type: ignore[return-value]


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, **more: Any,
) -> torch.Tensor:  # fmt: skip
    mask = None if attn_mask is None else attn_mask.detach()
    return aten.scaled_dot_product_attention.default(q, k, v, mask, 0.0, is_causal, **more)


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    return aten.native_dropout.default(x, p, train)[0] if train and 0 < p < 1 else x


KERNELS: dict[Any, Callable] = {
    aten.rms_norm.default: _rms_norm,
    aten.scaled_dot_product_attention.default: _attention,
    aten.dropout.default: _dropout,
}


def with_saved_tensors(
    program: Program, values: dict[str, Value], nodes: tuple[Node, ...]
) -> tuple[tuple[Node, ...], tuple[str, ...]]:
    """The nodes with `saved` and `differentiable` filled in, and warnings about ops that cannot run."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with silence(), torch.enable_grad(), torch.backends.mkldnn.flags(enabled=False), fake:
        recorder = _Recorder(program, values)
        recorder.run(*recorder.placeholders())
    found = recorder.saved
    nodes = tuple(
        replace(
            node,
            saved=tuple(found.get(node.name, ())),
            differentiable=node.name.partition(WRITE_BACK)[0] in recorder.differentiable,
        )
        for node in nodes
    )
    return nodes, recorder.warnings()


class _Recorder(torch.fx.Interpreter):
    """Runs an exported graph on fake CPU tensors and listens to what autograd keeps."""

    def __init__(self, program: Program, values: dict[str, Value]) -> None:
        super().__init__(program.module, garbage_collect_values=False)
        self.program = program
        self.values = values
        self.saved: dict[str, list[Saved]] = {}
        self.differentiable: set[str] = set()
        self.owner: dict[int, str] = {}
        """Storage address -> the value that created it. All tensors stay alive: no address is reused."""
        self.counted: set[int] = set()
        self.packed: list[torch.Tensor] = []
        """What the running node keeps."""
        self.alive: list[Any] = []
        self.failed: set[str] = set()
        self.function = ""
        """The custom autograd function that is running."""
        self.inside: set[str] = set()
        """Nodes of it that have run."""

    def placeholders(self) -> list[Any]:
        """Fake tensors for the graph's inputs; tied parameters share one."""
        shared: dict[int, torch.Tensor] = {}
        nodes = self.program.module.graph.find_nodes(op="placeholder")
        return [self._placeholder(node, shared) for node in nodes]

    def _placeholder(self, node: torch.fx.Node, shared: dict[int, torch.Tensor]) -> Any:
        meta = node.meta.get("val")
        if not isinstance(meta, torch.Tensor):
            return meta
        kind, _, held = self.program.held(node.name)
        if held is not None and id(held) in shared:
            return shared[id(held)]
        tensor = _fake_like(
            meta, requires_grad=held is not None and kind == "parameter" and held.requires_grad
        )
        if held is not None:
            shared[id(held)] = tensor
        if kind in ("parameter", "buffer"):
            self.counted.add(_address(tensor))
        self.owner[_address(tensor)] = node.name
        return tensor

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node and note the storages that it creates and keeps."""
        if n.op != "call_function":
            return super().run_node(n)
        self._enter(custom_function_of(n))
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            try:
                result = self._run_inside(n) if self.function else super().run_node(n)
            except Exception:
                result = self._assume(n)
        self.alive.append(result)
        several = isinstance(result, tuple | list)
        for index, tensor in enumerate(result if several else (result,)):
            name = output_name(n.name, index, several=several)
            if isinstance(tensor, torch.Tensor) and name in self.values:
                self._own(tensor, name, rewritten=writes_in_place(n))
                if tensor.requires_grad:
                    self.differentiable.add(n.name)
        self._settle(n.name)
        return result

    def _enter(self, function: str) -> None:
        if function != self.function:
            self.function, self.inside = function, set()

    def _run_inside(self, n: torch.fx.Node) -> Any:
        """Run an op of a custom autograd function: what it reads from outside is kept, and nothing else."""
        read = {node.name: self.env[node] for node in n.all_input_nodes}
        wanted = {
            name: tensor
            for name, tensor in read.items()
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad
        }
        self.packed += [tensor.detach() for name, tensor in wanted.items() if name not in self.inside]
        with torch.no_grad():
            result = super().run_node(n)
        self.inside.add(n.name)
        for tensor in pytree.tree_leaves(result):
            if wanted and isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.requires_grad_()
        return result

    def _own(self, tensor: torch.Tensor, name: str, *, rewritten: bool) -> None:
        """Say whose storage it is: who made it first, or last wrote all of it in place."""
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        if rewritten and whole:
            self.owner[_address(tensor)] = name
        self.owner.setdefault(_address(tensor), name)

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an op on the CPU, as the kernel that an accelerator would use."""
        args, kwargs = pytree.tree_map(_on_cpu, (args, kwargs))
        kernel: Callable = KERNELS.get(target) or target
        return kernel(*args, **kwargs)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.packed.append(tensor.detach())
        return tensor

    def _settle(self, node: str) -> None:
        """Attribute what was packed to the node, now that its outputs have their names."""
        for tensor in self.packed:
            if _address(tensor) not in self.counted:
                self.counted.add(_address(tensor))
                self.saved.setdefault(node, []).append(self._describe(tensor))
                self.alive.append(tensor)
        self.packed.clear()

    def _describe(self, tensor: torch.Tensor) -> Saved:
        value = self.values.get(self.owner.get(_address(tensor), ""))
        stored_bytes = tensor.untyped_storage().nbytes()
        if value is not None and value.bytes == stored_bytes:
            return Saved(value=value.name, shape=value.shape, dtype=value.dtype)
        elements = stored_bytes // tensor.element_size()
        shape = tuple(tensor.shape) if tensor.numel() == elements else (elements,)
        return Saved(value=value and value.name, shape=shape, dtype=dtype_name(tensor.dtype))

    def _assume(self, node: torch.fx.Node) -> Any:
        """The op cannot run on fake tensors: assume that it keeps its floating-point inputs."""
        inputs = [self.env[source] for source in node.all_input_nodes]
        inputs = [t for t in inputs if isinstance(t, torch.Tensor) and t.is_floating_point()]
        differentiable = any(tensor.requires_grad for tensor in inputs)
        if differentiable:
            self.failed.add(str(node.target))
            self.packed += [tensor.detach() for tensor in inputs]

        def make(leaf: Any) -> Any:
            grad = differentiable and isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            return _fake_like(leaf, requires_grad=grad) if isinstance(leaf, torch.Tensor) else leaf

        return pytree.tree_map(make, node.meta.get("val"))

    def warnings(self) -> tuple[str, ...]:
        """One sentence that names the ops whose kept tensors are assumed."""
        if not self.failed:
            return ()
        ops = ", ".join(sorted(self.failed))
        return (f"kept activations of {ops} are assumed to be all their floating-point inputs",)


def _fake_like(tensor: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    """A fake CPU tensor with the sizes, strides and dtype of a tensor on any device."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", requires_grad=requires_grad
    )


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _on_cpu(leaf: Any) -> Any:
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
