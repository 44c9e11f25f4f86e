"""moe-fb-overlap against Megatron's schedules in the same layout: equal bits."""

from typing import Any

from tests.features.parity import BUCKETS, FULL, Given, given, trains

SELECTIVE = {"recompute": {"granularity": "selective"}}
MLA = {"multi_latent_attention": True}


def both(case: str, *also: str, settings: Any = None, nproc: int = 2, **world: Any) -> dict[str, Given]:
    """The case without stages, and with two chunks on each of two stages."""
    sizes = {"ep": 2, "micro_batch_size": 1, "global_batch_size": 8 * nproc // 2} | world
    alone = given(also=["expert-parallel", *also], settings=settings, nproc=nproc, **sizes)
    stages = {"pp": 2, "vpp": 2, "num_layers": 4}
    staged = given(also=["expert-parallel", "virtual-pipeline", *also], settings=settings, nproc=2 * nproc, **stages | sizes)
    return {case: alone, f"{case}, stages": staged}


test_paired_passes_are_megatrons = trains(
    "moe-fb-overlap",
    both("experts")
    | both("in bf16", dtype="bf16")
    | both("full recompute", "recompute", settings=FULL)
    | both("selective recompute", "recompute", settings=SELECTIVE)
    | both("shared experts", "moe-shared-experts", settings={"moe-shared-experts": {"count": 1}})
    | both(
        "shared experts, full recompute",
        "moe-shared-experts",
        "recompute",
        settings={"moe-shared-experts": {"count": 1}} | FULL,
    )
    | both("multi-token prediction", mtp_num_layers=1)
    | both("multi-token prediction of two depths", mtp_num_layers=2)
    | both("latent attention", **MLA)
    | both("own dispatcher", "moe-alltoall-dispatcher")
    | both("own dispatcher, full recompute", "moe-alltoall-dispatcher", "recompute", settings=FULL)
    | both("overlap within", "moe-alltoall-overlap")
    | both("zero memory", "moe-zero-memory", settings={"moe-zero-memory": {"level": "level1"}})
    | both("adaptive recompute of experts", "moe-adaptive-recompute")
    | both("norms and activations", "norm-recompute", "activation-recompute")
    | {
        "noop layers": given(
            also=["expert-parallel", "virtual-pipeline", "noop-layers"],
            settings={"noop-layers": {"layers": "auto"}},
            nproc=4,
            ep=2,
            pp=2,
            vpp=2,
            num_layers=3,
            micro_batch_size=1,
            global_batch_size=8,
        )
    }
    | both("ring", "ring-attention", nproc=4, cp=2)
    | both("tensor parallel", "sequence-parallel", nproc=4, tp=2)
    | both("whole experts on tensor ranks", "moe-tp-extend-ep", nproc=4, tp=2)
    | both("buckets", *BUCKETS, nproc=4),
)
