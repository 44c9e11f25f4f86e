"""The dispatcher with the setting of the active feature."""

from __future__ import annotations

from typing import Any

from mindspeed.moe.dispatchers import OverlappedAllToAll
from mindspeed.plugins import active_feature


class OverlappedDispatch(OverlappedAllToAll):
    """Stands before ``MoEAlltoAllTokenDispatcher``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parts = active_feature("moe-alltoall-overlap").args.parts
