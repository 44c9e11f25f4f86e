"""Switch off functions that run at import, as MindSpeed's consumers decorate them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class AutoExecuteFunction:
    """Call a function, unless the call is inside of `NoExecuteFunction`."""

    AUTO_EXECUTE: ClassVar[bool] = True

    def __init__(self, func: Callable[..., Any]) -> None:
        self._func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._func(*args, **kwargs) if AutoExecuteFunction.AUTO_EXECUTE else None


class NoExecuteFunction:
    """A block in which functions decorated with `AutoExecuteFunction` do nothing."""

    def __enter__(self) -> None:
        AutoExecuteFunction.AUTO_EXECUTE = False

    def __exit__(self, *error: object) -> None:
        AutoExecuteFunction.AUTO_EXECUTE = True
