"""Capacity-gated experts one after another, while the rows of the others travel."""

from __future__ import annotations

from typing import Any

from mindspeed.features.pipe_experts import conditions
from mindspeed.features.pipe_experts.conditions import PipeExpertsArgs
from mindspeed.plugins import (
    After,
    Category,
    Feature,
    FeatureSpec,
    GiveSetting,
    ModelCondition,
    Numerics,
    Requires,
    VerifyWith,
    hookimpl,
)


class PipeExperts(Feature[PipeExpertsArgs]):
    """Overlap expert dispatch, compute and return.

    The experts of deepspeed-moe run one by one, each in slices, so that transfers of one slice overlap with compute of
    another.
    """

    spec = FeatureSpec(
        name="pipe-experts",
        category=Category.DEEPSPEED_MOE,
        megatron=">=0.14,<0.17",
        constraints=(
            Requires(
                "deepspeed-moe",
                reason="pipe-experts splits the inputs of experts into slices, and only deepspeed-moe gives them equal sizes "
                "on all ranks",
            ),
            Requires(
                "moe-grouped-gemm",
                reason="pipe-experts reads the weights of all local experts from one tensor, which only the experts of "
                "moe-grouped-gemm have",
            ),
            After("deepspeed-moe"),
            After("moe-grouped-gemm"),
            conditions.ranks_exchange_rows,
            conditions.ranks_have_units,
            conditions.slices_have_tokens,
            conditions.ranks_share_experts,
            ModelCondition(
                "mindspeed.features.pipe_experts.spec:missing_places",
                "parts is not greater than the capacity of an expert",
                fix=(
                    GiveSetting("pipe-experts.parts", note="fewer"),
                    GiveSetting("deepspeed-moe.capacity_factor", note="larger"),
                ),
            ),
        ),
        numerics=Numerics.reordered(
            reason="the tokens of an expert are computed in slices instead of all at once. Smaller matrix products and the sum "
            "of weight gradients over slices change the summation order"
        ),
        verify_with=VerifyWith(
            algorithm=("mindspeed.features.deepspeed_moe.units",),
            features=("deepspeed-moe",),
            settings={"pipe-experts": {"parts": 2}, "deepspeed-moe": {"groups": 4}},
            world={"ep": 2},
        ),
    )

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.pipe_experts.spec import with_units

        return with_units(spec, self.args)
