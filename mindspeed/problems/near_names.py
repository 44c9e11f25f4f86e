"""Names that look like one that does not exist, and the fix that offers them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def near_names(name: object, known: Iterable[str], cutoff: float = 0.5, number: int = 3) -> list[str]:
    """The known names most like ``name``, best first."""
    return get_close_matches(str(name), list(known), n=number, cutoff=cutoff)


def suggestion(near: Sequence[str], otherwise: str = "") -> str:
    """``did you mean a or b?``; without similar names the text ``otherwise``."""
    return f"did you mean {' or '.join(near)}?" if near else otherwise
