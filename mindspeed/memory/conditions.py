"""Conditions that features of memory share. Light."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mindspeed import plugins as ms
from mindspeed.job.hybrid_pattern import ATTENTION, EXPERTS, KINDS, MLP
from mindspeed.plugins.shared_conditions import NO_CPU_OFFLOADING, NO_FSDP, NO_OTHER_PASSES, NO_TRANSFORMER_ENGINE_LAYERS

_REMOVE: Final = ms.Fix.remove_feature()


def _has_blocks(args: Any, world: ms.World) -> bool:
    """Return whether block recomputation is used."""
    return bool(world.block_recomputed)


_PARTS: Final = {
    "": ("".join(KINDS), "layers"),
    "self_attention": (ATTENTION, "attention layers"),
    "mlp": (MLP + EXPERTS, "layers with an MLP or experts"),
}
"""Layers of a hybrid model that have a part, by their characters and in words."""


def _places(args: Any, world: ms.World) -> list[list[int]]:
    """Return for each model chunk the places of the layers that a feature acts on.

    A layer of a hybrid model has one part; ``part`` of the arguments is the one that the feature acts on, if not all.
    """
    if not world.is_hybrid:
        return [list(range(size)) for size in world.layers_per_chunk]
    kinds, _ = _PARTS[getattr(args, "part", "")]
    return [[at for at, layer in enumerate(chunk) if layer in kinds] for chunk in world.pattern_per_chunk]


def _is_uniform(args: Any, world: ms.World) -> bool:
    """Return whether full recomputation takes every layer, in groups."""
    return world.recompute_granularity == "full" and world.recompute_method == "uniform"


def _layers_left(args: Any, world: ms.World) -> Mapping[str, Any]:
    """Return the layers wanted of each model chunk, and those of the chunk in which block recomputation leaves the fewest.

    Chunks that are recomputed as a whole count only where all of them are.
    """
    chunks = _places(args, world)
    taken = world.block_recomputed or [0] * len(chunks)
    wanted = getattr(args, "num_layers", None) or 1
    counts = [(sum(at >= first for at in places), len(places)) for places, first in zip(chunks, taken, strict=True) if places]
    left, number = min([count for count in counts if count[0]] or counts or [(0, 0)])
    most = min(((places[-wanted:] or [0])[0] for places in chunks if places), default=0)
    _, words = _PARTS[getattr(args, "part", "") if world.is_hybrid else ""]
    return {"wanted": wanted, "number": number, "layers": f"{number} {words}", "left": left, "most": most}


@ms.condition("every layer is recomputed as a whole, so {feature} has nothing to do", otherwise="idle")
def some_layer_is_left(args: Any, world: ms.World) -> bool:
    """Check that full recomputation does not take every layer of the model."""
    return not _is_uniform(args, world) and not (_has_blocks(args, world) and _layers_left(args, world)["left"] == 0)


def _counts_layers(args: Any, world: ms.World) -> bool:
    """Return whether num_layers is set."""
    return getattr(args, "num_layers", None) is not None


def _counts_layers_left(args: Any, world: ms.World) -> bool:
    """Return whether num_layers counts layers that block recomputation leaves."""
    return _counts_layers(args, world) and _has_blocks(args, world) and _layers_left(args, world)["left"] > 0


@ms.condition(
    "--recompute-method block recomputes layers as a whole, and leaves {left} of the {layers} of a model chunk. {feature} "
    "works only in layers that are left, and needs at least {wanted} of them",
    fix=(ms.Fix.give_field("recompute_num_layers", "{most}", "or less"), _REMOVE),
    when=_counts_layers_left,
    values=_layers_left,
)
def blocks_leave_layers(args: Any, world: ms.World) -> bool:
    """Check that block recomputation leaves as many layers of each model chunk as are wanted."""
    numbers = _layers_left(args, world)
    return bool(numbers["wanted"] <= numbers["left"])


@ms.condition(
    "the setting num_layers={args.num_layers} is greater than the {layers} of a model chunk",
    fix=(ms.Fix.give_setting("num_layers", "{number}"), ms.Fix.drop_setting("num_layers")),
    when=_counts_layers,
    values=_layers_left,
)
def chunks_have_num_layers(args: Any, world: ms.World) -> bool:
    """Check that each model chunk has at least num_layers layers of those that the feature acts on."""
    return bool(args.num_layers <= min(map(len, filter(None, _places(args, world))), default=0))


LAYERS_OF_MODEL: Final = ms.ModelCondition(
    "mindspeed.memory.model_layers:missing_layers",
    "each model chunk has the requested number of layers, without fully sharded weights (FSDP)",
)
PARTS_OF_LAYERS: Final = (
    some_layer_is_left,
    *NO_OTHER_PASSES,
    NO_CPU_OFFLOADING,
    NO_TRANSFORMER_ENGINE_LAYERS,
    blocks_leave_layers,
    LAYERS_OF_MODEL,
)
"""Conditions of every feature that recomputes or offloads a part of each layer."""


@ms.condition(
    "the setting num_layers={args.num_layers} requires a multiple of {args.num_layers} layers per model chunk, but "
    "{world.num_layers} layers are split into {world.pp} x {world.vpp} (pp x vpp) chunks",
    fix=(ms.Fix.give_setting("num_layers", 1, "or another number that divides the layers of every model chunk"),),
)
def groups_fill_chunks(args: Any, world: ms.World) -> bool:
    """Check that the layers of each model chunk are a multiple of the layers that are recomputed as a group."""
    return all(layers % args.num_layers == 0 for layers in world.layers_per_chunk)


modules_have_experts = ms.Condition.at_least(
    "num_experts",
    1,
    "moe and shared_experts are modules of a MoE model, but the model is dense",
    fix=(ms.Fix.give_setting("modules", note="without moe and shared_experts"), ms.Fix.give_field("num_experts")),
)


NO_SHARED_EXPERT_OVERLAP: Final = ms.Condition.unset(
    "shared_expert_overlap",
    "shared experts overlap with the transfers of routed experts (moe_shared_expert_overlap), which {feature} does not support",
)
LOCAL_LAYERS: Final = (ms.Fix.advise("build the model with Megatron's local layers"), _REMOVE)
"""Fix for a model with fused layers, such as Transformer Engine's norm and linear layer in one."""

