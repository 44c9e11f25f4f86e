"""Optimizer steps that do not wait for the global gradient norm: each is validated later, and repeated where it clips or skips.

The idea is that of Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 4. Here the step is not undone by
arithmetic but by copies, so that a repeated step has the bits of one that was synchronized.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.pipeline.messages import VALIDATION
from mindspeed.plugins.active import active_features
from mindspeed.plugins.patches import Function, wrapper

MARGIN: Final = 1e-3
"""Share by which a norm must be below the limit of clipping to count as valid: far above the rounding of its sum. Between them
the step is repeated, and Megatron's own norm decides."""


def open_validation() -> PostValidation:
    """Create the process group of validations; collective over all ranks of the job.

    NCCL and HCCL create a communicator at its first message and block the host meanwhile, so there is one here.
    """
    group = dist.new_group(group_desc=VALIDATION)
    dist.all_reduce(torch.zeros(1, device=torch.cuda.current_device()), group=group)
    return PostValidation(group)


class PostValidation:
    """Hold the optimizer step of this rank that is not validated yet.

    ``group`` has all ranks of the job.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.norm = 0.0
        """Gradient norm of the latest validated step."""
        self.repeated = 0
        """Steps that were undone and repeated or skipped."""
        self._steps: list[_OptimisticStep] = []
        self._clearings: list[Callable[[], None]] = []
        self._attached: list[tuple[Any, str]] = []

    @property
    def is_pending(self) -> bool:
        return bool(self._steps)

    @property
    def is_attached(self) -> bool:
        return bool(self._attached)

    def attach(self, optimizer: Any) -> None:
        """Let an optimizer of Megatron step without synchronization over pipeline stages."""
        methods: dict[str, Callable[..., Any]] = {"step": partial(self._step, optimizer), "zero_grad": self._zero_grad}
        methods |= dict.fromkeys(_READERS, self._after_validation)
        for name, method in methods.items():
            if (own := getattr(optimizer, name, None)) is not None:
                setattr(optimizer, name, partial(method, own))
                self._attached.append((optimizer, name))

    def detach(self) -> None:
        """Remove the replaced methods of optimizers. The weights of a pending step remain, with a warning."""
        if self._steps:
            warnings.warn(_NOT_VALIDATED, stacklevel=2)
        self._steps, self._clearings = [], []
        for optimizer, name in self._attached:
            vars(optimizer).pop(name, None)
        self._attached = []

    def keeps_gradients(self, clearing: Callable[[], None]) -> bool:
        """Return whether a step needs the gradients that are to be cleared; its validation calls ``clearing`` then."""
        if self._steps:
            self._clearings.append(clearing)
        return bool(self._steps)

    def note_schedule(self, scheduler: Any, increment: int) -> None:
        """Remember that a learning-rate scheduler has counted the pending steps."""
        for step in self._steps:
            step.scheduled.append((scheduler, increment))

    def close(self) -> None:
        """Destroy the process group."""
        self.detach()
        dist.destroy_process_group(self._group)

    def validate(self) -> bool:
        """Wait for the norms, and repeat the steps that need it; return whether none did. Collective."""
        steps, self._steps = self._steps, []
        for step in steps:
            step.wait()
        are_valid = all(step.is_valid for step in steps)
        for step in steps:
            self.norm = step.norm if are_valid else step.repeat()
            self.repeated += not are_valid
        clearings, self._clearings = self._clearings, []
        for clearing in clearings:
            clearing()
        return are_valid

    def _step(self, optimizer: Any, step: Callable[[], Any]) -> tuple[bool, float, None]:
        self.validate()
        self._steps.append(_OptimisticStep(optimizer, step, self._group))
        return True, self.norm, None

    def _zero_grad(self, zero_grad: Callable[..., None], set_to_none: bool = True) -> None:
        clearing = partial(zero_grad, set_to_none)
        if not self.keeps_gradients(clearing):
            clearing()

    def _after_validation(self, reader: Callable[..., Any], *args: Any, **more: Any) -> Any:
        self.validate()
        return reader(*args, **more)


_NOT_VALIDATED: Final = (
    "the last optimizer step was not validated: it is not clipped, and not skipped for infinite gradients. Save a checkpoint, "
    "or call state_dict() of the optimizer on all ranks, before mindspeed is deactivated or process groups are destroyed"
)

_READERS: Final = (
    "state_dict",
    "sharded_state_dict",
    "save_parameter_state",
    "load_state_dict",
    "load_parameter_state",
    "reload_model_params",
)
"""Methods of an optimizer that read or write its weights or states as a whole."""


class _OptimisticStep:
    """Take a step of an optimizer at once, unless the gradients of this rank alone require clipping or a skip.

    ``scheduled`` has the learning-rate schedulers that count it, and by how much.
    """

    @torch.no_grad()
    def __init__(self, optimizer: Any, step: Callable[[], Any], group: Any) -> None:
        self._optimizer, self._step = optimizer, step
        self._members: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
        self._inner = [member.optimizer for member in self._members if member.optimizer is not None]
        self.scheduled: list[tuple[Any, int]] = []
        clip = optimizer.config.clip_grad
        self._limit = clip * (1 - MARGIN) - 1e-6 if clip > 0 else math.inf  # Megatron adds 1e-6 to the norm
        self._scalers = [(scaler, vars(scaler).copy()) for scaler in _scalers(self._members)]
        with _kept_local(self._members):
            found_inf = optimizer.prepare_grads()
        own, weighted = _squares(self._members)
        takes = not found_inf and self._is_small(math.sqrt(own))
        self._sum = torch.tensor([weighted if takes else math.inf], device=torch.cuda.current_device())
        self._work = dist.all_reduce(self._sum, group=group, async_op=True)
        self._before = [_settings(inner) for inner in self._inner]
        self._copies = [_Copies(inner) for inner in self._inner] if takes else []
        if takes:
            optimizer.step_with_ready_grads()
        else:
            self._publish()
        self._after = [_settings(inner) for inner in self._inner]

    def wait(self) -> None:
        """Wait for the sum over all ranks."""
        self._work.wait()
        self.norm = math.sqrt(self._sum.item())

    @property
    def is_valid(self) -> bool:
        """Return whether a synchronized step would have been the same. A norm that is not a number is not valid."""
        return self._is_small(self.norm)

    def _is_small(self, norm: float) -> bool:
        return math.isfinite(norm) and norm <= self._limit

    @torch.no_grad()
    def repeat(self) -> float:
        """Undo the step and take it with Megatron's own synchronization; return the norm of gradients. Collective."""
        later = [_changes(inner, after) for inner, after in zip(self._inner, self._after, strict=True)]
        for copies in self._copies:
            copies.restore()
        for scaler, state in self._scalers:
            vars(scaler).update(state)
        for inner, before in zip(self._inner, self._before, strict=True):
            _restore(inner, before)
        self._optimizer.prepare_grads = self._agree_on_infinities
        try:
            is_taken, norm, _ = self._step()
        finally:
            del self._optimizer.prepare_grads
        for inner, changed in zip(self._inner, later, strict=True):
            _set(inner, changed)
        if not is_taken:
            self._publish()
            for scheduler, increment in self.scheduled:
                scheduler.step(increment=-increment)
        return norm or 0.0

    def _agree_on_infinities(self) -> bool:
        """Return whether any rank has found an infinite gradient, and change loss scales as Megatron does.

        It stands for ``prepare_grads()`` of gradients that are prepared already.
        """
        found = False
        for member in self._members:
            if getattr(member, "grad_scaler", None):
                group = member.get_grad_stats_parallel_group()
                dist.all_reduce(member.found_inf, op=dist.ReduceOp.MAX, group=group)
                here = bool(member.found_inf.item())
                member.grad_scaler.update(here)
                found |= here
        return found

    def _publish(self) -> None:
        """Give the model the main weights as they are, with the collectives of a step."""
        idle = SimpleNamespace(step=lambda: None)
        inner = [member.optimizer for member in self._members]
        try:
            for member in self._members:
                member.optimizer = idle
            self._optimizer.step_with_ready_grads()
        finally:
            for member, own in zip(self._members, inner, strict=True):
                member.optimizer = own


