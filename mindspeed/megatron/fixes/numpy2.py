"""Functions of Megatron's checkpoints that call ``numpy.product``, for numpy 2, which no longer has it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import is_main_replica

from mindspeed.plugins.patches import Function, wrapper

_IS_1 = hasattr(np, "product")


@wrapper
def local_coordinates(original: Function, self: Any) -> Any:
    """``ShardedTensor.local_coordinates``: the index of every element of a flattened range, an array per axis."""
    if _IS_1:
        return original(self)
    if self.flattened_range is None:
        raise CheckpointingException(f"{self.key} has no flattened range, so its coordinates are undefined")
    return np.unravel_index(np.arange(math.prod(self.local_shape))[self.flattened_range], self.local_shape)


@wrapper
def shard_size(original: Function, sh_ten: Any) -> Any:
    """``_shard_size``: bytes of a sharded tensor."""
    if _IS_1:
        return original(sh_ten)
    part = sh_ten.flattened_range
    count = math.prod(sh_ten.local_shape) if part is None else part.stop - part.start
    return int(count * sh_ten.dtype.itemsize)


@wrapper
def check_coverage(original: Function, tensors_by_shard: Sequence[Any]) -> None:
    """``_validate_sharding_for_key_flattened``: the flattened ranges of one shard lie end to end and fill it."""
    if _IS_1:
        original(tensors_by_shard)
        return
    first = tensors_by_shard[0]
    count = math.prod(first.local_shape)
    main = [shard.flattened_range for shard in tensors_by_shard if is_main_replica(shard.replica_id)]
    ranges = sorted((part.start, part.stop) for part in main)
    ends = [(0, 0), *ranges, (count, count)]
    one_shape = all(shard.local_shape == first.local_shape for shard in tensors_by_shard)
    if not one_shape or any(stop != start for (_, stop), (start, _) in pairwise(ends)):
        raise CheckpointingException(f"the ranges {ranges} do not fill the {count} elements of a shard of {first.key}")
