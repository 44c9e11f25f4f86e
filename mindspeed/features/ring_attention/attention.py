"""Ring attention as a function of tensors and a process group, with the layouts that it takes."""

from mindspeed.context_parallel.costs import Keep
from mindspeed.context_parallel.layout import Layout, contiguous, zigzag
from mindspeed.context_parallel.ring import ring_attention

__all__ = ["Keep", "Layout", "contiguous", "ring_attention", "zigzag"]
