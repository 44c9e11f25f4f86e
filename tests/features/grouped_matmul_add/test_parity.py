"""Grouped experts against Megatron's single experts with the same weights: its grouped ones need a CUDA package."""

from tests.features.parity import DTYPES, TENSOR, given, trains

test_grouped_experts_train_as_single_ones = trains(
    "grouped-matmul-add",
    {dtype: given(dtype=dtype) for dtype in DTYPES}
    | {f"spread, {dtype}": given("expert-parallel", nproc=2, dtype=dtype) for dtype in DTYPES}
    | {f"split by tensor ranks, {dtype}": given(also=TENSOR, nproc=2, dtype=dtype) for dtype in DTYPES}
    | {
        "experts with weights of their own": given("transformer-engine-layers"),
        "hooks of buckets": given("matmul-add", "async-ddp", "distributed-optimizer", nproc=2),
        "all operators of experts": given(
            "matmul-add",
            "moe-token-permute",
            "expert-parallel",
            settings={"expert-parallel": {"dispatcher": "allgather"}},
            nproc=2,
        ),
    },
)
