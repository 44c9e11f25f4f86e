import itertools
import random

import pytest

from mindspeed.memory.choice import Option, choose


def made(count: int, seed: int, equal: bool = False) -> list[list[Option]]:
    numbers = random.Random(seed)
    groups = []
    for _ in range(count):
        size, time = (64, 3.0) if equal else (numbers.randrange(1, 100), numbers.random())
        groups.append([Option("keep", size, 0.0), Option("recompute", 0, time), Option("swap", size // 10, time / 2)])
    return groups


def total(groups: list[list[Option]], chosen: list[int]) -> tuple[int, float]:
    options = [group[index] for group, index in zip(groups, chosen, strict=True)]
    return sum(option.bytes for option in options), sum(option.seconds for option in options)


def brute_force(groups: list[list[Option]], budget: int) -> float:
    choices = itertools.product(*(range(len(group)) for group in groups))
    return min(seconds for choice in choices for size, seconds in [total(groups, list(choice))] if size <= budget)


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_optimum(seed):
    groups = made(7, seed)
    for budget in (0, 50, 150, 300):
        chosen = choose(groups, budget)
        assert chosen is not None
        size, seconds = total(groups, chosen)
        assert size <= budget
        assert seconds == pytest.approx(brute_force(groups, budget))


@pytest.mark.parametrize(("count", "seed", "budget", "worse"), [(16, 3, 400, 1 + 1e-9), (60, 5, 1500, 1.01)])
def test_many_groups_of_two_options_are_the_optimum_or_within_one_percent(count, seed, budget, worse):
    groups = [group[:2] for group in made(count, seed)]
    table = [0.0] * (budget + 1)  # time that is saved, by a table over every number of bytes
    for keep, away in groups:
        for size in reversed(range(keep.bytes, budget + 1)):
            table[size] = max(table[size], table[size - keep.bytes] + away.seconds)
    best = sum(away.seconds for _, away in groups) - max(table)
    chosen = choose(groups, budget)
    assert chosen is not None
    assert total(groups, chosen)[0] <= budget
    assert total(groups, chosen)[1] <= best * worse


def test_a_hundred_layers_are_solved_quickly():
    assert choose(made(400, 1, equal=True), 6400) is not None


def test_a_budget_below_the_least_has_no_choice():
    groups = [[Option("keep", 10, 0.0), Option("swap", 3, 1.0)]] * 2
    assert choose(groups, 5) is None
    assert choose(groups, 6) == [1, 1]
