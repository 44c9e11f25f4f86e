"""The policy for losses that are not finite and for loss spikes: which steps change no weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Literal

import torch

from mindspeed.workbench.training.batches import largest, over_ranks
from mindspeed.workbench.training.config import TrainConfig

_WINDOW: Final = 100
"""Steps whose mean loss a spike is compared with."""
_FEWEST: Final = 10
"""Steps before which no loss is a spike."""
LIMIT: Final = 10
"""Rejected steps without a usable one beyond them after which the run ends."""

Action = Literal["skip", "rollback"]


class LossGuard:
    """Judge each step before the optimizer uses its gradients; equal on every rank.

    ``scales_loss`` is true for fp16, where infinite gradients are normal: the optimizer skips these steps and lowers the scale.
    """

    def __init__(self, config: TrainConfig, scales_loss: bool) -> None:
        self._config, self._scales_loss = config, scales_loss
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._last_rejected = 0
        self.rejected = 0

    @property
    def is_active(self) -> bool:
        """Return whether the policy rejects any step."""
        return self._config.on_nan != "stop" or self._config.on_spike != "off"

    def judge(self, step: int, local_loss: torch.Tensor | None, chunks: Sequence[Any]) -> Action | None:
        """Return what becomes of a step, None for a usable one; collective."""
        loss = over_ranks(local_loss)
        (worst,) = largest(0.0 if self._scales_loss else float(not _is_finite(chunks)))
        action = self._action(loss, is_finite=math.isfinite(loss) and worst == 0)
        if action is not None:
            self.rejected, self._last_rejected = self.rejected + 1, max(step, self._last_rejected)
            return action
        self._losses.append(loss)
        if step > self._last_rejected:
            self.rejected = 0
        return None

    def _action(self, loss: float, is_finite: bool) -> Action | None:
        if not is_finite:
            return None if self._config.on_nan == "stop" else self._config.on_nan
        if self._config.on_spike == "off" or len(self._losses) < _FEWEST:
            return None
        mean = sum(self._losses) / len(self._losses)
        return self._config.on_spike if loss > self._config.spike_factor * mean else None


def _is_finite(chunks: Sequence[Any]) -> bool:
    """Return whether all gradients of this rank are finite."""
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    largest_gradients = [torch.linalg.vector_norm(buffer.grad_data, math.inf, dtype=torch.float32) for buffer in buffers]
    return bool(torch.isfinite(torch.stack(largest_gradients)).all()) if largest_gradients else True
