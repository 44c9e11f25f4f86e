"""What runs where a linear layer calls the operator `lcal_coc`, as a plan says it."""

from __future__ import annotations

from typing import Final

from mindspeed.plugins import World

RANKS: Final = (2, 4, 8, 16)
INNER: Final = range(256, 65535)
"""Ranks and inner sizes of a product that torch_npu's calls take."""


def describe_fused_products(world: World) -> list[str]:
    """Say which calls of torch_npu run on an NPU and where the reference does; elsewhere the plan has a row of its own."""
    if world.platform != "npu":
        return []
    reasons = [f"{world.tp} ranks are not 2, 4, 8 or 16"] if world.tp not in RANKS else []
    if world.knows("dtype") and world.dtype == "fp32":
        reasons.append("fp32 is neither bf16 nor fp16")
    if reasons:
        return [f"the reference of lcal_coc runs, because {' and '.join(reasons)}"]
    notes = ["lcal_coc runs npu_all_gather_base_mm and npu_mm_reduce_scatter_base"]
    if world.knows("hidden_size") and world.knows("ffn_hidden_size"):
        h, ffn = world.hidden_size, world.ffn_hidden_size
        sizes = {"hidden size": h, "attention of a rank": h // world.tp, "MLP of a rank": ffn // world.tp}
        notes += [
            f"the reference of lcal_coc runs where the inner size of a product is the {what}: {size} is outside of 256 to 65534"
            for what, size in sizes.items()
            if size not in INNER
        ]
    return notes
