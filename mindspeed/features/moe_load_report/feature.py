"""The load of experts in the log of every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed.plugins import Category, Check, Feature, FeatureArgs, FeatureSpec, Numerics, hookimpl


class MoeLoadReport(Feature[FeatureArgs]):
    """Count the tokens that routers send to each expert on the device, and read them once per step."""

    spec = FeatureSpec(
        name="moe-load-report",
        summary="Load of the experts and share of dropped tokens in the log of every step",
        category=Category.TOOL,
        constraints=(
            Check(
                lambda args, world: world.num_experts > 0,
                "there are no experts whose load could be reported, the model is dense",
                fix="--num-experts N, or remove moe-load-report",
            ),
        ),
        numerics=Numerics.exact(),
    )

    @hookimpl
    def model_built(self, chunks: Sequence[Any]) -> None:
        from mindspeed.features.moe_load_report.load import watch

        self.load = watch(chunks)

    @hookimpl
    def step_metrics(self, state: Any) -> Mapping[str, float]:
        return self.load.read()
