"""The stages of a rank in one step: Megatron's chunks, gradient hooks and loss functions behind the operations of a list."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.utils import get_model_type
from pydantic import ValidationError
from torch import Tensor

from mindspeed.job.world import UnknownValue, World
from mindspeed.pipeline.checkpoints import Checkpoints
from mindspeed.pipeline.host_queue import HostQueue
from mindspeed.pipeline.operations import Op, Schedule
from mindspeed.pipeline.running_step import RunningStep
from mindspeed.pipeline.weight_gradients import WeightGradients
from mindspeed.plugins.discovery import discover
from mindspeed.plugins.patches import ArgOverride
from mindspeed.problems import Fix, Problem, RunError, advice

if TYPE_CHECKING:
    from mindspeed.pipeline.megatron import Engine


def refuse(owner: str, text: str) -> NoReturn:
    """Raise MS651."""
    raise RunError([Problem("MS651", f"{owner}: {text}", (owner,), fix=Fix.advise(f"remove {owner}, or remove that argument"))])


def _staying_weights(chunks: list[Any], output_layer: bool) -> Iterator[int]:
    """Yield the identities of weights whose gradient is not made by linear layers alone, and that of an output layer."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, VocabParallelEmbedding):
            yield id(module.weight)
        head = getattr(module, "output_layer", None)
        if head is not None and not output_layer:
            yield id(getattr(head, "weight", None))


def _shape_fix() -> str:
    """Return the line that allows tensors of other shapes between stages."""
    return f"add {' or '.join(_features_that_set('variable_seq_lengths'))}, or give all micro-batches the same length"


def _features_that_set(argument: str) -> Iterator[str]:
    """Yield the features that set an argument of Megatron with their default settings."""
    known = discover(only=())
    for name in known.usable:
        feature = known.feature(name)
        try:
            overrides: list[ArgOverride] = getattr(feature(feature.Args(), World({})), "megatron_args", list)()
        except (UnknownValue, ValidationError):
            continue
        if any(override.argument == argument for override in overrides):
            yield name


@functools.lru_cache(maxsize=4)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)


def _known(function: Callable[..., Any], **optional: Any) -> dict[str, Any]:
    """Return those of the arguments that a release's function has."""
    return {name: value for name, value in optional.items() if name in _parameters(function)}


