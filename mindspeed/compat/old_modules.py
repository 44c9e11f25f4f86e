"""Import names of MindSpeed that have no counterpart here, and what does their work instead."""

from __future__ import annotations

from typing import Final

from mindspeed.files.tables import table_beside

OLD_MODULES: Final[dict[str, list[str] | str]] = table_beside(__file__)
"""Old modules by prefix, of which the longest counts: the features that do its work, or a sentence."""


def replacement(prefix: str) -> str:
    """Describe the replacement of an old module of the table."""
    features = OLD_MODULES[prefix]
    if isinstance(features, str):
        return features
    if len(features) == 1:
        return f"use --features {features[0]} instead"
    return f"use the features {', '.join(features[:-1])} and {features[-1]} instead"
