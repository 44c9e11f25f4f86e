"""The bias in the operator and across ranks, against Megatron's own core attention with the bias added to its scores."""

from typing import Any

from tests.features.parity import DTYPES, FULL, RINGS, Given, cp, given, trains

HEADS = {"num_attention_heads": 12, "num_query_groups": 4, "hidden_size": 48}
LAYOUTS = ("tensor-parallel", "pipeline-parallel", "recompute", "eod-reset", "bf16")


def shared(algorithm: str, other: str) -> Given:
    """A share of the sequence beside another layout."""
    features = () if other == "bf16" else (other,)
    world: dict[str, Any] = HEADS | ({"dtype": "bf16"} if other == "bf16" else {})
    return given(algorithm, *features, settings=cp(2, **(FULL if other == "recompute" else {})), **world)


test_training_is_that_of_megatrons_scores = trains(
    "alibi",
    {dtype: given(dtype=dtype) for dtype in DTYPES}
    | {
        "a matrix": given(settings={"alibi": {"fused_type": 0}}),
        "the root": given(settings={"alibi": {"fused_type": 3}}),
        "square, filled": given(settings={"alibi": {"square": True, "fill": True}}),
        "shared key heads": given(num_query_groups=2),
        "six heads": given(num_attention_heads=6, num_query_groups=3, hidden_size=48),
        "documents": given("eod-reset", micro_batch_size=2),
        "pipeline": given("pipeline-parallel"),
        "recomputed": given("recompute", settings=FULL),
        "slopes of the heads of tensor ranks": given(
            "tensor-parallel", "sequence-parallel", num_attention_heads=6, num_query_groups=2, hidden_size=48
        ),
        "hybrid, four ranks": given("hybrid-attention", settings=cp(4, **{"hybrid-attention": {"ulysses_degree": 2}})),
    }
    | {f"{name}, {size} ranks": given(name, settings=cp(size)) for name in RINGS for size in (2, 4)}
    | {f"{name}, {other}": shared(name, other) for name in RINGS for other in LAYOUTS},
)
