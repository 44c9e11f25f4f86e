"""Offload what attention keeps for backward to host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from mindspeed import plugins as ms
from mindspeed.job.hybrid_pattern import ATTENTION
from mindspeed.job.world import share_of_chunk
from mindspeed.memory.conditions import PARTS_OF_LAYERS
from mindspeed.memory.feature import ATTENTION as MODULES_OF_ATTENTION
from mindspeed.memory.feature import EXPERTS, MLP
from mindspeed.memory.patches import WHOLE_MLPS
from mindspeed.plugins.saved_tensors import SavedTensors, in_backward, leave

if TYPE_CHECKING:
    from mindspeed.memory.swap import LayerSwap


@ms.condition(
    "no attention layer can be offloaded: the last one keeps its activations on the device, and the model has no other",
    fix=(ms.Fix.remove_feature(),),
)
def offloads_attention(args: Any, world: ms.World) -> bool:
    """Check that there is an attention layer besides the last one of the last model chunk."""
    if not world.is_hybrid:
        return bool(world.num_layers > 1)
    last = world.pattern_per_chunk[-1]
    return world.pattern.count(ATTENTION) > any(layer in ATTENTION for layer in last)


MODULES = tuple(MODULES_OF_ATTENTION)


class SwapAttentionArgs(ms.FeatureArgs):
    part: ClassVar[str] = "self_attention"
    """The part that a layer of a hybrid model needs."""

    modules: tuple[str, ...] | None = ms.Field(
        None,
        min_length=1,
        examples=[MODULES],
        description="Modules of self-attention whose activations are offloaded (default: those of core_attention, linear_qkv "
        "and linear_proj that the model allows). core_attention: all tensors that it saves for backward; linear_qkv and "
        "linear_proj: their input",
    )
    attention_layers: int | None = ms.Field(
        None, ge=1, description="Number of first layers of each model chunk whose attention is offloaded (default: all)"
    )
    mlp_layers: int | None = ms.Field(
        None,
        ge=1,
        description="Number of first layers of each model chunk whose MLP or experts are recomputed in backward, as a whole "
        "(default: none). With offloaded attention, this replaces full recomputation",
    )
    per_rank: bool = ms.Field(
        False,
        description="Both numbers count the layers of a pipeline rank, dealt out to its model chunks in turn. "
        "false = the layers of each model chunk",
    )

    def layers_of(self, count: int | None, chunk: int, chunks: int) -> int | None:
        """Return how many layers of one of the chunks of a rank a count means; None for all."""
        return share_of_chunk(count, chunk, chunks) if count is not None and self.per_rank else count


@ms.condition(
    "recompute_modules contains core_attn, which then keeps no activations to offload",
    fix=(ms.Fix.give_field("recompute_modules", note="N = your list of modules, without core_attn"), ms.Fix.remove_feature()),
)
def core_attention_is_not_recomputed(args: SwapAttentionArgs, world: ms.World) -> bool:
    """Check that selective recomputation does not take core attention."""
    return not (world.recompute_granularity == "selective" and "core_attn" in world.recompute_modules)


def _is_latent(args: SwapAttentionArgs, world: ms.World) -> bool:
    """Return whether attention is multi-latent attention."""
    return world.is_set("multi_latent_attention")


def parts_of(world: ms.World) -> tuple[str, ...]:
    """Return the modules of an attention layer by Megatron's names; those of latent attention differ."""
    if not world.is_set("multi_latent_attention"):
        return MODULES
    queries = ("linear_q_down_proj", "linear_q_up_proj") if world.q_lora_rank else ("linear_q_proj",)
    return ("core_attention", *queries, "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")


def _fuses_norm(args: SwapAttentionArgs, world: ms.World) -> bool:
    """Return whether linear_qkv includes the norm before it."""
    return world.is_set("engine_over_local")


def offloaded(args: SwapAttentionArgs, world: ms.World) -> tuple[str, ...]:
    """Return the modules that are offloaded: those that are given, or all that the model allows."""
    if args.modules is not None:
        return args.modules
    fused = {"linear_qkv"} if _fuses_norm(args, world) else set()
    return tuple(name for name in MODULES if name in parts_of(world) and name not in fused)


@ms.condition(
    "modules={args.modules} has a name that latent attention lacks, such as linear_qkv",
    fix=(ms.Fix.give_setting("modules", ("core_attention", "linear_proj")), ms.Fix.remove_feature()),
    when=_is_latent,
)
def modules_exist(args: SwapAttentionArgs, world: ms.World) -> bool:
    """Check that attention has the modules."""
    return set(args.modules or ()) <= set(parts_of(world))


def _requests_linear_qkv(args: SwapAttentionArgs, world: ms.World) -> bool:
    """Return whether linear_qkv is among the given modules."""
    return "linear_qkv" in (args.modules or ())


def _recomputes_mlps(args: SwapAttentionArgs, world: ms.World) -> bool:
    """Return whether MLPs are recomputed."""
    return args.mlp_layers is not None


