"""What the user names -> a module on meta, its inputs and its loss.

A source is `model.py[:factory]`, a Hugging Face `config.json` (or its folder), a `.pt2` export, or an
`nn.Module`. Modules are built under `torch.device("meta")`, so any size costs nothing; a module that
already has weights is copied as structure only. All mistakes of the user raise `ModelError`.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import ModelError, did_you_mean
from ..graph_cache import DEFAULT_SEQ_LEN, TraceOptions
from .export import LossFunction, default_loss, describe, silence

DEFAULT_FACTORY = "build_model"
DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model ready to be traced: everything is on meta and in the wanted dtype."""

    name: str
    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    loss: LossFunction
    seq_len: int
    warnings: tuple[str, ...] = ()


@contextlib.contextmanager
def python_file(path: Path) -> Iterator[ModuleType]:
    """Execute a model file; its folder is importable meanwhile, as for a script.

    Raises:
        ModelError: the file has a syntax error or fails; one line with its place.
    """
    folder = str(path.parent.resolve())
    before = set(sys.modules)
    sys.path.insert(0, folder)
    try:
        yield _execute(path)
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            if _lies_in(sys.modules[name], folder):
                del sys.modules[name]


def _lies_in(module: ModuleType, folder: str) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and str(Path(file).resolve()).startswith(folder)


def _execute(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tpplan_model_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except SystemExit:
        raise ModelError(f"{path.name} ended the program while it was loaded") from None
    except SyntaxError as error:
        place = f"{Path(error.filename or path).name}:{error.lineno}"
        raise ModelError(f"syntax error in {place}: {error.msg}") from None
    except Exception as error:
        raise ModelError(f"{path.name} failed while it was loaded: {describe(error)}") from None
    return module


def from_file(module: ModuleType, path: Path, factory: str | None, options: TraceOptions) -> Loaded:
    """Build the model of an executed file through its factory and `example_inputs`."""
    with torch.device("meta"):
        model = call(function_of(module, factory or DEFAULT_FACTORY, path), path)
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"{path.name}: {factory or DEFAULT_FACTORY}() returned {type(model).__name__}, "
                "expected a torch.nn.Module"
            )
        examples = function_of(module, "example_inputs", path)
        seq_len = options.seq_len or own_seq_len(examples)
        inputs = call(examples, path, options.batch, seq_len)
    args, kwargs = split_inputs(inputs, f"{path.name}: example_inputs(batch, seq)")
    loss = getattr(module, "loss", None)
    return prepare(path.stem, model, args, kwargs, loss, dtype=options.dtype, seq_len=seq_len)


def own_seq_len(example_inputs: Callable) -> int:
    """The sequence length that `example_inputs(batch, seq=...)` has as its default."""
    try:
        parameters = list(inspect.signature(example_inputs).parameters.values())
    except (TypeError, ValueError):  # a callable that cannot be inspected
        return DEFAULT_SEQ_LEN
    own = parameters[1].default if len(parameters) > 1 else None
    return own if isinstance(own, int) and own > 0 else DEFAULT_SEQ_LEN


def load_export(path: Path) -> torch.export.ExportedProgram:
    """Read a `.pt2` file.

    Raises:
        ModelError: it was not written by `torch.export.save`, or by an incompatible version.
    """
    try:
        with silence():
            return torch.export.load(path)
    except Exception as error:
        raise ModelError(f"{path.name} is no readable export: {describe(error)}") from None


def function_of(module: ModuleType, name: str, path: Path) -> Callable:
    """A function of the model file, or an error that lists what the file has."""
    function = getattr(module, name, None)
    if callable(function):
        return function
    found = sorted(
        key for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    )  # fmt: skip
    listed = ", ".join(f"{key}()" for key in found) or "no function"
    raise ModelError(
        f"{path.name} has no function {name}(); found {listed}; expected build_model() -> nn.Module "
        f"(or model.py:FACTORY) and example_inputs(batch, seq) -> tuple or dict{did_you_mean(name, found)}"
    )


def call(function: Callable, path: Path, *args: Any) -> Any:
    """Call a function of the user's file; whatever it raises becomes one line."""
    try:
        return function(*args)
    except ModelError:
        raise
    except Exception as error:
        name = getattr(function, "__name__", "the factory")
        raise ModelError(f"{path.name}: {name}() failed: {describe(error)}") from None


def split_inputs(inputs: Any, what: str) -> tuple[tuple, dict[str, Any]]:
    """Positional and keyword arguments from what `example_inputs` returned."""
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, dict) and all(isinstance(key, str) for key in inputs):
        args, kwargs = (), inputs
    elif isinstance(inputs, tuple | list):
        args, kwargs = tuple(inputs), {}
    else:
        raise ModelError(f"{what} returned {type(inputs).__name__}, expected a tuple of arguments or a dict")
    if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(inputs)):
        raise ModelError(f"{what} returned no tensor, expected a tuple of tensors or a dict of them")
    return args, kwargs


def prepare(
    name: str,
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    loss: LossFunction | None,
    *,
    dtype: str,
    seq_len: int,
) -> Loaded:
    """Move everything to meta and floating-point tensors to the training dtype."""
    wanted = DTYPES.get(dtype)
    if wanted is None:
        raise ModelError(
            f"unknown dtype {dtype!r}, expected one of bf16, fp16, fp32{did_you_mean(dtype, DTYPES)}"
        )

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to("meta", wanted if leaf.is_floating_point() else leaf.dtype)

    model = model.to("meta").to(wanted)
    args, kwargs = pytree.tree_map(move, (args, kwargs))
    return Loaded(
        name=name, module=model, args=args, kwargs=kwargs, loss=loss or default_loss, seq_len=seq_len
    )


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of a module's structure on meta; the original and its weights are not touched."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = _on_meta(tensor)
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:  # some attribute cannot be copied: share it
        return _structural_copy(model, memo)


def _structural_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A module of the same class whose submodules are copied alike and whose other attributes are shared."""
    if id(module) in memo:
        return memo[id(module)]
    copied = memo[id(module)] = type(module).__new__(type(module))
    for name, value in vars(module).items():
        if name == "_modules":
            value = {key: child and _structural_copy(child, memo) for key, child in value.items()}
        elif isinstance(value, dict):
            value = {key: memo.get(id(item), item) for key, item in value.items()}
        copied.__dict__[name] = memo.get(id(value), value)
    return copied


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
