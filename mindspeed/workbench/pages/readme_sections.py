"""The README of a feature, split by its headings and bold leads."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

Section = Literal["about", "when", "usage", "how", "settings", "numerics", "measured", "limits", "flags"]
_LEADS: Final[Mapping[str, Section]] = {
    "when": "when",
    "when to use it": "when",
    "usage": "usage",
    "settings": "settings",
    "numerics": "numerics",
    "measured": "measured",
    "planned idle time": "measured",
    "timeline": "measured",
    "limits": "limits",
    "limitations": "limits",
    "checked": "limits",
    "refusals": "limits",
}
"""Section of a paragraph with this bold lead or heading; one with another lead explains how the feature works."""
_KEPT: Final = ("timeline", "checked", "planned idle time")
_LEAD: Final = re.compile(r"(?:\*\*([^*]+?)\.?\*\*|## ([^\n]+))\s*")


def sections(readme: str) -> Mapping[Section, Sequence[str]]:
    """The paragraphs of each section, without the title and the table of settings, which pages have from the declaration."""
    found: defaultdict[Section, list[str]] = defaultdict(list)
    section: Section = "about"
    for block in _blocks(readme):
        if block.startswith(("# ", "| setting ")):
            continue
        if re.match(r"Old flags?\b", block):
            section = "flags"
        elif lead := _LEAD.match(block):
            name = (lead[1] or lead[2]).lower()
            section = _LEADS.get(name, "how")
            if name in _LEADS and name not in _KEPT:
                block = block[lead.end() :]
            elif lead[2]:
                block = f"**{lead[2]}.** {block[lead.end() :]}"
        elif section == "about" and block.startswith("```"):
            found["usage"].append(block)
            continue
        if block:
            found[section].append(block)
    return found


def _blocks(text: str) -> Iterator[str]:
    """Blocks between empty lines; a fenced block is one, whatever it holds."""
    lines: list[str] = []
    fenced = False
    for line in text.strip().splitlines():
        if line.startswith("```"):
            fenced = not fenced
        if line or fenced:
            lines.append(line)
        elif lines:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)
