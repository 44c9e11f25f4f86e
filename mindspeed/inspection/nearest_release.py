"""Choose the recorded Megatron version that stands for one that was not recorded."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import InvalidVersion, Version


def nearest(version: str, recorded: Iterable[str]) -> str | None:
    """The recorded version that is most like ``version``: the highest that is not above it, of its own minor release if any.

    Patch releases of one minor release are alike, so 0.15.0 is read as 0.15.3 rather than as 0.14.0. None when every
    recorded version is above, or for a malformed version.
    """
    try:
        wanted = Version(version)
    except InvalidVersion:
        return None
    versions = {Version(known): known for known in recorded}
    siblings = {one for one in versions if one.release[:2] == wanted.release[:2]}
    below = [one for one in siblings or versions if one <= wanted]
    found = max(below, default=min(siblings, default=None))
    return versions[found] if found is not None else None
