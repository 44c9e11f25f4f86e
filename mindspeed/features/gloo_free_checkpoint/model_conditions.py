"""Optimizers whose checkpoints cannot be sent in slices. Light, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed import plugins as ms


def unsuited_shards(feature: ms.Feature[Any], optimizer: Any) -> Iterator[str]:
    """Yield a sentence for each deviation of a distributed optimizer, chained or not, from one shard in buffers per rank."""
    members = getattr(optimizer, "chained_optimizers", [optimizer])
    configs = [config for member in members if (config := getattr(member, "ddp_config", None)) is not None]
    instances = max((getattr(config, "num_distributed_optimizer_instances", 1) for config in configs), default=1)
    if instances > 1:
        yield f"{instances} instances of the distributed optimizer hold copies of one shard"
    if any(config.use_megatron_fsdp for config in configs):
        yield "Megatron FSDP keeps no optimizer shards in buffers"
