"""Fused linear layers against one process."""

from tests.features.parity import DTYPES, LLAMA, given, trains

test_training_is_that_of_one_process = trains(
    "mc2",
    {dtype: given(dtype=dtype, **LLAMA) for dtype in DTYPES}
    | {
        "pipeline": given("pipeline-parallel", tp=2, pp=2),
        "matmul-add": given("matmul-add", tp=2),
        "buckets": given("distributed-optimizer", "async-ddp", tp=2, world_size=4),
    },
)
