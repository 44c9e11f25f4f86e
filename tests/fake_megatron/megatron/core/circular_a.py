"""Imports in the middle of itself."""


def early():
    return "early"


from megatron.core import circular_b  # noqa: E402
from megatron.core.circular_c import third  # noqa: E402, F401


def both():
    return early(), circular_b.early()
