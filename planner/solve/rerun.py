"""What recomputation drops of what a block keeps, and which ops it runs again for it.

In: a block's ops with their local extents, what each keeps, how long each takes forward. Out: bytes
dropped and ops run again, by the framework's kind of selective recomputation (`SELECTIVE`), and the seconds
of running everything again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..estimate.op_work import Sizes, operand_bytes
from ..graph import Op

HEAVY = ("gemm", "grouped_gemm", "attention")
"""Families whose results selective recomputation keeps: everything else is cheap to run again."""
Dropped = tuple[float, set[int]]
"""Bytes no longer kept, and ops to run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What one block keeps for backward on one device."""

    ops: tuple[Op, ...]
    local: tuple[Sizes, ...]
    """Extents of every op on one device."""
    kept: dict[tuple[int, int], float]
    """(op, index of its saved storage) -> bytes."""
    forward_times: tuple[float, ...]
    """Seconds of every op."""
    input_bytes: float
    """What enters the block."""
    collected_bytes: float
    """Results of collectives inside it, forward."""
    fused: bool
    stops_early: bool
    """Whether running again ends once everything kept is back."""

    def whole_s(self, forward_s: float) -> float:
        """Seconds of running the whole forward again, up to the last op that keeps something."""
        if not self.stops_early:
            return forward_s
        keeping = [i for i, _ in self.kept]
        last = max(keeping, default=len(self.ops) - 1)
        operands = [self.ops[last].saved[j].operand for i, j in self.kept if i == last]
        own = any(operand is None or operand < 0 for operand in operands)
        return forward_s - sum(self.forward_times[last + own :])

    def attention_core(self) -> tuple[float, set[int]]:
        """What attention itself makes and keeps: bytes dropped, ops to run again."""
        again = {i for i, op in enumerate(self.ops) if op.family == "attention"}
        inside = [
            nbytes for (i, j), nbytes in self.kept.items() if i in again and self._saved_tensor(i, j) is None
        ]
        return sum(inside), again

    def alternate_products(self) -> tuple[float, set[int]]:
        """All but the results of attention and of every second matrix product, and the block's input.

        A compiler keeps none of them that backward does not read, and makes none of them again.
        """
        ops = self.ops
        products = [i for i, op in enumerate(ops) if op.family in ("gemm", "grouped_gemm")]
        held = set(products[::2]) | {i for i, op in enumerate(ops) if op.family == "attention"}
        wanted = self._read_in_backward() if self.fused else set(range(len(ops)))
        held &= wanted
        kept = sum(operand_bytes(write, self.local[i]) for i in held for write in ops[i].writes)
        dropped = sum(self.kept.values()) - kept - self.input_bytes
        return max(dropped, 0.0), wanted - held

    def _read_in_backward(self) -> set[int]:
        """Ops whose results are kept for backward, or lead to one that is."""
        ops = self.ops
        maker = {write.tensor: i for i, op in enumerate(ops) for write in op.writes}
        wanted = [maker.get(tensor) for i, j in self.kept if (tensor := self._saved_tensor(i, j)) is not None]
        wanted += [i for i, _ in self.kept if any(s.operand is None for s in ops[i].saved)]
        found: set[int] = set()
        while wanted:
            index = wanted.pop()
            if index is not None and index not in found:
                found.add(index)
                wanted += [maker.get(read.tensor) for read in ops[index].reads]
        return found

    def cheap_ops(self) -> tuple[float, set[int]]:
        """Storages made by cheap ops from what is kept anyway: bytes dropped, ops to run again."""
        ops = self.ops
        maker = {write.tensor: i for i, op in enumerate(ops) for write in op.writes}
        held = {self._saved_tensor(i, j) for i, j in self.kept} - {None}
        dropped, again = 0.0, set()
        for (i, j), nbytes in self.kept.items():
            tensor = self._saved_tensor(i, j)
            source = maker.get(tensor) if tensor is not None else i
            if source is None or ops[source].family in HEAVY:
                continue
            needed = self._sources(source, maker, held, set())
            if needed is not None:
                dropped += nbytes
                again |= needed
        return dropped, again

    def heavy_results(self) -> Dropped:
        """All but what enters, the results of matrix products and attention, and those of collectives."""
        heavy = {i for i, op in enumerate(self.ops) if op.family in HEAVY}
        kept = self.input_bytes + self.collected_bytes
        kept += sum(operand_bytes(write, self.local[i]) for i in heavy for write in self.ops[i].writes)
        kept += sum(n for (i, j), n in self.kept.items() if i in heavy and self._saved_tensor(i, j) is None)
        return sum(self.kept.values()) - kept, set(range(len(self.ops))) - heavy

    def _saved_tensor(self, op: int, saved: int) -> str | None:
        storage = self.ops[op].saved[saved]
        if storage.operand is None:
            return None
        operand = storage.operand
        tensor = (self.ops[op].reads[operand] if operand >= 0 else self.ops[op].writes[~operand]).tensor
        return tensor

    def _sources(
        self, index: int, maker: dict[str, int], held: set[str | None], path: set[int]
    ) -> set[int] | None:
        """Cheap ops to rerun for op `index` from held heavy results; None if one is not held."""
        op = self.ops[index]
        needed = {index}
        for read in op.reads:
            source = maker.get(read.tensor)
            if source is None or read.kind == "constant":
                continue
            if self.ops[source].family in HEAVY:
                if read.tensor not in held:
                    return None
                continue
            if source in path:
                continue
            deeper = self._sources(source, maker, held, path | {index})
            if deeper is None:
                return None
            needed |= deeper
        return needed


SELECTIVE: dict[str, Callable[[Kept], Dropped]] = {
    "cheap": Kept.cheap_ops,
    "attention": Kept.attention_core,
    "alternate": Kept.alternate_products,
    "results": Kept.heavy_results,
}
"""What selective recomputation drops and runs again, by `Framework.selective`."""
