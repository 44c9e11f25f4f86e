"""Operators on Ascend NPU: `KERNELS` of each file maps schema names to kernels that call operators of torch_npu 2.13.

They are reached as ``torch.ops.npu.<name>``, which exists once torch_npu is imported: without an NPU tensor nothing here
runs. What an operator of torch_npu does not take, by its documentation, runs the reference.
"""

from __future__ import annotations

from typing import Final

import torch

HALVES: Final = (torch.float16, torch.bfloat16)
"""The types that operators for training in mixed precision and those that communicate take."""
TYPES: Final = (*HALVES, torch.float32)
"""The types that most operators of torch_npu take."""
RANKS: Final = (2, 4, 8, 16)
"""Sizes of a group that products fused with a collective take."""
_LAST: Final = 65536


def narrow(*sizes: int) -> bool:
    """Return whether sizes are below the limit of torch_npu's matrix products for a last dimension, transposed or not."""
    return max(sizes) < _LAST
