"""The dispatcher with the setting of the active feature."""

from __future__ import annotations

from typing import Any

from mindspeed.moe.dispatchers import AllToAllDispatch
from mindspeed.plugins import active_feature


class Dispatch(AllToAllDispatch):
    """Stands before ``MoEAlltoAllTokenDispatcher``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.once_per_rank = active_feature("moe-alltoall-dispatcher").args.once_per_rank
