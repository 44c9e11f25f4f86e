"""A formula for one job gives each of many layouts what it gives that layout alone."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mindspeed.memory_planner.several import by_case, several

LAYOUTS = np.array([1, 2, 2, 3, 4, 6, 8, 8])


def grouped(size: Any) -> Any:
    return {1: 0, 2: 10}.get(size, size)


FORMULAS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "arithmetic": (lambda n: 13 + 9 * n // 2 - n % 3 + abs(-n) ** 2, 1),
    "comparisons are numbers": (lambda n: (n > 1) + (n > 2), 5),
    "truth": (lambda n: 7 if n - 1 else 5, 3),
    "smallest": (lambda n: max(1, n // 3) + min(n, 4), 6),
    "index": (lambda n: math.gcd(n, 4) + len([0] * n) + len(range(n)), 7),
    "whole number": (lambda n: int(n / 4) + math.ceil(n / 3), 9),
    "key": (grouped, 7),
    "text": (lambda n: len(f"{n}, {n:03}"), 7),
    "a method that arrays lack": (lambda n: n.bit_length(), 7),
    "power that arrays lack": (lambda n: n**-1, 7),
    "guarded division": (lambda n: 60 // (n - 1) if n > 1 else 0, 3),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_gives_each_layout_what_it_gives_that_layout_alone(name: str) -> None:
    formula, most = FORMULAS[name]
    calls = []

    def asked(rows: Any) -> Any:
        calls.append(rows)
        return formula(several(LAYOUTS[rows]))

    found = np.zeros(len(LAYOUTS))
    for rows, answer in by_case(asked, np.arange(len(LAYOUTS)), [LAYOUTS]):
        found[rows] = answer
    assert found.tolist() == [formula(int(size)) for size in LAYOUTS]
    assert len(calls) <= most


def test_an_error_of_a_formula_is_raised_with_numbers_of_one_layout() -> None:
    with pytest.raises(ZeroDivisionError, match="integer"):
        list(by_case(lambda rows: 60 // (several(LAYOUTS[rows]) - 1), np.arange(len(LAYOUTS)), [LAYOUTS]))
