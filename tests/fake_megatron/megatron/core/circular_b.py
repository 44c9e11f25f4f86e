from megatron.core.circular_a import early  # noqa: F401
