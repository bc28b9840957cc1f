"""From chosen splits to `BlockCost`: what one block costs one device for one microbatch.

In: the graph, the choice of every op on the expert and tensor axes, local extents, prices. Out: per
block class its compute, its collectives (from the reshards on its edges and exchanges inside its
ops), bytes kept for backward under each recompute mode, and its parameters.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..cost import BlockCost, Communication, Estimate, Origin, ParameterGroup, Recompute, Work, worst
from ..estimate.op_work import Sizes, backward_work, extent, forward_work, operand_bytes, saved_bytes
from ..graph import DTYPE_BYTES, Block, Edge, Graph, Op, Operand, Value
from ..layout import Collective, Partial, Placement, Replicate, Shard, conversion, gradient_needed
from ..profile import Framework
from ..rules.choices import BATCH, SEQUENCE, Choice
from .axis import Axis, AxisSolution, OpKey, imbalance, inner_exchanges

if TYPE_CHECKING:
    from .intra_op import Splits

HEAVY = ("gemm", "grouped_gemm", "attention")
"""Families whose results selective recomputation keeps: everything else is cheap to run again."""
LOSS = "aten.cross_entropy"
HALF_BYTES = 2
"""Bytes of one logit, and of its gradient, outside the loss."""
GRADIENT_COPIES = 1.0
"""Live gradients of an op's operands while its backward runs; the operands themselves are kept or remade."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """A conversion that one block pays for, forward or backward."""

    axis: str
    collective: Collective
    bytes: float
    count: float
    """Per block and microbatch."""
    backward: bool
    label: str
    consumers: frozenset[tuple[int, int]]
    """(op, read) that need it."""
    copies: float = 1.0
    """Rows per token, of rows sent to the experts that were picked."""


def block_costs(
    graph: Graph,
    splits: Splits,
    axes: tuple[Axis, ...],
    levels: tuple[str, ...],
    framework: Framework,
    work_time: Callable[[Work], Estimate],
    *,
    pipelined: bool = False,
) -> dict[str, BlockCost]:
    """`BlockCost` of every block class. `axes` and `levels` are those of ep and tp, in this order.

    `pipelined`: blocks may lie on different stages, so each holds its own copy of tied parameters.
    """
    priced = {axis.name: (axis, level) for axis, level in zip(axes, levels, strict=True)}
    reshards = defaultdict(list)
    solved = [(splits.ep, splits.before_ep), (splits.tp, splits.before_tp)]
    if splits.cp is not None and splits.before_cp is not None:
        solved.insert(0, (splits.cp, splits.before_cp))
    for i, (solution, sizes) in enumerate(solved):
        inner = [later for later, _ in solved[i + 1 :]]
        for reshard, block in _reshards(graph, solution, sizes, inner):
            reshards[block].append(reshard)
    return {
        name: _Block(graph, block, splits, reshards[name], priced, framework, work_time, pipelined).cost()
        for name, block in graph.blocks.items()
    }


def _reshards(
    graph: Graph, solution: AxisSolution, sizes: dict[OpKey, Sizes], inner: list[AxisSolution]
) -> list[tuple[Reshard, str]]:
    """Every conversion on the edges of the graph along one axis, each paid once per layout.

    `inner`: axes that split what this axis leaves: a rank moves only its part of what they shard.
    """
    if solution.degree == 1:
        return []
    found = []
    for edge in graph.edges:
        count = edge.count / graph.blocks[edge.block].count
        ways = _ways(edge, inner)
        found.extend((r, edge.block) for r in _edge_reshards(graph, edge, solution, sizes, count, ways))
    found += _parameter_reshards(graph, solution, sizes)
    for key, choice in solution.choices.items():
        op = graph.blocks[key[0]].ops[key[1]]
        for collective, nbytes, times, backward in inner_exchanges(op, choice, sizes[key], solution.degree):
            found.append(
                (
                    Reshard(
                        axis=solution.axis,
                        collective=collective,
                        bytes=nbytes,
                        count=times,
                        backward=backward,
                        label=f"inside {place(op)}",
                        consumers=frozenset(),
                    ),
                    key[0],
                )
            )
    return found


