"""Pipeline stages from the user's own module.

In: the model, the plan, example inputs of one microbatch. Out: for each stage of this rank a model
with the same names, in which only its own layers (and, on the first and last stage, what comes
before and after them) have parameters.

Every stage runs the user's own `forward` on the step's own inputs. In place of an absent module
stands one that makes zeros of the right shape; what they lead to is thrown away where the first
layer of the stage begins: there the received activation takes the place of the layer's first
argument. After the stage's last layer the forward is left, and that layer's output is the stage's.
So anything that the forward computes from its inputs for all layers (masks, rotary tables) is right
on every stage, and nothing needs to be known about the forward but its list of layers.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ..planner.errors import ModelError, PlanError
from ..planner.plan import Plan
from ..planner.schedule import stages_of
from .batch import Call, map_tensors
from .names import matches


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCut:
    """Which layers one stage holds."""

    index: int
    of: int
    """Number of stages of the whole pipeline."""
    layers: range
    """Indices in the model's list of layers; empty for a model without one."""
    modes: tuple[str, ...]
    """Recompute mode of each; of the whole model where it has no layers."""

    @property
    def is_first(self) -> bool:
        """Whether the model's inputs enter here."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.index == self.of - 1


# --------------------------------------------------------------------------- what the plan says


def list_path(plan: Plan) -> str | None:
    """Path of the list of repeated layers, `layers`; None for a model without one."""
    paths = sorted({entry.module.removesuffix(".*") for entry in plan.layer_lists})
    if len(paths) > 1 and plan.mesh.pp > 1:
        raise PlanError(
            f"a model with several lists of layers ({', '.join(paths)}) cannot be run in a pipeline"
        )
    return paths[0] if len(paths) == 1 else None


def stage_cuts(plan: Plan, rank: int) -> tuple[StageCut, ...]:
    """The stages of pipeline rank `rank`, in model order.

    Raises `PlanError` for a stage without layers, and for recomputation outside the layers.
    """
    counts, held = _layers_by_stage(plan), _held(plan, rank)
    modes = list(_layer_modes(plan, rank))
    cuts = []
    for index in held:
        first, count = sum(counts[:index]), counts[index]
        if not count and len(counts) > 1:
            raise PlanError(f"stage {index} of {len(counts)} has no layer: it cannot be cut out of the model")
        own = modes if len(counts) == 1 else modes[:count]
        cuts.append(
            StageCut(index=index, of=len(counts), layers=range(first, first + count), modes=tuple(own))
        )
        modes = modes[count:]
    return tuple(cuts)


def _held(plan: Plan, rank: int) -> tuple[int, ...]:
    """Indices of the stages of one pipeline rank."""
    if plan.mesh.pp == 1:
        return (0,)
    return stages_of(plan.schedule, pp=plan.mesh.pp, virtual_stages=plan.virtual_stages, rank=rank)


def _layers_by_stage(plan: Plan) -> list[int]:
    """Number of layers of each stage, in model order."""
    counts = [0] * (plan.mesh.pp * plan.virtual_stages)
    for rank, stage in enumerate(plan.stages):
        for index, layers in zip(_held(plan, rank), stage.chunk_layers or (stage.layers,), strict=True):
            counts[index] = layers
    return counts


def _layer_modes(plan: Plan, rank: int) -> Iterator[str]:
    repeated = {entry.block for entry in plan.layer_lists} or {plan.stages[rank].blocks[0][0]}
    for block, count, mode in plan.stages[rank].blocks:
        if block in repeated:
            yield from (mode,) * count
        elif mode != "none":
            raise PlanError(f"the plan recomputes {block!r}; only repeated layers can be recomputed")


# --------------------------------------------------------------------------- what the model does


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """What one whole forward without data showed."""

    hidden: torch.Tensor
    """First argument of the first layer, on meta."""
    before: frozenset[str]
    """Modules that own parameters and run before the first layer."""
    after: frozenset[str]
    """Those that run after it (one module may be in both)."""


def find_border(model: nn.Module, path: str, call: Call) -> Border:
    """Run the model without data and watch. Raises `ModelError` when that is not possible."""
    layers = model.get_submodule(path)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise ModelError(
            f"{path} is a {type(layers).__name__}; a pipeline cuts a ModuleList with layers in it"
        )
    if any(p is not None for p in model._parameters.values()):
        raise ModelError("the model owns parameters directly: put them into a module to run it in a pipeline")
    hidden: list[torch.Tensor] = []
    before: set[str] = set()
    after: set[str] = set()

    def entered(_module: nn.Module, args: tuple[Any, ...]) -> None:
        hidden.append(args[0] if args else None)  # pyright: ignore[reportArgumentType]

    def called(name: str) -> Callable[..., None]:
        return lambda *_: (after if hidden else before).add(name)

    hooks = [layers[0].register_forward_pre_hook(entered)]
    for name, module in model.named_modules():
        if any(p is not None for p in module._parameters.values()) and not name.startswith(f"{path}."):
            hooks.append(module.register_forward_pre_hook(called(name)))
    try:
        _run_hollow(model, call)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"no place to cut a pipeline: a forward without data fails: {reason}") from None
    finally:
        for hook in hooks:
            hook.remove()
    if not hidden or not isinstance(hidden[0], torch.Tensor):
        raise ModelError(
            f"{path}.0 is not called with a tensor as first argument: no place to cut a pipeline"
        )
    activation = torch.empty(hidden[0].shape, dtype=_dtype(layers), device="meta")
    return Border(hidden=activation, before=frozenset(before), after=frozenset(after))


def _run_hollow(module: nn.Module, call: Call) -> Any:
    """Shapes of a forward, without data; in bf16, the only dtype whose grouped products can be so run."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        empty = {name: _hollow(tensor) for name, tensor in state.items()}
        call = map_tensors(call, _hollow)
        return functional_call(module, empty, call.args, call.kwargs)


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype)


