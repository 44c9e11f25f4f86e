"""Processes that are spawned, as Megatron's asynchronous checkpoint writers are, get the plan of their parent.

multiprocessing sends every spawned child its preparation data first. An object in it makes the child
activate the plan while the data is read, before anything of the parent's is imported there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any


class PlanCarrier:
    """Activates a plan where it is unpickled, on the import path of the process that made it."""

    def __init__(self, activate: Callable[[str, Sequence[str]], None], plan: str, path: Sequence[str]) -> None:
        self.activate = activate
        self.plan = plan
        self.path = tuple(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.activate, (self.plan, self.path)


def bring_plan(get_preparation_data: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """``multiprocessing.spawn.get_preparation_data``."""

    @wraps(get_preparation_data)
    def prepared(name: str) -> dict[str, Any]:
        from mindspeed.runtime import session

        data = get_preparation_data(name)
        active = session.current()
        if active is not None and active.surroundings is not None:
            plan = json.dumps(active.plan.to_json())
            data["mindspeed"] = PlanCarrier(active.surroundings.activate_child, plan, data["sys_path"])
        return data

    return prepared
