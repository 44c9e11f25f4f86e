"""Rows by index against products with masks, and against the formula of the layer."""

from tests.features.parity import DTYPES, TENSOR, given, trains

test_rows_by_index_are_rows_by_masks = trains(
    "deepspeed-moe-rearrange",
    {f"formula, {dtype}": given("expert-parallel", nproc=2, ep=2, dtype=dtype) for dtype in DTYPES}
    | {f"masks, {dtype}": given("expert-parallel", also=["deepspeed-moe"], nproc=2, ep=2, dtype=dtype) for dtype in DTYPES}
    | {
        "tensor ranks": given(
            "expert-parallel",
            *TENSOR,
            settings={"deepspeed-moe": {"groups": 4}, "expert-parallel": {"expert_tensor_size": 2}},
            nproc=4,
            ep=2,
            tp=2,
        )
    },
)
