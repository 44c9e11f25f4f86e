"""A pipeline over a list of modules, by the executor and the schedules of `mindspeed.pipeline`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from mindspeed.memory.recomputation import generators
from mindspeed.nn.mesh import Mesh, group_of
from mindspeed.ops.errors import refuse
from mindspeed.pipeline.deferred_linears import DeferredLinears, accumulate
from mindspeed.pipeline.executor import execute
from mindspeed.pipeline.messages import routes
from mindspeed.pipeline.operations import Costs, Op, PipelineShape, Schedule
from mindspeed.pipeline.search import NAMES, named
from mindspeed.pipeline.simulator import judge
from mindspeed.pipeline.transport import Channels, open_links
from mindspeed.pipeline.weight_gradients import WeightGradients

LossFunction: TypeAlias = Callable[[Tensor, int], Tensor]
"""The loss of a micro-batch, from the output of the last stage and the number of the micro-batch."""


class Pipeline:
    """Runs the stages of this rank in the order of a schedule, and exchanges outputs and gradients with its neighbours.

    ``stages`` are this rank's modules, each from one tensor to one tensor. With P ranks, rank r has the stages r, r + P,
    r + 2 P ... of the model; with ``zb-v`` it has r and 2 P - 1 - r. ``mesh`` is a `DeviceMesh` of one dimension or a process
    group. All ranks of the job make their pipelines at once. ``shape`` and ``dtype`` are those of the tensors between stages;
    without a shape, each tensor is announced by a message that tells it.

    ``schedule`` is a name or a `Schedule` of one's own:

    - ``1f1b``, the default with one stage a rank, and ``interleaved``, the default with several (Narayanan et al.,
      arXiv 2104.04473)
    - ``zb-h1`` (Qi et al., arXiv 2401.10241) and ``zb-v`` (arXiv 2405.15362), whose weight gradients fill the bubbles
    - ``fastest``, which is searched for durations that are equal
    - ``paired``, in which a forward pass computes while the tokens of another micro-batch's backward pass travel to the experts
      of `mindspeed.nn.MoE`, and the other way round

    Weight gradients are computed apart from the backward pass in ``nn.Linear`` and ``functional.linear``, with the bits of the
    backward pass. Gradients of other parameters, and of those that FSDP2 shards, stay in it. Raises OperatorError for a
    schedule that cannot run.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mesh: Mesh,
        micro_batches: int,
        *,
        schedule: str | Schedule = "",
        shape: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        group = group_of(mesh, "Pipeline")
        self.stages, self.rank = list(stages), group.rank()
        self.schedule = _schedule(schedule, group.size(), len(stages), micro_batches)
        if problems := [*judge(self.schedule).problems]:
            refuse(f"Pipeline: {problems[0]}", "use another schedule or number of micro-batches")
        kinds = {op.kind for ops in self.schedule.ops for op in ops}
        if "R" in kinds:
            refuse("Pipeline: the schedule has operations R", "recompute with mindspeed.parallel.Checkpoint in the stages")
        self.defers = "W" in kinds
        modules = (module for stage in stages for module in stage.modules())
        if self.defers and any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules):
            refuse(
                "Pipeline: this schedule computes weight gradients after the backward pass, in which "
                "DistributedDataParallel reduces them",
                "use schedule='1f1b', or reduce the gradients after the step",
            )
        self.shape = None if shape is None else tuple(shape)
        self._routes = routes(self.schedule)
        self._empty = partial(torch.empty, dtype=dtype, device=device)
        self._links = open_links(group, len(stages), self.schedule.shape.placement, self._empty)

    def step(self, inputs: Sequence[Any], loss: LossFunction) -> list[Tensor]:
        """Compute gradients of the sum of all losses, and return the losses, in order, on the rank of the last stage.

        ``inputs`` has what the first stage is called with for each micro-batch; other ranks do not read it.
        """
        run = _Step(self, inputs, loss)
        channels = Channels(self._routes, self.rank, self._links, self._buffer, self._empty)
        execute(self.schedule, self.rank, run, channels, states=generators() if self.schedule.pairs else ())
        return run.losses

    def _buffer(self) -> Tensor | None:
        return None if self.shape is None else self._empty(self.shape)

    def close(self) -> None:
        """Destroy the communicators of the pipeline."""
        self._links.destroy()


