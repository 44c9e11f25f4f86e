"""The least memory of a job, whatever leaves. Light."""

from __future__ import annotations

from typing import Any, Final

from mindspeed import plugins as ms
from mindspeed.memory.feature import ACTIVATIONS, ATTENTION, NORMS
from mindspeed.plugins.saved_tensors import SavedTensors, in_backward, leave

MIB: Final = 2**20
NAME: Final = "adaptive-recompute"
SWAPPED: Final = ("core_attention", "linear_proj")
"""Parts of attention that may be on the host. The input of linear_qkv is the output of a norm, which is recomputed."""


@ms.condition(
    "budget_mb is not set, but {feature} needs the maximum device memory of a rank",
    fix=(
        ms.Fix.give_setting("budget_mb", note="MiB of device memory for training, weights and optimizer included"),
        ms.Fix.remove_feature(),
    ),
)
def budget_is_given(args: Any, world: ms.World) -> bool:
    """Check that a budget is given."""
    return args.budget_mb is not None


def least_saved(swap: bool, fused_norms: bool, tensors: SavedTensors) -> SavedTensors:
    """Return what is kept where every part leaves, as in the profiling steps; the run fills what a budget has above that.

    Norms that are fused into linear layers stay.
    """
    if swap:
        names = [tensor for module in SWAPPED for tensor in ATTENTION[module]]
        tensors = in_backward(leave(tensors, names, "swapped", NAME, spare=1), NAME)
    activations = [tensor for tensors in ACTIVATIONS.values() for tensor in tensors]
    recomputed = activations if fused_norms else (*NORMS, *activations)
    return leave(tensors, recomputed, "recomputed", NAME)
