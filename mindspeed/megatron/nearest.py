"""Which of the recorded Megatron versions speaks for one that was not recorded."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import InvalidVersion, Version


def at_or_below(version: str, recorded: Iterable[str]) -> str | None:
    """The highest of ``recorded`` that is not above ``version``; None when there is none, or for a malformed version."""
    try:
        wanted = Version(version)
    except InvalidVersion:
        return None
    below = [known for known in recorded if Version(known) <= wanted]
    return max(below, key=Version, default=None)
