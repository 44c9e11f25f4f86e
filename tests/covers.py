"""Covers of tables: ``@pytest.mark.cover`` keeps the few rows of a long test in which all facts of its table meet.

A row of a table, or a combination of a grid, has facts: an active feature, a setting with its value, a size of the job, a
parameter with its value. By default a few rows run in which every two facts meet that meet in some row. Rows of the default
run count and always stay. ``--exhaustive`` runs every row, and ``python -m pytest --collect-only -m long`` lists what is left
to it, with the reason.

- ``cover(1, because="...")``: every fact occurs; the reason says where their meetings are proven.
- ``cover(of=("fault",))``: facts of these parameters alone.
- ``exhaustive("where the claim is proven")`` on a test or a row leaves it to ``--exhaustive`` altogether.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import combinations
from typing import Any, Final

import pytest

Fact = tuple[str, ...]
_NAMES: Final = {"id", "long"}
"""Fields of a row that say nothing of what it runs."""
BY_PAIRS: Final = "every two values that meet there meet in the rows that run"


def add_options(parser: pytest.Parser) -> None:
    """The options of this module."""
    parser.addoption("--exhaustive", action="store_true", help="run every row of the tables of which a cover is run")


def facts(value: object, *path: str) -> frozenset[Fact]:
    """What a parameter says: its path of names with a value, for each value that it holds."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return frozenset().union(*(facts(each, *path, str(key)) for key, each in value.items() if key not in _NAMES))
    if isinstance(value, str) and value.startswith("--"):
        return frozenset((*path, f"--{flag.strip()}") for flag in value.split("--")[1:])
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str):
        return frozenset().union(*(facts(each, *path) for each in value))
    return frozenset({(*path, getattr(value, "__qualname__", str(value)))})


def meetings(row: Iterable[Fact], strength: int = 2) -> set[Hashable]:
    """Every fact of a row, and for strength 2 every two of them."""
    row = set(row)
    return row | set(combinations(sorted(row), 2)) if strength > 1 else row


def cover(has: Sequence[set[Hashable]], given: Iterable[int] = ()) -> set[int]:
    """Numbers of rows, ``given`` ones among them, in which all meetings of the table occur. Greedy, the first of equals."""
    kept = set(given)
    todo = set().union(*has).difference(*(has[number] for number in kept))
    while todo:
        best = max(range(len(has)), key=lambda number: (len(has[number] & todo), -number))
        kept.add(best)
        todo -= has[best]
    return kept


def kept_rows(mark: pytest.Mark, rows: Sequence[Mapping[str, object]], given: Iterable[int]) -> set[int]:
    """Numbers of the rows of a test with this mark that run, by their parameters."""
    strength, of = next(iter(mark.args), 2), mark.kwargs.get("of")
    chosen = [{name: value for name, value in row.items() if of is None or name in of} for row in rows]
    return cover([meetings(facts(row), strength) for row in chosen], given)


class Covers:
    """Leaves rows to ``--exhaustive``, and lists them where tests are collected alone."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[int, int, str]] = {}

    @pytest.hookimpl(tryfirst=True)  # before the marks of -m: rows of the default run count
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if config.option.exhaustive:
            return
        tests: dict[str, list[Any]] = {}
        for item in items:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
        left = {item for name, rows in tests.items() for item in self._leave(name, rows)}
        if left:
            config.hook.pytest_deselected(items=sorted(left, key=lambda item: item.nodeid))
            items[:] = [item for item in items if item not in left]

    def _leave(self, name: str, rows: Sequence[Any]) -> list[Any]:
        """The rows of a test that do not run, with an entry in the list."""
        marks = {row: row.get_closest_marker("exhaustive") for row in rows}
        left = [row for row, mark in marks.items() if mark]
        reasons = {mark.args[0]: None for mark in marks.values() if mark}
        rest = [row for row in rows if not marks[row]]
        if rest and (mark := rest[0].get_closest_marker("cover")):
            given = [number for number, row in enumerate(rest) if row.get_closest_marker("long") is None]
            kept = kept_rows(mark, [row.callspec.params for row in rest], given)
            if len(kept) < len(rest):
                left += [row for number, row in enumerate(rest) if number not in kept]
                reasons[mark.kwargs.get("because", BY_PAIRS)] = None
        if left:
            self._left[name] = len(left), len(rows), "; ".join(reasons)
        return left

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._left and terminalreporter.config.option.collectonly:
            terminalreporter.section(f"{sum(count for count, _, _ in self._left.values())} tests are left to --exhaustive")
            for name, (count, total, reason) in sorted(self._left.items()):
                terminalreporter.write_line(f"{count} of {total}  {name}: {reason}")
