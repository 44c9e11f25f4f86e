"""Megatron-LM's own unit tests under a plan: the runner, and the outcomes that are expected."""
