"""Sharded state of the roles, as Megatron's wrappers of Transformer Engine give it."""

from __future__ import annotations

import inspect
from typing import Any

from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


def sharded_parameters(
    layer: Any,
    axes: dict[str, int],
    prefix: str,
    offsets: tuple[Any, ...],
    metadata: dict[str, Any] | None,
    state: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the sharded state of a layer whose entries are split along ``axes`` over its tensor-parallel ranks.

    ``state`` is the layer's own where it is not given.

    Before Megatron 0.16 the function has no groups: it takes those of the parallel state.
    """
    takes = inspect.signature(make_sharded_tensors_for_checkpoint).parameters
    groups = {"tp_group": layer._tp_group, "dp_cp_group": _data_parallel(metadata)}
    if state is None:
        state = layer.state_dict(prefix="", keep_vars=True)
    known = {name: group for name, group in groups.items() if name in takes}
    result: dict[str, Any] = make_sharded_tensors_for_checkpoint(state, prefix, axes, offsets, **known)
    return result


def _data_parallel(metadata: dict[str, Any] | None) -> Any:
    """Return the data-parallel group of a checkpoint's metadata, or that of the process."""
    from megatron.core import parallel_state

    given = (metadata or {}).get("dp_cp_group")
    return given if given is not None else parallel_state.get_data_parallel_group(with_context_parallel=True)
