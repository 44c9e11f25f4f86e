"""Column and row split of the weights."""

from __future__ import annotations

from mindspeed.plugins import (
    ArgOverride,
    Category,
    Check,
    CheckpointState,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    GiveField,
    Numerics,
    RequiresAny,
    hookimpl,
)


class TensorParallelArgs(FeatureArgs):
    size: int = Field(1, ge=1, description="ranks over which the weights of a layer are split")


class TensorParallel(Feature[TensorParallelArgs]):
    """Split the first linear of a pair by columns and the second by rows, one all-reduce per pair and direction."""

    spec = FeatureSpec(
        name="tensor-parallel",
        summary="Column and row split of attention, MLP and vocabulary weights over ranks",
        category=Category.MEGATRON,
        level=0,
        sizes={"tp": "size"},
        constraints=(
            Check(
                lambda args, world: world.num_attention_heads % args.size == 0,
                "{world.num_attention_heads} attention heads cannot be split over {args.size} ranks",
                fix=(GiveField("tp", note="a divisor of {world.num_attention_heads}"),),
            ),
            Check(
                lambda args, world: world.num_query_groups % args.size == 0 or args.size % world.num_query_groups == 0,
                "{world.num_query_groups} query groups are neither a multiple nor a divisor of {args.size} ranks",
                fix=(GiveField("tp", note="a divisor of {world.num_query_groups}"),),
            ),
            Check(
                lambda args, world: world.ffn_hidden_size % args.size == 0,
                "an MLP of {world.ffn_hidden_size} hidden units cannot be split over {args.size} ranks",
                fix=(GiveField("tp", note="a divisor of {world.ffn_hidden_size}"),),
            ),
            Check(
                lambda args, world: world.vocab_size % args.size == 0,
                "a vocabulary of {world.vocab_size} cannot be split over {args.size} ranks",
                fix="pad the vocabulary to a multiple of {args.size}",
            ),
            RequiresAny(
                "sequence-parallel",
                reason="Megatron trains MoE layers under tensor parallelism only with sequence parallelism",
                when=lambda args, world: args.size > 1 and world.num_experts > 0,
            ),
        ),
        numerics=Numerics.reordered(reason="sums over the hidden dimension are split over ranks"),
        state=CheckpointState("resharded", "weights are saved whole, as slices that any other split can load"),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [ArgOverride("tensor_model_parallel_size", self.args.size, "tensor-parallel.size")]
