"""The interleaved schedule: several model chunks per stage."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed import plugins as ms
from mindspeed.pipeline.conditions import has_stages, shares

_REMOVE = ms.Fix.remove_feature()


class VirtualPipelineArgs(ms.FeatureArgs):
    size: int = ms.Field(
        1,
        ge=1,
        description="Number of model chunks per pipeline rank (virtual pipeline size). More chunks = smaller bubbles, more "
        "messages. In a HybridModel, each chunk is a segment of the pattern",
    )
    overlap_p2p: bool = ms.Field(
        True,
        description="Overlap sends and receives of one micro-batch with the computation of another (Megatron's "
        "overlap_p2p_comm)",
    )


@ms.condition(
    "at least two model chunks per stage are needed, but vpp is {args.size}",
    fix=(ms.Fix.give_field("vpp", 2, or_more=True), _REMOVE),
)
def stages_have_chunks(args: VirtualPipelineArgs, world: ms.World) -> bool:
    """Check that a stage has several model chunks."""
    return args.size > 1


def _waits_for_messages(args: VirtualPipelineArgs, world: ms.World) -> bool:
    """Return whether overlap_p2p is off."""
    return not args.overlap_p2p


@ms.condition(
    "two pipeline stages can interleave chunks only with overlapped communication, but overlap_p2p is false",
    fix=(ms.Fix.give_setting("overlap_p2p", True),),
    when=_waits_for_messages,
)
def two_stages_overlap(args: VirtualPipelineArgs, world: ms.World) -> bool:
    """Check that two stages overlap communication."""
    return bool(world.pp != 2)


@ms.condition(
    "{shared} layers are not divisible by pp x vpp = {stages} x {args.size} model chunks",
    fix=(
        ms.Fix.together(
            (ms.Fix.give_field("pp"), ms.Fix.give_field("vpp", note="their product must divide {world.num_layers}"))
        ),
        ms.Fix.add_feature("noop-layers"),
    ),
    values=shares,
)
def chunks_share_layers(args: VirtualPipelineArgs, world: ms.World) -> bool:
    """Check that the chunks of a stage have equal shares of its layers, or a layout, a hybrid pattern or a feature deals."""
    layers, stages = world.equal_share
    return bool(
        world.layer_split or world.pipeline_layout or world.is_hybrid or layers % (max(1, stages) * max(1, args.size)) == 0
    )


def _has_uneven_stages(args: VirtualPipelineArgs, world: ms.World) -> bool:
    """Return whether the first or the last stage has an explicit number of layers."""
    return world.first_stage_layers > 0 or world.last_stage_layers > 0


@ms.condition(
    "first_stage_layers={world.first_stage_layers} and last_stage_layers={world.last_stage_layers} are not both multiples of "
    "vpp={args.size}, the number of model chunks per stage",
    fix=(ms.Fix.give_field("vpp", 1),),
    when=_has_uneven_stages,
)
def uneven_stages_have_whole_chunks(args: VirtualPipelineArgs, world: ms.World) -> bool:
    """Check that the chunks of the first and the last stage have equal shares of an explicit number of layers."""
    numbers = (world.first_stage_layers, world.last_stage_layers)
    return all(number % max(1, args.size) == 0 for number in numbers)


def _group(args: VirtualPipelineArgs, world: ms.World) -> Mapping[str, str]:
    """Return what micro-batches are taken in groups of."""
    group = world.micro_batch_group
    return {
        "group": f"the group size {group}, which must be at least pp={world.pp}" if group else f"{world.pp} pipeline stages"
    }


@ms.condition(
    "{world.num_micro_batches} micro-batches per step are not a multiple of {group}",
    fix=(
        ms.Fix.give_field(
            "global_batch_size",
            note="a multiple of micro batch size x dp x pp = {world.micro_batch_size} x {world.dp} x {world.pp}",
        ),
    ),
    values=_group,
)
def micro_batches_fill_stages(args: VirtualPipelineArgs, world: ms.World) -> bool:
    """Check that micro-batches come in groups of at least as many as there are stages."""
    group, count = world.micro_batch_group or world.pp, world.num_micro_batches
    return bool(world.pp <= group <= count and (count % group == 0 or (world.micro_batch_group and count % group >= world.pp)))


class VirtualPipeline(ms.Feature[VirtualPipelineArgs]):
    """Interleave model chunks for smaller bubbles.

    The idle time of the pipeline is divided by the number of model chunks per stage.
    """

    spec = ms.FeatureSpec(
        name="virtual-pipeline",
        category=ms.Category.MEGATRON,
        level=0,
        sizes={"vpp": "size"},
        constraints=(
            ms.Requires("pipeline-parallel", reason="virtual-pipeline interleaves the model chunks of pipeline stages"),
            stages_have_chunks,
            has_stages,
            two_stages_overlap,
            chunks_share_layers,
            uneven_stages_have_whole_chunks,
            micro_batches_fill_stages,
        ),
        megatron_flags=(ms.MegatronFlag("overlap_p2p_comm", "overlap_p2p"),),
        numerics=ms.Numerics.reordered(
            reason="the first and the last stage sum the gradient of tied embeddings, so the summation order differs from "
            "training in one process"
        ),
        state=ms.CheckpointState(
            "resharded", "layers are saved under their number in the whole model", settings={"overlap_p2p": "safe"}
        ),
        own_trainer="from mindspeed.parallel import Pipeline",
    )

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        overrides = [
            ms.ArgOverride(
                "virtual_pipeline_model_parallel_size",
                self.args.size,
                "virtual-pipeline.size sets the number of model chunks per stage",
            )
        ]
        if self.args.overlap_p2p:
            reason = "virtual-pipeline.overlap_p2p=true overlaps messages with computation, which needs batch_p2p_comm=False"
            overrides += [ms.ArgOverride("overlap_p2p_comm", True, reason), ms.ArgOverride("batch_p2p_comm", False, reason)]
        return overrides
