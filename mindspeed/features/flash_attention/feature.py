"""Core attention without the score matrix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal

from mindspeed import plugins as ms
from mindspeed.plugins.saved_tensors import SavedTensors, resized
from mindspeed.plugins.shared_conditions import NO_TRANSFORMER_ENGINE_LAYERS


class FlashAttentionArgs(ms.FeatureArgs):
    sparse_mode: Literal[0, 1, 2, 3, 4, 7, 8] | None = ms.Field(
        None,
        description="Keys that a query attends to. 0 = those that mask and window (pre_tokens, next_tokens) allow, 1 = those "
        "that the mask allows, 4 = those in the window. 2 = causal, top-left aligned: query i attends to keys 0 to i. 3 = "
        "causal, bottom-right aligned: the last query attends to all keys. For packed sequences: 7 = causal, bottom-right "
        "aligned, but the last sequence uses the window. 8 = causal, top-left aligned, but the first sequence uses the window. "
        "Default: the pattern that the mask of the layer requires",
    )
    pre_tokens: int = ms.Field(
        65536,
        description="Size of the window: number of keys before a query that the query attends to. Applies only if "
        "sparse_mode is 0, 4, 7 or 8. With 7 it applies only to the last packed sequence, with 8 only to the first one",
    )
    next_tokens: int = ms.Field(
        0,
        description="Size of the window: number of keys after a query that the query attends to. Applies only if "
        "sparse_mode is 0, 4, 7 or 8. With 7 it applies only to the last packed sequence, with 8 only to the first one",
    )


NO_QK_CLIP: Final = ms.Condition.unset(
    "qk_clip", "qk_clip needs the largest attention logits, which the operator does not return"
)
NO_LOGGED_LOGITS: Final = ms.Condition.unset(
    "logged_attention_logits",
    "log_max_attention_logit (--logged-attention-logits) needs the largest attention logits, which the operator does not "
    "return",
)


def _differs_between_documents(args: FlashAttentionArgs, world: ms.World) -> bool:
    """Return whether the first or last document of a sample has another mask than the others."""
    return args.sparse_mode in (7, 8)


@ms.condition(
    "sparse_mode={args.sparse_mode} is defined for packed samples, but attention receives whole sequences",
    fix=(ms.Fix.give_setting("sparse_mode", 3), ms.Fix.drop_setting("sparse_mode")),
    when=_differs_between_documents,
)
def samples_are_packed(args: FlashAttentionArgs, world: ms.World) -> bool:
    """Check that samples are packed documents."""
    return world.is_set("packed_samples")


class FlashAttention(ms.Feature[FlashAttentionArgs]):
    """Compute attention without the score matrix.

    Core attention calls the operator ``mindspeed::fusion_attention``, for causal, windowed, masked and packed attention. No
    S x S tensor is kept. Under context parallelism, the chosen algorithm calls the same operator for its blocks.
    """

    spec = ms.FeatureSpec(
        name="flash-attention",
        category=ms.Category.COMPUTE,
        level=1,
        ops=("fusion_attention",),
        constraints=(
            ms.Condition.equals(
                "cp",
                1,
                "cp is {world.cp}, and the context-parallel algorithm already calls the same attention operator",
                fix=(ms.Fix.remove_feature(),),
                otherwise="idle",
            ),
            ms.Condition.equals(
                "softmax_type",
                "vanilla",
                "softmax_type is {world.softmax_type}, but the operator computes only the vanilla softmax",
            ),
            samples_are_packed,
            NO_QK_CLIP,
            NO_LOGGED_LOGITS,
            NO_TRANSFORMER_ENGINE_LAYERS,
        ),
        numerics=ms.Numerics.reordered(
            reason="the softmax is summed block by block. Attention dropout uses other random numbers"
        ),
        own_trainer="from mindspeed.nn import Attention",
    )

    @ms.hookimpl
    def notes(self) -> Iterable[str]:
        if self.world.platform != "cuda" or self.world.cp > 1:
            return []
        return [
            "calls with an attention mask run the plain-torch reference on cuda. Causal layers need no mask: "
            "--no-create-attention-mask-in-dataloader"
        ]

    @ms.hookimpl
    def saved_tensors(self, tensors: SavedTensors) -> SavedTensors | None:
        """Count queries, keys and values without copies for each group, and two numbers of each row of scores, which the
        kernel of an NPU makes eight times."""
        if self.world.cp > 1:
            return None
        world = self.world
        tokens, heads = world.seq_length * world.micro_batch_size, world.num_attention_heads
        sizes = {
            "attention: softmax": (64 if world.knows("platform") and world.platform == "npu" else 8)
            * heads
            // world.tp
            * tokens,
        }
        if not world.is_set("multi_latent_attention"):  # whose keys are never shared by a group
            width = world.hidden_size // heads * (heads + 2 * world.num_query_groups) // world.tp
            sizes["attention: queries, keys, values"] = tokens * width * (4 if world.dtype == "fp32" else 2)
        return resized(tensors, sizes | {"attention: softmax dropout": 0, "attention: score buffer": 0})

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        if self.world.cp > 1:
            return spec
        from mindspeed.features.flash_attention.layers import with_flash_attention

        return with_flash_attention(spec, self.args)
