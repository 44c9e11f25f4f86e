"""Every environment variable that mindspeed reads. A test compares this table with the source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.plugins.fixes import Advice
from mindspeed.plugins.near_names import near_names, suggestion
from mindspeed.plugins.problems import Problem

VARIABLES: Final[dict[str, str]] = {
    "MINDSPEED_FEATURES": "features to switch on, as `--features`: `a,b`",
    "MINDSPEED_SET": "settings, as `--set`, separated by semicolons: `a.size=2;b.mode=x`",
    "MINDSPEED_WITHOUT": "features to leave out, as `--without`",
    "MINDSPEED_STRICT": "`1` is `--strict`",
    "MINDSPEED_PLATFORM": "npu, cuda or cpu, before any detection",
    "MINDSPEED_CACHE": "folder for prepared data and built operators; the user's cache folder if not given",
    "MINDSPEED_OPS": "`reference` runs the plain-torch reference of every operator, whatever is built",
    "MINDSPEED_KEPT_MEMORY": "MiB of memory that results of the C++ operators have left and the next ones may have, in each "
    "process; 256 if not given, 0 gives all back at once",
    "MINDSPEED_CSRC": "folder of the C++ sources of operators, for those who work on them; those of the package if not given",
    "MINDSPEED_DISABLE": "features to switch off whatever a job asks for: `a,b`; said loudly, and a row of the plan",
    "MINDSPEED_PLUGINS": "whose features may be loaded: `all`, `none`, or names of distributions: `acme,bolt`",
    "MINDSPEED_TRACE": "`1` prints a line for each step of discovery, resolution, activation and each hook",
    "MINDSPEED_REPORT": "file into which rank 0 writes the activation report; a run of ours sets it to its own folder",
    "MINDSPEED_AGREEMENT_TIMEOUT": "seconds that ranks wait for the slowest one to name its plan; 600 if not given",
    "MINDSPEED_LAUNCHED": "set by mindspeed itself: number of the launcher, which prints the last words of this process",
    "MINDSPEED_JOINED": "set by mindspeed itself: this process helps a rank, and agrees with nobody",
    "MINDSPEED_PLAN": "set by mindspeed itself for the processes that it starts: the file of their plan",
    "MINDSPEED_TRAIN": "set by mindspeed itself for training processes: the file of their job",
}

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
            "MS301", f"{name} is {environ[name]!r}, not {words}", where=name, fix=Advice(f"unset {name}, or set it to {words}")
        )
        for name, (pattern, words) in _VALUES.items()
        if environ.get(name) and not re.fullmatch(pattern, environ[name])
    ]


def unknown_variables(environ: Mapping[str, str]) -> tuple[PlanNote, ...]:
    """List a warning for every variable with our prefix that mindspeed does not read."""
    names = sorted(name for name in environ if name.startswith("MINDSPEED_") and name not in VARIABLES)
    return tuple(
        PlanNote(
            "warning", name, f"mindspeed does not read {name}; {suggestion(near_names(name, VARIABLES, number=1), 'unset it')}"
        )
        for name in names
    )
