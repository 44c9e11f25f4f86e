"""Counting calls: the function is the same object for every holder, and afterwards nothing is left."""

from __future__ import annotations

from collections.abc import Callable

from mindspeed.verification.evidence import calls_counted


def made(start: int) -> Callable[..., int]:
    def add(a: int, b: int = 2, *, c: int = 3) -> int:
        return start + a + b + c

    return add


def test_calls_are_counted_for_every_holder_with_defaults_and_closure() -> None:
    function = made(10)
    holder = [function]
    code = function.__code__
    counts: dict[str, int] = {}
    with calls_counted(function, counts, "site"):  # type: ignore[arg-type]
        assert holder[0](1) == 16
        assert function(1, 1, c=1) == 13
    assert counts == {"site": 2}
    assert function.__code__ is code
    assert function(1) == 16
    assert counts == {"site": 2}


def test_a_function_that_raises_is_counted_and_restored() -> None:
    def broken() -> None:
        raise ValueError("no")

    code, counts = broken.__code__, dict[str, int]()
    try:
        with calls_counted(broken, counts, "site"):  # type: ignore[arg-type]
            broken()
    except ValueError:
        pass
    assert counts == {"site": 1}
    assert broken.__code__ is code
