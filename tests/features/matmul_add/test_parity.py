"""Gradient accumulation fusion against Megatron's own gradients, in one buffer and in reduced buckets."""

from tests.features.parity import DTYPES, given, trains

test_gradients_added_by_the_product_are_megatrons = trains(
    "matmul-add",
    {dtype: given(dtype=dtype) for dtype in DTYPES}
    | {f"tensor ranks, {dtype}": given(also=["tensor-parallel"], nproc=2, dtype=dtype) for dtype in DTYPES}
    | {
        "sequence parallel": given("sequence-parallel", nproc=2),
        "hooks of buckets": given("async-ddp", nproc=2),
        "hooks of buckets, sharded": given("async-ddp", "distributed-optimizer", nproc=2),
        "experts": given("expert-parallel", nproc=2),
        "stages of tensor ranks": given("pipeline-parallel", nproc=4, pp=2, tp=2),
    },
)
