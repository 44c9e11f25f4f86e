"""Optimizers whose checkpoints cannot be sent in slices. Light, without torch."""

from __future__ import annotations

from typing import Any


def refusals(optimizer: Any) -> list[str]:
    """List what a distributed optimizer of Megatron, chained or not, has beside one shard of two Adam states for each rank."""
    members = getattr(optimizer, "chained_optimizers", [optimizer])
    configs = [config for member in members if (config := getattr(member, "ddp_config", None)) is not None]
    if not configs:
        return []
    instances = max(getattr(config, "num_distributed_optimizer_instances", 1) for config in configs)
    wrong = {
        f"the optimizer {optimizer.config.optimizer} has other states than exp_avg and exp_avg_sq": optimizer.config.optimizer
        != "adam",
        f"{instances} instances of the distributed optimizer have copies of one shard": instances > 1,
        "Megatron FSDP has no shards in buffers": any(config.use_megatron_fsdp for config in configs),
    }
    return [sentence for sentence, holds in wrong.items() if holds]