class _Copies:
    """Copies of the weights and states that a step of torch's optimizer changes."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._weights: list[tuple[Tensor, Tensor, dict[str, Any] | None]] = [
            (weight, weight.detach().clone(), _copied(inner.state.get(weight)))
            for group in inner.param_groups
            for weight in group["params"]
            if weight.grad is not None
        ]

    def restore(self) -> None:
        for weight, value, state in self._weights:
            weight.data.copy_(value)
            if state is None:
                self._inner.state.pop(weight, None)
            else:
                self._inner.state[weight] = state


def _copied(state: dict[str, Any] | None) -> dict[str, Any] | None:
    if not state:
        return None
    return {name: _copy(value) for name, value in state.items()}


def _settings(inner: Any) -> list[dict[str, Any]]:
    """Return the settings of parameter groups, such as the learning rate, or a number of steps that a kernel counts there."""
    return [{name: _copy(value) for name, value in group.items() if name != "params"} for group in inner.param_groups]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _changes(inner: Any, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those settings of parameter groups that were changed since."""
    return [
        {name: value for name, value in now.items() if name not in then or _differs(value, then[name])}
        for now, then in zip(_settings(inner), before, strict=True)
    ]


def _differs(one: Any, other: Any) -> bool:
    return not one.equal(other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one is not other


def _restore(inner: Any, settings: list[dict[str, Any]]) -> None:
    """Give parameter groups these settings and no others."""
    for group, values in zip(inner.param_groups, settings, strict=True):
        for name in group.keys() - values.keys() - {"params"}:
            del group[name]
    _set(inner, settings)


def _set(inner: Any, settings: list[dict[str, Any]]) -> None:
    for group, values in zip(inner.param_groups, settings, strict=True):
        for name, value in values.items():
            if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                group[name].copy_(value)
            else:
                group[name] = value


def _scalers(members: list[Any]) -> list[Any]:
    """Return the loss scales of optimizers, each once."""
    scalers = [scaler for member in members if (scaler := getattr(member, "grad_scaler", None))]
    return list({id(scaler): scaler for scaler in scalers}.values())


@contextmanager
def _kept_local(members: list[Any]) -> Iterator[None]:
    """Let optimizers look for infinite gradients in those of this rank alone."""
    scaled = [member for member in members if getattr(member, "grad_scaler", None)]
    for member in scaled:
        member._unscale_main_grads_and_check_for_nan = partial(_unscale, member)
    try:
        yield
    finally:
        for member in scaled:
            del member._unscale_main_grads_and_check_for_nan


def _unscale(member: Any) -> bool:
    """Divide the gradients of an optimizer by the loss scale; return whether one is not finite."""
    member.found_inf.zero_()
    if not getattr(member, "is_stub_optimizer", False):
        gradients = member._collect_main_grad_data_for_unscaling()
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, member.found_inf, member.grad_scaler.inv_scale)
    return bool(member.found_inf.item())


