"""Settings of the gate, and the tokens that they mean."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from mindspeed.moe.capacity import capacity_of
from mindspeed.plugins import FeatureArgs, Field, World


class DeepspeedMoeArgs(FeatureArgs):
    capacity_factor: float = Field(1.0, gt=0, description="places of an expert, as a multiple of an equal share of choices")
    eval_capacity_factor: float | None = Field(None, gt=0, description="the same in evaluation; capacity_factor if not given")
    min_capacity: int = Field(4, ge=1, description="fewest places of an expert for the tokens of a group")
    noise: Literal["none", "jitter", "rsample"] = Field(
        "none",
        description="in training: jitter of the gate's input, or Gumbel noise on the logits that choose one expert (rsample); "
        "DeepSpeed's spellings are accepted too",
    )
    random_priority: bool = Field(False, description="in training, one expert per token: places are given by lot, not in order")
    sinkhorn: bool = Field(False, description="logits that Sinkhorn's rounds balance over experts choose, weights stay")
    groups: int | None = Field(
        None, ge=1, description="groups of consecutive tokens of a micro-batch, each with a capacity; one per rank if not given"
    )
    interval: int = Field(1, ge=1, description="layers N, 2N, 3N ... have experts, counted from 1")
    reference: bool = Field(
        False, description="every expert on every token, one process: the formula that verify compares with"
    )

    @field_validator("noise", mode="before")
    @classmethod
    def _in_lower_case(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value


def shares(world: World) -> int:
    """Count the ranks that share the tokens of a micro-batch."""
    return int(world.tp * world.cp)


def group_tokens(args: DeepspeedMoeArgs, world: World) -> int:
    """Count the tokens of one group."""
    return int(world.seq_length * world.micro_batch_size // (args.groups or shares(world)))


def describe_masks(args: DeepspeedMoeArgs, world: World) -> list[str]:
    """Return the bytes that the masks of dispatch and combination keep, and what does without them."""
    tokens = group_tokens(args, world)
    capacity = capacity_of(tokens, world.num_experts, world.router_topk, args.capacity_factor, args.min_capacity)
    everything = world.seq_length * world.micro_batch_size // shares(world)
    kept = mask_bytes(everything, world.num_experts, capacity, 4 if world.dtype == "fp32" else 2)
    return [
        f"masks of {everything:,} tokens x {world.num_experts} experts x {capacity} places keep {kept:,} bytes per layer and "
        "micro-batch; deepspeed-moe-rearrange has none"
    ]


def mask_bytes(tokens: int, experts: int, capacity: int, value: int) -> int:
    """Bytes that the masks of dispatch and combination keep for backward, of values of ``value`` bytes."""
    return 2 * tokens * experts * capacity * value
