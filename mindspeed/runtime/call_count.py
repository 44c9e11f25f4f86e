"""Counting the calls of a function without standing in its way: the count lives in its code object.

The function stays the same object for every holder, and when counting ends it has its own code object back. The counting
code has the parameters of the original and is ordinary Python, so that `inspect` sees no difference and ``torch.compile``
can trace through it.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import cache
from types import CodeType, FunctionType
from typing import Any, Final

TARGETS: Final[dict[int, Callable[..., Any]]] = {}
"""Functions that the counting code calls, by the number that stands in it."""

_numbers = itertools.count()


class CallCount:
    """Counts the calls of one function from now until `stop`. Of several counts of a function the last stops first."""

    __slots__ = ("_calls", "_code", "_function", "_number")

    def __init__(self, function: FunctionType) -> None:
        self._calls = calls = [0]
        self._function = function
        self._code = code = function.__code__
        self._number = next(_numbers)
        original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
        original.__kwdefaults__ = function.__kwdefaults__

        def count(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            return original(*args, **kwargs)

        TARGETS[self._number] = count
        template = _template(_parameters(code), len(code.co_freevars))
        constants = tuple(self._number if constant == _PLACE else constant for constant in template.co_consts)
        function.__code__ = template.replace(
            co_consts=constants, co_freevars=code.co_freevars, co_name=code.co_name, co_firstlineno=code.co_firstlineno
        )

    @property
    def calls(self) -> int:
        """Calls so far."""
        return self._calls[0]

    def stop(self) -> None:
        """Give the function its own code back; harmless the second time."""
        if TARGETS.pop(self._number, None) is not None:
            self._function.__code__ = self._code


_PLACE: Final = "the number of the target"
_Parameters = tuple[tuple[str, ...], tuple[str, ...], str, tuple[str, ...], str]


def _parameters(code: CodeType) -> _Parameters:
    """Names of the parameters: positional only, others, ``*args``, keyword only, ``**kwargs``; "" for one that is not there."""
    names = iter(code.co_varnames)
    first = tuple(itertools.islice(names, code.co_posonlyargcount))
    others = tuple(itertools.islice(names, code.co_argcount - code.co_posonlyargcount))
    keywords = tuple(itertools.islice(names, code.co_kwonlyargcount))
    rest = next(names) if code.co_flags & inspect.CO_VARARGS else ""
    more = next(names) if code.co_flags & inspect.CO_VARKEYWORDS else ""
    return first, others, rest, keywords, more


@cache
def _template(parameters: _Parameters, free: int) -> CodeType:
    """Compile code with these parameters that passes them all to the target whose number stands for `_PLACE`.

    The code has ``free`` free variables, under names that the caller replaces, and the instruction that copies their cells
    into the frame: without it, whoever reads the locals of the frame follows a null pointer.
    """
    first, others, rest, keywords, more = parameters
    spread, named = [f"*{rest}"] if rest else [], [f"**{more}"] if more else []
    bare = ["*"] if keywords and not rest else []
    head = [*first, *(["/"] if first else []), *others, *spread, *bare, *keywords, *named]
    passed = [*first, *others, *spread, *(f"{keyword}={keyword}" for keyword in keywords), *named]
    cells = [f"mindspeed_cell_{index:04}" for index in range(free)]
    source = (
        f"def enclosing({', '.join(cells)}):\n"
        f"    def counting({', '.join(head)}):\n"
        f"        from {__name__} import TARGETS as mindspeed_targets\n"
        f"        return mindspeed_targets[{_PLACE!r}]({', '.join(passed)})\n"
        f"        {', '.join(cells)}\n"
    )
    return _inner_code(_inner_code(compile(source, __file__, "exec")))


def _inner_code(code: CodeType) -> CodeType:
    (inner,) = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return inner
