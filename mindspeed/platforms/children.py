"""Processes that are spawned, as Megatron's asynchronous checkpoint writers are, get the plan of their parent.

multiprocessing sends every spawned child its preparation data first. An object in it makes the child
activate the plan while the data is read, before anything of the parent's is imported there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed.plugins.patches import Function, wrapper


@dataclass(frozen=True, slots=True)
class PlanCarrier:
    """Activates a plan where it is unpickled, on the import path of the process that made it."""

    activate: Callable[[str, Sequence[str]], None]
    plan: str
    path: tuple[str, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.activate, (self.plan, self.path)


@wrapper
def bring_plan(get_preparation_data: Function, name: str) -> dict[str, Any]:
    """``multiprocessing.spawn.get_preparation_data``."""
    from mindspeed.engine.runtime import session

    data: dict[str, Any] = get_preparation_data(name)
    active = session.current()
    if active is not None and active.surroundings is not None:
        plan = json.dumps(active.plan.to_json())
        data["mindspeed"] = PlanCarrier(active.surroundings.activate_child, plan, tuple(data["sys_path"]))
    return data
