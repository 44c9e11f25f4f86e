"""The interleaved schedule: several model chunks per stage."""

from __future__ import annotations

from mindspeed.plugins import (
    ArgOverride,
    Category,
    Check,
    CheckpointState,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    GiveField,
    MegatronFlag,
    Numerics,
    RemoveFeature,
    Requires,
    Together,
    hookimpl,
)


class VirtualPipelineArgs(FeatureArgs):
    size: int = Field(1, ge=1, description="model chunks per stage")
    overlap_p2p: bool = Field(True, description="send and receive behind the computation of another chunk")


class VirtualPipeline(Feature[VirtualPipelineArgs]):
    """Each stage holds several chunks of layers, which divides the idle time of the pipeline by their number."""

    spec = FeatureSpec(
        name="virtual-pipeline",
        summary="Several model chunks per pipeline stage, interleaved, for a smaller pipeline bubble",
        category=Category.MEGATRON,
        level=0,
        sizes={"vpp": "size"},
        constraints=(
            Requires("pipeline-parallel", reason="it interleaves the chunks of its stages"),
            Check(
                lambda args, world: args.size > 1,
                "one model chunk per stage is the plain pipeline",
                fix=(GiveField("vpp", 2, or_more=True), RemoveFeature()),
            ),
            Check(
                lambda args, world: world.pp > 1,
                "chunks are interleaved over pipeline stages, and there is {world.pp}",
                fix=(GiveField("pp", 2, or_more=True), RemoveFeature()),
            ),
            Check(
                lambda args, world: world.pp > 2,
                "two stages cannot interleave without overlapped communication",
                fix="--set virtual-pipeline.overlap_p2p=true",
                when=lambda args, world: not args.overlap_p2p and world.pp == 2,
            ),
            Check(
                lambda args, world: bool(world.layer_split) or world.num_layers % (world.pp * args.size) == 0,
                "{world.num_layers} layers cannot be split evenly over pp x vpp = {world.pp} x {args.size} chunks",
                fix=(Together((GiveField("pp"), GiveField("vpp", note="their product divides {world.num_layers}"))),),
            ),
            Check(
                lambda args, world: world.num_micro_batches > 0 and world.num_micro_batches % world.pp == 0,
                "{world.num_micro_batches} micro-batches per step are not a multiple of {world.pp} stages",
                fix="use a --global-batch-size that is a multiple of "
                "micro batch size x dp x pp = {world.micro_batch_size} x {world.dp} x {world.pp}",
            ),
        ),
        megatron_flags=(MegatronFlag("overlap_p2p_comm", "overlap_p2p"),),
        numerics=Numerics.reordered(reason="as pipeline-parallel"),
        state=CheckpointState(
            "resharded", "layers are saved under their number in the whole model", settings={"overlap_p2p": "safe"}
        ),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        overrides = [ArgOverride("virtual_pipeline_model_parallel_size", self.args.size, "virtual-pipeline.size")]
        if self.args.overlap_p2p:
            reason = "virtual-pipeline.overlap_p2p is set"
            overrides += [ArgOverride("overlap_p2p_comm", True, reason), ArgOverride("batch_p2p_comm", False, reason)]
        return overrides
