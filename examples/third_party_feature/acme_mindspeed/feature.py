"""The z-loss of PaLM: keep the normalizer of the output softmax near one."""

from __future__ import annotations

from math import log
from typing import Any

from mindspeed import plugins as ms


class ZLossArgs(ms.FeatureArgs):
    coefficient: float = ms.Field(1e-4, gt=0, description="weight of (log Z)^2 beside the cross entropy")


@ms.condition(
    "a coefficient of {args.coefficient} drowns the cross entropy of {world.vocab_size} words",
    fix=(ms.Fix.give_setting("coefficient", 1e-4),),
)
def cross_entropy_dominates(args: ZLossArgs, world: ms.World) -> bool:
    """Check that the term is small beside the cross entropy of a uniform guess."""
    return args.coefficient * log(world.vocab_size) < 0.1


class ZLoss(ms.Feature[ZLossArgs]):
    """Keep the normalizer of the output softmax near one, against drifting logits.

    Adds ``coefficient * (log Z)^2`` to the loss of every token, Z being the sum of its exponentiated logits.
    """

    spec = ms.FeatureSpec(
        name="acme-z-loss",
        category=ms.Category.COMPUTE,
        slots={"z-loss"},
        constraints=(cross_entropy_dominates,),
        numerics=ms.Numerics.approximate(loss=0.1, gradient=0.1, reason="the loss has one more term; that is its purpose"),
    )

    @ms.hookimpl
    def config_ready(self, config: Any) -> None:
        config.acme_z_loss = self.args.coefficient

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [
            ms.Wrap(
                "megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss",
                "acme_mindspeed.loss:with_z_loss",
                reason="it is the one place that sees the logits and returns a loss per token",
            )
        ]
