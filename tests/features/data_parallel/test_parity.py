"""Data parallelism against one process with the same global batch."""

from tests.features.parity import given, trains

test_replicas_train_as_one_process = trains(
    "data-parallel", {"two": given(nproc=2), "four": given(nproc=4), "bf16": given(dtype="bf16")}
)
