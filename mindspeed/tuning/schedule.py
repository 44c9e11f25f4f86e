"""How long a pipeline takes in units of one micro-batch on one stage."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def rounds(stages: Any, chunks: Any, micro_batches: Any) -> NDArray[np.float64]:
    """Return micro-batches and bubble of 1F1B, or with several chunks of its interleaved form, for equal stages.

    The bubble is ``stages - 1`` micro-batches, and ``chunks`` times shorter when a rank works on its chunks in turn.
    """
    return np.asarray(micro_batches + (stages - 1) / chunks, dtype=np.float64)
