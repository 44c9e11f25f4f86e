"""Counting calls: the function is the same object for every holder, and afterwards nothing is left."""

import functools
import inspect
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed.engine.runtime.call_count import CallCount


def made(start: int) -> Callable[..., int]:
    def add(a: int, b: int = 2, *, c: int = 3) -> int:
        return start + a + b + c

    return add


def test_calls_are_counted_for_every_holder_with_defaults_and_closure() -> None:
    function = made(10)
    holder, code, attributes = [function], function.__code__, dict(vars(function))
    count = CallCount(function)  # type: ignore[arg-type]
    assert holder[0](1) == 16
    assert function(1, 1, c=1) == 13
    count.stop()
    assert function.__code__ is code
    assert vars(function) == attributes
    assert function(1) == 16
    assert count.calls == 2


def test_a_function_that_raises_is_counted_and_restored() -> None:
    def broken() -> None:
        raise ValueError("no")

    code = broken.__code__
    count = CallCount(broken)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no"):
        broken()
    count.stop()
    assert count.calls == 1
    assert broken.__code__ is code


def test_a_counted_function_shows_its_own_signature() -> None:
    function = made(1)
    before = inspect.signature(function)
    count = CallCount(function)  # type: ignore[arg-type]
    assert inspect.signature(function) == before
    assert inspect.getfullargspec(function).kwonlyargs == ["c"]
    count.stop()
    assert inspect.signature(function) == before


def test_a_counted_wrapper_shows_the_signature_of_what_it_wraps() -> None:
    inner = made(1)

    @functools.wraps(inner)
    def outer(*args: int, **kwargs: int) -> int:
        return inner(*args, **kwargs)

    count = CallCount(outer)  # type: ignore[arg-type]
    assert inspect.signature(outer) == inspect.signature(inner)
    assert outer(1, c=0) == 4
    count.stop()
    assert count.calls == 1


def test_two_functions_of_one_code_object_are_counted_apart() -> None:
    first, second = made(1), made(2)
    counts = CallCount(first), CallCount(second)  # type: ignore[arg-type]
    assert (first(0), second(0), second(0)) == (6, 7, 7)
    assert [count.calls for count in counts] == [1, 2]
    for count in counts:
        count.stop()
    assert first.__code__ is second.__code__


def test_a_compiled_caller_traces_through_the_count_without_a_graph_break() -> None:
    import torch

    scaled = made(1)

    def compute(x: torch.Tensor) -> torch.Tensor:
        return x * scaled(1)

    code = scaled.__code__
    count = CallCount(scaled)  # type: ignore[arg-type]
    compiled = torch.compile(compute, fullgraph=True, backend="eager")
    assert [compiled(torch.ones(1)).item() for _ in range(4)] == [7.0] * 4
    assert count.calls == 4
    count.stop()
    assert scaled.__code__ is code
    assert compiled(torch.ones(1)).item() == 7.0
    assert count.calls == 4


def everything(a: int, /, b: int, c: int = 3, *rest: int, d: int, e: int = 5, **more: int) -> tuple[object, ...]:
    return a, b, c, rest, d, e, more


def test_every_kind_of_parameter_arrives_as_it_was_passed() -> None:
    expected = everything(1, 2, d=4), everything(1, b=2, d=4, f=6), everything(1, 2, 3, 4, d=5, e=6, g=7)
    count = CallCount(everything)  # type: ignore[arg-type]
    assert (everything(1, 2, d=4), everything(1, b=2, d=4, f=6), everything(1, 2, 3, 4, d=5, e=6, g=7)) == expected
    with pytest.raises(TypeError, match=r"everything\(\) missing 1 required keyword-only argument: 'd'"):
        everything(1, 2)  # type: ignore[call-arg]
    count.stop()
    assert count.calls == 3


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_the_locals_of_a_counted_closure_can_be_read(version: str) -> None:
    beside = map(str, sorted(Path(sys.base_prefix).parent.glob(f"{version}.*/bin/python{version}")))  # as pyenv installs them
    works = (
        path
        for path in (shutil.which(f"python{version}"), *beside)
        if path and subprocess.run([path, "-V"], capture_output=True).returncode == 0
    )
    if (python := next(works, None)) is None:
        pytest.skip(f"python{version} is not on this machine")
    script = Path(__file__).with_name("counted_locals.py")
    done = subprocess.run([python, script, script.parents[3]], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "('first', 'second') ['first', 'second'] True True 6 26 [2, 1]\n"
