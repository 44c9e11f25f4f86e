"""The layer in chunks against the same layer in one piece, with equal groups on both sides."""

from typing import Any

from tests.features.parity import BUCKETS, DTYPES, FULL, TENSOR, Given, given, trains


def split(*features: str, also: tuple[str, ...] = (), parts: int = 2, nproc: int = 2, more: Any = None, **world: Any) -> Given:
    """Chunks of the layer of DeepSpeed on two ranks of experts."""
    settings = {"ampipe": {"parts": parts}, "deepspeed-moe": {"groups": 4}, **(more or {})}
    return given("expert-parallel", *features, also=also, settings=settings, nproc=nproc, ep=2, **world)


def shared(overlap: bool) -> dict[str, dict[str, Any]]:
    return {"ampipe": {"parts": 2, "overlap": overlap}, "expert-parallel": {"expert_tensor_size": 2}}


def routed(*features: str, parts: int | None = None, count: int = 0, **world: Any) -> Given:
    """Chunks of layers of Megatron's router."""
    settings = {"ampipe": {"parts": parts}} if parts else {}
    return given("moe-alltoall-overlap", *features, settings=settings | shared_experts(count), nproc=2, ep=2, **world)


def shared_experts(count: int) -> dict[str, dict[str, Any]]:
    return {"moe-shared-experts": {"count": count}} if count else {}


test_chunks_are_the_layer = trains(
    "ampipe",
    {f"{parts} parts, {dtype}": split(parts=parts, dtype=dtype) for parts in (2, 4) for dtype in DTYPES}
    | {
        "slices of the rows of tensor ranks": split(*TENSOR, more={"expert-parallel": {"expert_tensor_size": 1}}, tp=2),
        "tensor ranks that share experts": split(*TENSOR, more=shared(False), nproc=4, tp=2),
        "tensor ranks that share experts, overlap": split(*TENSOR, more=shared(True), nproc=4, tp=2),
        "attention with scores": split("flash-attention"),
        "tables by index": split(also=("deepspeed-moe-rearrange",)),
        "tables that drop nothing": split(also=("deepspeed-moe-dropless",)),
        "buckets": split(*BUCKETS, nproc=4),
        "recomputed layers": split("recompute", more=FULL),
        "stages": split("pipeline-parallel", nproc=4, pp=2, vpp=1),
        "chunks of stages": split("pipeline-parallel", "virtual-pipeline", nproc=4, pp=2, vpp=2),
        "Megatron's router": routed(),
        "Megatron's router, shared experts": routed("moe-shared-experts", count=1),
    }
    | {f"Megatron's router in bf16, {parts} parts": routed(parts=parts, dtype="bf16") for parts in (2, 4)},
)
