"""A pipeline over a list of modules, by the executor and the schedules of `mindspeed.pipeline`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from mindspeed.nn.mesh import Mesh, group_of
from mindspeed.ops.errors import refuse
from mindspeed.pipeline.executor import execute
from mindspeed.pipeline.messages import routes
from mindspeed.pipeline.operations import Op, PipelineShape, Schedule
from mindspeed.pipeline.simulator import judge
from mindspeed.pipeline.synthesis import megatron
from mindspeed.pipeline.transport import Channels, open_links

LossFunction: TypeAlias = Callable[[Tensor, int], Tensor]
"""The loss of a micro-batch, from the output of the last stage and the number of the micro-batch."""


class Pipeline:
    """Runs the stages of this rank in the order of a schedule, and exchanges outputs and gradients with its neighbours.

    ``stages`` are this rank's modules, each from one tensor to one tensor. With P ranks, rank r has the stages r, r + P,
    r + 2 P ... of the model. ``mesh`` is a `DeviceMesh` of one dimension or a process group. All ranks of the job make their
    pipelines at once. ``schedule`` makes the list of operations for a shape, by default 1F1B, or with several stages a rank
    interleaved 1F1B (Narayanan et al., arXiv 2104.04473). ``dtype`` is that of the tensors between stages. Raises OperatorError
    for a schedule that cannot run, and for one with separate weight gradients, which only Megatron's linear layers have.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mesh: Mesh,
        micro_batches: int,
        *,
        schedule: Callable[[PipelineShape], Schedule] = megatron,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        group = group_of(mesh, "Pipeline")
        self.stages, self.rank = list(stages), group.rank()
        shape = PipelineShape(group.size(), len(stages), micro_batches)
        if len(stages) > 1 and micro_batches % group.size():
            below = micro_batches // group.size() * group.size()
            near = f"{below} or {below + group.size()}" if below else str(group.size())
            refuse(
                f"Pipeline: {micro_batches} micro-batches are not divisible by {group.size()} ranks with interleaved stages",
                f"use {near} micro-batches",
            )
        self.schedule = schedule(shape)
        if problems := [*judge(self.schedule).problems]:
            refuse(f"Pipeline: {problems[0]}", "use another schedule or number of micro-batches")
        if other := {op.kind for ops in self.schedule.ops for op in ops} - {"F", "D"}:
            refuse(f"Pipeline: the schedule has operations {', '.join(sorted(other))}", "use a schedule of F and D alone")
        self._routes = routes(self.schedule)
        self._empty = partial(torch.empty, dtype=dtype, device=device)
        self._links = open_links(group, len(stages), shape.placement, self._empty)

    def step(self, inputs: Sequence[Any], loss: LossFunction) -> list[Tensor]:
        """Compute gradients of the sum of all losses, and return the losses, in order, on the rank of the last stage.

        ``inputs`` has what the first stage is called with for each micro-batch; other ranks do not read it.
        """
        run = _Step(self, inputs, loss)
        # without a size that is known beforehand, a header tells the shape of each message
        channels = Channels(self._routes, self.rank, self._links, lambda: None, self._empty)
        execute(self.schedule, self.rank, run, channels)
        return run.losses

    def close(self) -> None:
        """Destroy the communicators of the pipeline."""
        self._links.destroy()


class _Step:
    """The stages of one step, as the executor calls them."""

    def __init__(self, pipeline: Pipeline, inputs: Sequence[Any], loss: LossFunction) -> None:
        self._pipeline, self._inputs, self._loss = pipeline, inputs, loss
        self.losses: list[Tensor] = []

    def forward(self, op: Op, given: Tensor | None) -> Tensor:
        shape = self._pipeline.schedule.shape
        output: Tensor = self._pipeline.stages[op.chunk](self._inputs[op.micro_batch] if given is None else given)
        if shape.stage_of(self._pipeline.rank, op.chunk) == shape.stages - 1:
            output = self._loss(output, op.micro_batch)
            self.losses.append(output.detach())
        return output

    def backward(self, op: Op, given: Tensor | None, output: Tensor, gradient: Tensor | None) -> Tensor | None:
        torch.autograd.backward(output, gradient)
        return None if given is None else given.grad

    def weight(self, op: Op) -> None:
        """No schedule of this pipeline has W."""

    def recompute(self, op: Op) -> None:
        """No schedule of this pipeline has R."""

    def sent(self, op: Op, output: Tensor) -> None:
        """Keep the output: torch's backward reads its shape."""
