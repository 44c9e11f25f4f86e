"""Megatron's checkpoint of a norm as a region."""

from __future__ import annotations

from mindspeed.memory.region_checkpoint import RegionCheckpoint


class RecomputedNorm(RegionCheckpoint):
    """Mixin of ``CheckpointWithoutOutput``: Megatron's own calls around a norm keep the graph of the first forward pass."""
