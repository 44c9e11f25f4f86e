"""Overlapped weight gathering against one process."""

from tests.features.parity import given, trains

test_training_is_that_of_one_process = trains(
    "async-param-gather",
    {
        "both overlaps": given("async-ddp", "distributed-optimizer"),
        "bf16": given(dtype="bf16"),
        "interleaved": given("virtual-pipeline"),
    },
)
