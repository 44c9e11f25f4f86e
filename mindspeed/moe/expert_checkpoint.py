"""Sharded state of grouped experts in the keys and shapes of Megatron's single experts."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor

from mindspeed.plugins import MindSpeedError, Problem
from mindspeed.problems.fixes import advice

IGNORED_KEY: Final = "_extra_state"
"""Keys of the empty states that single linear layers add to checkpoints."""


def sharded_experts(module: Any, prefix: str, offsets: tuple[Any, ...], metadata: dict[str, Any] | None) -> dict[str, Any]:
    """Map both parameters of a module of grouped experts, and one empty extra state per expert and layer."""
    single = (metadata or {}).get("singleton_local_shards", False)
    first = module.ep_group.rank() * module.num_local_experts
    total = module.ep_group.size() * module.num_local_experts
    state: dict[str, Any] = {}
    for name, layer in (("weight1", "linear_fc1"), ("weight2", "linear_fc2")):
        build = partial(_build, module, offsets, layer == "linear_fc1", single)
        merge = partial(_merge, getattr(module, name).shape, module.num_local_experts)
        key, replica = f"{prefix}experts.{layer}.weight", (0, 0, module.dp_group.rank())
        state[f"{prefix}{name}"] = ShardedTensorFactory(key, getattr(module, name), build, merge, replica)
        for expert in range(first, first + module.num_local_experts):
            where = offsets if single else (*offsets, (len(offsets), expert, total))
            place = f"experts.{expert}" if single else "experts"
            state[f"{prefix}expert{expert}.{layer}.{IGNORED_KEY}"] = make_sharded_object_for_checkpoint(
                None, f"{prefix}{place}.{layer}.{IGNORED_KEY}", where, (0, module.tp_group.rank(), module.dp_group.rank())
            )
    return state


def refuse_other_experts(module: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Raise MindSpeedError with MS642 for a state of single experts, or with weights of other shapes, before it is loaded."""
    shapes = {name: (tuple(weight.shape), state.get(f"{prefix}{name}")) for name, weight in module.named_parameters()}
    other = {name: (own, tuple(given.shape)) for name, (own, given) in shapes.items() if given is not None}
    found = [f"{name} is {own}, but {given} in the loaded state" for name, (own, given) in other.items() if own != given]
    fix = (
        "load the state into a model with the same number and size of experts on the same number of ranks, or use a "
        "distributed checkpoint"
    )
    if any(key.startswith(f"{prefix}local_experts.") for key in state):
        found = ["the layer has one tensor for all local experts, but the loaded state has one tensor for each expert"]
        fix = "save the state with --ckpt-format torch_dist, which both kinds of layers can load, or remove --moe-grouped-gemm"
    if found:
        text = f"the experts of the loaded state do not fit {prefix.removesuffix('.') or 'the layer'}: {', '.join(found)}"
        raise MindSpeedError([Problem("MS642", text, fix=advice(fix))])


@torch.no_grad()
def _build(
    module: Any,
    offsets: tuple[Any, ...],
    is_first: bool,
    single: bool,
    key: str,
    tensor: Tensor,
    replica_id: Any,
    flattened_range: slice | None,
) -> list[Any]:
    """The shards of a parameter, or of a tensor of its optimizer: of each matrix [out, in], gate and value apart.

    With ``single`` every expert has shards of its own, else all experts of the rank are one with the expert in front. Raises
    MindSpeedError with MS641 for a range of a flattened tensor, which only Megatron before 0.16 stores, by its own code.
    """
    if flattened_range is not None:
        text = (
            f"the optimizer state of {key} would be saved as a range of a flattened tensor, a format that Megatron no "
            "longer reads"
        )
        fix = (
            "in the metadata for sharded_state_dict, set distrib_optim_sharding_type to dp_reshardable or fully_reshardable "
            "instead of fully_sharded_model_space"
        )
        raise MindSpeedError([Problem("MS641", text, fix=advice(fix))])
    axis, tp_rank, tp_size = len(offsets), module.tp_group.rank(), module.tp_group.size()
    inner = module.config.hidden_size if is_first else -1
    outer = -1 if is_first else module.config.hidden_size
    matrices = tensor.view(module.num_local_experts, inner, outer).transpose(1, 2)
    halves = matrices.chunk(2, 1) if is_first and module.config.gated_linear_unit else (matrices,)
    shards = []
    for number, half in enumerate(halves):
        if single:
            first = module.ep_group.rank() * module.num_local_experts
            suffix = f"_{'wv'[number]}" if len(halves) == 2 else ""
            split = (axis + (not is_first), tp_rank, tp_size)
            before, _, layer = key.rpartition("experts.")
            named = [(f"{before}experts.{first + n}.{layer}{suffix}", matrix) for n, matrix in enumerate(half)]
            shards += [_shard(name, matrix, offsets, (split,), axis, replica_id) for name, matrix in named]
        else:
            experts = (axis, module.ep_group.rank(), module.ep_group.size())
            split = (axis + 1 + (not is_first), number * tp_size + tp_rank, len(halves) * tp_size)
            shards.append(_shard(key, half, offsets, (experts, split), axis, replica_id))
    return shards


def _shard(key: str, tensor: Tensor, offsets: Any, splits: Any, prepended: int, replica_id: Any) -> Any:
    return ShardedTensor.from_rank_offsets(
        key, tensor.contiguous(), *offsets, *splits, replica_id=replica_id, prepend_axis_num=prepended
    )


@torch.no_grad()
def _merge(shape: torch.Size, experts: int, shards: list[Tensor]) -> Tensor:
    """Join the shards of `_build` to the parameter: halves side by side, matrices [in, out]."""
    if shards[0].dim() == 2:
        shards = [torch.stack(shards[start : start + experts]) for start in range(0, len(shards), experts)]
    return torch.cat(shards, -2).transpose(-1, -2).reshape(shape)
