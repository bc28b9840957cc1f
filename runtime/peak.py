"""How many bytes tensors occupy at the most while code runs, on the CPU.

In: code run inside `track`, the tensors that are there before, and the batch. Out: a `Peak`. Every storage
that an operation makes is counted once, from its making until nothing refers to it, at the size it is
resized to meanwhile. What kernels need inside one operation is not seen; the batch, which is the caller's,
is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Bytes of live storages, now and at the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._sizes: dict[int, tuple[int, weakref.ref]] = {}
        self._aside: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its parts are what is counted
        result = func(*args, **(kwargs or {}))
        self.add(x for x in tree_leaves(result) if isinstance(x, Tensor))
        return result

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count what these tensors are stored in, unless it is counted already."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.device.type == "cpu" and type(local) in (Tensor, torch.nn.Parameter):
                self.resized(local.untyped_storage())

    def leave_aside(self, tensors: Iterable[Tensor]) -> None:
        """Never count what these, which have to outlive this, are stored in."""
        self._aside.update(id(tensor.untyped_storage()) for tensor in tensors)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage is new or has another size."""
        key = id(storage)
        if key in self._aside:
            return
        before, reference = self._sizes.get(key, (0, None))
        if reference is None or reference() is not storage:
            reference = weakref.ref(storage, lambda _: self._forget(key))
        self._sizes[key] = storage.nbytes(), reference
        self._count(storage.nbytes() - before)

    def _forget(self, key: int) -> None:
        size, _ = self._sizes.pop(key, (0, None))
        self._count(-size)

    def _count(self, difference: int) -> None:
        self.now_bytes += difference
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)


@contextmanager
def track(present: Iterable[Tensor], *, batch: Any = ()) -> Iterator[Peak]:
    """Follow what code inside makes, on top of the tensors that are `present`, those of `batch` aside."""
    peak = Peak()
    peak.leave_aside(x for x in tree_leaves(batch) if isinstance(x, Tensor))
    peak.add(present)
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        peak.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with peak:
            yield peak
    finally:
        torch.UntypedStorage.resize_ = original