def _dtype(module: nn.Module) -> torch.dtype:
    """In which dtype a module computes: its first parameter's."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


# --------------------------------------------------------------------------- the cut


class StageLayers(nn.ModuleList):
    """Some layers of a list, under their own indices."""

    def __init__(self, layers: nn.ModuleList, kept: Iterable[int]) -> None:
        """`kept`: indices in `layers`."""
        super().__init__()
        self._modules = OrderedDict((str(i), layers[i]) for i in kept)  # pyright: ignore
        self.total = len(layers)

    def __getitem__(self, index: int | slice) -> Any:
        """The layer of that index in the whole model; a slice keeps the order and skips absent ones."""
        if isinstance(index, slice):
            return [
                self._modules[str(i)] for i in range(*index.indices(self.total)) if str(i) in self._modules
            ]
        key = str(index % self.total)
        if key not in self._modules:
            raise PlanError(f"layer {index} is not on this stage (which has {', '.join(self._modules)})")
        return self._modules[key]


class Absent(nn.Module):
    """Stands for a module of another stage: zeros of the shape that it would make."""

    def __init__(self, module: nn.Module) -> None:
        """`module` is kept for its shapes only."""
        super().__init__()
        hollow = structural_copy(module)
        for part in hollow.modules():
            part._parameters = {
                key: p if p is None else nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
                for key, p in part._parameters.items()
            }  # pyright: ignore[reportIncompatibleVariableOverride]
        self._hollow = (hollow,)  # in a tuple: no submodule, so it shows no parameters
        self._recent: tuple[Hashable, Any] = (None, None)

    def __getattr__(self, name: str) -> Any:
        """What the module's own attributes say of it, as the dtype of a weight inside."""
        if "_hollow" in self.__dict__:
            return getattr(self._hollow[0], name)
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Zeros."""
        (hollow,) = self._hollow
        device = next((x.device for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)), None)
        dtype = _dtype(hollow)

        def zeros(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return torch.zeros(x.shape, device=device, dtype=dtype if x.is_floating_point() else x.dtype)

        return tree_map(zeros, self._shapes(Call(args, kwargs)))

    def _shapes(self, call: Call) -> Any:
        """Of the outputs; known from the last call when that one's arguments looked alike."""
        looks = _looks(call)
        if looks is None or looks != self._recent[0]:
            self._recent = (looks, _run_hollow(self._hollow[0], call))
        return self._recent[1]


def _looks(call: Call) -> Hashable:
    """All that shapes of outputs can depend on; None where an argument is an object with a state."""
    leaves, structure = tree_flatten((call.args, call.kwargs))
    if not all(isinstance(leaf, torch.Tensor | bool | int | float | str | None) for leaf in leaves):
        return None
    tensors = ((x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves)
    return repr(structure), tuple(tensors)


def structural_copy(module: nn.Module) -> nn.Module:
    """New modules with the same parameters and buffers."""
    seen: dict[int, nn.Module] = {}

    def copied(original: nn.Module) -> nn.Module:
        if id(original) not in seen:
            new = seen[id(original)] = copy.copy(original)
            for name, value in vars(original).items():
                if isinstance(value, dict) and (
                    name.endswith("hooks") or name in ("_parameters", "_buffers")
                ):
                    new.__dict__[name] = copy.copy(value)
            new.__dict__["_modules"] = OrderedDict(
                (name, child if child is None else copied(child)) for name, child in original._modules.items()
            )
        return seen[id(original)]

    return copied(module)


def cut_out(model: nn.Module, path: str, cut: StageCut, border: Border) -> nn.Module:
    """The model with all but one stage's parameters taken away. The original is left as it is."""
    stage = structural_copy(model)
    layers = stage.get_submodule(path)
    assert isinstance(layers, nn.ModuleList)
    _replace(stage, path, StageLayers(layers, cut.layers))
    kept = (border.before if cut.is_first else frozenset()) | (border.after if cut.is_last else frozenset())
    for name in _outermost((border.before | border.after) - kept):
        _replace(stage, name, Absent(stage.get_submodule(name)))
    return stage


def _outermost(names: Iterable[str]) -> list[str]:
    """Modules that lie in none of the others."""
    kept: list[str] = []
    for name in sorted(names):
        if not any(name.startswith(f"{outer}.") for outer in kept):
            kept.append(name)
    return kept


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module


def layers_in(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """All repeated layers of a model or stage, in order."""
    patterns = {entry.module for entry in plan.layer_lists}
    return [m for name, m in model.named_modules() if any(matches(pattern, name) for pattern in patterns)]
