"""The tables and counts of README.md, from the declarations: ``python -m tools.docs.readme README.md`` fills a page in."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mindspeed import ops
from mindspeed.plugins.discovery import BUILT_IN, Catalog
from mindspeed.plugins.feature import Category
from tools.docs.markdown import table
from tools.docs.migration_guide import PUBLISHED
from tools.docs.operators import forward_only


def filled(page: str, catalog: Catalog) -> str:
    """A page with every part between ``<!-- NAME -->`` and ``<!-- end of NAME -->`` made anew."""
    parts = {"features": feature_table(catalog), "operators": operator_count(), "published commands": published_count()}
    for name, lines in parts.items():
        text = "\n".join(lines)
        page = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", rf"\g<1>{text}\n\g<2>", page, flags=re.DOTALL)
    return page


def feature_table(catalog: Catalog) -> list[str]:
    """The number of built-in features, and one row per category."""
    names = [row.name for row in catalog.usable.values() if row.distribution == BUILT_IN]
    kinds = {spec.stability.value for name, spec in catalog.specs.items() if name in names}
    head = [f"{len(names)} features, all of them *{kinds.pop()}*:" if len(kinds) == 1 else f"{len(names)} features:", ""]
    return head + table(("category", "", "features"), _rows(catalog, names))


def _rows(catalog: Catalog, names: list[str]) -> Iterator[tuple[str, str, str]]:
    for category in Category:
        members = [name for name in names if catalog.specs[name].category is category]
        if members:
            yield category.value, str(len(members)), ", ".join(f"[{name}](docs/features/{name}.md)" for name in members)


def operator_count() -> list[str]:
    """The number of operators, and of those without a gradient."""
    without = forward_only()
    listed = ", ".join(f"`{name}`" for name in without)
    return [f"{len(ops.OPERATORS)} operators; {len(without)} of them are forward only: {listed}."]


def published_count() -> list[str]:
    """How many of the training commands that MindSpeed and MindSpeed-LLM publish have a plan."""
    record = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    sources = " and ".join(f"{name} ({source['commit'][:10]})" for name, source in record["checkouts"].items())
    return [
        f"Of {record['commands']} pretraining commands that {sources} publish, {record['planned']} have a plan with "
        f"their flags unchanged (Megatron-LM {record['megatron']}, {record['date']}); "
        "[the others, and why](docs/moving-from-mindspeed.md#published-commands)."
    ]


if __name__ == "__main__":
    from mindspeed.plugins.discovery import discover

    file = Path(sys.argv[1])
    file.write_text(filled(file.read_text(encoding="utf-8"), discover(only=())), encoding="utf-8")
