"""Glue as features write it: it imports what it patches."""

from megatron.core.state import get_size
from megatron.core.transformer.attention import Attention


class RingAttention(Attention):
    def forward(self, x):
        return ("ring", *super().forward(x))


class Helper(Attention):
    """Another subclass in the glue, which follows the patch."""


def size_plus_one():
    return get_size() + 1
