"""Column and row split of the weights."""

from __future__ import annotations

from mindspeed import plugins as ms


class TensorParallelArgs(ms.FeatureArgs):
    size: int = ms.Field(
        1, ge=1, description="Number of ranks over which the weights of a layer are split (tensor-parallel size)"
    )


@ms.condition(
    "{world.num_query_groups} query groups are neither a multiple nor a divisor of tp={args.size}",
    fix=(ms.Fix.give_field("tp", note="a divisor of {world.num_query_groups}"),),
)
def query_groups_divide(args: TensorParallelArgs, world: ms.World) -> bool:
    """Check that each rank gets as many key heads, or as many ranks share one."""
    return bool(world.num_query_groups % args.size == 0 or args.size % world.num_query_groups == 0)


def _splits_experts(args: TensorParallelArgs, world: ms.World) -> bool:
    """Return whether a MoE model is split over several ranks."""
    return bool(args.size > 1 and world.num_experts > 0)


class TensorParallel(ms.Feature[TensorParallelArgs]):
    """Split weights and vocabulary over ranks.

    The first linear layer of attention or of an MLP is split by columns and the second by rows. Together they need one
    all-reduce in forward and one in backward.
    """

    spec = ms.FeatureSpec(
        name="tensor-parallel",
        category=ms.Category.MEGATRON,
        level=0,
        sizes={"tp": "size"},
        constraints=(
            ms.Condition.divides(
                "num_attention_heads",
                ("args.size",),
                "{world.num_attention_heads} attention heads are not divisible by tp={args.size}",
                fix=(ms.Fix.give_field("tp", note="a divisor of {world.num_attention_heads}"),),
            ),
            query_groups_divide,
            ms.Condition.divides(
                "ffn_hidden_size",
                ("args.size",),
                "ffn_hidden_size={world.ffn_hidden_size} is not divisible by tp={args.size}",
                fix=(ms.Fix.give_field("tp", note="a divisor of {world.ffn_hidden_size}"),),
            ),
            ms.Condition.divides(
                "vocab_size",
                ("args.size",),
                "vocabulary size {world.vocab_size} is not divisible by tp={args.size}",
            ),
            ms.RequiresAny(
                "sequence-parallel",
                reason="Megatron trains a MoE model with tp > 1 only if sequence parallelism is on",
                when=_splits_experts,
            ),
        ),
        numerics=ms.Numerics.reordered(reason="sums over the hidden dimension are split over ranks"),
        state=ms.CheckpointState("resharded", "weights are saved whole, as slices that any other layout can load"),
        own_trainer="from mindspeed.nn import ColumnParallelLinear, RowParallelLinear",
    )

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        return [
            ms.ArgOverride(
                "tensor_model_parallel_size", self.args.size, "tensor-parallel.size sets the number of ranks that split a layer"
            )
        ]
