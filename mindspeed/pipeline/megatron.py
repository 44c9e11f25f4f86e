"""Megatron's forward-backward function on a list of operations: unmodified model chunks, gradient hooks and loss functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_model_config
from torch import Tensor

from mindspeed.memory.model_layers import tracker_state
from mindspeed.memory.on_host import HostBuffers
from mindspeed.memory.recomputation import generators
from mindspeed.pipeline.executor import Review, execute
from mindspeed.pipeline.megatron_stages import MegatronStages, refuse
from mindspeed.pipeline.messages import Routes, routes, warm_up
from mindspeed.pipeline.operations import Costs, PipelineShape, Placement, Schedule
from mindspeed.pipeline.paired_transfers import LAYER_STATES, TRACKER_NAME
from mindspeed.pipeline.post_validation import PostValidation
from mindspeed.pipeline.recompute_feature import RecomputeFeature
from mindspeed.pipeline.recording import Timed, agreed_costs, collect, device_time, is_collecting, write_trace
from mindspeed.pipeline.repeated_forwards import RepeatedForwards
from mindspeed.pipeline.running_step import running
from mindspeed.pipeline.simulator import judge, out_of_order
from mindspeed.pipeline.transport import Channels, Links, moved
from mindspeed.plugins.active import active_features
from mindspeed.problems import Fix, Problem, RunError

_FOREIGN: Final = ("adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection", "grad_finalize_pgs")
"""Arguments of Megatron's function with which a caller brings communication of its own."""


MEASURED_STEPS: Final = range(1, 3)
"""Steps whose operations are timed where costs are measured: not the first one, in which memory is allocated."""


