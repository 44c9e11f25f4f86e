"""Why an operator has no variant on a platform, in one sentence each; the list and the documentation say it."""

from __future__ import annotations

from typing import Final

_EVERYWHERE: Final = {
    "ffn": "two matrix products and an activation, which torch runs with the device's own kernels",
    "lcal_coc": "the device's own matrix product and collective take nearly all of its time",
    "npu_all_to_all_all_gather_bmm": "the device's own matrix product and collectives take nearly all of its time",
    "npu_bmm_reduce_scatter_all_to_all": "the device's own matrix product and collectives take nearly all of its time",
    "npu_grouped_mat_mul_all_reduce": "the device's own matrix product and collective take nearly all of its time",
    "npu_mm_all_reduce_add_rms_norm": "the device's own matrix product and collective take nearly all of its time",
    "npu_mm_all_reduce_add_rms_norm_": "it is npu_mm_all_reduce_add_rms_norm, written into its argument",
}
_BY_PLATFORM: Final[dict[tuple[str, str], str]] = {}

NOT_YET: Final = "nobody has written one yet"


def reason(op: str, platform: str) -> str:
    """The reason for an operator that runs its reference on a platform."""
    return _BY_PLATFORM.get((op, platform)) or _EVERYWHERE.get(op) or NOT_YET
