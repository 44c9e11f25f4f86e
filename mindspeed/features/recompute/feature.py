"""Activations recomputed in the backward pass instead of kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, get_args

from mindspeed import plugins as ms
from mindspeed.features.recompute.rules import CONSTRAINTS, Module, RecomputeArgs, is_full
from mindspeed.job.arithmetic import mean_layer_forward, score_forward, shape_of_world
from mindspeed.job.world import share_of_chunk
from mindspeed.memory.feature import ACTIVATIONS, EXPERTS, MLP
from mindspeed.memory.patches import WHOLE_MLPS
from mindspeed.plugins.saved_tensors import SavedTensors, in_backward, leave

_BETWEEN_LAYERS: Final = ("layer input",)
_OUTSIDE_PREDICTION: Final = (
    *("prediction norms: input", "prediction: embedding dropout mask", "prediction: next tokens"),
    *("final norm: output", "loss: logits", "loss: targets"),
)
"""Tensors of multi-token prediction that Megatron's full recomputation, by groups of layers, keeps."""
_MODULES: Final = {
    "core_attn": ("attention: softmax", "attention: softmax dropout"),
    "layernorm": tuple(
        f"{norm}: {part}" for norm in ("input norm", "pre-mlp norm") for part in ("statistics", "copies", "output")
    ),
    "mla_up_proj": ("attention: queries, keys, values", "attention: rotary tables"),
    "mlp": MLP,
    "moe_act": ACTIVATIONS["experts"],
    "shared_experts": ("shared experts: activation input", *ACTIVATIONS["shared experts"]),
    "moe": EXPERTS,
}
"""Tensors that the recomputation of a module leaves out."""
_ATTENTION: Final = ("input norm", "attention")
_MLP: Final = ("pre-mlp norm", "mlp", "moe", "shared experts", "experts")


