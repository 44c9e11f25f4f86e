"""The load of experts in the log of every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed import plugins as ms
from mindspeed.plugins.shared_conditions import NO_CUDA_GRAPHS, has_experts


class MoeLoadReport(ms.Feature[ms.FeatureArgs]):
    """Log expert load and dropped tokens of each step.

    Tokens per expert are counted on the device and read once per step.
    """

    spec = ms.FeatureSpec(
        name="moe-load-report",
        category=ms.Category.TOOL,
        constraints=(has_experts, NO_CUDA_GRAPHS),
        numerics=ms.Numerics.exact(),
    )

    @ms.hookimpl
    def model_built(self, chunks: Sequence[Any]) -> None:
        from mindspeed.features.moe_load_report.load import watch

        self.load = watch(chunks)

    @ms.hookimpl
    def step_metrics(self, state: Any) -> Mapping[str, float]:
        return self.load.read()