ELEMENTWISE: Final = ("adam", "sgd")
"""Optimizers of Megatron that update each element by itself."""


@ms.condition(
    "the optimizer {world.optimizer} does not update each element independently, which {feature} needs",
    fix=(ms.Fix.give_field("optimizer", "adam"), _REMOVE),
)
def optimizer_is_elementwise(args: Any, world: ms.World) -> bool:
    """Check that the optimizer updates each element by itself; one that is not known passes until it is built."""
    return not world.knows("optimizer") or world.optimizer in ELEMENTWISE


MAIN_WEIGHTS: Final = (
    ms.Condition.unset("qk_clip", "QK clipping changes main weights between steps, which {feature} does not support"),
    ms.Condition.unset(
        "low_precision_weights", "weights are stored in fp8 or fp4, but {feature} writes updated weights only in 16 bits"
    ),
    ms.Condition.unset(
        "offloaded_optimizer",
        "Megatron offloads main weights and optimizer states (optimizer_cpu_offload), which {feature} does not support",
    ),
    ms.Condition.unset(
        "shared_gradient_buffer",
        "mxfp8 weights are computed from all fp32 weights at once (reuse_grad_buf_for_mxfp8_param_ag), which {feature} does "
        "not support",
    ),
    NO_FSDP,
    optimizer_is_elementwise,
    ms.ModelCondition(
        "mindspeed.memory.model_layers:unsuited_optimizers",
        "the optimizer updates each element independently, without FSDP",
        subject="optimizer",
    ),
)
"""Conditions of every feature that takes main weights or states away from the optimizer between steps."""