def _offloads_linear_qkv(args: SwapAttentionArgs, world: ms.World) -> bool:
    """Return whether the input of linear_qkv is offloaded."""
    return "linear_qkv" in offloaded(args, world)


class SwapAttention(ms.Feature[SwapAttentionArgs]):
    """Offload attention activations to host memory.

    Activations are offloaded after forward and prefetched before backward. Both transfers overlap with the computation of a
    neighbouring layer. The last layer keeps its activations on the device. In place of full recomputation, the MLPs of some
    layers are recomputed.
    """

    spec = ms.FeatureSpec(
        name="swap-attention",
        category=ms.Category.MEMORY,
        constraints=(
            offloads_attention,
            core_attention_is_not_recomputed,
            modules_exist,
            ms.Condition.unset(
                "engine_over_local",
                "linear_qkv includes the norm, so its input cannot be offloaded: the residual connection needs it too",
                fix=(
                    ms.Fix.give_setting("modules", note="without linear_qkv"),
                    ms.Fix.give_field("transformer_engine_layers", False),
                ),
                when=_requests_linear_qkv,
            ),
            *PARTS_OF_LAYERS,
            ms.ModelCondition(
                "mindspeed.features.swap_attention.model_conditions:parts_of_attention",
                "attention has every module to offload, and linear_qkv includes no norm",
                fix=(ms.Fix.give_setting("modules"), ms.Fix.remove_feature()),
            ),
            ms.Conflicts(
                "norm-recompute",
                reason="norm-recompute already frees the input of linear_qkv; remove linear_qkv from swap-attention.modules",
                when=_offloads_linear_qkv,
            ),
            ms.Conflicts(
                "moe-zero-memory",
                reason="swap-attention.mlp_layers already recomputes the experts of these layers",
                when=_recomputes_mlps,
            ),
        ),
        numerics=ms.Numerics.exact(),
        own_trainer="from mindspeed.parallel import SwapActivations",
    )

    swap: LayerSwap | None = None
    handles: Sequence[Any] = ()

    @ms.hookimpl
    def notes(self) -> Iterable[str]:
        if self.args.modules is None and _fuses_norm(self.args, self.world):
            yield (
                "linear_qkv includes the norm, whose input the residual connection needs too: its input is kept on the device"
            )

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [WHOLE_MLPS] if _recomputes_mlps(self.args, self.world) else []

    @ms.hookimpl
    def saved_tensors(self, tensors: SavedTensors) -> SavedTensors:
        """Return what is left: all but the layer before the loss are offloaded, and one is prefetched for backward."""
        names = [name for module in offloaded(self.args, self.world) for name in MODULES_OF_ATTENTION.get(module, ())]
        chunk, chunks = next((tensor.chunk for tensor in tensors), 0), self.world.vpp
        attention = self.args.layers_of(self.args.attention_layers, chunk, chunks)
        left = leave(tensors, names, "swapped", self.spec.name, attention, spare=1)
        mlps = self.args.layers_of(self.args.mlp_layers, chunk, chunks) or 0
        dense = sum(tensor.layers for tensor in tensors if tensor.name == MLP[0] and not tensor.prediction)
        left = leave(left, MLP, "recomputed", self.spec.name, min(mlps, dense))
        left = leave(left, EXPERTS, "recomputed", self.spec.name, mlps - min(mlps, dense))
        return in_backward(left, self.spec.name)

    @ms.hookimpl
    def model_built(self, chunks: Sequence[Any]) -> None:
        from mindspeed.features.swap_attention.layers import recompute_mlps
        from mindspeed.memory.attention import swap_attention
        from mindspeed.memory.swap import LayerSwap

        self.swap = self.swap or LayerSwap()
        modules = offloaded(self.args, self.world)
        for number, chunk in enumerate(chunks):
            layers = self.args.layers_of(self.args.attention_layers, number, len(chunks))
            swapped = swap_attention(self.swap, chunk, modules, self.spec.name, layers)
            self.handles = [*self.handles, *(handle for layer in swapped for handle in layer.handles)]
            recompute_mlps(chunk, self.args.layers_of(self.args.mlp_layers, number, len(chunks)) or 0)

    @ms.hookimpl
    def around_schedule(self, chunks: Sequence[Any], forward_only: bool) -> AbstractContextManager[None] | None:
        if self.swap is not None and not forward_only:
            self.swap.begin_step()
        return None

    @ms.hookimpl
    def around_forward_step(self, unit: Any) -> AbstractContextManager[None] | None:
        return None if self.swap is None else _forward_pass(self.swap, unit)

    @ms.hookimpl
    def around_backward_step(self, unit: Any) -> AbstractContextManager[None] | None:
        if self.swap is not None:
            self.swap.enter_backward()
        return None

    @ms.hookimpl
    def deactivated(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles, self.swap = (), None


@contextmanager
def _forward_pass(swap: LayerSwap, unit: Any) -> Iterator[None]:
    swap.begin(unit)
    yield
    swap.end()