def _ways(edge: Edge, axes: list[AxisSolution]) -> int:
    """Into how many parts `axes` cut the tensor of this edge where it is made."""
    made = [(a.degree, a.choices[edge.producer[:2]].writes[edge.producer[2]]) for a in axes]
    return math.prod(degree for degree, placement in made if isinstance(placement, Shard))


def _edge_reshards(
    graph: Graph, edge: Edge, solution: AxisSolution, sizes: dict[OpKey, Sizes], count: float, ways: int
) -> list[Reshard]:
    source = solution.choices[edge.producer[:2]].writes[edge.producer[2]]
    label = edge_label(graph, edge)
    return _conversions(graph, solution, sizes, source, edge.consumers, count=count, ways=ways, label=label)


def _parameter_reshards(
    graph: Graph, solution: AxisSolution, sizes: dict[OpKey, Sizes]
) -> list[tuple[Reshard, str]]:
    """Conversions of parameters that several ops read, from the layout they are stored in.

    The gradient of one that is stored whole is summed once per step, with the others: see `ParameterGroup`.
    """
    readers: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for block in graph.blocks.values():
        for i, op in enumerate(block.ops):
            for j, read in enumerate(op.reads):
                if read.kind == "parameter" and read.fqn is not None:
                    readers[read.tensor].append((block.name, i, j))
    found = []
    for tensor, places in readers.items():
        stored = solution.parameters[tensor]
        if len(places) == 1:
            continue
        block, op, read = places[0]
        label = graph.blocks[block].ops[op].reads[read].fqn or tensor
        count = 1.0 / graph.blocks[block].count
        made = _conversions(graph, solution, sizes, stored, tuple(places), count=count, ways=1, label=label)
        found += [(r, block) for r in made if not (r.backward and isinstance(stored, Replicate))]
    return found


def _conversions(
    graph: Graph,
    solution: AxisSolution,
    sizes: dict[OpKey, Sizes],
    source: Placement,
    consumers: tuple[tuple[str, int, int], ...],
    *,
    count: float,
    ways: int,
    label: str,
) -> list[Reshard]:
    """What it takes to hand a tensor laid out as `source` to its consumers, and their gradients back."""
    forward: dict[Placement, list[tuple[int, int]]] = defaultdict(list)
    gradients: dict[Placement, list[tuple[int, int]]] = defaultdict(list)
    for block, op, read in consumers:
        choice = solution.choices[block, op]
        forward[choice.reads[read]].append((op, read))
        gradient = choice.read_gradients[read]
        if gradient is not None:
            gradients[gradient].append((op, read))
    block, op, read = consumers[0]
    nbytes = operand_bytes(graph.blocks[block].ops[op].reads[read], sizes[block, op]) / ways
    needed = gradient_needed(source)
    pairs = [(source, target, users, False) for target, users in forward.items()]
    pairs += [(gradient, needed, users, True) for gradient, users in gradients.items()]
    result = []
    for before, target, users, backward in pairs:
        collective = conversion(before, target)
        if collective is None:
            continue
        buffer = nbytes / solution.degree if collective is Collective.ALL_TO_ALL else nbytes
        result.append(
            Reshard(
                axis=solution.axis,
                collective=collective,
                bytes=buffer,
                count=count,
                backward=backward,
                label=label,
                consumers=frozenset(users),
                copies=_copies(graph.blocks[block].ops[op], read, sizes[block, op]),
            )
        )
    return result


def _copies(op: Op, read: int, sizes: Sizes) -> float:
    """Rows per token of a tensor in expert order."""
    operand = op.reads[read]
    if not operand.sorted_by_expert or not operand.axes:
        return 1.0
    names = {dim.label: dim.name for dim in op.dims}
    return math.prod(sizes[label] for label in operand.axes[0] if names[label] not in (BATCH, SEQUENCE))


def distinct_share(copies: float, units: int) -> float:
    """Distinct units over copies when each of `copies` picks one of `units` at random."""
    return units * (1 - (1 - 1 / units) ** copies) / copies


def place(op: Op) -> str:
    """Where an op is, in words: its module, or its own name outside any module."""
    return op.module.removeprefix("model.") or op.target.split(".")[1]


