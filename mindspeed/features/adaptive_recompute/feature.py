"""Parts of layers that are kept, recomputed or swapped, chosen from measurements for a budget of device memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from mindspeed.features.adaptive_recompute.least import NAME, least_saved
from mindspeed.plugins import (
    After,
    Category,
    Check,
    Conflicts,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    Mixin,
    Numerics,
    Patch,
    Slot,
    VerifyWith,
    Wrap,
    hookimpl,
)

if TYPE_CHECKING:
    from mindspeed.features.adaptive_recompute.policy import Policy

_DECIDED = f"{NAME} decides it"


class AdaptiveRecomputeArgs(FeatureArgs):
    budget_mb: float | None = Field(None, gt=0, description="device memory of the job on each rank, in MiB")
    profiling_steps: int = Field(3, ge=2, description="first steps, in which nothing is kept; the last of them is measured")
    swap: bool = Field(False, description="attention may be moved to the host")


class AdaptiveRecompute(Feature[AdaptiveRecomputeArgs]):
    """Measure bytes and time of norms, activations and attention, and keep those that save most time within the budget."""

    spec = FeatureSpec(
        name=NAME,
        summary="Norms, activations and attention kept, recomputed or swapped layer by layer, within a memory budget",
        category=Category.MEMORY,
        slots={Slot.RECOMPUTE_POLICY},
        constraints=(
            After(Slot.MOE_DISPATCHER),  # it decides how shared experts run
            Check(
                lambda args, world: args.budget_mb is not None,
                "no budget is given",
                fix="--set adaptive-recompute.budget_mb=MIB, the memory of a device without what other programs use",
            ),
            Conflicts("norm-recompute", reason=_DECIDED),
            Conflicts("activation-recompute", reason=_DECIDED),
            Conflicts("swap-attention", reason=_DECIDED),
            Conflicts("recompute", reason=_DECIDED),
        ),
        numerics=Numerics.exact(),
        saved=least_saved,
        budget="budget_mb",
        verify_with=VerifyWith(settings={"adaptive-recompute": {"budget_mb": 1, "profiling_steps": 2}}),
    )

    policy: Policy | None = None
    get_group: Callable[[str], Any] | None = None

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Wrap(
                "megatron.core.transformer.mlp:MLP.forward",
                "mindspeed.memory.activations:with_region",
                reason="the activation between the two linear layers is a region",
            ),
            Mixin(
                "megatron.core.tensor_parallel.random:CheckpointWithoutOutput",
                "mindspeed.features.adaptive_recompute.policy:RecomputedPart",
                reason="Megatron's own calls around norms and in grouped experts keep the graph of the first forward pass",
            ),
        ]

    @hookimpl
    def config_ready(self, config: Any) -> None:
        from mindspeed.memory.model_layers import refusals

        wrong = refusals(config)
        if config.moe_shared_expert_overlap:
            wrong.append("moe_shared_expert_overlap runs shared experts in parts")
        if config.cpu_offloading or getattr(config, "fine_grained_activation_offloading", False):
            wrong.append("Megatron moves activations to the host itself")
        if wrong:
            self.decline(" and ".join(wrong))

    @hookimpl
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        self.get_group = get_group

    @hookimpl
    def model_built(self, chunks: Sequence[Any]) -> None:
        from mindspeed.features.adaptive_recompute.policy import Policy

        self.policy = Policy(chunks, self.args, self.get_group)

    @hookimpl
    def optimizer_built(self, optimizer: Any) -> None:
        if self.policy is not None:
            self.policy.memory.optimizer = optimizer

    @hookimpl
    def around_schedule(self, chunks: Sequence[Any], forward_only: bool) -> AbstractContextManager[None] | None:
        return None if self.policy is None or forward_only else self.policy.step()

    @hookimpl
    def around_forward_step(self, unit: Any) -> AbstractContextManager[None] | None:
        return None if self.policy is None else self.policy.forward(unit)

    @hookimpl
    def around_backward_step(self, unit: Any) -> AbstractContextManager[None] | None:
        return None if self.policy is None else self.policy.backward(unit)

    @hookimpl
    def step_metrics(self, state: Any) -> Mapping[str, float] | None:
        return None if self.policy is None else self.policy.metrics()

    @hookimpl
    def deactivated(self) -> None:
        if self.policy is not None:
            self.policy.close()
        self.policy = None
