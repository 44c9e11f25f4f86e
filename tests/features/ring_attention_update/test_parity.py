"""A ring that merges by the operator against the same ring in stock Megatron's place, and against one process."""

from tests.features.parity import cp, given, trains

test_a_ring_that_merges_by_the_operator_trains_as_one_process = trains(
    "ring-attention-update",
    {
        "one process": given("ring-attention", settings=cp(2)),
        "the same ring": given(also=["ring-attention"], settings=cp(2)),
    },
)
