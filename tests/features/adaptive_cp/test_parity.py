"""Adaptive context parallelism against Megatron in one process with the same mask."""

from typing import Any

from tests.features.parity import BUCKETS, FULL, TENSOR, Given, cp, given, trains

MASKS: dict[str, dict[str, Any]] = {
    "window": {"kind": "sliding-window", "width": 3},
    "prefix": {"kind": "prefix", "prefix": 7},
    "interleaved": {"kind": "interleaved"},
}
DYNAMIC = cp(2, **{"adaptive-cp": {"dynamic_mask": True}})
SETTINGS: tuple[dict[str, Any], ...] = ({}, {"only_reschedule": True}, {"without_coarse": True}, {"coarse": 4})
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "tensor ranks": (TENSOR, {"tensor-parallel": {"size": 2}}),
    "stages": (("pipeline-parallel",), {"pipeline-parallel": {"size": 2}}),
    "buckets": (BUCKETS, {}),
    "recompute": (("recompute",), FULL),
}


def masked(*features: str, mask: str = "interleaved", size: int = 2, more: Any = None, **case: Any) -> Given:
    """Both runs have the mask: that it is stock Megatron with that mask, to the bit, is its own test."""
    settings = cp(size, **{"shared-attention-mask": MASKS[mask], **(more or {})})
    return given(*features, also=["shared-attention-mask"], settings=settings, **case)


test_training_is_that_of_one_process = trains(
    "adaptive-cp",
    {
        "causal": given(settings=cp(2)),
        "planned with each batch": given(settings=DYNAMIC),
        "rotary positions": masked("rms-norm", normalization="RMSNorm", num_query_groups=2),
        "uneven shares": masked(size=3, nproc=3, seq_length=27),
        "bf16": masked(dtype="bf16"),
    }
    | {f"mask {mask}": masked(mask=mask) for mask in MASKS}
    | {f"settings {chosen}": masked(more={"adaptive-cp": chosen}) for chosen in SETTINGS}
    | {
        f"{mask} on four ranks, {degree} trade heads": masked(
            mask=mask, size=4, more={"adaptive-cp": {"ulysses_degree": degree}}
        )
        for mask in MASKS
        for degree in (1, 2)
    }
    | {f"beside {name}": masked(*features, more=settings) for name, (features, settings) in LAYOUTS.items()}
    | {f"dynamic, {name}": given(*names, settings=DYNAMIC | settings) for name, (names, settings) in LAYOUTS.items()},
)
