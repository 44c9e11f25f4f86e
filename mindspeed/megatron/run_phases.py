"""Where a run passes from one phase to the next: wraps on the few Megatron functions that every run calls.

They tell the proof (`mindspeed.runtime.effects`) when a phase has ended once, per step or rarer. Nothing here imports
megatron.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from mindspeed.plugins.patches import Patch, Wrap
from mindspeed.runtime import session

Function = Callable[..., Any]

_HERE: Final = "mindspeed.megatron.run_phases"
_REASON: Final = "the proof of application knows which phase of the run begins"

PHASES: Final[tuple[Patch, ...]] = (
    Wrap("megatron.core.parallel_state:initialize_model_parallel", f"{_HERE}:build_follows", _REASON, phase="setup"),
    Wrap("megatron.core.pipeline_parallel.schedules:get_forward_backward_func", f"{_HERE}:step_begins", _REASON),
    Wrap("megatron.core.dist_checkpointing.serialization:save", f"{_HERE}:checkpoint_between", _REASON, phase="checkpoint"),
    Wrap("megatron.core.parallel_state:destroy_model_parallel", f"{_HERE}:teardown_begins", _REASON, phase="teardown"),
)
"""The wraps of every plan with a feature."""


def build_follows(original: Function) -> Function:
    """Around ``initialize_model_parallel``: with the groups, set-up has ended."""

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        session.enter("build")
        return result

    return initialize_model_parallel


def step_begins(original: Function) -> Function:
    """Around ``get_forward_backward_func``: what it returns begins a step, or an evaluation when it is only a forward.

    A step lasts until the next one begins, so that the optimizer belongs to it.
    """

    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Function:
        schedule = original(*args, **kwargs)

        @functools.wraps(schedule)
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            session.enter("evaluate" if kwargs.get("forward_only") else "step")
            return schedule(*args, **kwargs)

        return forward_backward

    return get_forward_backward_func


def checkpoint_between(original: Function) -> Function:
    """Around ``dist_checkpointing.save``."""

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        session.enter("checkpoint")
        try:
            return original(*args, **kwargs)
        finally:
            session.enter(None)

    return save


def teardown_begins(original: Function) -> Function:
    """Around ``destroy_model_parallel``."""

    @functools.wraps(original)
    def destroy_model_parallel(*args: Any, **kwargs: Any) -> Any:
        session.enter("teardown")
        return original(*args, **kwargs)

    return destroy_model_parallel