def _squares(members: list[Any]) -> tuple[float, float]:
    """Return the sum of squared gradients of this rank, and its share of the sum over all ranks.

    Replicas share the gradients that each of them has as a whole.
    """
    sums = torch.zeros(2, device=torch.cuda.current_device())
    for member in members:
        if gradients := member.get_main_grads_for_grad_norm():
            squares = torch.stack(torch._foreach_norm(gradients)).square().sum()
            ranks = dist.get_world_size(member.get_grad_stats_parallel_group())
            sums += squares * torch.tensor([1.0, ranks / dist.get_world_size()], device=sums.device)
    own, weighted = sums.tolist()
    return own, weighted


def late_gathers(feature: Any, chunks: Sequence[Any]) -> list[str]:
    """Return a sentence for a model whose weights are gathered in its forward passes, which a repeated step has passed."""
    late = any(getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False) for chunk in chunks)
    return ["the weights of the model are gathered in forward passes (overlap_param_gather)"] if late else []


# -- wraps of Megatron's functions --------------------------------------------------------------------------------------


def _active() -> PostValidation | None:
    """Return the steps of the active schedule, None where it has none that are validated later."""
    engines = [getattr(feature, "engine", None) for feature in active_features(object)]
    found = [getattr(engine, "validation", None) for engine in engines]
    return next((validation for validation in found if validation is not None and validation.is_attached), None)


@wrapper
def clear_after_validation(original: Function, chunk: Any) -> None:
    """Wrap ``DistributedDataParallel.zero_grad_buffer()``: a step that may be repeated needs the gradients."""
    validation = _active()
    if validation is None or not validation.keeps_gradients(chunk.zero_grad_buffer):
        original(chunk)


@wrapper
def with_steps_to_take_back(original: Function, scheduler: Any, increment: int) -> None:
    """Wrap ``OptimizerParamScheduler.step()``: a step that is skipped at its validation is not counted."""
    original(scheduler, increment)
    if (validation := _active()) is not None:
        validation.note_schedule(scheduler, increment)


@wrapper
def without_reduction(original: Function, value: Any) -> Any:
    """Wrap a reduction of the success or the norm of a step over ranks: they are those of the validation, which are equal."""
    return original(value) if _active() is None else value
