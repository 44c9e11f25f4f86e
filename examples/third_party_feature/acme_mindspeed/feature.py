"""The z-loss of PaLM: keep the normalizer of the output softmax near one."""

from __future__ import annotations

from math import log
from typing import Any

from mindspeed.plugins import (
    Category,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    Fix,
    Numerics,
    Patch,
    World,
    Wrap,
    condition,
    hookimpl,
)


class ZLossArgs(FeatureArgs):
    coefficient: float = Field(1e-4, gt=0, description="weight of (log Z)^2 beside the cross entropy")


@condition(
    "a coefficient of {args.coefficient} drowns the cross entropy of {world.vocab_size} words",
    fix=(Fix.give_setting("coefficient", 1e-4),),
)
def cross_entropy_dominates(args: ZLossArgs, world: World) -> bool:
    """Check that the term is small beside the cross entropy of a uniform guess."""
    return args.coefficient * log(world.vocab_size) < 0.1


class ZLoss(Feature[ZLossArgs]):
    """Keep the normalizer of the output softmax near one, against drifting logits.

    Adds ``coefficient * (log Z)^2`` to the loss of every token, Z being the sum of its exponentiated logits.
    """

    spec = FeatureSpec(
        name="acme-z-loss",
        category=Category.COMPUTE,
        slots={"z-loss"},
        constraints=(cross_entropy_dominates,),
        numerics=Numerics.approximate(loss=0.1, gradient=0.1, reason="the loss has one more term; that is its purpose"),
    )

    @hookimpl
    def config_ready(self, config: Any) -> None:
        config.acme_z_loss = self.args.coefficient

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Wrap(
                "megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss",
                "acme_mindspeed.loss:with_z_loss",
                reason="it is the one place that sees the logits and returns a loss per token",
            )
        ]
