"""The device interface of the CPU under one name, for `mindspeed.platforms.runtime` where no plan is active."""

from mindspeed.platforms.cpu_device import current_device, synchronize
from mindspeed.platforms.cpu_memory import empty_cache, max_memory_allocated, memory_allocated, reset_peak_memory_stats
from mindspeed.platforms.cpu_streams import Event, Stream, current_stream, stream

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "empty_cache",
    "max_memory_allocated",
    "memory_allocated",
    "reset_peak_memory_stats",
    "stream",
    "synchronize",
]
