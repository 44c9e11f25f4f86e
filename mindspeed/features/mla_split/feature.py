"""Up-projections of multi-latent attention without copies of queries and values."""

from __future__ import annotations

from typing import Any

from mindspeed import plugins as ms
from mindspeed.plugins.shared_conditions import NO_FSDP, NO_LOW_PRECISION, NO_TRANSFORMER_ENGINE_LAYERS


@ms.condition(
    "attention is not multi-latent, so it has no up-projections",
    fix=(ms.Fix.remove_feature(),),
    selects=True,
)
def attention_is_latent(args: Any, world: ms.World) -> bool:
    """Check that attention is multi-latent."""
    return world.is_set("multi_latent_attention")


class MlaSplit(ms.Feature[ms.FeatureArgs]):
    """Split the up-projections of latent attention.

    Keys and values are separate products of the latent vector, and queries are rotated in place, so values and queries are not
    copied. Under sequence parallelism, the gather of the queries' latent vectors overlaps with the product of keys and values.
    """

    spec = ms.FeatureSpec(
        name="mla-split",
        category=ms.Category.COMPUTE,
        megatron=">=0.16",
        slots={ms.Slot.LINEAR},
        constraints=(attention_is_latent, NO_LOW_PRECISION, NO_TRANSFORMER_ENGINE_LAYERS, NO_FSDP),
        numerics=ms.Numerics.reordered(
            reason="keys and values are separate products instead of a common one, for which the summation order of a matrix "
            "library may differ"
        ),
        verify_with=ms.VerifyWith(
            algorithm=("mindspeed.features.mla_split.projections",), features=("sequence-parallel",), world={"tp": 2}
        ),
        own_trainer="from mindspeed.features.mla_split.projections import queries, keys_and_values",
    )

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        return [
            ms.ArgOverride(
                "apply_rope_fusion",
                False,
                "makes Megatron prepare angles for its unfused function of rotary positions, which works on queries in place",
            )
        ]

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [
            ms.Wrap(
                "megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors",
                "mindspeed.features.mla_split.layers:with_products_in_place",
                reason="computes queries, keys and values in the tensors that attention reads, instead of concatenating them "
                "from parts of two products",
            )
        ]
