"""Parts of layers that are kept, recomputed or swapped, chosen from measurements for a budget of device memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from mindspeed import plugins as ms
from mindspeed.features.adaptive_recompute.least import NAME, budget_is_given, least_saved
from mindspeed.memory.conditions import LOCAL_LAYERS, NO_SHARED_EXPERT_OVERLAP, PARTS_OF_LAYERS
from mindspeed.plugins.saved_tensors import SavedTensors

if TYPE_CHECKING:
    from mindspeed.features.adaptive_recompute.policy import Policy


class AdaptiveRecomputeArgs(ms.FeatureArgs):
    budget_mb: float | None = ms.Field(
        None, gt=0, description="Maximum device memory that a rank uses, in MiB (required). Larger = more activations are kept"
    )
    profiling_steps: int = ms.Field(
        3, ge=2, description="Number of first steps that keep no activations. The last of them measures memory and time"
    )
    swap: bool = ms.Field(
        False, description="Offload attention activations that exceed the budget; false = never offload these"
    )

    @property
    def part(self) -> str:
        """The part that a layer of a hybrid model needs, of which norms are not recomputed."""
        return "" if self.swap else "mlp"


class AdaptiveRecompute(ms.Feature[AdaptiveRecomputeArgs]):
    """Recompute or offload within a memory budget.

    The first steps measure memory and time of norms, activation functions and attention. Activations that are slow to
    recompute are kept as far as the memory budget allows. The others are recomputed or offloaded to host memory.
    """

    spec = ms.FeatureSpec(
        name=NAME,
        category=ms.Category.MEMORY,
        slots={ms.Slot.RECOMPUTE_POLICY},
        constraints=(
            ms.After(ms.Slot.MOE_DISPATCHER),  # it decides how shared experts run
            budget_is_given,
            *PARTS_OF_LAYERS,
            NO_SHARED_EXPERT_OVERLAP,
            ms.ModelCondition(
                "mindspeed.features.adaptive_recompute.policy:fused_parts",
                "a norm or an activation function of the layers is a separate call that can be recomputed",
                fix=LOCAL_LAYERS,
            ),
            *(
                ms.Conflicts(name, reason=f"{NAME} itself decides which modules are recomputed or offloaded")
                for name in ("norm-recompute", "activation-recompute", "swap-attention", "recompute")
            ),
        ),
        numerics=ms.Numerics.exact(),
        verify_with=ms.VerifyWith(settings={"adaptive-recompute": {"budget_mb": 6.0, "profiling_steps": 2}}),
        own_trainer="from mindspeed.parallel import RecomputePlanner",
    )

    policy: Policy | None = None
    get_group: Callable[[str], Any] | None = None

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [
            ms.Wrap(
                "megatron.core.transformer.mlp:MLP.forward",
                "mindspeed.memory.activations:with_region",
                reason="recomputes in backward the output of the activation function between the two linear layers of an MLP",
            ),
            ms.Mixin(
                "megatron.core.tensor_parallel.random:CheckpointWithoutOutput",
                "mindspeed.features.adaptive_recompute.policy:RecomputedPart",
                reason="reuses the autograd graph of the forward pass when norms or grouped experts are recomputed, so "
                "gradients are bitwise equal to those without recomputation. Megatron's class builds a second graph in "
                "backward, which may sum gradients in a different order",
            ),
        ]

    @ms.hookimpl
    def budget(self) -> tuple[str, float] | None:
        return None if self.args.budget_mb is None else ("budget_mb", self.args.budget_mb)

    @ms.hookimpl
    def saved_tensors(self, tensors: SavedTensors) -> SavedTensors:
        return least_saved(self.args.swap, self.world.is_set("transformer_engine_layers"), tensors)

    @ms.hookimpl
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        self.get_group = get_group

    @ms.hookimpl
    def model_built(self, chunks: Sequence[Any]) -> None:
        from mindspeed.features.adaptive_recompute.policy import Policy

        self.policy = Policy(chunks, self.args, self.get_group)

    @ms.hookimpl
    def optimizer_built(self, optimizer: Any) -> None:
        if self.policy is not None:
            self.policy.memory.optimizer = optimizer

    @ms.hookimpl
    def around_schedule(self, chunks: Sequence[Any], forward_only: bool) -> AbstractContextManager[None] | None:
        return None if self.policy is None or forward_only else self.policy.step()

    @ms.hookimpl
    def around_forward_step(self, unit: Any) -> AbstractContextManager[None] | None:
        return None if self.policy is None else self.policy.forward(unit)

    @ms.hookimpl
    def around_backward_step(self, unit: Any) -> AbstractContextManager[None] | None:
        return None if self.policy is None else self.policy.backward(unit)

    @ms.hookimpl
    def step_metrics(self, state: Any) -> Mapping[str, float] | None:
        return None if self.policy is None else self.policy.metrics()

    @ms.hookimpl
    def deactivated(self) -> None:
        if self.policy is not None:
            self.policy.close()
        self.policy = None
