"""Dispatch by all-gather whose experts wait for their rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mindspeed.moe.dispatchers import AllGatherDispatch


class OverlappedAllGather(AllGatherDispatch):
    """Dispatch by all-gather with the weights of experts between post and wait."""

    def dispatch_postprocess(self: Any, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Any, Tensor]:
        """Give the experts the call in the place of counts: they wait for their rows themselves."""
        posted, self.experts_call = self.experts_call, None
        return tokens, posted, probs
