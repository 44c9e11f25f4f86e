"""Conditions and patches of the V placement of pipeline stages. Light."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from mindspeed import plugins as ms

_HERE: Final = "mindspeed.pipeline.v_placement"
BY_CHUNK: Final = ">=0.14,<0.19"
"""Releases of Megatron that ask for stages where the wraps of a V answer: by chunk, and no loss by stage."""
_UNEVEN: Final = {
    "first_stage_layers": "gives the first stage {} layers",
    "last_stage_layers": "gives the last stage {} layers",
    "embedding_is_layer": "counts the embedding as a layer",
    "loss_is_layer": "counts the output layer as a layer",
}


def _uneven(args: Any, world: ms.World) -> Mapping[str, str]:
    """Return what makes stages unequal."""
    texts = [text.format(getattr(world, field)) for field, text in _UNEVEN.items() if world.is_set(field)]
    return {"uneven": " and ".join(texts)}


def v_conditions(who: str, without: ms.Fix, when: Callable[[Any, ms.World], bool] | None = None) -> tuple[ms.Condition, ...]:
    """Return the conditions of a V: ``who`` needs them, ``without`` is the fix that does without it."""

    @ms.condition(
        f"{who} needs the same number of layers in every stage or a layout of the stages, but the job {{uneven}}",
        fix=(without, *map(ms.Fix.drop_field, _UNEVEN)),
        when=when,
        values=_uneven,
    )
    def stages_are_equal(args: Any, world: ms.World) -> bool:
        """Check that stages have equal numbers of layers."""
        return world.is_hybrid or not any(world.is_set(field) for field in _UNEVEN)

    @ms.condition(
        f"{who} does not support a HybridModel, whose layers Megatron assigns to ranks by the pattern",
        fix=(without,),
        when=when,
    )
    def model_is_no_hybrid(args: Any, world: ms.World) -> bool:
        """Check that the model is no HybridModel."""
        return not world.is_hybrid

    @ms.condition(f"{who} supports Megatron 0.14 to 0.18, but the version is {{world.megatron}}", fix=(without,), when=when)
    def megatron_asks_by_chunk(args: Any, world: ms.World) -> bool:
        """Check that this release of Megatron finds the stages of a V."""
        from packaging.specifiers import SpecifierSet

        return SpecifierSet(BY_CHUNK).contains(world.megatron, prereleases=True)

    return (
        ms.Condition.equals(
            "vpp",
            2,
            f"{who} needs two model chunks on each rank, but vpp is {{world.vpp}}",
            fix=(ms.Fix.give_field("vpp", 2), without),
            when=when,
        ),
        stages_are_equal,
        ms.Condition.unset(
            "mtp_standalone",
            f"{who} needs multi-token prediction in the stage of the output layer, but the layout has it in an earlier one",
            fix=(ms.Fix.advise("let pipeline_model_parallel_layout end with mL, such as Et|tt|tt|mL"), without),
            when=when,
        ),
        model_is_no_hybrid,
        megatron_asks_by_chunk,
    )


V_PLACEMENT: Final[tuple[ms.Patch, ...]] = (
    ms.Mixin(
        "megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout",
        f"{_HERE}:LayoutOfV",
        reason="places the stages of a layout as a V",
        phase="build",
        optional=True,
    ),
    ms.Wrap(
        "megatron.core.models.common.language_module.language_module:LanguageModule.setup_embeddings_and_output_layer",
        f"{_HERE}:with_shared_weight_on_one_rank",
        reason="copies a weight that the embedding shares from the first to the second chunk of rank 0, which has the "
        "output layer and multi-token prediction",
        phase="build",
        optional=True,
    ),
    ms.Wrap(
        "megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads",
        f"{_HERE}:with_gradients_of_one_rank",
        reason="sums the gradients of that weight over the two chunks of rank 0",
        optional=True,
    ),
    ms.Wrap(
        "megatron.core.transformer.transformer_layer:get_transformer_layer_offset",
        f"{_HERE}:with_v_offset",
        reason="gives the second chunk of rank r the layers of stage r counted from the end",
        phase="build",
    ),
    ms.Wrap(
        "megatron.core.parallel_state:is_pipeline_last_stage",
        f"{_HERE}:with_v_last_stage",
        reason="the last stage is chunk 1 of rank 0",
        phase="build",
        optional=True,
    ),
    ms.Wrap(
        "megatron.core.pipeline_parallel.utils:is_pp_last_stage",
        f"{_HERE}:with_v_last_rank",
        reason="the last stage is on rank 0, where Megatron looks for its chunk separately",
        phase="build",
        optional=True,
    ),
    *(
        ms.Wrap(
            f"{module}:get_batch_on_this_tp_rank",
            f"{_HERE}:with_whole_batch",
            reason="the ranks of the first stage also hold the last stage and need labels",
            when=ms.When(megatron=versions),
            optional=True,
        )
        for module, versions in (("megatron.training.utils", "<0.18"), ("megatron.core.utils", ">=0.18"))
    ),
)
"""The patches of stages that are placed as a V."""
