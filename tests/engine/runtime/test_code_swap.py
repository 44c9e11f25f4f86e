"""Swaps of one function's code nest and stop in any order."""

import pytest

from mindspeed.engine.runtime.call_count import CallCount, CodeSwap


def tagged(tag: str, log: list[str]):
    def make(original):
        def call(*args, **kwargs):
            log.append(tag)
            return original(*args, **kwargs)

        return call

    return make


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0), (0, 2, 1)])
def test_a_function_is_as_it_was_when_all_have_stopped(order: tuple[int, ...]) -> None:
    def double(x: int) -> int:
        return 2 * x

    code, log = double.__code__, []
    swaps = [CodeSwap(double, tagged("a", log)), CallCount(double), CodeSwap(double, tagged("c", log))]
    assert double(2) == 4
    assert log == ["c", "a"]
    left = {"a", "c"}
    for number in order:
        swaps[number].stop()
        left -= {"a" if number == 0 else "c" if number == 2 else ""}
        log.clear()
        assert double(3) == 6
        assert set(log) == left
    assert double.__code__ is code
