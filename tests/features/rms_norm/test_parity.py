"""The RMSNorm operator against Megatron's norm."""

from tests.features.parity import given, trains

test_the_operator_trains_as_the_norm_of_megatron = trains(
    "rms-norm",
    {"fp32": given(), "bf16": given(dtype="bf16"), "sums its gradient under sequence parallel": given("sequence-parallel")},
)
