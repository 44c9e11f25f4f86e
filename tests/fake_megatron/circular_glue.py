"""Glue that needs a name which does not exist yet while its target runs."""

from megatron.core.circular_a import both  # noqa: F401


def third_too():
    return "replaced"
