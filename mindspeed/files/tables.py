"""Tables in YAML or JSON next to the module that reads them. Light."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def table_beside(module_file: str) -> Any:
    """Read the YAML file that has the name of a module, given its ``__file__``."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where PyYAML was built with it: ten times as fast
    return yaml.load(Path(module_file).with_suffix(".yaml").read_text(encoding="utf-8"), loader)


def json_beside(module_file: str) -> Any:
    """Read the JSON file that has the name of a module: for what every command reads, as YAML takes long to import."""
    return json.loads(Path(module_file).with_suffix(".json").read_text(encoding="utf-8"))


def fields_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as the fields of a frozen object, with tuples for lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
