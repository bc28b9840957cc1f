"""From chosen splits to `BlockCost`: what one block costs one device for one microbatch.

In: the graph, the choice of every op on the expert and tensor axes, local extents, prices. Out: per
block class its compute, its collectives (from the reshards on its edges and exchanges inside its
ops), bytes kept for backward under each recompute mode, and its parameters.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ..cost import BlockCost, Communication, Live, ParameterGroup, Recompute, Work, worst
from ..estimate.live import live
from ..estimate.op_work import Sizes, extent, operand_bytes, saved_bytes
from ..graph import DTYPE_BYTES, Block, Edge, Graph, Operand, Value
from ..layout import Collective, Replicate, Shard
from ..profile import Framework
from .axis import Axis, imbalance
from .op_times import OpTimes
from .rerun import SELECTIVE, Kept
from .reshards import Reshard, distinct_share, partial_gradients, reshards_along

if TYPE_CHECKING:
    from .intra_op import Splits

LOSS = "aten.cross_entropy"
HALF_BYTES = 2
"""Bytes of one logit, and of its gradient, outside the loss."""
LEAVES_A_PART = (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)
"""Collectives after which a device holds its part of the buffer that they are priced by."""
GRADIENT_COPIES = 1.0
"""Live gradients of an op's operands while its backward runs; the operands themselves are kept or remade."""


