"""The declaration of transformer-engine-layers. It imports neither torch nor Megatron."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from mindspeed import plugins as ms

_EXTENSION: Final = "megatron.core.extensions.transformer_engine"
_ROTARY: Final = "megatron.core.models.common.embeddings.rope_utils"
_FUSED_ROTARY: Final = ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd")
_ROLES: Final = (
    ("norm", "TENorm", "defines TENorm as a local LayerNorm or RMSNorm"),
    (
        "linear",
        "TELinear TEColumnParallelLinear TERowParallelLinear",
        "defines Transformer Engine's linear layers by Megatron's local linear layers",
    ),
    (
        "norm_linear",
        "TELayerNormColumnParallelLinear",
        "defines TELayerNormColumnParallelLinear by a norm and Megatron's local ColumnParallelLinear",
    ),
    ("attention", "TEDotProductAttention", "defines TEDotProductAttention by Megatron's local DotProductAttention"),
    (
        "grouped",
        "TEGroupedLinear TEColumnParallelGroupedLinear TERowParallelGroupedLinear",
        "defines Transformer Engine's grouped linear layers by one matrix product per local expert",
    ),
    ("functions", "Fp8Padding Fp8Unpadding", "adds no rows to those of experts, because products in fp8 take any number here"),
    ("functions", "TEActivationOp", "defines TEActivationOp by the activation functions of torch"),
    ("functions", "TEFusedMLP", "defines TEFusedMLP by Megatron's unfused MLP"),
    ("functions", "TECudaRNGStatesTracker", "defines TECudaRNGStatesTracker by Megatron's CudaRNGStatesTracker"),
    ("functions", "te_checkpoint", "recomputes activations by Megatron's own function"),
    ("functions", "cpu_offload", "accepts the switch that Megatron sets while it offloads activations"),
    ("functions", "te_parallel_cross_entropy", "computes the cross entropy by Megatron's own function"),
    (
        "fused",
        "fused_permute fused_permute_with_probs",
        "copies each token once per selected expert and sorts the copies by expert, with an operator of mindspeed",
    ),
    ("fused", "fused_unpermute", "sums the expert outputs of each token with an operator of mindspeed"),
    (
        "fused",
        "fused_sort_chunks_by_index fused_sort_chunks_by_index_with_probs",
        "reorders the tokens of experts by Megatron's unfused function",
    ),
    ("fused", "fused_topk_with_score_function", "selects experts by Megatron's unfused function"),
    (
        "fused",
        "fused_compute_score_for_moe_aux_loss fused_moe_aux_loss",
        "computes the load-balancing loss of experts by Megatron's unfused function",
    ),
)
"""Names of Megatron's module for Transformer Engine: the module that has the role, the names, and what they do here."""
_PURPOSE: Final = "so that layer specs for Transformer Engine work without Transformer Engine"


def role_patches() -> list[ms.Patch]:
    """Return the patches that put each role in the place of Transformer Engine's."""
    since = {"TEActivationOp": ms.When(">=0.15"), "cpu_offload": ms.When(">=0.16")}
    patches: list[ms.Patch] = [
        ms.Set(
            f"{_EXTENSION}:{name}",
            ms.Ref(f"{_HERE}.{module}:{name}"),
            f"{does}, {_PURPOSE}",
            since.get(name),
            "build",
            optional=True,
        )
        for module, names, does in _ROLES
        for name in names.split()
    ]
    rotary = f"applies rotary embedding by Megatron's unfused function, {_PURPOSE}"
    patches += [ms.Set(f"{_ROTARY}:{name}", ms.Ref(f"{_HERE}.fused:{name}"), rotary, optional=True) for name in _FUSED_ROTARY]
    version = "reports the version of Transformer Engine whose interface these layers have, because Megatron asks for it"
    patches += [
        ms.Replace(f"megatron.core.utils:{name}", f"{_HERE}.functions:{name}", version, phase="build", optional=True)
        for name in ("get_te_version", "is_te_min_version")
    ]
    patches.append(
        ms.Replace(
            "megatron.core.fp8_utils:get_fp8_context",
            f"{_HERE}.mxfp8:get_fp8_context",
            "lets linear layers of a transformer layer multiply by the recipe mxfp8 without Transformer Engine",
            optional=True,
        )
    )
    sharded = "shards linear layers with their transformer layer, as Megatron does with local ones"
    patches.append(ms.Wrap(_FSDP2, f"{_HERE}.functions:shard_linear_layers_with_theirs", sharded, phase="build", optional=True))
    return patches


_HERE: Final = "mindspeed.features.transformer_engine_layers"
_FSDP2: Final = "megatron.core.distributed.torch_fully_sharded_data_parallel:TorchFullyShardedDataParallel.__init__"
_REMOVE: Final = ms.Fix.remove_feature()


class TransformerEngineLayersArgs(ms.FeatureArgs):
    replace: bool = ms.Field(
        False,
        description="Use the layers of this feature also where Transformer Engine is installed (true), or refuse such a job "
        "(false)",
    )


