"""Stands for parallel_state: functions that many modules import, and a flag."""

import functools

HAVE_FAST = False
LIMIT = 1

_size = 1


def get_size():
    return _size


def scale(value, factor=2, *, offset=0):
    return value * factor + offset


def initialize(size=1):
    global _size
    _size = size


@functools.lru_cache
def table(n):
    return get_size() * n


try:
    import no_such_accelerator

    def fused(x):
        return no_such_accelerator.fused(x)

except ImportError:

    def fused(x):
        return x


if HAVE_FAST:

    def only_when_fast():
        return "fast"
