"""Megatron-LM's own rules: its argument and configuration modules are executed in a child process, without torch."""
