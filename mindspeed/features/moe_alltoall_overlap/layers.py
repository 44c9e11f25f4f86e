"""The dispatcher with the setting of the active feature, and the models with shared experts."""

from __future__ import annotations

from typing import Any

from mindspeed.moe.dispatchers import OverlappedAllToAll
from mindspeed.plugins import active_feature


class OverlappedDispatch(OverlappedAllToAll):
    """Stands before ``MoEAlltoAllTokenDispatcher``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parts = active_feature("moe-alltoall-overlap").args.parts


def has_shared_experts(config: Any) -> bool:
    """Tell whether a configuration has shared experts."""
    return bool(config.num_moe_experts) and bool(config.moe_shared_expert_intermediate_size)