@dataclass
class Engine:
    """A feature's schedules on Megatron's chunks; one object for the life of the process groups.

    ``plan(shape, costs)`` returns the schedule for a number of micro-batches. ``links`` are `transport.open_links` of the
    pipeline group. A list that sums gradients in another order than Megatron is refused. ``output_layer`` lets its weight
    gradient wait as well. With ``measured`` the ranks time their operations in `MEASURED_STEPS`, agree on ``costs``, and plan
    again. ``trace`` is a folder in which every rank writes the times of its latest step. With ``host`` the queue
    of weight gradients is on the host but for two chunk-steps. ``validation`` has the optimizer steps that are validated behind
    the warm-up of the step after.
    """

    owner: str
    plan: Callable[[PipelineShape, Costs], Schedule]
    links: Links
    placement: Placement = "loop"
    output_layer: bool = False
    costs: Costs = field(default_factory=Costs)
    measured: bool = False
    trace: str | None = None
    host: HostBuffers | None = None
    validation: PostValidation | None = None
    recomputed: int = 0
    bytes_sent: int = 0
    recorded: list[Timed] = field(default_factory=list)
    """The times of the latest step that was recorded."""
    _lists: dict[tuple[int, bool], tuple[Schedule, Routes]] = field(default_factory=dict)
    _steps: int = 0
    _measured: list[Timed] = field(default_factory=list)

    def destroy(self) -> None:
        """Destroy the communicators."""
        self.links.destroy()
        if self.validation is not None:
            self.validation.close()

    def lists(self, shape: PipelineShape, forward_only: bool) -> tuple[Schedule, Routes]:
        """Return the judged schedule for a shape, made once. Raises RunError with MS650 for one that cannot run."""
        key = (shape.micro_batches, forward_only)
        if key not in self._lists:
            try:
                schedule = self.plan(shape, self.costs)
                for feature in active_features(RecomputeFeature):  # type: ignore[type-abstract]  # it asks for instances
                    schedule = feature.listed(schedule)
                problems = [*judge(schedule).problems, *out_of_order(schedule)]
            except ValueError as error:
                problems = [str(error)]
            if problems:
                fix = Fix.remove_feature(self.owner)
                raise RunError([Problem("MS650", f"{self.owner}: {text}", (self.owner,), fix=fix) for text in problems])
            if forward_only:
                forwards = tuple(tuple(op for op in ops if op.kind == "F") for ops in schedule.ops)
                schedule = Schedule(schedule.name, shape, forwards)
            self._lists[key] = schedule, routes(schedule)
        return self._lists[key]

    def __call__(
        self,
        *,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        force_all_reduce: bool | None = False,
        **others: Any,
    ) -> list[Any]:
        """Run one step as Megatron's function does, and return the data of the loss function on the last pipeline rank."""
        for name in _FOREIGN:
            if others.get(name) is not None:
                refuse(self.owner, f"the caller passes {name}, but the schedule replaces the communication")
        chunks = list(model) if isinstance(model, list) else [model]
        iterators = self._iterators(data_iterator, len(chunks))
        config = get_model_config(chunks[0])
        group = getattr(config, "microbatch_group_size_per_vp_stage", None) if len(chunks) > 1 else None
        shape = PipelineShape(len(self.links.ranks), len(chunks), num_microbatches, self.placement, group)
        schedule, order = self.lists(shape, forward_only)
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        empty = partial(_empty, config.pipeline_dtype)
        shapes_vary = config.variable_seq_lengths or getattr(config, "mtp_standalone", False)
        expected = None if shapes_vary else _tensor_shape(config, seq_length, micro_batch_size)
        repeated = None
        if self.validation is not None and self.validation.is_pending:
            if forward_only:
                self.validation.validate()
            else:
                repeated = RepeatedForwards(chunks, iterators)
                iterators = repeated.iterators
        step = MegatronStages(self, schedule, chunks, iterators, config, forward_step_func, forward_only)
        step.expected = expected
        step.keywords = {"collect_non_loss_data": collect_non_loss_data, "first_val_step": first_val_step}
        channels = Channels(order, step.rank, self.links, lambda: expected and empty(expected), empty)
        with running(step.kept), step.gradients_kept_local():
            self._execute(schedule, step, channels, self._review(schedule, step, channels, repeated))
        self.bytes_sent = channels.bytes_sent
        self.recomputed = step.checkpoints.recomputed
        if (last := shape.rank_of(shape.stages - 1)) != shape.pp - 1:
            self._report(step, last, shape.pp - 1)
        if not forward_only:
            step.finish(force_all_reduce)
            self._learn(shape, step.rank)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return step.losses

    def _iterators(self, given: Any, chunks: int) -> list[Any]:
        """Return the data iterator of each chunk, which is None on a rank without data. Raises RunError with MS651."""
        iterators = [None] * chunks if given is None else given if isinstance(given, list) else [given]
        if len(iterators) != chunks:
            text = f"each model chunk needs a data iterator, but the rank has {len(iterators)} for {chunks} chunks"
            fix = Fix.advise("pass data_iterator as a list with one iterator for each model chunk")
            raise RunError([Problem("MS651", f"{self.owner}: {text}", (self.owner,), fix=fix)])
        return iterators

    def _report(self, step: MegatronStages, last: int, reporting: int) -> None:
        """Move what the last stage computed for the log, from its rank to the one where Megatron's trainer logs.

        Losses of multi-token prediction leave no entry behind, so that the data-parallel ranks of one rank alone average them.
        """
        tracker = MTPLossLoggingHelper.tracker
        made = (step.losses, step.tokens, tracker.pop("values", None)) if step.rank == last else None
        reported = moved(made, self.links, step.rank, last, reporting, step.tokens.device)
        step.losses, step.tokens, predicted = reported or ([], step.tokens, None)
        if predicted is not None:
            tracker["values"] = tracker.get("values", 0.0) + predicted
            tracker["avg_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)

    def _review(
        self, schedule: Schedule, step: MegatronStages, channels: Channels, repeated: RepeatedForwards | None
    ) -> Review | None:
        """Return the validation of the last optimizer step, behind the forward passes that a wrong one repeats."""
        if self.validation is None or repeated is None:
            return None
        validate, first = self.validation.validate, warm_up(schedule)

        def holds() -> bool:
            with step.gradients_untouched():
                is_valid = validate()
            if not is_valid:
                repeated.restore()
                step.restart()
                channels.restart({channel: len(order) for channel, order in routes(first).order.items()})
            repeated.release()
            return is_valid

        return Review(len(first.ops[step.rank]), holds)

    def _execute(self, schedule: Schedule, step: MegatronStages, channels: Channels, review: Review | None) -> None:
        states = (*generators(), tracker_state(), TRACKER_NAME, LAYER_STATES, *step.states) if schedule.pairs else ()
        if self.trace is None and not self._measuring and not is_collecting():
            execute(schedule, step.rank, step, channels, states=states, review=review)
            return
        timed = self.recorded = []
        execute(schedule, step.rank, step, channels, lambda *times: timed.append(Timed(*times)), device_time, states, review)
        collect(timed)

    @property
    def _measuring(self) -> bool:
        return self.measured and self._steps in MEASURED_STEPS

    def _learn(self, shape: PipelineShape, rank: int) -> None:
        """Write the times of a training step, and plan again behind the last step that is measured."""
        if self.trace is not None:
            write_trace(self.trace, self.recorded)
        if self._measuring:
            self._measured += self.recorded
            if self._steps == MEASURED_STEPS[-1]:
                self.costs = agreed_costs(self._measured, shape, rank, self.costs)
                self._measured.clear()
                self._lists.clear()
        self._steps += 1


def _tensor_shape(config: Any, seq_length: int, micro_batch_size: int) -> tuple[int, int, int]:
    length = seq_length // parallel_state.get_context_parallel_world_size()
    if config.sequence_parallel:
        length //= parallel_state.get_tensor_model_parallel_world_size()
    return length, micro_batch_size, config.hidden_size


def _empty(default: torch.dtype, shape: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or default, device=torch.cuda.current_device())
