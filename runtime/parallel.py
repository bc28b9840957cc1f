"""`Parallel`: a model that has been put onto its mesh, and one step of it.

    parallel = auto_parallelize(model, inputs, plan=plan, loss_fn=loss)
    optimizer = torch.optim.AdamW(parallel.parameters())
    for batch in data:                       # the same global batch on every rank
        loss = parallel.train_step(batch)    # forward and backward, all microbatches
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

Without a pipeline `parallel.module` is an ordinary module for any other loop: it takes this rank's
samples and gives ordinary tensors; `finish_gradients()` belongs between backward and the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..planner.errors import PlanError
from ..planner.plan import Plan
from .batch import Call, microbatches
from .data import set_last_microbatch, sum_replicas
from .forward import WholeForward
from .gradients import clip, global_norm, sum_partial
from .labels import LOSS_LABEL, labelled
from .mesh import Meshes
from .schedule import Pipeline
from .ties import Tie, sum_copies


class Parallel:
    """The parts of a model that this rank holds."""

    def __init__(
        self,
        *,
        plan: Plan,
        mesh: Meshes,
        device: torch.device,
        stages: Sequence[nn.Module],
        whole: WholeForward | None,
        pipeline: Pipeline | None,
        ties: Sequence[Tie],
        differences: Sequence[str],
    ) -> None:
        """Made by `apply`. Either `whole` (and one stage) or `pipeline` is given."""
        self.plan = plan
        self.mesh = mesh
        self.device = device
        self.stages = tuple(stages)
        self.differences = tuple(differences)
        """In words: what runs otherwise than the plan priced it, with equal results."""
        self.local_loss: Tensor | None = None
        """Of this rank's samples in the last step; 0 where a later stage has it."""
        self._whole, self._pipeline, self._ties = whole, pipeline, tuple(ties)

    @property
    def module(self) -> nn.Module:
        """The model, when it is not cut into pipeline stages. Raises `PlanError` when it is."""
        if self._pipeline is not None:
            raise PlanError(
                f"a plan with pp={self.plan.mesh.pp} has stages, no single module: use train_step"
            )
        return self.stages[0]

    def train_step(self, batch: Any) -> Tensor:
        """Forward and backward of one global batch; gradients are added to `.grad`.

        `batch`: what the model is called with, a tuple or a dict whose tensors hold all samples of
        the step in dim 0, the same on every rank. Returns the mean loss, equal on every rank.
        Raises `OptionError` for a batch of another size than the plan's.
        """
        calls = microbatches(batch, self.plan, data_rank=self.data_rank, device=self.device)
        loss = self._run(calls) if self._pipeline is None else self._pipeline.step(calls, self.device)
        self.local_loss = loss
        self.finish_gradients()
        return self._mean(loss)

    def _run(self, calls: list[Call]) -> Tensor:
        assert self._whole is not None
        total = torch.zeros((), device=self.device)
        self._whole.ends_in_loss = True
        try:
            for i, call in enumerate(calls):
                last = i == len(calls) - 1
                set_last_microbatch(self.module, zero_stage=self.plan.zero_stage, last=last)
                loss = self.module(*call.args, **call.kwargs) / len(calls)
                loss.backward()
                total += loss.detach()
        finally:
            self._whole.ends_in_loss = False
        return total

    def _mean(self, loss: Tensor) -> Tensor:
        """Over data ranks; in a pipeline only the last stage has one."""
        mesh = self.plan.mesh
        if mesh.devices == 1:
            return loss
        mean = loss / (mesh.batch_ways * mesh.cp * mesh.tp)
        with labelled(LOSS_LABEL):
            dist.all_reduce(mean)
        return mean

    @property
    def data_rank(self) -> int:
        """Which of the `dp * ep` parts of the batch this rank runs."""
        at = self.plan.mesh.coordinates(dist.get_rank())
        return at["dp"] * self.plan.mesh.ep + at["ep"]

    def finish_gradients(self) -> None:
        """Add what backward left in parts. `train_step` does it; call it yourself in a loop of your own."""
        sum_partial(self.parameters())
        sum_replicas(self.parameters(), self.mesh)
        sum_copies(self._ties)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before.

        Collective over all ranks; right on parameters of several meshes and stages.
        """
        parameters = list(self.parameters())
        copies = {id(p): tie.copies for tie in self._ties for p in tie.local}
        ranks = self.plan.mesh.devices // self.plan.mesh.pp
        norm = global_norm(parameters, stage_ranks=ranks, copies=copies)
        clip(parameters, norm, max_norm)
        return norm

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the original model's names."""
        for stage in self.stages:
            yield from stage.named_parameters()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parameters and buffers by their original names, for torch.distributed.checkpoint."""
        return {name: value for stage in self.stages for name, value in stage.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave. Raises `PlanError` when a name of this rank's is missing."""
        missing = [name for name in self.state_dict() if name not in state]
        if missing:
            raise PlanError(f"the state dict lacks {', '.join(missing[:5])}")
        for stage in self.stages:
            stage.load_state_dict({name: state[name] for name in stage.state_dict()})
