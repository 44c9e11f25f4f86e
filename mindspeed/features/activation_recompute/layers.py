"""Megatron's checkpoint of an activation as a region."""

from __future__ import annotations

from mindspeed.memory.region_checkpoint import RegionCheckpoint


class RecomputedActivation(RegionCheckpoint):
    """Mixin of ``CheckpointWithoutOutput``: grouped experts keep the graph of the first forward pass."""
