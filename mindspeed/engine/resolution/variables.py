"""Every environment variable that mindspeed reads. A test compares this table with the source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Final

from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.files.tables import table_beside
from mindspeed.problems import Fix, Problem, near_names, suggestion


@cache
def variables() -> dict[str, str]:
    """Return the environment variables that mindspeed reads, and what each means."""
    table: dict[str, str] = table_beside(__file__)
    return table


_VALUES: Final[dict[str, tuple[str, str]]] = {
    "MINDSPEED_STRICT": (r"(?i)0|1|true|false|yes|no", "1 or 0"),
    "MINDSPEED_TRACE": (r"0|1", "1 or 0"),
    "MINDSPEED_OPS": (r"reference", "reference"),
    "MINDSPEED_KEPT_MEMORY": (r"\d+", "a whole number of MiB"),
    "MINDSPEED_AGREEMENT_TIMEOUT": (r"\d+(\.\d*)?", "a number of seconds"),
}
"""Variables that take few values: a pattern, and the requirement in words. An empty variable is one that is not set."""


def value_problems(environ: Mapping[str, str]) -> list[Problem]:
    """List MS301 for every variable whose value means nothing."""
    return [
        Problem(
            "MS301",
            f"{name} is {environ[name]!r}, not {words}",
            where=name,
            fix=Fix.advise(f"unset {name}, or set it to {words}"),
        )
        for name, (pattern, words) in _VALUES.items()
        if environ.get(name) and not re.fullmatch(pattern, environ[name])
    ]


def unknown_variables(environ: Mapping[str, str]) -> tuple[PlanNote, ...]:
    """List a warning for every variable with our prefix that mindspeed does not read."""
    own = [name for name in environ if name.startswith("MINDSPEED_")]
    known = variables() if own else {}
    names = sorted(name for name in own if name not in known)
    return tuple(
        PlanNote(
            "warning",
            name,
            f"mindspeed does not read the variable {name}; {suggestion(near_names(name, known, number=1), 'unset it')}",
        )
        for name in names
    )
