"""Experts of a MoE layer spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

from mindspeed import plugins as ms
from mindspeed.plugins.shared_conditions import has_experts


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


def has_tensor_ranks(args: Any, world: ms.World) -> bool:
    """Return whether there are several tensor-parallel ranks."""
    return world.tp > 1


@ms.condition(
    "world size {world.world_size} is not a multiple of expert_tensor_size x ep x pp = "
    "{args.expert_tensor_size} x {args.size} x {world.pp}",
    fix=(
        ms.Fix.give_field("ep", note="so that expert_tensor_size x ep x pp divides {world.world_size}"),
        ms.Fix.give_setting("expert_tensor_size", 1),
    ),
    when=lambda args, world: args.expert_tensor_size is not None,
)
def ranks_hold_experts_of_given_size(args: ExpertParallelArgs, world: ms.World) -> bool:
    """Check that the ranks suffice for experts of which each takes the given number of ranks."""
    return bool(world.world_size % ((args.expert_tensor_size or 1) * args.size * world.pp) == 0)


@ms.condition(
    f"dispatcher=auto estimates transfers from {', '.join(NEEDED)}, but some of these are not set",
    fix=(ms.Fix.advise("set all of these values"), ms.Fix.give_setting("dispatcher", "alltoall")),
    when=lambda args, world: args.dispatcher == "auto",
)
def bytes_are_known(args: ExpertParallelArgs, world: ms.World) -> bool:
    """Check that the bytes of both dispatchers can be computed."""
    return all(world.knows(name) for name in NEEDED)


@ms.condition(
    "linear layers have biases, but tensor-parallel ranks cannot share an expert with biases",
    fix=(ms.Fix.give_field("linear_bias", False), ms.Fix.give_setting("expert_tensor_size", 1)),
    when=lambda args, world: world.tp > 1 and world.linear_bias,
)
def biased_experts_are_whole(args: ExpertParallelArgs, world: ms.World) -> bool:
    """Check that experts with biases are on one rank each."""
    return bool((args.expert_tensor_size or world.tp) == 1)


class ExpertParallel(ms.Feature[ExpertParallelArgs]):
    """Distribute the experts of MoE layers over ranks.

    Tokens are sent to the ranks of their experts and back.
    """

    spec = ms.FeatureSpec(
        name="expert-parallel",
        category=ms.Category.MEGATRON,
        level=0,
        sizes={"ep": "size"},
        constraints=(
            has_experts,
            ms.Condition.divides(
                "num_experts",
                ("args.size",),
                "{world.num_experts} experts are not divisible by ep={args.size}",
                fix=(ms.Fix.give_field("ep", note="a divisor of {world.num_experts}"),),
            ),
            ms.Condition.divides(
                "world_size",
                ("tp", "args.size", "pp"),
                "world size {world.world_size} is not a multiple of tp x ep x pp = {world.tp} x {args.size} x {world.pp}",
                fix=(
                    ms.Fix.give_field("ep", note="so that tp x ep x pp divides {world.world_size}"),
                    ms.Fix.give_setting("expert_tensor_size", 1),
                ),
                when=lambda args, world: args.expert_tensor_size is None,
            ),
            ranks_hold_experts_of_given_size,
            bytes_are_known,
            biased_experts_are_whole,
            ms.Requires(
                "sequence-parallel",
                reason="Megatron trains MoE layers with tp > 1 only with sequence parallelism",
                when=has_tensor_ranks,
            ),
        ),
        megatron_flags=(
            ms.MegatronFlag("expert_tensor_parallel_size", "expert_tensor_size"),
            ms.MegatronFlag("moe_token_dispatcher_type", "dispatcher", follows_default=True),
        ),
        numerics=ms.Numerics.reordered(reason="expert gradients are summed over the tokens of several ranks"),
        state=ms.CheckpointState(
            "resharded",
            "the optimizer state of distributed experts is separate, and another number of ranks can load it",
            added="refused",
            removed="refused",
            settings={"dispatcher": "safe"},
        ),
    )

    @ms.hookimpl
    def notes(self) -> Iterable[str]:
        return describe_choice(self.args, self.world)

    @ms.hookimpl
    def job_values(self) -> Mapping[str, Any]:
        size = self.args.expert_tensor_size
        return {"dispatcher": self._dispatcher()} | ({} if size is None else {"expert_tensor_size": size})

    def _dispatcher(self) -> str:
        chosen = self.args.dispatcher
        return cheaper_dispatcher(self.args, self.world) if chosen == "auto" else chosen

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        overrides = [
            ms.ArgOverride(
                "expert_model_parallel_size",
                self.args.size,
                "expert-parallel.size sets the number of ranks that share the experts",
            ),
            ms.ArgOverride(
                "moe_token_dispatcher_type",
                self._dispatcher(),
                "expert-parallel.dispatcher selects the collective that sends tokens to experts",
            ),
        ]
        if self.args.expert_tensor_size is not None:
            size = self.args.expert_tensor_size
            overrides.append(
                ms.ArgOverride(
                    "expert_tensor_parallel_size",
                    size,
                    "expert-parallel.expert_tensor_size sets the number of ranks that split each expert",
                )
            )
        return overrides
