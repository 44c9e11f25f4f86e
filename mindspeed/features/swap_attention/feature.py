"""Move what attention keeps for backward to the host meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from mindspeed.memory.feature import ATTENTION
from mindspeed.plugins import (
    Category,
    Check,
    Conflicts,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    Numerics,
    hookimpl,
    in_backward,
    leave,
)

if TYPE_CHECKING:
    from mindspeed.memory.swap import LayerSwap

MODULES = tuple(ATTENTION)


class SwapAttentionArgs(FeatureArgs):
    modules: tuple[str, ...] = Field(
        MODULES,
        min_length=1,
        description="parts of self-attention, by their exact names: what core_attention saves, and the inputs of linear layers",
    )


def _saved(args: Any, world: Any, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """All but the layer before the loss are on the host; one comes back ahead of backward."""
    names = [tensor for module in args.modules for tensor in ATTENTION.get(module, ())]
    return in_backward(leave(tensors, names, "swapped", "swap-attention", spare=1), "swap-attention")


class SwapAttention(Feature[SwapAttentionArgs]):
    """Move what attention saves to the host behind the next layer, and back one layer ahead of backward."""

    spec = FeatureSpec(
        name="swap-attention",
        summary="Activations of attention on the host between forward and backward, with transfers beside the computation",
        category=Category.MEMORY,
        constraints=(
            Check(
                lambda args, world: world.num_layers > 1,
                "the model has one layer, whose backward follows its forward at once",
                fix="remove swap-attention",
            ),
            Conflicts(
                "norm-recompute",
                reason="the input of linear_qkv is recomputed; leave linear_qkv out of swap-attention.modules",
                when=lambda args, world: "linear_qkv" in args.modules,
            ),
        ),
        numerics=Numerics.exact(),
        saved=_saved,
    )

    swap: LayerSwap | None = None
    handles: Sequence[Any] = ()

    @hookimpl
    def config_ready(self, config: Any) -> None:
        from mindspeed.memory.model_layers import refusals

        wrong = refusals(config)
        if config.recompute_granularity == "selective" and "core_attn" in (config.recompute_modules or ()):
            wrong.append("recompute.modules has core_attn, which then saves nothing")
        if config.cpu_offloading or getattr(config, "fine_grained_activation_offloading", False):
            wrong.append("Megatron moves activations to the host itself")
        if wrong:
            self.decline(" and ".join(wrong))

    @hookimpl
    def model_built(self, chunks: Sequence[Any]) -> None:
        from mindspeed.memory.attention import refused_modules, swap_attention
        from mindspeed.memory.swap import LayerSwap

        if wrong := refused_modules(chunks, self.args.modules, self.spec.name):
            self.decline(*wrong)
        self.swap = self.swap or LayerSwap()
        swapped = swap_attention(self.swap, chunks, self.args.modules, self.spec.name)
        self.handles = [*self.handles, *(handle for layer in swapped for handle in layer.handles)]

    @hookimpl
    def around_schedule(self, chunks: Sequence[Any], forward_only: bool) -> AbstractContextManager[None] | None:
        if self.swap is not None and not forward_only:
            self.swap.begin_step()
        return None

    @hookimpl
    def around_forward_step(self, unit: Any) -> AbstractContextManager[None] | None:
        return None if self.swap is None else _forward_pass(self.swap, unit)

    @hookimpl
    def around_backward_step(self, unit: Any) -> AbstractContextManager[None] | None:
        if self.swap is not None:
            self.swap.enter_backward()
        return None

    @hookimpl
    def deactivated(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles, self.swap = (), None


@contextmanager
def _forward_pass(swap: LayerSwap, unit: Any) -> Iterator[None]:
    swap.begin(unit)
    yield
    swap.end()
