"""A capacity that follows the load: no token of capacity-gated experts is dropped."""

from __future__ import annotations

from typing import Any

from mindspeed import plugins as ms


class DeepspeedMoeDroplessArgs(ms.FeatureArgs):
    padding: bool = ms.Field(
        False,
        description="Limit the number of different expert input sizes in a run to 8, so that freed memory is reused. For this, "
        "the capacity of experts is rounded up to a multiple of 1/8 of the tokens in a group (deepspeed-moe.groups). Example: "
        "a multiple of 512 for groups of 4,096 tokens",
    )


class DeepspeedMoeDropless(ms.Feature[DeepspeedMoeDroplessArgs]):
    """Grow expert capacity so that no token is dropped.

    The capacity of deepspeed-moe's experts becomes the largest number of tokens that any expert receives.
    """

    spec = ms.FeatureSpec(
        name="deepspeed-moe-dropless",
        category=ms.Category.DEEPSPEED_MOE,
        megatron=">=0.14,<0.17",
        constraints=(
            ms.Requires("deepspeed-moe", reason="deepspeed-moe-dropless sets the capacity of the deepspeed-moe layer"),
            ms.After("deepspeed-moe"),
        ),
        numerics=ms.Numerics.reordered(
            reason="compared with deepspeed-moe at a fixed capacity that is large enough to drop no token, expert inputs have "
            "less padding. The matrix products are smaller, so they sum in a different order"
        ),
        verify_with=ms.VerifyWith(
            features=("deepspeed-moe",), settings={"deepspeed-moe": {"capacity_factor": 8.0, "groups": 4}}, world={"ep": 2}
        ),
    )

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.moe.capacity import with_options

        return with_options(spec, dropless=True, padding=self.args.padding)