def edge_label(graph: Graph, edge: Edge) -> str:
    """Between which places a tensor goes, in words: `layers.*.norm1 -> layers.*.attention.q`."""
    producer = graph.blocks[edge.producer[0]].ops[edge.producer[1]]
    consumers = dict.fromkeys(place(graph.blocks[b].ops[op]) for b, op, _ in edge.consumers)
    return f"{place(producer)} -> {', '.join(consumers)}"


class _Block:
    """One block class under its splits."""

    def __init__(
        self,
        graph: Graph,
        block: Block,
        splits: Splits,
        reshards: list[Reshard],
        priced: dict[str, tuple[Axis, str]],
        framework: Framework,
        work_time: Callable[[Work], Estimate],
        pipelined: bool,
    ) -> None:
        self.graph, self.block, self.splits, self.pipelined = graph, block, splits, pipelined
        self.reshards, self.priced = reshards, priced
        self.framework, self.work_time = framework, work_time
        self.fused = framework.fuses_pointwise
        self.local = [splits.local[block.name, i] for i in range(len(block.ops))]
        self.origins: list[Origin] = []
        self.forward_times = [self._seconds(i, forward_work) for i in range(len(block.ops))]
        self.logits = self._logits()
        self.sparse = sparse_parameters(graph)
        self.kept = self._kept()

    def cost(self) -> BlockCost:
        """Everything about the block."""
        host_s = self.framework.routing_s if any(op.experts for op in self.block.ops) else 0.0
        forward_s = sum(self.forward_times) + host_s
        backward_s = sum(self._seconds(i, backward_work) for i in range(len(self.block.ops))) + host_s
        parameters = tuple(self._parameters())
        backward_s += self._accumulation_s(parameters)
        forward_comm = tuple(self._communication(r) for r in self.reshards if not r.backward)
        backward_comm = tuple(self._communication(r) for r in self.reshards if r.backward)
        regather = tuple(self._communication(r) for r in self._gathered_again())
        saved, extra_s, extra_comm_s = self._recompute(forward_s, forward_comm)
        return BlockCost(
            name=self.block.name,
            forward_s=forward_s,
            backward_s=backward_s,
            forward_comm=forward_comm,
            backward_comm=(*backward_comm, *regather),
            saved_bytes=saved,
            recompute_s=extra_s,
            recompute_comm_s=extra_comm_s,
            working_bytes=self._working_bytes(),
            loss_bytes=self._loss_bytes(),
            logit_bytes=HALF_BYTES * self.logits,
            output_bytes=self._output_bytes(),
            parameters=parameters,
            model_flops=self._model_flops(),
            origin=worst(*self.origins),
        )

    def _seconds(self, index: int, work: Callable[..., tuple[Work, ...]]) -> float:
        op = self.block.ops[index]
        choice = self.splits.tp.choices[self.block.name, index]
        skew = imbalance(op, choice, self.splits.tp.degree)
        total = 0.0
        for item in work(op, self.local[index], imbalance=skew, fused=self.fused):
            estimate = self.work_time(item)
            self.origins.append(estimate.origin)
            total += estimate.seconds
        return total

    def _accumulation_s(self, parameters: tuple[ParameterGroup, ...]) -> float:
        """Adding this microbatch's gradients to those of earlier ones."""
        numel = sum(group.numel for group in parameters if group.trainable)
        if not self.framework.accumulation_bytes or not numel:
            return 0.0
        nbytes = numel * self.framework.accumulation_bytes
        estimate = self.work_time(Work(family="memory", flops=0.0, bytes=nbytes, dtype="fp32"))
        self.origins.append(estimate.origin)
        return estimate.seconds

    def _communication(self, reshard: Reshard) -> Communication:
        axis, level = self.priced[reshard.axis]
        nbytes = reshard.bytes
        if self.framework.dedups_routing and reshard.copies > 1 and axis.networks > 1:
            nbytes *= distinct_share(reshard.copies, axis.networks)
        time = axis.collective_time(reshard.collective, nbytes)
        return Communication(
            label=f"{reshard.label}{' (gradient)' if reshard.backward else ''}",
            collective=reshard.collective,
            axis=reshard.axis,
            group_size=axis.degree,
            bytes=nbytes,
            seconds=time.seconds,
            exposed_s=time.seconds,
            count=reshard.count,
            level=level,
            origin=time.origin,
        )

    # ------------------------------------------------------------------ memory

    def _kept(self) -> dict[tuple[int, int], float]:
        """(op, index of its saved storage) -> local bytes, shards where shards are kept."""
        gathered = self._gathered_reads()
        kept = {}
        for i, op in enumerate(self.block.ops):
            for j, (saved, nbytes) in enumerate(zip(op.saved, saved_bytes(op, self.local[i]), strict=True)):
                if self._is_logits(nbytes / saved.element_bytes):
                    continue
                reshard = gathered.get((i, saved.operand)) if saved.operand is not None else None
                kept[i, j] = nbytes / self.priced[reshard.axis][0].degree if reshard else nbytes
        return kept

    def _gathered_reads(self) -> dict[tuple[int, int], Reshard]:
        """Reads that were gathered on the way and of which the shard is kept.

        Over tp as the framework does it; over cp always, since whole keys and values are what context
        parallelism is meant to avoid.
        """
        axes = ("cp",) if self.framework.saves_gathered_input else ("cp", "tp")
        return {
            user: r
            for r in self.reshards
            if r.axis in axes and not r.backward and r.collective is Collective.ALL_GATHER
            for user in r.consumers
        }

    def _gathered_again(self) -> list[Reshard]:
        """All-gathers repeated in backward where only the shard is kept."""
        gathered = self._gathered_reads()
        again: dict[int, Reshard] = {
            id(reshard): reshard
            for (i, _), reshard in gathered.items()
            if reshard.axis == "cp" and self.block.ops[i].family == "attention"
        }
        for i, op in enumerate(self.block.ops):
            for saved in op.saved:
                if saved.operand is not None and (i, saved.operand) in gathered:
                    reshard = gathered[i, saved.operand]
                    again[id(reshard)] = reshard
        return [
            Reshard(
                axis=r.axis,
                collective=r.collective,
                bytes=r.bytes,
                count=r.count,
                backward=True,
                label=f"{r.label}, gathered again",
                consumers=r.consumers,
            )
            for r in again.values()
        ]

    def _recompute(
        self, forward_s: float, forward_comm: tuple[Communication, ...]
    ) -> tuple[dict[Recompute, float], dict[Recompute, float], dict[Recompute, float]]:
        everything = sum(self.kept.values())
        comm_s = sum(c.seconds * c.count for c in forward_comm)
        saved = {Recompute.NONE: everything, Recompute.FULL: self._input_bytes()}
        extra = {Recompute.NONE: 0.0, Recompute.FULL: self._recomputed_s(forward_s)}
        extra_comm = {Recompute.NONE: 0.0, Recompute.FULL: comm_s}
        dropped, again = SELECTIVE[self.framework.selective](self)
        saved[Recompute.SELECTIVE] = everything - dropped
        extra[Recompute.SELECTIVE] = sum(self.forward_times[i] for i in again)
        extra_comm[Recompute.SELECTIVE] = sum(
            c.seconds * c.count
            for c, r in zip(forward_comm, (r for r in self.reshards if not r.backward), strict=True)
            if any(op in again for op, _ in r.consumers)
        )
        return saved, extra, extra_comm

    def _recomputed_s(self, forward_s: float) -> float:
        """Seconds of running the whole forward again, up to the last op that keeps something."""
        if not self.framework.recompute_stops_early:
            return forward_s
        keeping = [i for i, _ in self.kept]
        last = max(keeping, default=len(self.block.ops) - 1)
        operands = [self.block.ops[last].saved[j].operand for i, j in self.kept if i == last]
        own = any(operand is None or operand < 0 for operand in operands)
        return forward_s - sum(self.forward_times[last + own :])

    def attention_core(self) -> tuple[float, set[int]]:
        """What attention itself makes and keeps: bytes dropped, ops to run again."""
        again = {i for i, op in enumerate(self.block.ops) if op.family == "attention"}
        inside = [
            nbytes for (i, j), nbytes in self.kept.items() if i in again and self._saved_tensor(i, j) is None
        ]
        return sum(inside), again

    def alternate_products(self) -> tuple[float, set[int]]:
        """All but the results of attention and of every second matrix product, and the block's input.

        A compiler keeps none of them that backward does not read, and makes none of them again.
        """
        ops = self.block.ops
        products = [i for i, op in enumerate(ops) if op.family in ("gemm", "grouped_gemm")]
        held = set(products[::2]) | {i for i, op in enumerate(ops) if op.family == "attention"}
        wanted = self._read_in_backward() if self.fused else set(range(len(ops)))
        held &= wanted
        kept = sum(operand_bytes(write, self.local[i]) for i in held for write in ops[i].writes)
        dropped = sum(self.kept.values()) - kept - self._input_bytes()
        return max(dropped, 0.0), wanted - held

    def _read_in_backward(self) -> set[int]:
        """Ops whose results are kept for backward, or lead to one that is."""
        ops = self.block.ops
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
        ops = self.block.ops
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

    def _saved_tensor(self, op: int, saved: int) -> str | None:
        storage = self.block.ops[op].saved[saved]
        if storage.operand is None:
            return None
        operand = storage.operand
        tensor = (
            self.block.ops[op].reads[operand] if operand >= 0 else self.block.ops[op].writes[~operand]
        ).tensor
        return tensor

    def _sources(
        self, index: int, maker: dict[str, int], held: set[str | None], path: set[int]
    ) -> set[int] | None:
        """Cheap ops to rerun for op `index` from held heavy results; None if one is not held."""
        op = self.block.ops[index]
        needed = {index}
        for read in op.reads:
            source = maker.get(read.tensor)
            if source is None or read.kind == "constant":
                continue
            if self.block.ops[source].family in HEAVY:
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

    def _input_bytes(self) -> float:
        """What enters the block from others, in the layout it arrives in."""
        tensors: dict[str, float] = {}
        for edge in self.graph.edges:
            if edge.block != self.block.name or not _crosses(edge):
                continue
            block, op, read = edge.consumers[0]
            operand = self.graph.blocks[block].ops[op].reads[read]
            nbytes = operand_bytes(operand, self.splits.before_tp[block, op])
            source = self.splits.tp.choices[edge.producer[:2]].writes[edge.producer[2]]
            local = nbytes / self.splits.tp.degree if isinstance(source, Shard) else nbytes
            if operand.grad:
                tensors[operand.tensor] = max(local, tensors.get(operand.tensor, 0.0))
        return sum(tensors.values())

    def _output_bytes(self) -> float:
        handed = self.graph.boundary.get(self.block.name)
        if handed is None:
            return 0.0
        return operand_bytes(self.block.ops[handed[0]].writes[handed[1]], self.local[handed[0]])

    def _working_bytes(self) -> float:
        """Gradients of the largest op's operands, and that of the logits."""
        largest = 0.0
        for op, sizes in zip(self.block.ops, self.local, strict=True):
            operands = [operand_bytes(o, sizes) for o in (*op.reads, *op.writes) if self._is_live(o, sizes)]
            largest = max(largest, GRADIENT_COPIES * sum(operands))
        if self.framework.logits_bytes is None:
            return largest + self.framework.logits_bytes_per_element * self.logits
        return largest + HALF_BYTES * self.logits

    def _loss_bytes(self) -> float:
        """Every copy of the logits that the loss makes."""
        framework = self.framework
        if framework.logits_bytes is None:
            return 0.0
        if framework.split_logits_bytes is not None and self._splits_vocabulary():
            return self.logits * framework.split_logits_bytes
        return self.logits * framework.logits_bytes

    def _splits_vocabulary(self) -> bool:
        """Whether tp splits the classes of the loss."""
        losses = (i for i, op in enumerate(self.block.ops) if op.target.startswith(LOSS))
        for i in losses:
            before = self.splits.before_tp[self.block.name, i]
            if any(self.local[i][label] < before[label] for label in self.block.ops[i].reads[0].axes[-1]):
                return True
        return False

    def _is_live(self, operand: Operand, sizes: Sizes) -> bool:
        elements = operand_bytes(operand, sizes) / DTYPE_BYTES[operand.dtype]
        return operand.kind == "activation" and not self._is_logits(elements)

    def _is_logits(self, elements: float) -> bool:
        """Whether a tensor of so many elements is accounted for by the framework's bytes per logit."""
        return self.framework.logits_bytes is not None and 0 < self.logits <= elements

    def _logits(self) -> float:
        """Local elements that the loss reads."""
        losses = [i for i, op in enumerate(self.block.ops) if op.target.startswith(LOSS)]
        return sum(
            operand_bytes(op.reads[0], self.local[i]) / DTYPE_BYTES[op.reads[0].dtype]
            for i in losses
            for op in (self.block.ops[i],)
        )

    # ------------------------------------------------------------------ parameters

    def _parameters(self) -> list[ParameterGroup]:
        groups: dict[tuple, list[float]] = defaultdict(list)
        for value, tied in (*((v, False) for v in self.block.parameters), *((v, True) for v in self._tied())):
            over_tp = self.splits.tp.parameters.get(value.name, Replicate())
            over_ep = self.splits.ep.parameters.get(value.name, Replicate())
            numel = value.numel
            numel /= self.splits.tp.degree if isinstance(over_tp, Shard) else 1
            numel /= self.splits.ep.degree if isinstance(over_ep, Shard) else 1
            key = (
                DTYPE_BYTES[value.dtype],
                value.name in self.sparse,
                value.trainable,
                isinstance(over_tp, Replicate) and self._partial_gradient(value.name),
                tied,
            )
            groups[key].append(numel)
        return [
            ParameterGroup(
                numel=sum(sizes),
                element_bytes=width,
                sparse=sparse,
                trainable=trainable,
                tensors=len(sizes),
                replicated_over_tp=replicated,
                tied=tied,
            )
            for (width, sparse, trainable, replicated, tied), sizes in sorted(groups.items())
        ]

    def _tied(self) -> list[Value]:
        """Parameters of other blocks that this one reads too, when a pipeline may part them."""
        if not self.pipelined:
            return []
        read = {read.tensor for op in self.block.ops for read in op.reads if read.kind == "parameter"}
        own = {value.name for value in self.block.parameters}
        others = (
            v for block in self.graph.blocks.values() if block is not self.block for v in block.parameters
        )
        return [value for value in others if value.name in read - own]

    def _partial_gradient(self, tensor: str) -> bool:
        """Whether the ranks of tp each hold a term of this parameter's gradient."""
        for i, op in enumerate(self.block.ops):
            choice: Choice = self.splits.tp.choices[self.block.name, i]
            for read, gradient in zip(op.reads, choice.read_gradients, strict=True):
                if read.tensor == tensor and isinstance(gradient, Partial):
                    return True
        return False

    def _model_flops(self) -> float:
        return sum(
            factor * extent(labels, (self.splits.before_cp or self.splits.before_ep)[self.block.name, i])
            for i, op in enumerate(self.block.ops)
            for factor, labels in op.flops
        )


SELECTIVE = {
    "cheap": _Block.cheap_ops,
    "attention": _Block.attention_core,
    "alternate": _Block.alternate_products,
}
"""What selective recomputation drops and runs again, by `Framework.selective`."""


def _crosses(edge: Edge) -> bool:
    """Whether an edge comes from another block or from an earlier copy of the same class."""
    return edge.producer[0] != edge.block or edge.producer[1] >= min(op for _, op, _ in edge.consumers)


def sparse_parameters(graph: Graph) -> frozenset[str]:
    """Tensor names of expert weights, seen through views, and of tables that dominate the model."""
    names = set()
    for block in graph.blocks.values():
        viewed = {
            write.tensor: op.reads[0].tensor
            for op in block.ops
            for write in op.writes
            if op.reads and all(read.kind == "parameter" for read in op.reads)
        }
        for op in block.ops:
            if op.experts:
                tensor = op.reads[1].tensor
                while tensor in viewed:
                    tensor = viewed[tensor]
                names.add(tensor)
            if op.table and op.reads[0].fqn in graph.table_fqns:
                names.add(op.reads[0].tensor)
    return frozenset(names)
