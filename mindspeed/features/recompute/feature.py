"""Activations recomputed in the backward pass instead of kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, get_args

from pydantic import model_validator

from mindspeed import plugins as ms
from mindspeed.job.arithmetic import mean_layer_forward, score_forward, shape_of_world
from mindspeed.memory.conditions import groups_fill_chunks, modules_have_experts
from mindspeed.plugins.constraints import Constraint
from mindspeed.plugins.saved_tensors import SavedTensors, in_backward, leave
from mindspeed.plugins.shared_conditions import NO_CPU_OFFLOADING, NO_OVERLAPPED_MICRO_BATCHES

Module = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]


class RecomputeArgs(ms.FeatureArgs):
    granularity: Literal["selective", "full"] = ms.Field(
        "selective", description="What to recompute: selective (only the modules in recompute.modules) or full (whole layers)"
    )
    modules: tuple[Module, ...] | None = ms.Field(
        None, min_length=1, description="With selective granularity: the modules that are recomputed (default: core_attn)"
    )
    method: Literal["uniform", "block"] | None = ms.Field(
        None,
        description="With full granularity: uniform = recompute all layers in groups of num_layers; block = recompute only "
        "the first num_layers of each model chunk",
    )
    num_layers: int | None = ms.Field(
        None,
        ge=1,
        description="With full granularity: number of layers per group (method uniform), or number of recomputed layers per "
        "model chunk (method block). In a HybridModel, each character of the pattern is a layer",
    )
    distribute: bool = ms.Field(
        False,
        description="With full granularity: split the saved inputs of layers over the tensor-parallel ranks. Saves memory, "
        "adds an all-gather in backward",
    )

    @model_validator(mode="after")
    def _settings_fit_granularity(self) -> RecomputeArgs:
        needed: dict[str, str | int] = {"method": "uniform", "num_layers": 1} if self.granularity == "full" else {}
        if missing := [name for name in needed if getattr(self, name) is None]:
            text = f"granularity=full needs {' and '.join(missing)}"
            raise ms.SettingsError(text, ms.Fix.together(tuple(ms.Fix.give_setting(name, needed[name]) for name in missing)))
        other = "selective" if self.granularity == "full" else "full"
        of_other = ("modules",) if other == "selective" else ("method", "num_layers", "distribute")
        if given := [name for name in of_other if getattr(self, name)]:
            text = f"{' and '.join(given)} can be set only with granularity={other}, but granularity is {self.granularity}"
            drop = ms.Fix.together(tuple(ms.Fix.drop_setting(name) for name in given))
            raise ms.SettingsError(text, drop, ms.Fix.give_setting("granularity", other))
        return self


def _takes(args: RecomputeArgs, module: Module) -> bool:
    return args.granularity == "selective" and module in (args.modules or ("core_attn",))


def is_full(args: RecomputeArgs, world: ms.World) -> bool:
    """Return whether whole layers are recomputed."""
    return args.granularity == "full"


def _is_distributed(args: RecomputeArgs, world: ms.World) -> bool:
    """Return whether saved inputs are split over tensor-parallel ranks."""
    return args.distribute


def _takes_shared_experts(args: RecomputeArgs, world: ms.World) -> bool:
    """Return whether shared experts are recomputed."""
    return _takes(args, "shared_experts")


def _takes_expert_activation(args: RecomputeArgs, world: ms.World) -> bool:
    """Return whether the activation of grouped experts is recomputed."""
    return _takes(args, "moe_act")


@ms.condition(
    "recompute.num_layers={args.num_layers} is greater than the number of layers of a model chunk "
    "({world.num_layers} layers / pp={world.pp} / vpp={world.vpp}), so every layer is recomputed. "
    "Give a smaller number to recompute fewer layers",
    when=lambda args, world: args.method == "block",
    otherwise="warn",
)
def chunks_have_the_layers(args: RecomputeArgs, world: ms.World) -> bool:
    """Check that a model chunk has as many layers as are to be recomputed."""
    return args.num_layers is None or args.num_layers <= max(world.layers_per_chunk)


@ms.condition(
    "moe_act recomputes the activation of grouped experts, but the model has none (for other experts and MLPs, "
    "activation-recompute does this)",
    fix=(ms.Fix.give_setting("modules", note="without moe_act"),),
    when=_takes_expert_activation,
)
def experts_are_grouped(args: RecomputeArgs, world: ms.World) -> bool:
    """Check that the model has grouped experts."""
    return bool(world.num_experts > 0 and world.grouped_experts)


@ms.condition(
    "mla_up_proj is part of multi-latent attention, but the model does not use it",
    fix=(ms.Fix.give_setting("modules", note="without mla_up_proj"),),
    when=lambda args, world: _takes(args, "mla_up_proj"),
)
def attention_is_latent(args: RecomputeArgs, world: ms.World) -> bool:
    """Check that attention is multi-latent."""
    return bool(world.multi_latent_attention)


_HIDING: Final = (
    "shared experts cannot be recomputed while they overlap with transfers; remove shared_experts from recompute.modules to "
    "use both features"
)
CONSTRAINTS: Final[tuple[Constraint, ...]] = (
    replace(groups_fill_chunks, when=lambda args, world: args.method == "uniform"),
    chunks_have_the_layers,
    ms.Condition.at_least(
        "tp",
        2,
        "distribute=true splits saved inputs over tensor-parallel ranks, but tp is {world.tp}",
        fix=(ms.Fix.give_setting("distribute", False), ms.Fix.give_field("tp", 2, or_more=True)),
        when=_is_distributed,
    ),
    replace(modules_have_experts, when=lambda args, world: _takes(args, "moe") or _takes(args, "shared_experts")),
    experts_are_grouped,
    attention_is_latent,
    NO_CPU_OFFLOADING,
    replace(NO_OVERLAPPED_MICRO_BATCHES, when=is_full),
    ms.Conflicts(
        "moe-zero-memory",
        reason="recompute.granularity=full already recomputes the experts, as a part of whole layers",
        when=is_full,
    ),
    ms.Conflicts(
        "moe-zero-memory",
        reason="moe in recompute.modules makes both features recompute the experts. To use both, remove moe from this setting",
        when=lambda args, world: _takes(args, "moe"),
    ),
    ms.Conflicts(
        "moe-zero-memory",
        reason="moe_act in recompute.modules makes both features recompute the activation of experts. To use both, remove "
        "moe_act from this setting",
        when=_takes_expert_activation,
    ),
    ms.Conflicts("moe-allgather-overlap", reason=_HIDING, when=_takes_shared_experts),
    ms.Conflicts("moe-alltoall-overlap", reason=_HIDING, when=_takes_shared_experts),
    ms.Conflicts(
        "sequence-parallel",
        reason="recompute.distribute=true splits saved inputs over tensor-parallel ranks, which sequence-parallel already "
        "does; set recompute.distribute=false",
        when=_is_distributed,
    ),
)


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
    "mlp": ("mlp: activation input", "mlp: activation inner", "mlp: activation output"),
    "moe_act": ("mlp: activation inner", "mlp: activation output"),
    "moe": (
        "mlp: activation input",
        "mlp: activation inner",
        "mlp: activation output",
        "moe: dispatched tokens",
        "moe: routing",
    ),
}
"""Tensors that the recomputation of a module leaves out."""
_ATTENTION: Final = ("input norm", "attention")
_MLP: Final = ("pre-mlp norm", "mlp", "moe")


def saved(args: Any, world: Any, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Remove recomputed tensors; the layers of a group are restored together, where no others are kept."""
    if args.granularity == "selective":
        chosen = args.modules or ("core_attn",)
        if bool(world.num_experts) and "mlp" in chosen:
            chosen = tuple(module for module in chosen if module != "mlp")
        names = [name for module in chosen for name in _MODULES.get(module, ())]
        return leave(tensors, names, "recomputed", "recompute", prediction=True)
    of_layers = [t for t in tensors if t.name.startswith(("layer", *_ATTENTION, *_MLP)) and not (t.once or t.prediction)]
    counts = Counter[str]()  # other features may have taken some layers of a tensor
    for tensor in of_layers:
        counts[tensor.name] += tensor.layers
    inputs = counts[of_layers[0].name]
    layers = min(inputs, args.num_layers or 1)
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
    layers = 1.0 if args.method == "uniform" else (args.num_layers or 0) * world.pp * world.vpp / shape.num_layers
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
            reason = "keeps a bias that is returned separately from the output out of the autograd graph"
            patches.append(ms.Wrap(f"{_RANDOM}:checkpoint", f"{_LAYERS}:checkpoint", reason))
        if modules & {"layernorm", "moe_act", "mla_up_proj"}:
            reason = "avoids a request for Transformer Engine where it is not installed, and lets a norm be recomputed"
            patches.append(ms.Mixin(f"{_RANDOM}:CheckpointWithoutOutput", f"{_LAYERS}:LocalCheckpoint", reason))
        return patches
