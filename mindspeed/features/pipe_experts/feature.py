"""Capacity-gated experts one after another, while the rows of the others travel."""

from __future__ import annotations

from typing import Any

from mindspeed import plugins as ms
from mindspeed.features.pipe_experts import conditions
from mindspeed.features.pipe_experts.conditions import PipeExpertsArgs


class PipeExperts(ms.Feature[PipeExpertsArgs]):
    """Overlap expert dispatch, compute and return.

    The experts of deepspeed-moe run one by one, each in slices, so that transfers of one slice overlap with compute of
    another.
    """

    spec = ms.FeatureSpec(
        name="pipe-experts",
        category=ms.Category.DEEPSPEED_MOE,
        megatron=">=0.14,<0.17",
        constraints=(
            ms.Requires(
                "deepspeed-moe",
                reason="pipe-experts splits the inputs of experts into slices, and only deepspeed-moe gives them equal sizes "
                "on all ranks",
            ),
            ms.Requires(
                "moe-grouped-gemm",
                reason="pipe-experts reads the weights of all local experts from one tensor, which only the experts of "
                "moe-grouped-gemm have",
            ),
            ms.After("deepspeed-moe"),
            ms.After("moe-grouped-gemm"),
            conditions.ranks_exchange_rows,
            conditions.ranks_have_units,
            conditions.slices_have_tokens,
            conditions.ranks_share_experts,
            ms.ModelCondition(
                "mindspeed.features.pipe_experts.spec:missing_places",
                "parts is not greater than the capacity of an expert",
                fix=(
                    ms.GiveSetting("pipe-experts.parts", note="fewer"),
                    ms.GiveSetting("deepspeed-moe.capacity_factor", note="larger"),
                ),
            ),
        ),
        numerics=ms.Numerics.reordered(
            reason="the tokens of an expert are computed in slices instead of all at once. Smaller matrix products and the sum "
            "of weight gradients over slices change the summation order"
        ),
        verify_with=ms.VerifyWith(
            algorithm=("mindspeed.features.deepspeed_moe.units",),
            features=("deepspeed-moe",),
            settings={"pipe-experts": {"parts": 2}, "deepspeed-moe": {"groups": 4}},
            world={"ep": 2},
        ),
    )

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.pipe_experts.spec import with_units

        return with_units(spec, self.args)
