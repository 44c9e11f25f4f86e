"""The rotary operator against Megatron's rotary embedding."""

from tests.features.parity import DTYPES, FULL, given, trains

test_the_operator_trains_as_megatron = trains(
    "rotary-embedding",
    {dtype: given(dtype=dtype) for dtype in DTYPES}
    | {f"tensor ranks, {dtype}": given("tensor-parallel", dtype=dtype) for dtype in DTYPES}
    | {"called again in recompute": given("recompute", settings=FULL)},
)
