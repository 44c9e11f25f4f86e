"""Megatron's optimizers without Apex: torch's own Adam, the schedule of weight decay, FSDP2's steps, scaled gradients."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer

from mindspeed.plugins.patches import Function, wrapper

_SHARDING = "distrib_optim_sharding_type"


@wrapper
def step_zero(state_dict: Function, self: Any) -> Any:
    """``DistributedOptimizer.state_dict``: before the first step every parameter is at step 0."""
    state = self.optimizer.state
    if distrib_optimizer.HAVE_APEX_OR_TE or any("step" in values for values in state.values()):
        return state_dict(self)
    parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
    added = [parameter for parameter in parameters if parameter not in state]
    for parameter in parameters:
        state[parameter]["step"] = torch.zeros(())
    try:
        return state_dict(self)
    finally:
        for parameter in parameters:
            del state[parameter]["step"]
        for parameter in added:
            del state[parameter]


@wrapper
def reshardable(
    sharded_state_dict: Function,
    self: Any,
    model_state: Any = None,
    is_loading: bool = False,
    sharding_type: Any = None,
    metadata: Any = None,
) -> Any:
    """``DistributedOptimizer.sharded_state_dict``: who names no format gets the one that loads on any layout."""
    if sharding_type is None and _SHARDING not in (metadata or {}):
        metadata = {**(metadata or {}), _SHARDING: "fully_reshardable"}
    return sharded_state_dict(self, model_state or {}, is_loading, sharding_type, metadata)


@wrapper
def leave_step(get_states: Function, self: Any, model_param: Any) -> dict[str, Any]:
    """``DistributedOptimizer._get_main_param_and_optimizer_states``: the step is saved once, with the parameter groups."""
    tensors = get_states(self, model_param)
    return tensors if distrib_optimizer.HAVE_APEX_OR_TE else {k: v for k, v in tensors.items() if k != "step"}


@wrapper
def own_steps(load_state_dict: Function, self: Any, state_dict: Any) -> None:
    """``DistributedOptimizer.load_state_dict``: every parameter counts its steps separately.

    Megatron gives all of them one tensor, to which torch's Adam would add one for each parameter.
    """
    load_state_dict(self, state_dict)
    for values in self.optimizer.state.values():
        if isinstance(values.get("step"), torch.Tensor):
            values["step"] = values["step"].clone()


@wrapper
def keep_step(set_states: Function, self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    """``DistributedOptimizer._set_main_param_and_optimizer_states``: the step is kept, as no parameter saves it."""
    group, order = self.model_param_group_index_map[model_param]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
    step = {"step": state["step"]} if "step" in state and not distrib_optimizer.HAVE_APEX_OR_TE else {}
    with torch.no_grad():  # the main parameters of an fp32 model are views of its own, which require gradients
        set_states(self, model_param, {**step, **tensors})


@wrapper
def decay_of_checkpoint(load_state_dict: Function, self: Any, state_dict: Any) -> None:
    """Wrap ``OptimizerParamScheduler.load_state_dict``: Megatron sets the weight decay before it loads the schedule of it."""
    load_state_dict(self, state_dict)
    self.step(increment=0)


@wrapper
def reduced_by_torch(finish_grad_sync: Function, self: Any, force_all_reduce: bool = False) -> None:
    """``_BaseDataParallel.finish_grad_sync``: FSDP2 has reduced all gradients in the backward pass."""
    finish_grad_sync(self)


def scale_into(chunk_size: int, noop_flag: Any, tensor_lists: Any, scale: float) -> None:
    """Write the tensors of the first list times ``scale`` into those of the second, which may be the same."""
    for source, target in zip(*tensor_lists, strict=True):
        torch.mul(source, scale, out=target)
