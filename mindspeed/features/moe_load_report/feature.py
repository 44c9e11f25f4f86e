"""The load of experts in the log of every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, Numerics, hookimpl
from mindspeed.plugins.shared_conditions import NO_CUDA_GRAPHS, has_experts


class MoeLoadReport(Feature[FeatureArgs]):
    """Log expert load and dropped tokens of each step.

    Tokens per expert are counted on the device and read once per step.
    """

    spec = FeatureSpec(
        name="moe-load-report",
        category=Category.TOOL,
        constraints=(has_experts, NO_CUDA_GRAPHS),
        numerics=Numerics.exact(),
    )

    @hookimpl
    def model_built(self, chunks: Sequence[Any]) -> None:
        from mindspeed.features.moe_load_report.load import watch

        self.load = watch(chunks)

    @hookimpl
    def step_metrics(self, state: Any) -> Mapping[str, float]:
        return self.load.read()