def saved(args: Any, world: Any, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Remove recomputed tensors; the layers of a group are restored together, where no others are kept."""
    if args.granularity == "selective":
        names = [name for module in args.modules or ("core_attn",) for name in _MODULES.get(module, ())]
        return leave(tensors, names, "recomputed", "recompute", prediction=True)
    of_layers = [t for t in tensors if t.name.startswith(("layer", *_ATTENTION, *_MLP)) and not (t.once or t.prediction)]
    counts = Counter[str]()  # other features may have taken some layers of a tensor
    for tensor in of_layers:
        counts[tensor.name] += tensor.layers
    inputs = counts[of_layers[0].name]
    chunk, chunks = (of_layers[0].chunk, world.vpp) if args.per_rank else (0, 1)
    layers = min(inputs, share_of_chunk(args.num_layers or 1, chunk, chunks))
    if not layers:
        return tensors
    left = tensors
    for name, count in counts.items():
        if name in _BETWEEN_LAYERS:
            continue
        first = (layers * count + (0 if name.startswith(_MLP) else inputs - 1)) // inputs
        left = leave(left, (name,), "recomputed", "recompute", first if args.method == "block" else None)
    if args.method == "block":
        return left if inputs > layers else _coming_back(world, left, 1)
    groups = inputs // layers
    repeated = [t.name for t in tensors if t.prediction and t.name not in _OUTSIDE_PREDICTION]
    left = (
        *(t for t in left if not t.prediction),
        *leave([t for t in left if t.prediction], repeated, "recomputed", "recompute", prediction=True),
    )
    return _coming_back(world, leave(left, _BETWEEN_LAYERS, "recomputed", "recompute", inputs - groups), layers)


def _coming_back(world: Any, tensors: tuple[Any, ...], layers: Any) -> tuple[Any, ...]:
    """Restore a group of layers, of which those of a hybrid model have attention or an MLP each."""
    if not world.is_hybrid:
        return in_backward(tensors, "recompute", layers)
    names = [t.name for t in tensors]
    halves = [[name for name in names if not name.startswith(other)] for other in (_MLP, _ATTENTION)]
    return in_backward(tensors, "recompute", -(-layers // 2), halves if layers == 1 else ())


def estimate(args: Any, world: Any) -> ms.Estimate:
    """Estimate what recomputation adds in work."""
    shape = shape_of_world(world)
    share = world.micro_batch_size / (world.cp * world.tp)
    if args.granularity == "selective":
        return ms.Estimate(flops=score_forward(shape) * shape.counts.attention / shape.num_layers * share)
    chunks = world.pp * (1 if args.per_rank else world.vpp)
    layers = 1.0 if args.method == "uniform" else (args.num_layers or 0) * chunks / shape.num_layers
    return ms.Estimate(flops=mean_layer_forward(shape) * share * layers, repeated=layers)


def variants(world: Any) -> list[dict[str, Any]]:
    """Return the settings that a search tries: selective, every layer, and the first 1, 2, 4 ... layers of a chunk."""
    blocks = [1 << power for power in range(int(world.num_layers).bit_length()) if 1 << power < world.num_layers]
    full = {"granularity": "full"}
    every = {**full, "method": "uniform", "num_layers": 1}
    return [{"granularity": "selective"}, every, *({**full, "method": "block", "num_layers": number} for number in blocks)]


_LAYERS = "mindspeed.features.recompute.layers"
_RANDOM = "megatron.core.tensor_parallel.random"


class Recompute(ms.Feature[RecomputeArgs]):
    """Recompute activations of layers or modules.

    Only the inputs of these modules or layers are kept. Their forward pass runs again when backward needs the rest.
    """

    spec = ms.FeatureSpec(
        name="recompute",
        category=ms.Category.MEGATRON,
        level=0,
        slots={ms.Slot.RECOMPUTE_POLICY},
        constraints=CONSTRAINTS,
        megatron_flags=(
            ms.MegatronFlag("recompute_granularity", "granularity", switch="on"),
            ms.MegatronFlag("recompute_activations", switch="on"),
            *(ms.MegatronFlag(f"recompute_{setting}", setting) for setting in ("method", "num_layers")),
            ms.MegatronFlag("recompute_modules", "modules", takes=get_args(Module)),
            ms.MegatronFlag("distribute_saved_activations", "distribute"),
        ),
        numerics=ms.Numerics.exact(),
    )

    @ms.hookimpl
    def held_slots(self) -> Collection[str]:
        return self.spec.slots if is_full(self.args, self.world) else ()

    @ms.hookimpl
    def job_values(self) -> Mapping[str, Any]:
        return {"recompute_per_rank": True} if self.args.per_rank else {}

    @ms.hookimpl
    def saved_tensors(self, tensors: SavedTensors) -> SavedTensors:
        return saved(self.args, self.world, tensors)

    @ms.hookimpl
    def estimate(self) -> ms.Estimate:
        return estimate(self.args, self.world)

    @ms.hookimpl
    def variants(self) -> Sequence[Mapping[str, Any]]:
        return variants(self.world)

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        overrides = [
            ms.ArgOverride(f"recompute_{name}", value, f"recompute.{name} controls what backward recomputes")
            for name in ("granularity", "modules", "method", "num_layers")
            if (value := getattr(self.args, name)) is not None
        ]
        if self.args.distribute:
            overrides.append(
                ms.ArgOverride(
                    "distribute_saved_activations",
                    True,
                    "recompute.distribute=true splits saved inputs over tensor-parallel ranks",
                )
            )
        return overrides

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        modules = set(self.args.modules or ())
        patches: list[ms.Patch] = []
        if "mlp" in modules:
            patches.append(WHOLE_MLPS)
        if modules & {"layernorm", "moe_act", "mla_up_proj"}:
            reason = "avoids a request for Transformer Engine where it is not installed, and lets a norm be recomputed"
            patches.append(ms.Mixin(f"{_RANDOM}:CheckpointWithoutOutput", f"{_LAYERS}:LocalCheckpoint", reason))
        if self.args.per_rank:
            reason = "gives each model chunk its share of the layers that recompute.num_layers counts per pipeline rank"
            patches.append(
                ms.Wrap("megatron.core.optimizer:get_megatron_optimizer", f"{_LAYERS}:with_shares", reason, phase="build")
            )
        return patches
