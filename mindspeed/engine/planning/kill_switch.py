"""``MINDSPEED_DISABLE=a,b``: a switch that disables features without changing a job. It overrides every request."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.request import Layer, split_names
from mindspeed.problems import Problem, ResolutionError, advice

DISABLE_VARIABLE: Final = "MINDSPEED_DISABLE"


def disabled_layer(environ: Mapping[str, str] = os.environ) -> Layer:
    """The layer that removes the named features. Reports it on standard error, once per process and on rank 0 only."""
    names = split_names(environ.get(DISABLE_VARIABLE, ""))
    if names and environ.get("RANK", "0") == "0":
        _announce(names)
    return Layer(DISABLE_VARIABLE, disabled=names)


@lru_cache(maxsize=8)
def _announce(names: tuple[str, ...]) -> None:
    print(f"mindspeed: {DISABLE_VARIABLE} removes {', '.join(names)} from every plan", file=sys.stderr, flush=True)


def refuse_disabled(plan: ActivationPlan, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ResolutionError (MS211) for a plan, made before or elsewhere, that has a feature which is disabled here."""
    names = [name for name in plan.names if name in split_names(environ.get(DISABLE_VARIABLE, ""))]
    fix = f"make the plan again, or remove {', '.join(names)} from the variable"
    problems = [
        Problem(
            "MS211",
            f"the plan contains {name}, but {DISABLE_VARIABLE} switches it off",
            (name,),
            where=DISABLE_VARIABLE,
            fix=advice(fix),
        )
        for name in names
    ]
    if problems:
        raise ResolutionError(problems)
