"""Overlapped gradient reduction against one process."""

from tests.features.parity import given, trains

test_training_is_that_of_one_process = trains(
    "async-ddp",
    {
        "fp32": given(),
        "bf16": given(dtype="bf16"),
        "small buckets": given(settings={"async-ddp": {"bucket_size": 5000}}),
        "interleaved": given("virtual-pipeline"),
    },
)