def block_costs(
    graph: Graph,
    splits: Splits,
    axes: tuple[Axis, ...],
    levels: tuple[str, ...],
    framework: Framework,
    times: OpTimes,
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
        for reshard, block in reshards_along(graph, solution, sizes, inner):
            reshards[block].append(reshard)
    return {
        name: _Block(graph, block, splits, reshards[name], priced, framework, times, pipelined).cost()
        for name, block in graph.blocks.items()
    }


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
        times: OpTimes,
        pipelined: bool,
    ) -> None:
        self.graph, self.block, self.splits, self.pipelined = graph, block, splits, pipelined
        self.reshards, self.priced = reshards, priced
        self.framework, self.work_time = framework, times.kernel_time
        self.fused = framework.fuses_pointwise
        self.local = [splits.local[block.name, i] for i in range(len(block.ops))]
        found = [times(op, self.local[i], self._skew(i)) for i, op in enumerate(block.ops)]
        self.origins = [estimate.origin for pair in found for estimate in pair]
        self.forward_times = [forward.seconds for forward, _ in found]
        self.backward_s = sum(backward.seconds for _, backward in found)
        self.logits = self._logits()
        self.sparse = sparse_parameters(graph)
        self.kept = self._kept()

    def cost(self) -> BlockCost:
        """Everything about the block."""
        forward_host_s, backward_host_s = self._host_s()
        forward_s = sum(self.forward_times) + forward_host_s
        backward_s = self.backward_s + backward_host_s
        parameters = tuple(self._parameters())
        backward_s += self._accumulation_s(parameters)
        forward_comm = tuple(self._communication(r) for r in self.reshards if not r.backward)
        backward_comm = tuple(self._communication(r) for r in self.reshards if r.backward)
        regather = tuple(self._communication(r) for r in self._gathered_again())
        again = self._again()
        saved, extra_s, extra_comm_s = self._recompute(forward_s, forward_comm, again)
        return BlockCost(
            name=self.block.name,
            forward_s=forward_s,
            backward_s=backward_s,
            forward_comm=forward_comm,
            backward_comm=(*backward_comm, *regather),
            saved_bytes=saved,
            recompute_s=extra_s,
            again=again,
            recompute_comm_s=extra_comm_s,
            working_bytes=self._working_bytes(),
            loss_bytes=self._loss_bytes(),
            logit_bytes=HALF_BYTES * self.logits,
            output_bytes=self._output_bytes(),
            live=self._live(),
            parameters=parameters,
            model_flops=self._model_flops(),
            origin=worst(*self.origins),
        )

    def _skew(self, index: int) -> float:
        """What the busiest rank does of an op over the mean."""
        choice = self.splits.tp.choices[self.block.name, index]
        return imbalance(self.block.ops[index], choice, self.splits.tp.degree)

    def _host_s(self) -> tuple[float, float]:
        """What the host takes, forward and backward, that nothing hides."""
        ops, host = self.block.ops, self.framework.host
        routing_s = self.framework.routing_s if any(op.experts for op in ops) else 0.0
        if host is None:
            return routing_s, routing_s
        split = self.splits.tp.degree > 1
        return (
            routing_s + host.forward(len(ops), split=split),
            routing_s + host.backward(len(ops), split=split),
        )

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
                first=r.first,
            )
            for r in again.values()
        ]

    def _again(self) -> frozenset[int]:
        """Which forward collectives a block that is run again runs again: up to where running again ends.

        Not what happens to a tensor before it enters the block.
        """
        forward = [r for r in self.reshards if not r.backward]
        last = max((i for i, _ in self.kept), default=len(self.block.ops) - 1)
        end = last if self.framework.recompute_stops_early else len(self.block.ops)
        return frozenset(i for i, r in enumerate(forward) if not r.enters and r.first <= end)

    def _recompute(
        self, forward_s: float, forward_comm: tuple[Communication, ...], again_comm: frozenset[int]
    ) -> tuple[dict[Recompute, float], dict[Recompute, float], dict[Recompute, float]]:
        held = self._held()
        everything = sum(self.kept.values())
        comm_s = sum(c.seconds * c.count for i, c in enumerate(forward_comm) if i in again_comm)
        saved = {Recompute.NONE: everything, Recompute.FULL: held.input_bytes}
        again_s = held.whole_s(forward_s)
        extra = {Recompute.NONE: 0.0, Recompute.FULL: again_s}
        extra_comm = {Recompute.NONE: 0.0, Recompute.FULL: comm_s}
        dropped, again = SELECTIVE[self.framework.selective](held)
        saved[Recompute.SELECTIVE] = everything - dropped
        extra[Recompute.SELECTIVE] = sum(self.forward_times[i] for i in again)
        extra_comm[Recompute.SELECTIVE] = sum(
            c.seconds * c.count
            for c, r in zip(forward_comm, (r for r in self.reshards if not r.backward), strict=True)
            if any(op in again for op, _ in r.consumers)
        )
        return saved, extra, extra_comm

    def _held(self) -> Kept:
        return Kept(
            ops=self.block.ops,
            local=tuple(self.local),
            kept=self.kept,
            forward_times=tuple(self.forward_times),
            input_bytes=self._input_bytes(),
            collected_bytes=self._collected_bytes(),
            fused=self.fused,
            stops_early=self.framework.recompute_stops_early,
        )

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

    def _collected_bytes(self) -> float:
        """What the forward's collectives leave on one device."""
        return sum(
            r.count * r.bytes / (self.priced[r.axis][0].degree if r.collective in LEAVES_A_PART else 1)
            for r in self.reshards
            if not r.backward
        )

    def _output_bytes(self) -> float:
        handed = self.graph.boundary.get(self.block.name)
        if handed is None:
            return 0.0
        return operand_bytes(self.block.ops[handed[0]].writes[handed[1]], self.local[handed[0]])

    def _live(self) -> Live:
        if not self.framework.follows_tensors:
            return Live()
        handed = self.graph.boundary.get(self.block.name)
        tensor = None if handed is None else self.block.ops[handed[0]].writes[handed[1]].tensor
        return live(self.block.ops, self.local, self.kept, tensor, self._made_again())

    def _made_again(self) -> dict[int, float]:
        """Under cp: keys and values gathered again in backward, weights' gradients when they are scaled."""
        again: dict[int, float] = defaultdict(float)
        if self.splits.cp is None or self.splits.cp.degree == 1:
            return again
        for (i, read), reshard in self._gathered_reads().items():
            if reshard.axis == "cp":
                again[i] += operand_bytes(self.block.ops[i].reads[read], self.local[i])
        for i, op in enumerate(self.block.ops):
            again[i] += sum(operand_bytes(r, self.local[i]) for r in op.reads if r.kind == "parameter")
        return again

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
        partial = partial_gradients(self.block, self.splits.tp)
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
                isinstance(over_tp, Replicate) and value.name in partial,
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

    def _model_flops(self) -> float:
        return sum(
            factor * extent(labels, (self.splits.before_cp or self.splits.before_ep)[self.block.name, i])
            for i, op in enumerate(self.block.ops)
            for factor, labels in op.flops
        )


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
