"""Where a parameter's values come from, so that they are equal on every rank whatever the mesh.

In: a model on a real device or on meta, and perhaps a state dict of whole tensors in the model's own
names. Out: whole values by name. A real model's weights are rank 0's; a module on meta is
initialised by its own `reset_parameters`, under a seed made of the user's and the module's name.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from ..planner.errors import ModelError
from .names import aliases


def agree(model: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's parameters and buffers. Collective; meta parameters are passed over.

    Raises `ModelError` for a buffer on meta, whose values nothing can restore.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelError(
                f"buffer {name} is on meta: give state_dict=, or build the model on a real device"
            )
    if dist.get_world_size() == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            shared = tensor.detach().to(device)
            dist.broadcast(shared, src=0)
            tensor.data = shared.to(tensor.device)


def load_whole(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Put the whole tensors of `state` into the model, in place of meta ones too.

    Raises `ModelError` when names or shapes differ.
    """
    expected = model.state_dict()
    wrong = sorted(set(expected) ^ set(state)) or [n for n in expected if expected[n].shape != state[n].shape]
    if wrong:
        raise ModelError(f"the state dict and the model differ in {', '.join(wrong[:5])}")
    model.load_state_dict(dict(state), assign=True)


class Weights:
    """Whole values of the parameters of one model, made when asked for."""

    def __init__(self, model: nn.Module, *, seed: int) -> None:
        """`model` is the whole one, before any cut."""
        self._model, self._seed = model, seed
        self._first = {name: names[0] for name, names in aliases(model).items()}
        self._recent: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def value(self, name: str) -> torch.Tensor:
        """The whole tensor; tied parameters have their first name's.

        Raises `ModelError` for a module on meta that cannot initialise itself.
        """
        prefix, _, key = self._first[name].rpartition(".")
        module = self._model.get_submodule(prefix)
        parameter = module.get_parameter(key)
        if not parameter.is_meta:
            return parameter.detach()
        if self._recent[0] != prefix or not self._recent[1]:
            self._recent = (prefix, _initialised(prefix, module, self._seed))
        return self._recent[1][key]


def _initialised(name: str, module: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """What a module's own `reset_parameters` makes of its own parameters, whole, on the CPU."""
    if getattr(module, "reset_parameters", None) is None:
        raise ModelError(
            f"{name or 'the model'} ({type(module).__name__}) is on meta and has no reset_parameters(): "
            "give state_dict=, or build it on a real device"
        )
    blank = copy.copy(module)
    blank.__dict__["_parameters"] = {
        key: p if p is None else nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad)
        for key, p in module._parameters.items()
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        blank.reset_parameters()  # pyright: ignore[reportCallIssue]
    return {key: p.detach() for key, p in blank._parameters.items() if p is not None}
