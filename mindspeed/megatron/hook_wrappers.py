"""Wrapper factories of the seams: each turns a Megatron function into one that also calls a hook.

A wrapper asks for the active plan at every call, so one that outlives its plan does what the original does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mindspeed.plugins.problems import MindSpeedError, Problem
from mindspeed.runtime import session

Function = Callable[..., Any]


def with_config_ready(original: Function) -> Function:
    """Around ``TransformerConfig.__post_init__``."""

    @functools.wraps(original)
    def post_init(config: Any, *args: Any) -> None:
        original(config, *args)
        session.call("config_ready", config=config)

    return post_init


def with_groups_created(original: Function) -> Function:
    """Around ``initialize_model_parallel``."""

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        session.call("groups_created", sizes=group_sizes(), get_group=get_group)
        return result

    return initialize_model_parallel


def with_groups_destroyed(original: Function) -> Function:
    """Around ``destroy_model_parallel``."""

    @functools.wraps(original)
    def destroy_model_parallel(*args: Any, **kwargs: Any) -> Any:
        session.call("groups_destroyed")
        return original(*args, **kwargs)

    return destroy_model_parallel


def with_group_options(original: Function) -> Function:
    """Around ``get_nccl_options(pg_name, nccl_comm_cfgs)``: a feature's answer wins over Megatron's."""

    @functools.wraps(original)
    def get_nccl_options(pg_name: str, *args: Any, **kwargs: Any) -> Any:
        options = _only_answer("group_options", f"options for the group {pg_name}", group=pg_name)
        return original(pg_name, *args, **kwargs) if options is None else options

    return get_nccl_options


def with_layer_spec(original: Function) -> Function:
    """Around ``_get_block_submodules(config, spec, ...)``."""

    @functools.wraps(original)
    def get_block_submodules(config: Any, *args: Any, **kwargs: Any) -> Any:
        spec = original(config, *args, **kwargs)
        active = session.current()
        return spec if active is None else active.manager.fold("layer_spec", "spec", spec=spec, config=config)

    return get_block_submodules


def with_model_built(original: Function) -> Function:
    """Around ``get_megatron_optimizer(config, model_chunks, ...)``, before it."""

    @functools.wraps(original)
    def get_megatron_optimizer(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        session.call("model_built", chunks=model_chunks)
        return original(config, model_chunks, *args, **kwargs)

    return get_megatron_optimizer


def with_optimizer_built(original: Function) -> Function:
    """Around ``get_megatron_optimizer``, after it."""

    @functools.wraps(original)
    def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
        optimizer = original(*args, **kwargs)
        session.call("optimizer_built", optimizer=optimizer)
        return optimizer

    return get_megatron_optimizer


def with_schedule(original: Function) -> Function:
    """Around ``get_forward_backward_func``: what it returns asks the features once the model, and its config, is known."""

    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Function:
        default = original(*args, **kwargs)

        @functools.wraps(default)
        def forward_backward(**arguments: Any) -> Any:
            schedule = _only_answer("schedule", "a pipeline schedule", config=config_of(arguments["model"]))
            return (schedule or default)(**arguments)

        return forward_backward

    return get_forward_backward_func


def config_of(model: Any) -> Any:
    """The TransformerConfig of a model, or of the first of its chunks."""
    from megatron.core.utils import get_model_config

    return get_model_config(model[0] if isinstance(model, list) else model)


def group_sizes() -> dict[str, int]:
    """Sizes of Megatron's groups: tp, pp, cp, dp, ep."""
    from megatron.core import parallel_state as state

    return {
        "tp": state.get_tensor_model_parallel_world_size(),
        "pp": state.get_pipeline_model_parallel_world_size(),
        "cp": state.get_context_parallel_world_size(),
        "dp": state.get_data_parallel_world_size(),
        "ep": state.get_expert_model_parallel_world_size(),
    }


def get_group(name: str) -> Any:
    """A group of this rank by the name it has in Megatron's ProcessGroupCollection: tp, pp, cp, dp, dp_cp, ep, embd ..."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    return getattr(ProcessGroupCollection.use_mpu_process_groups([name]), name)


def _only_answer(hook: str, what: str, **arguments: Any) -> Any:
    """The one result of a hook that is not None. Raises MS402 when several features give one."""
    answers = [(feature, answer) for feature, answer in session.call(hook, **arguments) if answer is not None]
    if len(answers) > 1:
        names = tuple(feature for feature, _ in answers)
        raise MindSpeedError([Problem("MS402", f"{' and '.join(names)} both give {what}", names, fix="take out one of them")])
    return answers[0][1] if answers else None
