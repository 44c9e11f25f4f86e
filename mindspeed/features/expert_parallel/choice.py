"""Settings of expert parallelism, and the dispatcher that sends fewer bytes. Light."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

from mindspeed import plugins as ms


class ExpertWork(NamedTuple):
    """A micro-batch in a layer, on one of ``ranks`` ranks: tokens, experts of each, sizes, and bytes of a value and a
    probability."""

    tokens: int
    topk: int
    hidden: int
    value: int
    probability: int
    experts: int
    ranks: int

    @property
    def rows(self) -> int:
        """Rows that a rank sends."""
        return self.tokens * self.topk


def counts(call: ExpertWork) -> int:
    """Bytes of the numbers of rows of all ranks, 64 bits each."""
    return 8 * call.experts * call.ranks


def alltoall(call: ExpertWork, received: int | None = None) -> int:
    """Bytes of rows and probabilities, forward and backward, for a rank that receives ``received`` rows; balanced if None.

    Rows and probabilities go out and the gradients of answers too; answers come back and the gradients of the former.
    """
    arriving = call.rows if received is None else received
    return 2 * max(call.rows, arriving) * (2 * call.hidden * call.value + call.probability)


def shared_by_tensor_ranks(call: ExpertWork, tensor_ranks: int) -> int:
    """Bytes for gathering balanced rows and summing outputs over ``tensor_ranks`` that share every expert, forward and
    backward.

    Answers are summed in the type of probabilities.
    """
    if tensor_ranks == 1:
        return 0
    row = call.hidden * (call.value + call.probability) + call.probability
    return 2 * call.rows * tensor_ranks * row


def allgather(call: ExpertWork) -> tuple[int, int]:
    """Bytes of all-gathers and of reduce-scatters, forward and backward.

    Indices of 4 bytes, probabilities and tokens are gathered, and so are gradients of answers. Answers are summed in the type
    of probabilities.
    """
    chosen, row = call.tokens * call.topk, call.tokens * call.hidden
    gathered = chosen * (4 + call.probability) + row * (call.value + call.probability)
    summed = chosen * call.probability + row * (call.value + call.probability)
    return gathered * call.ranks, summed * call.ranks


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
    call = ExpertWork(tokens, world.router_topk, world.hidden_size, value, value, world.num_experts, args.size)
    everyone = call._replace(ranks=args.size * shared)
    sent = alltoall(call) + counts(everyone) + shared_by_tensor_ranks(call, shared)
    return {"alltoall": sent, "allgather": sum(allgather(everyone))}


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
