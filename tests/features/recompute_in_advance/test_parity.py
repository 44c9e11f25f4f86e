"""Recomputation ahead of the gradient against Megatron without it: equal bits."""

from tests.features.parity import given, trains

PIPELINES = {1: "pipeline-parallel", 2: "virtual-pipeline"}
GRANULARITIES = {kind: {"recompute-in-advance": {"granularity": kind}} for kind in ("full", "selective")}
test_layers_and_modules_recomputed_ahead_are_megatrons = trains(
    "recompute-in-advance",
    {
        f"{kind}, {vpp} chunks": given(also=[pipeline], settings=settings, nproc=2, pp=2, vpp=vpp)
        for kind, settings in GRANULARITIES.items()
        for vpp, pipeline in PIPELINES.items()
    }
    | {
        "sequence parallel": given(also=["pipeline-parallel", "sequence-parallel"], nproc=4, pp=2, tp=2, num_layers=8),
        "four stages": given(also=["pipeline-parallel"], nproc=4, pp=4, num_layers=8),
        "nano-pipe, sharded optimizer": given(
            also=["pipeline-parallel", "nano-pipe", "distributed-optimizer"], nproc=4, pp=2, num_layers=8
        ),
    },
)
