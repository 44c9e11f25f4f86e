"""Processes that are spawned, as Megatron's asynchronous checkpoint writers are, get the plan of their parent.

multiprocessing sends every spawned child its preparation data first. An object in it makes the child
activate the plan while the data is read, before anything of the parent's is imported there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any


class PlanCarrier:
    """Activates a plan where it is unpickled, on the import path of the process that made it."""

    def __init__(self, plan: str, path: Sequence[str]) -> None:
        self.plan = plan
        self.path = tuple(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return activate_here, (self.plan, self.path)


def bring_plan(get_preparation_data: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """``multiprocessing.spawn.get_preparation_data``."""

    @wraps(get_preparation_data)
    def prepared(name: str) -> dict[str, Any]:
        from mindspeed.runtime import session

        data = get_preparation_data(name)
        active = session.current()
        if active is not None:
            data["mindspeed"] = PlanCarrier(json.dumps(active.plan.to_json()), data["sys_path"])
        return data

    return prepared


def activate_here(plan: str, path: Sequence[str]) -> None:
    """Activate the plan in this child process.

    ``path`` goes first, as it does in multiprocessing a moment later: the Megatron of a checkout may lie on it alone.
    """
    sys.path[:] = path
    from mindspeed import registry
    from mindspeed.planning.plan import plan_from_json

    registry.activate(plan_from_json(json.loads(plan)))