def _schedule(given: str | Schedule, ranks: int, stages: int, micro_batches: int) -> Schedule:
    """Return the schedule of a name for a shape, or the one that is given, which has that shape."""
    if isinstance(given, Schedule):
        shape = PipelineShape(ranks, stages, micro_batches, given.shape.placement, given.shape.group)
        if shape != given.shape:
            refuse(f"Pipeline: the schedule is made for {given.shape}, but this pipeline is {shape}", "make it for this shape")
        return given
    name = given or ("1f1b" if stages == 1 else "interleaved")
    if name not in NAMES:
        refuse(f"Pipeline: no schedule {name!r}", f"use one of {', '.join(NAMES)}")
    if NAMES[name] == "v" and stages != 2:
        refuse(f"Pipeline: {name} has two stages on each rank, but there are {stages}", "pass two stages on each rank")
    if NAMES[name] == "loop" and stages > 1 and micro_batches % ranks:
        below = micro_batches // ranks * ranks
        near = f"{below} or {below + ranks}" if below else str(ranks)
        refuse(
            f"Pipeline: {micro_batches} micro-batches are not divisible by {ranks} ranks with interleaved stages",
            f"use {near} micro-batches",
        )
    try:
        return named(name, PipelineShape(ranks, stages, micro_batches, NAMES[name]), Costs())
    except ValueError as error:
        refuse(f"Pipeline: {error}", "use another schedule or number of stages")


class _Step:
    """The stages of one step, as the executor calls them."""

    def __init__(self, pipeline: Pipeline, inputs: Sequence[Any], loss: LossFunction) -> None:
        self._pipeline, self._inputs, self._loss = pipeline, inputs, loss
        self._queue = WeightGradients(accumulate)
        self._weights = [parameter for stage in pipeline.stages for parameter in stage.parameters()] if pipeline.defers else []
        self.losses: list[Tensor] = []

    def forward(self, op: Op, given: Tensor | None) -> Tensor:
        pipeline, places = self._pipeline, self._pipeline.schedule.shape
        stage = places.stage_of(pipeline.rank, op.chunk)
        with self._deferred(op, "forward"):
            output: Tensor = pipeline.stages[op.chunk](self._inputs[op.micro_batch] if given is None else given)
            if stage == places.stages - 1:
                output = self._loss(output, op.micro_batch)
                self.losses.append(output.detach())
            elif pipeline.shape not in (None, output.shape):
                found = tuple(output.shape)
                refuse(
                    f"Pipeline: the output of stage {stage} is {found}, but shape is {pipeline.shape}", f"pass shape={found}"
                )
        return output

    def backward(self, op: Op, given: Tensor | None, output: Tensor, gradient: Tensor | None) -> Tensor | None:
        with self._deferred(op, "backward"):
            torch.autograd.backward(output, gradient)
        if op.kind == "D":
            self.weight(op)
        return None if given is None else given.grad

    def weight(self, op: Op) -> None:
        self._queue.run(op[1:])

    def recompute(self, op: Op) -> None:
        """No schedule of this pipeline has R."""

    def sent(self, op: Op, output: Tensor) -> None:
        """Keep the output: torch's backward reads its shape."""

    @contextmanager
    def _deferred(self, op: Op, run: Literal["forward", "backward"]) -> Iterator[None]:
        if not self._pipeline.defers:
            yield
            return
        with self._queue.collected(op[1:], run), DeferredLinears(self._queue, self._weights):
            yield
