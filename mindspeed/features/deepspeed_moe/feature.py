"""Capacity-gated experts: DeepSpeed's MoE layer in Megatron models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mindspeed import plugins as ms
from mindspeed.features.deepspeed_moe.conditions import CONDITIONS, has_expert_ranks, has_tensor_ranks, shares_biases
from mindspeed.features.deepspeed_moe.settings import DeepspeedMoeArgs, describe_masks, shares

_OWN_TRANSFERS = (
    "deepspeed-moe exchanges tokens itself and never calls Megatron's token dispatcher, so features that change or use this "
    "dispatcher would have no effect"
)
_DISPATCHERS = ("moe-allgather-dispatcher", "moe-alltoall-dispatcher", "moe-zero-memory", "moe-tp-extend-ep")


class DeepspeedMoe(ms.Feature[DeepspeedMoeArgs]):
    """Give experts a fixed capacity, as DeepSpeed does.

    Each expert accepts a fixed number of tokens and drops the rest, so all-to-alls have equal sizes on all ranks.
    The first choices of all tokens take places in the experts before any second choice does.
    """

    spec = ms.FeatureSpec(
        name="deepspeed-moe",
        category=ms.Category.DEEPSPEED_MOE,
        slots={ms.Slot.MOE_LAYER},
        megatron=">=0.14,<0.17",
        constraints=(
            *CONDITIONS,
            ms.Requires(
                "sequence-parallel",
                reason="Megatron trains MoE layers with tp > 1 only with sequence parallelism",
                when=has_tensor_ranks,
            ),
            *(ms.Conflicts(name, reason=_OWN_TRANSFERS) for name in (ms.Slot.MOE_DISPATCHER, *_DISPATCHERS)),
            ms.Conflicts(
                "dynamic-shapes",
                reason="all ranks must exchange equal numbers of tokens, but with dynamic-shapes their micro-batches have "
                "different lengths",
                when=has_expert_ranks,
            ),
            ms.Conflicts(
                "moe-token-permute",
                reason="moe-token-permute changes Megatron's dispatcher, which deepspeed-moe does not use",
            ),
        ),
        numerics=ms.Numerics.reordered(
            reason="the baseline is a run with deepspeed-moe.reference=true, which drops the same tokens. "
            "Compared with that run, the summation order differs. Megatron's MoE layer is no baseline, because it keeps the "
            "tokens that deepspeed-moe drops"
        ),
        state=ms.CheckpointState(
            "own",
            "the number of groups decides which tokens are dropped",
            added="safe",
            removed="safe",
            changed="safe",
            settings={"groups": "refused"},
        ),
        reference={"reference": True},
        verify_with=ms.VerifyWith(settings={"deepspeed-moe": {"groups": 4}}, world={"ep": 2}),
    )

    @ms.hookimpl
    def notes(self) -> Iterable[str]:
        return describe_masks(self.args, self.world) if self.world.num_experts and not self.args.reference else ()

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        interval = self.args.interval
        if interval == 1:
            return []
        layers = tuple(int(number % interval == 0) for number in range(1, self.world.num_layers + 1))
        return [
            ms.ArgOverride(
                "moe_layer_freq",
                layers,
                "deepspeed-moe.interval selects the layers with experts: 1 = a layer with experts, 0 = a dense layer",
            )
        ]

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        if self.world.knows("linear_bias") and not shares_biases(self.args, self.world):
            return []
        return [
            ms.Wrap(
                "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
                "mindspeed.features.deepspeed_moe.configuration:with_shared_biases",
                reason="allows biases of experts that tensor-parallel ranks share, of which each rank adds its part",
                phase="build",
            )
        ]

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.deepspeed_moe.layers import with_capacity

        return with_capacity(spec, self.args)

    @ms.hookimpl
    def save_extra(self, state: Any) -> dict[str, Any]:
        return {"groups": self.args.groups or shares(self.world)}

    @ms.hookimpl
    def load_extra(self, state: Any, data: dict[str, Any]) -> None:
        here, before = self.args.groups or shares(self.world), data["groups"]
        if here != before:
            text = (
                f"deepspeed-moe: the checkpoint was trained with {before} groups of tokens per micro-batch, but this "
                f"run has {here}"
            )
            raise ms.MindSpeedError(
                [ms.Problem("MS304", text, ("deepspeed-moe",), fix=ms.Fix.give_setting("deepspeed-moe.groups", before))]
            )