@ms.condition(
    "Transformer Engine is installed, so its layers are used and {feature} is not needed (with the setting replace=true, "
    "Megatron's local layers are used instead)",
    fix=(ms.Fix.give_setting("replace", True), _REMOVE),
    selects=True,
)
def no_engine_is_installed(args: TransformerEngineLayersArgs, world: ms.World) -> bool:
    """Check that no Transformer Engine is installed, unless its layers are to be replaced."""
    return args.replace or not world.is_set("engine_installed")


_ONLY_REAL: Final = {
    "low_precision_weights": "weights are stored in fp8 or fp4",
    "tensor_parallel_overlap": "tp_comm_overlap (--tensor-parallel-overlap) overlaps collectives through user buffers",
    "qk_clip": "qk_clip needs the largest attention logits",
    "meta_device": "--init-model-with-meta-device creates weights on the meta device",
    "symmetric_reduction": "--symmetric-ar-type sums over tensor-parallel ranks through symmetric memory",
    "logged_attention_logits": "log_max_attention_logit (--logged-attention-logits) needs the largest attention logits",
}
REFUSED: Final = tuple(
    ms.Condition.unset(
        field,
        f"{text}, which only Transformer Engine's original layers support, not their replacements in transformer-engine-layers",
        (ms.Fix.give_field(field, False),),
    )
    for field, text in _ONLY_REAL.items()
)
"""Options of Transformer Engine's layers that these do not have."""


@ms.condition(
    "linear layers multiply by the recipe {world.low_precision_recipe}, but {feature} supports only mxfp8. Transformer "
    "Engine's original layers support the others",
    fix=(ms.Fix.give_field("low_precision_recipe", "mxfp8"), ms.Fix.give_field("low_precision", False)),
)
def recipe_is_known(args: TransformerEngineLayersArgs, world: ms.World) -> bool:
    """Check that linear layers keep their type, or multiply in fp8 by the recipe mxfp8."""
    return world.low_precision_recipe in ("none", "mxfp8")


class TransformerEngineLayers(ms.Feature[TransformerEngineLayersArgs]):
    """Replace Transformer Engine layers by local ones.

    Megatron's default layer specs then work where Transformer Engine is not installed. Its classes are provided on top
    of Megatron's local layers, with equal class names, parameter names and checkpoints. Features for local layers work
    on them too.
    """

    spec = ms.FeatureSpec(
        name="transformer-engine-layers",
        category=ms.Category.COMPUTE,
        level=0,
        follows="transformer_engine_layers",
        constraints=(
            no_engine_is_installed,
            *REFUSED,
            recipe_is_known,
            ms.Condition.equals(
                "weight_shards",
                1,
                "weight_shards is {world.weight_shards}, so Megatron (--tensor-parallel-num-weight-shards) splits the "
                "weights of each "
                "tensor-parallel rank again; only Transformer Engine's original layers support this",
                fix=(ms.Fix.give_field("weight_shards", 1),),
            ),
        ),
        verify_with=ms.VerifyWith(
            settings={"transformer-engine-layers": {"replace": True}},
            algorithm=tuple(f"{_HERE}.{module}" for module in ("attention", "linear", "norm_linear")),
        ),
        numerics=ms.Numerics.reordered(reason="norms and attention use other kernels than Transformer Engine's"),
        own_trainer="it provides the classes that Megatron's layer specs expect of Transformer Engine",
    )

    _stand_in: Any = None
    _names: Any = None

    @ms.hookimpl
    def job_values(self) -> Mapping[str, Any]:
        return {"engine_over_local": True}

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        return [
            ms.ArgOverride(
                "transformer_impl",
                "transformer_engine",
                "makes Megatron build its layer specs for Transformer Engine, in which this feature replaces the classes of "
                "Transformer Engine by local layers",
            )
        ]

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return role_patches()

    @ms.hookimpl
    def notes(self) -> Iterable[str]:
        yield "layers of Transformer Engine are replaced by Megatron's local layers under the same names"
        if self.world.is_set("low_precision"):
            yield (
                "linear layers round the operands of their products to mxfp8 and multiply them in the type of the model: the "
                "results are those of fp8, without its savings of time and memory"
            )
        yield "operators and Megatron's functions compute fused rotary embedding, token permutation and routing"

    @ms.hookimpl
    def config_ready(self, config: Any) -> None:
        from mindspeed.features.transformer_engine_layers.fused import without_kernels

        without_kernels(config)

    @ms.hookimpl
    def activated(self) -> None:
        from mindspeed.features.transformer_engine_layers.names import RoleNames
        from mindspeed.features.transformer_engine_layers.stand_in import EngineStandIn

        self._stand_in = EngineStandIn()
        self._stand_in.install()
        self._names = RoleNames(self._stand_in)
        self._names.bind()

    @ms.hookimpl
    def deactivated(self) -> None:
        if self._names is not None:
            self._names.release()
            self._stand_in.remove()
