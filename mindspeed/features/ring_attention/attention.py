"""Ring attention as a function of tensors and a process group, with the layouts that it takes."""

from mindspeed.features._shared.context_parallel.layout import Layout, contiguous, zigzag
from mindspeed.features._shared.context_parallel.ring import Keep, ring_attention

__all__ = ["Keep", "Layout", "contiguous", "ring_attention", "zigzag"]
