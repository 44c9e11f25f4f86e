"""The distributed optimizer against one process."""

from tests.features.parity import TENSOR, given, trains

test_a_sharded_step_updates_as_a_whole_one = trains(
    "distributed-optimizer",
    {
        "two": given(nproc=2),
        "four": given(nproc=4),
        "bf16": given(dtype="bf16"),
        "within a tensor rank": given(*TENSOR, nproc=4),
    },
)
