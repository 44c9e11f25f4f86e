"""The parameter state of Megatron's distributed optimizer on its first rank, in the form of its ``torch`` checkpoints.

For each buffer of gradients and each of ``param``, ``exp_avg`` and ``exp_avg_sq`` one fp32 tensor in host memory, without the
padding behind the buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Final

import torch
from torch import Tensor

from mindspeed import plugins as ms
from mindspeed.features.gloo_free_checkpoint import slices
from mindspeed.problems import advice

_KEYS: Final = ("param", "exp_avg", "exp_avg_sq")


def gathered_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_parameter_state_dp_zero(use_gloo_comm, empty_data, return_on_all_ranks)``.

    A state that all ranks take is gathered by Megatron over the device group.
    """

    @wraps(original)
    def gathered(self: Any, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False) -> Any:
        if return_on_all_ranks:
            return original(self, use_gloo_comm=False, empty_data=empty_data, return_on_all_ranks=True)
        return _gather_state(self, empty_data)

    return gathered


@torch.no_grad()
def _gather_state(optimizer: Any, empty_data: bool) -> dict[Any, Any] | None:
    first = optimizer.data_parallel_group.rank() == 0
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for index, dtype, buffer, ranges in _buffers(optimizer):
        keys = _KEYS if first else ()
        whole = {key: torch.zeros(buffer.numel_unpadded, dtype=torch.float32, device="cpu") for key in keys}
        for place, bucket, parameters in _buckets(buffer, ranges) if not empty_data else ():
            tensors = {parameter: optimizer._get_main_param_and_optimizer_states(parameter) for parameter in parameters}
            for key in _KEYS:
                shard = _shard(optimizer, bucket)
                for parameter, part in parameters.items():
                    shard[part].copy_(tensors[parameter][key])
                slices.gather(shard, whole[key][place] if first else None, *_way(optimizer, bucket))
        state[index] = {dtype: whole | ({"numel_unpadded": buffer.numel_unpadded} if first else {})}
    return state if first else None


@torch.no_grad()
def scatter_state(self: Any, state_dict: Any, *, update_legacy_format: bool = False) -> None:
    """Replace ``load_parameter_state_from_dp_zero(state_dict, update_legacy_format)``. Only the first rank has a state.

    Raises MindSpeedError with MS602 for a state of another size and for the format before 2024.
    """
    if update_legacy_format:
        raise _refused("the checkpoint has a format from before 2024", "load and save it once without gloo-free-checkpoint")
    first = self.data_parallel_group.rank() == 0
    if first:
        self.split_state_dict_if_needed(state_dict)
    for index, dtype, buffer, ranges in _buffers(self):
        whole = state_dict[index][dtype] if first else {}
        if first and whole["numel_unpadded"] != buffer.numel_unpadded:
            saved = whole["numel_unpadded"]
            text = f"the checkpoint has {saved} elements in buffer {index}, but the run has {buffer.numel_unpadded}"
            raise _refused(text, "resume with the model and the layout that the checkpoint was saved with")
        for place, bucket, parameters in _buckets(buffer, ranges):
            shards = {}
            for key in _KEYS:
                shards[key] = _shard(self, bucket)
                slices.scatter(whole[key][place] if first else None, shards[key], *_way(self, bucket))
            for parameter, part in parameters.items():
                self._set_main_param_and_optimizer_states(parameter, {key: shard[part] for key, shard in shards.items()})


def _buffers(optimizer: Any) -> Iterator[tuple[int, Any, Any, list[Any]]]:
    """Number, type, buffer and ranges of the buckets of every buffer."""
    for index, by_dtype in enumerate(optimizer.gbuf_ranges):
        for dtype, ranges in by_dtype.items():
            yield index, dtype, optimizer.buffers[index], ranges


def _buckets(buffer: Any, ranges: list[Any]) -> Iterator[tuple[slice, Any, dict[Any, slice]]]:
    """Every bucket: its place in the state, itself, and the places of this rank's parameters in its shard."""
    start = 0
    for bucket, owned in zip(buffer.buckets, ranges, strict=True):
        parameters = {p: slice(r["gbuf_local"].start, r["gbuf_local"].end) for p, r in owned["param_map"].items()}
        yield slice(start, start + bucket.numel_unpadded), bucket, parameters
        start += bucket.numel_unpadded


def _shard(optimizer: Any, bucket: Any) -> Tensor:
    """A shard of zeros in host memory."""
    return torch.zeros(bucket.grad_data.numel() // optimizer.data_parallel_group.size(), dtype=torch.float32, device="cpu")


def _way(optimizer: Any, bucket: Any) -> tuple[Any, int, torch.device]:
    """Group, elements of a slice and device of a transfer."""
    feature: Any = ms.active_feature("gloo-free-checkpoint")
    return optimizer.data_parallel_group, feature.args.slice, bucket.grad_data.device


def _refused(text: str, fix: str) -> ms.MindSpeedError:
    return ms.MindSpeedError([ms.Problem("MS602", text, ("gloo-free-checkpoint",), fix=advice(fix))])
