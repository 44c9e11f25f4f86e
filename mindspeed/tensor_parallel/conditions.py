"""Conditions of features that exchange the linear layers of tensor parallelism. Light."""

from __future__ import annotations

from typing import Final

from mindspeed import plugins as ms
from mindspeed.plugins.shared_conditions import NO_LOW_PRECISION, NO_TRANSFORMER_ENGINE_LAYERS

LINEAR_LAYERS: Final = (
    ms.Condition.at_least(
        "tp", 2, "tp is {world.tp}, so linear layers are not split over ranks and exchange no data", otherwise="idle"
    ),
    NO_TRANSFORMER_ENGINE_LAYERS,
    NO_LOW_PRECISION,
    ms.Condition.unset(
        "tensor_parallel_overlap",
        "tp_comm_overlap works only in Transformer Engine's layers, but {feature} works only in Megatron's local layers, so "
        "tp_comm_overlap would have no effect",
    ),
    ms.ModelCondition(
        "mindspeed.tensor_parallel.layers:missing_linear_layers",
        "the layers use Megatron's ColumnParallelLinear and RowParallelLinear",
        subject="spec",
        fix=(ms.Fix.give_field("transformer_engine_layers", False), ms.Fix.remove_feature()),
    ),
)
"""Conditions of features that replace linear layers."""


RANKS: Final = (2, 4, 8, 16)
INNER: Final = range(256, 65535)
"""Ranks and inner sizes of a product that torch_npu's calls take."""


def describe_fused_products(world: ms.World) -> list[str]:
    """Return notes on which calls of torch_npu run on an NPU and where the reference does; other platforms have another row."""
    if world.platform != "npu":
        return []
    reasons = [f"tp={world.tp} is not 2, 4, 8 or 16"] if world.tp not in RANKS else []
    if world.knows("dtype") and world.dtype == "fp32":
        reasons.append("the dtype is fp32, not bf16 or fp16")
    if reasons:
        return [f"lcal_coc is replaced by its plain-torch reference, because {' and '.join(reasons)}"]
    notes = ["lcal_coc uses the kernels npu_all_gather_base_mm and npu_mm_reduce_scatter_base"]
    if world.knows("hidden_size") and world.knows("ffn_hidden_size"):
        h, ffn = world.hidden_size, world.ffn_hidden_size
        sizes = {"hidden size": h, "attention of a rank": h // world.tp, "MLP of a rank": ffn // world.tp}
        notes += [
            (
                f"lcal_coc is replaced by its plain-torch reference for this product, because the {what} {size} is outside of "
                "256 to 65534"
            )
            for what, size in sizes.items()
            if size not in INNER
        ]
    return notes
