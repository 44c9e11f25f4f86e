"""Counting the calls of a function, or giving them a range, without standing in its way: it lives in its code object.

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


class CodeSwap:
    """Gives one function other behaviour from now until `stop`: ``make`` gets the function as it is and returns what is called.

    Several swaps of a function nest, the last outermost, and stop in any order.
    """

    __slots__ = ("_below", "_function", "_number", "_original")

    def __init__(self, function: FunctionType, make: Callable[[FunctionType], Callable[..., Any]]) -> None:
        self._function = function
        self._below = code = function.__code__
        self._number = next(_numbers)
        original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
        original.__kwdefaults__ = function.__kwdefaults__
        self._original = original
        TARGETS[self._number] = make(original)
        template = _template(_parameters(code), len(code.co_freevars))
        constants = tuple(self._number if constant == _PLACE else constant for constant in template.co_consts)
        function.__code__ = template.replace(
            co_consts=constants, co_freevars=code.co_freevars, co_name=code.co_name, co_firstlineno=code.co_firstlineno
        )
        _swaps.setdefault(function, []).append(self)

    def stop(self) -> None:
        """Give the function the code below this swap; harmless the second time."""
        if TARGETS.pop(self._number, None) is None:
            return
        swaps = _swaps[self._function]
        place = swaps.index(self)
        swaps.remove(self)
        if place < len(swaps):  # the next one calls what this one called
            above = swaps[place]
            above._below = above._original.__code__ = self._below
        else:
            self._function.__code__ = self._below
        if not swaps:
            del _swaps[self._function]


_swaps: Final[dict[FunctionType, list[CodeSwap]]] = {}
"""The swaps of each function, the innermost first."""


class CallCount(CodeSwap):
    """Counts the calls of one function from now until `stop`."""

    __slots__ = ("_calls",)

    def __init__(self, function: FunctionType) -> None:
        self._calls = calls = [0]

        def counting(original: FunctionType) -> Callable[..., Any]:
            def count(*args: Any, **kwargs: Any) -> Any:
                calls[0] += 1
                return original(*args, **kwargs)

            return count

        super().__init__(function, counting)

    @property
    def calls(self) -> int:
        """Calls so far."""
        return self._calls[0]


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
