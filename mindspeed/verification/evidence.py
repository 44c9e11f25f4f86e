"""Traces of a run in one process: patch sites and hooks that were reached, bytes that were sent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from mindspeed.activation import session
from mindspeed.plugins.hookspecs import PlanHooks
from mindspeed.verification.record import Record

_ASKED_WHILE_PLANNING: Final = frozenset(name for name in vars(PlanHooks) if not name.startswith("_"))


class Evidence(AbstractContextManager["Evidence"]):
    """Counts, over its with-block, into ``record``. A plan must be active, and it stays active until the block's end."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def __enter__(self) -> Evidence:
        active = session.current()
        if active is not None:
            for hook in vars(active.manager.hook):
                if not hook.startswith("_") and hook not in _ASKED_WHILE_PLANNING:
                    for implementation in getattr(active.manager.hook, hook).get_hookimpls():
                        implementation.function = self._counted(hook, implementation)
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def _counted(self, hook: str, implementation: Any) -> Callable[..., Any]:
        function: Callable[..., Any] = implementation.function
        counts = self.record.hooks.setdefault(implementation.plugin_name, {})

        @functools.wraps(function)
        def counted(*args: Any) -> Any:
            counts[hook] = counts.get(hook, 0) + 1
            return function(*args)

        return counted
