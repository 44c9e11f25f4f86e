"""Attention and experts pipelined over chunks of the sequence."""