class MegatronStages:
    """A call of the forward-backward function: the stages of a rank, and what Megatron keeps during a step."""

    def __init__(
        self,
        options: Engine,
        schedule: Schedule,
        chunks: list[Any],
        iterators: list[Any],
        config: Any,
        function: Any,
        forward_only: bool,
    ) -> None:
        self.options, self.schedule, self.chunks, self.iterators = options, schedule, chunks, iterators
        self.config, self.function, self.forward_only = config, function, forward_only
        self.rank = dist.get_rank(parallel_state.get_pipeline_model_parallel_group())
        self._starts_all_reductions = config.grad_sync_func is not None and (schedule.shape.vpp > 1 or self.rank > 0)
        self.losses: list[Any] = []
        self.tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
        self.keywords: dict[str, Any] = {}
        self.expected: tuple[int, ...] | None = None
        self._last = {op.chunk: op for op in schedule.ops[self.rank] if op.kind in "DW"}
        self._following = dict(zip(schedule.ops[self.rank], schedule.ops[self.rank][1:], strict=False))
        self._hooks: dict[int, Callable[..., None]] = {}
        self._gathered = 0
        self._no_sync = contextlib.ExitStack()
        self.checkpoints = Checkpoints(frozenset(op[1:] for op in schedule.ops[self.rank] if op.kind == "R"))
        waiting = any(op.kind == "W" for op in schedule.ops[self.rank])
        staying = frozenset(_staying_weights(chunks, options.output_layer))
        self.queue = WeightGradients(self._finish_weight, staying) if waiting else None
        if self.queue is not None and options.host is not None:
            self.queue.host = HostQueue(options.host, self.queue.storages_of)
        self.states = () if self.queue is None else (self.queue,)
        self.kept = RunningStep(self.queue, None if forward_only else self.checkpoints)

    # -- operations ---------------------------------------------------------------------------------------------------

    def forward(self, op: Op, given: Tensor | None) -> Tensor:
        self._gather_parameters(op)
        shape = self.schedule.shape
        last = shape.stage_of(self.rank, op.chunk) == shape.stages - 1
        first = op.micro_batch == 0
        if self.keywords["first_val_step"] is not None and self.forward_only:
            first = self.keywords["first_val_step"] and first
        optional = _known(
            schedules.forward_step,
            cp_group_size=parallel_state.get_context_parallel_world_size(),
            vp_stage=op.chunk if shape.vpp > 1 else None,
            is_last_stage=last,
        )
        with self._collected(op), self.checkpoints.entered(op[1:]):
            made: tuple[Tensor, Any] = schedules.forward_step(
                self.function,
                self.iterators[op.chunk],
                self.chunks[op.chunk],
                self.schedule.shape.micro_batches,
                given,
                self.losses,
                self.config,
                collect_non_loss_data=self.keywords["collect_non_loss_data"],
                is_first_microbatch=first,
                current_microbatch=op.micro_batch,
                **optional,
            )
        output, tokens = made
        self.tokens += tokens
        if not last and self.expected is not None and tuple(output.shape) != self.expected:
            owner = self.options.owner
            text = (
                f"{owner}: a stage produced a tensor of shape {tuple(output.shape)}, but the schedule expects {self.expected}"
            )
            raise RunError([Problem("MS651", text, (owner,), fix=advice(_shape_fix()))])
        return output

    def backward(self, op: Op, given: Tensor | None, output: Tensor, gradient: Tensor | None) -> Tensor | None:
        config, model_type = self.config, get_model_type(self.chunks[0])
        optional = _known(schedules.backward_step, model_type=model_type, pipeline_model_parallel_size=self.schedule.shape.pp)
        if gradient is not None:
            schedules.deallocate_output_tensor(output, config.deallocate_pipeline_outputs)
        with self._synchronised(op):
            with self._collected(op):
                made: Tensor | None = schedules.backward_step(given, output, gradient, config=config, **optional)
            if op.kind == "D" and self.queue is not None:
                self.queue.run(op[1:])
        self._end_of_chunk(op)
        return made

    def weight(self, op: Op) -> None:
        if self.queue is not None:
            with self._synchronised(op):
                self.queue.run(op[1:])
        self._end_of_chunk(op)

    def recompute(self, op: Op) -> None:
        with self._collected(op):
            self.checkpoints.restore(op[1:])

    def sent(self, op: Op, output: Tensor) -> None:
        schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs and not self.forward_only)

    def _collected(self, op: Op) -> contextlib.AbstractContextManager[None]:
        if self.queue is None or self.forward_only:
            return contextlib.nullcontext()
        following = self._following.get(op)
        last = self.schedule.shape.micro_batches - 1
        behind = op.kind == "B" and following is not None and following.kind == "W" and last not in (op[2], following[2])
        self.queue.due = following[1:] if behind and following is not None else None
        return self.queue.collected(op[1:], "backward" if op.kind in "BD" else "forward")

    def restart(self) -> None:
        """Forget the forward passes, which are repeated."""
        self.losses.clear()
        self.tokens.zero_()
        self.checkpoints.clear()

    # -- gradients ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def gradients_kept_local(self) -> Iterator[None]:
        """Reduce no gradient over data-parallel ranks but those of the last micro-batch."""
        self._keep_local()
        with self._no_sync:
            yield

    @contextlib.contextmanager
    def gradients_untouched(self) -> Iterator[None]:
        """Leave the state in which gradients are kept local, for code that clears them."""
        self._no_sync.close()
        yield
        self._keep_local()

    def _keep_local(self) -> None:
        functions = self.config.no_sync_func
        for function in functions if isinstance(functions, list) else [functions]:
            if function is not None:
                self._no_sync.enter_context(function())

    @contextlib.contextmanager
    def _synchronised(self, op: Op) -> Iterator[None]:
        """Let the gradients of a chunk's last micro-batch start their reduction, unless `_end_of_chunk` starts all of them."""
        if op.micro_batch != self.schedule.shape.micro_batches - 1 or self._starts_all_reductions:
            yield
            return
        self._no_sync.close()
        yield
        self._keep_local()

    def _end_of_chunk(self, op: Op) -> None:
        """Start the reduction of a chunk behind its last weight gradient, where Megatron is given a function for it.

        As in Megatron, the first rank does without that function if it has one chunk: it has no bubble behind its last
        backward pass, which alone can overlap the reduction.
        """
        if self._starts_all_reductions and self._last.get(op.chunk) == op:
            self._no_sync.close()
            functions = self.config.grad_sync_func
            (functions[op.chunk] if isinstance(functions, list) else functions)(self.chunks[op.chunk].parameters())
            self._keep_local()

    def _gather_parameters(self, op: Op) -> None:
        """Start the gather of the parameters of a chunk one chunk ahead, where Megatron is given a function for it."""
        functions = self.config.param_sync_func
        if functions is None or self.forward_only:
            return
        while self._gathered < min(len(self.chunks), op.chunk + 2):
            function = functions[self._gathered] if isinstance(functions, list) else functions
            function(self.chunks[self._gathered].parameters())
            self._gathered += 1

    def _finish_weight(self, chunk: int, weight: Any, gradient: Tensor | None) -> None:
        """Do what autograd does with the gradient of a weight, then what Megatron's hook on it does."""
        make_hook = getattr(self.chunks[chunk], "_make_backward_post_hook", None)
        if gradient is not None:
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        if make_hook is not None:
            if id(weight) not in self._hooks:
                self._hooks[id(weight)] = make_hook(weight)
            self._hooks[id(weight)]()

    # -- end of a step ------------------------------------------------------------------------------------------------

    def finish(self, force_all_reduce: bool | None) -> None:
        """Finish the gradients as Megatron does at the end of a step."""
        if self.queue is not None and len(self.queue):
            refuse(self.options.owner, f"{len(self.queue)} weight gradients are not computed at the end of a step")
        if len(self.checkpoints):
            refuse(self.options.owner, f"{len(self.checkpoints)} checkpoints are not used at the end of a step")
        if self.config.finalize_model_grads_func is not None:
            more = {"force_all_reduce": True} if force_all_reduce else {}
            tokens = self.tokens if self.config.calculate_per_token_loss else None
            self.config.finalize_model_grads_func(self.chunks, tokens, **more)
