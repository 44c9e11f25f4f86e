"""Settings of expert parallelism, and the dispatcher that sends fewer bytes. Light."""

from __future__ import annotations

from typing import Any, Final, Literal

from mindspeed import plugins as ms
from mindspeed.features.expert_parallel import costs

NEEDED: Final = ("num_experts", "router_topk", "hidden_size", "seq_length", "micro_batch_size", "dtype")


class ExpertParallelArgs(ms.FeatureArgs):
    size: int = ms.Field(
        1, ge=1, description="Number of ranks over which the experts of a MoE layer are distributed (expert-parallel size)"
    )
    dispatcher: Literal["alltoall", "allgather", "flex", "auto"] = ms.Field(
        "alltoall",
        description="Collective that sends tokens to experts: allgather, alltoall, flex (DeepEP or HybridEP), or auto = "
        "allgather or alltoall, whichever sends fewer bytes",
    )
    expert_tensor_size: int | None = ms.Field(
        None, ge=1, description="Number of ranks that share one expert (default: the tensor-parallel size)"
    )


def sent_bytes(args: Any, world: Any) -> dict[str, int]:
    """Compute the bytes that a rank sends per layer and micro-batch, forward and backward, with balanced experts."""
    shared = args.expert_tensor_size or world.tp
    value = 4 if world.dtype == "fp32" else 2
    tokens = world.micro_batch_size * world.seq_length // (world.tp * world.cp)
    call = costs.ExpertWork(tokens, world.router_topk, world.hidden_size, value, value, world.num_experts, args.size)
    everyone = call._replace(ranks=args.size * shared)
    sent = costs.alltoall(call) + costs.counts(everyone) + costs.shared_by_tensor_ranks(call, shared)
    return {"alltoall": sent, "allgather": sum(costs.allgather(everyone))}


def cheaper_dispatcher(args: Any, world: Any) -> str:
    """Return the dispatcher that sends fewer bytes."""
    sent = sent_bytes(args, world)
    return min(sent, key=lambda name: sent[name])


def describe_choice(args: Any, world: Any) -> list[str]:
    """Name the chosen dispatcher with the bytes of both, where the choice is left to mindspeed."""
    if args.dispatcher != "auto":
        return []
    chosen, sent = cheaper_dispatcher(args, world), sent_bytes(args, world)
    numbers = " and ".join(f"{name} {count:,}" for name, count in sent.items())
    return [f"the dispatcher is {chosen}: per layer and micro-batch a rank sends {numbers} bytes"]
