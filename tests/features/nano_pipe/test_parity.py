"""nano-pipe against Megatron's own schedules in the same layout: equal bits."""

from typing import Any

from tests.features.parity import BUCKETS, FULL, Given, given, trains

FREED = {"recompute": {"granularity": "selective"}, "pipeline-parallel": {"free_outputs": True}}
SWAPPED = {"nano-pipe": {"lag": 3, "swap": True}, "device-emulation": {"poison": True}}


def both(case: str, *also: str, settings: Any = None, nproc: int = 2, **world: Any) -> dict[str, Given]:
    """The case with one and with two chunks on each of two stages."""
    pipelines = {1: "pipeline-parallel", 2: "virtual-pipeline"}
    return {
        f"{case}, {vpp} chunks": given(also=[pipeline, *also], settings=settings, nproc=nproc, pp=2, vpp=vpp, **world)
        for vpp, pipeline in pipelines.items()
    }


test_weight_gradients_behind_are_megatrons = trains(
    "nano-pipe",
    both("batch 2", micro_batch_size=1, global_batch_size=2)
    | both("batch 4", micro_batch_size=1, global_batch_size=4)
    | both("batch 8", micro_batch_size=1, global_batch_size=8)
    | both("matmul-add in bf16", "matmul-add", dtype="bf16")
    | both("lag", "matmul-add", settings={"nano-pipe": {"lag": 2, "output_layer": True}})
    | both("experts", "moe-token-permute")
    | both("swapped", settings=SWAPPED, global_batch_size=16)
    | both("recompute", "recompute", settings=FULL)
    | both("recompute of attention, freed outputs", "recompute", settings=FREED)
    | both("sequence parallel", "sequence-parallel", nproc=4, tp=2)
    | both("tensor parallel", "tensor-parallel", nproc=4, tp=2)
    | both("ring", "ring-attention", nproc=4, cp=2)
    | both("buckets", *BUCKETS, nproc=4),
)
