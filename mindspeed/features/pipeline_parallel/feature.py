"""Stages of consecutive layers with the 1F1B schedule."""

from __future__ import annotations

from mindspeed import plugins as ms
from mindspeed.pipeline.conditions import shares
from mindspeed.plugins.shared_conditions import NO_CPU_OFFLOADING


class PipelineParallelArgs(ms.FeatureArgs):
    size: int = ms.Field(
        1,
        ge=1,
        description="Number of pipeline stages (pipeline-parallel size), each with an equal share of the layers. In a "
        "HybridModel, | in the pattern separates the stages",
    )
    free_outputs: bool = ms.Field(
        False,
        description="Free the output of a stage as soon as it is sent to the next stage, as Megatron-LM does. Saves memory",
    )


@ms.condition(
    "{shared} layers are not divisible by {stages} pipeline stages",
    fix=(ms.Fix.give_field("pp", note="a divisor of {layers}"), ms.Fix.add_feature("noop-layers")),
    values=shares,
)
def stages_share_layers(args: PipelineParallelArgs, world: ms.World) -> bool:
    """Check that stages have equal shares of the layers, or a layout, a hybrid pattern or another feature deals them out."""
    layers, stages = world.equal_share
    return bool(world.layer_split or world.pipeline_layout or world.is_hybrid or layers % max(1, stages) == 0)


def _has_uneven_stages(args: PipelineParallelArgs, world: ms.World) -> bool:
    """Return whether the first or the last stage has an explicit number of layers."""
    return world.first_stage_layers > 0 or world.last_stage_layers > 0


@ms.condition(
    "first_stage_layers={world.first_stage_layers} and last_stage_layers={world.last_stage_layers} leave {layers} layers for "
    "{stages} other pipeline stages",
    fix=(ms.Fix.together((ms.Fix.give_field("first_stage_layers", 0), ms.Fix.give_field("last_stage_layers", 0))),),
    when=_has_uneven_stages,
    values=shares,
)
def other_stages_have_layers(args: PipelineParallelArgs, world: ms.World) -> bool:
    """Check that layers remain for the stages without an explicit number of them, and none where there is no such stage."""
    layers, stages = world.equal_share
    return bool(world.layer_split or world.pipeline_layout or world.is_hybrid or (layers > 0 if stages else layers == 0))


class PipelineParallel(ms.Feature[PipelineParallelArgs]):
    """Split layers into pipeline stages (1F1B).

    Each rank holds consecutive layers. Every stage alternates between the forward pass of one micro-batch and the
    backward pass of another (schedule 1F1B).
    """

    spec = ms.FeatureSpec(
        name="pipeline-parallel",
        category=ms.Category.MEGATRON,
        level=0,
        sizes={"pp": "size"},
        constraints=(stages_share_layers, other_stages_have_layers, NO_CPU_OFFLOADING),
        numerics=ms.Numerics.reordered(
            reason="the first and the last stage sum the gradient of tied embeddings, so the summation order differs from "
            "training in one process"
        ),
        state=ms.CheckpointState("resharded", "layers are saved under their number in the whole model"),
        own_trainer="from mindspeed.parallel import Pipeline",
    )

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        overrides = [
            ms.ArgOverride("pipeline_model_parallel_size", self.args.size, "pipeline-parallel.size sets the number of stages")
        ]
        if self.args.free_outputs:
            overrides.append(
                ms.ArgOverride(
                    "deallocate_pipeline_outputs",
                    True,
                    "pipeline-parallel.free_outputs=true frees the output of a stage after it was sent",
                )
            )
        return overrides

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [
            ms.Wrap(
                "megatron.core.model_parallel_config:ModelParallelConfig.__post_init__",
                "mindspeed.features.pipeline_parallel.configuration:with_pipeline_dtype",
                reason="sets pipeline_dtype, which Megatron requires with pipeline stages, to the data type of the model",
                phase="build",
            ),
            ms.Wrap(
                "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
                "mindspeed.features.pipeline_parallel.shapes:with_checked_shapes",
                reason="checks that a stage receives a tensor of the expected shape, because gloo accepts a shorter one "
                "without an error",
                optional=True,
            ),
        ]
