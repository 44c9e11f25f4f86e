"""The reader of job files. Other requests need no YAML, which takes long to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mindspeed.engine.resolution.request import JobFile, job_from_data
from mindspeed.plugins.fixes import advice
from mindspeed.plugins.problems import Problem, ResolutionError


def load_job_file(path: str | Path) -> JobFile:
    """Read a job file (YAML). Raises ResolutionError with MS305 for every unreadable part at once."""
    path = Path(path)
    try:
        loader = _JobLoader(path.read_text(encoding="utf-8"))
        data = loader.get_single_data() or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ResolutionError([Problem("MS305", f"the job file cannot be read: {error}", where=str(path))]) from error
    if loader.repeated:
        fix = "keep one of the two"
        raise ResolutionError(Problem("MS305", text, where=f"{path}:{line}", fix=advice(fix)) for text, line in loader.repeated)
    return job_from_data(data, str(path))


class _JobLoader(yaml.SafeLoader):
    """A loader that collects every key that a mapping has twice, of which YAML would silently keep the last."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated: list[tuple[str, int]] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.value in lines:
                self.repeated.append((f"the key {key.value!r} is given twice, first in line {lines[key.value]}", line))
            lines.setdefault(key.value, line)
        return super().construct_mapping(node, deep)
