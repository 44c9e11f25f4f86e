"""The dispatcher with the setting of the active feature."""

from __future__ import annotations

from typing import Any

from mindspeed import plugins as ms
from mindspeed.moe.dispatchers import AllToAllDispatch


class Dispatch(AllToAllDispatch):
    """Stands before ``MoEAlltoAllTokenDispatcher``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.once_per_rank = ms.active_feature("moe-alltoall-dispatcher").args.once_per_rank
