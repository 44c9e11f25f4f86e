"""Files of Megatron's indexed data, by the prefix that they share."""

from __future__ import annotations

from pathlib import Path


def bin_path(prefix: str) -> Path:
    """Return the file with the tokens."""
    return Path(prefix + ".bin")


def idx_path(prefix: str) -> Path:
    """Return the file with the index."""
    return Path(prefix + ".idx")
