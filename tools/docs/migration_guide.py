"""The tables of docs/moving-from-mindspeed.md, from the code: ``python -m tools.docs.migration_guide PAGE`` fills a page in."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mindspeed.legacy.flags import OLD_FLAGS
from mindspeed.legacy.imports import OLD_MODULES, replacement
from mindspeed.plugins.discovery import Catalog


def flag_rows(catalog: Catalog) -> list[str]:
    """One row per old flag: the flag, the feature, what to write now."""
    rows = ["| old flag | feature | write instead |", "| --- | --- | --- |"]
    for old in OLD_FLAGS:
        values = {feature: [value for value, name in old.choices.items() if name == feature] for feature in old.features}
        for feature in old.features:
            value = "" if not old.choices or old.chooser else f" {' or '.join(values[feature])}"
            if old.chooser:
                value = f" with {old.chooser} {values[feature][0]}"
            spelling = f"`{old.new_spelling(feature, True if old.takes == 'nothing' else 'VALUE')}`"
            there = spelling if feature in catalog.usable else "not there yet"
            there = f"not needed: {old.noop_reason}" if old.noop_reason else there
            rows.append(f"| `{old.flag}{value}` | {feature} | {there} |")
    return rows


def module_rows() -> list[str]:
    """One row per old import name that does not exist: the name, and what takes its place."""
    rows = ["| old import name | what takes its place |", "| --- | --- |"]
    operators = "mindspeed.ops."  # which of them exist is a page of its own
    return rows + [f"| `{name}` | {replacement(name)} |" for name in sorted(OLD_MODULES) if not name.startswith(operators)]


def filled(page: str, catalog: Catalog) -> str:
    """A page with its marked tables made anew."""
    for mark, rows in (("flags", flag_rows(catalog)), ("imports", module_rows())):
        table = "\n".join(rows)
        page = re.sub(rf"(<!-- {mark} -->\n).*?(<!-- end of {mark} -->)", rf"\g<1>{table}\n\g<2>", page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    from mindspeed.registry import catalog

    file = Path(sys.argv[1])
    file.write_text(filled(file.read_text(encoding="utf-8"), catalog()), encoding="utf-8")
