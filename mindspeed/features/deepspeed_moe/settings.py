"""Settings of the gate, and the tokens that they mean."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from mindspeed import plugins as ms
from mindspeed.moe.capacity import capacity_of


class DeepspeedMoeArgs(ms.FeatureArgs):
    capacity_factor: float = ms.Field(
        1.0,
        gt=0,
        description="Capacity of an expert, as a multiple of its balanced share of the tokens. Tokens above the "
        "capacity are dropped",
    )
    eval_capacity_factor: float | None = ms.Field(
        None, gt=0, description="Capacity factor in evaluation (default: capacity_factor)"
    )
    min_capacity: int = ms.Field(
        4,
        ge=1,
        description="Minimum capacity: every expert accepts at least this number of tokens of each group (setting groups)",
    )
    noise: Literal["none", "jitter", "rsample"] = ms.Field(
        "none",
        description="Noise of the router in training. jitter = multiply the router's input by random factors near 1. "
        "rsample = add Gumbel noise to the router's logits, where a token has one expert. DeepSpeed's names Jitter and RSample "
        "also work",
    )
    random_priority: bool = ms.Field(
        False, description="In training with one expert per token: fill expert capacity in random order instead of token order"
    )
    sinkhorn: bool = ms.Field(
        False,
        description="Balance the router's logits by Sinkhorn iterations before experts are chosen. Expert outputs "
        "are still weighted by the original scores",
    )
    groups: int | None = ms.Field(
        None,
        ge=1,
        description="Number of groups of consecutive tokens in a micro-batch, each with a separate expert capacity (default: "
        "one per tensor- and context-parallel rank)",
    )
    interval: int = ms.Field(
        1,
        ge=1,
        description="Distance between MoE layers: with N, layers N, 2N, 3N ... have experts and the others are dense (layers "
        "count from 1)",
    )
    reference: bool = ms.Field(
        False,
        description="For verification only: run every expert on every token, in one process. mindspeed features verify uses "
        "it as the baseline",
    )

    @field_validator("noise", mode="before")
    @classmethod
    def _in_lower_case(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value


def shares(world: ms.World) -> int:
    """Count the ranks that share the tokens of a micro-batch."""
    return int(world.tp * world.cp)


def group_tokens(args: DeepspeedMoeArgs, world: ms.World) -> int:
    """Count the tokens of one group."""
    return int(world.seq_length * world.micro_batch_size // (args.groups or shares(world)))


def describe_masks(args: DeepspeedMoeArgs, world: ms.World) -> list[str]:
    """Return the bytes that the masks of dispatch and combination keep, and what does without them."""
    tokens = group_tokens(args, world)
    capacity = capacity_of(tokens, world.num_experts, world.router_topk, args.capacity_factor, args.min_capacity)
    everything = world.seq_length * world.micro_batch_size // shares(world)
    kept = mask_bytes(everything, world.num_experts, capacity, 4 if world.dtype == "fp32" else 2)
    return [
        (
            f"masks of {everything:,} tokens x {world.num_experts} experts x {capacity} slots keep {kept:,} bytes per layer "
            "and micro-batch; deepspeed-moe-rearrange avoids these masks"
        )
    ]


def mask_bytes(tokens: int, experts: int, capacity: int, value: int) -> int:
    """Bytes that the masks of dispatch and combination keep for backward, of values of ``value`` bytes."""
    return 2 * tokens * experts * capacity * value
