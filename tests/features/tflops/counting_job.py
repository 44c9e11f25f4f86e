"""Train a tiny model on the ranks of a job and return what the feature counted."""

from typing import Any

from mindspeed.plugins import active_feature
from mindspeed.workbench.verification.shape import Recipe
from mindspeed.workbench.verification.training import train


def counted(recipe: Recipe) -> dict[str, float]:
    """Return the numbers of the last step of a run."""
    train(recipe)
    feature: Any = active_feature("tflops")
    metrics: dict[str, float] = feature.meter.metrics()
    return metrics
