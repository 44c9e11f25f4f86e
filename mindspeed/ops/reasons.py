"""Reasons why operators have no variant on a platform, one sentence each, for the list and the documentation."""

from __future__ import annotations

from typing import Final

_COMPOSED: Final = "it is composed of the device's own matrix products and collectives"
EVERYWHERE: Final = {
    "ffn": "it is composed of the device's own matrix products and an activation",
    "lcal_coc": _COMPOSED,
    "npu_all_to_all_all_gather_bmm": _COMPOSED,
    "npu_bmm_reduce_scatter_all_to_all": _COMPOSED,
    "npu_grouped_mat_mul_all_reduce": _COMPOSED,
    "npu_mm_all_reduce_add_rms_norm": _COMPOSED,
    "npu_mm_all_reduce_add_rms_norm_": "it is npu_mm_all_reduce_add_rms_norm, written into its argument",
}
BY_PLATFORM: Final[dict[tuple[str, str], str]] = {
    ("quant_gmm", "cuda"): "nobody has written a Triton kernel of integer products yet",
}

NOT_YET: Final = "nobody has written one yet"


def reason(op: str, platform: str) -> str:
    """The reason for an operator that runs its reference on a platform."""
    return BY_PLATFORM.get((op, platform)) or EVERYWHERE.get(op) or NOT_YET
