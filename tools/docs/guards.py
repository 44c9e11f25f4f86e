"""Which test guards which reported case.

The cases stand in ``tests/cases.yaml``; a test says what it guards with ``@pytest.mark.guards(1, 3)``, and
``processes=True`` beside the numbers when it starts processes of its own. The marks are read from the source of the
tests, so nothing is imported or run.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from mindspeed.workbench.pages.reference import MadePage

ROOT: Final = Path(__file__).resolve().parents[2]
NUMBERS: Final = (*map(str, range(1, 21)), "20b", *map(str, range(21, 53)))
"""Every case has a line of its own in the table."""

MUST: Final = frozenset(map(str, [1, 3, 5, *range(10, 17), 20, "20b", *range(21, 26), *range(27, 33), 35, 38, 39, 41]))
"""Cases that a release may not leave for later."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that users met: a sentence, its public links, and why nothing guards it yet (empty if something does)."""

    number: str
    group: str
    sentence: str
    links: tuple[str, ...]
    later: str = ""


@dataclass(frozen=True, slots=True)
class Guard:
    """One test that fails when a case can happen again."""

    test: str
    processes: bool
    long: bool


def read_cases(path: Path = ROOT / "tests" / "cases.yaml") -> tuple[Case, ...]:
    """The table of cases, in its own order."""
    groups: dict[str, dict[Any, dict[str, Any]]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tuple(
        Case(str(number), group, row["case"], tuple(map(_address, row["links"])), row.get("later", ""))
        for group, rows in groups.items()
        for number, row in rows.items()
    )


def _address(link: str) -> str:
    """``owner/name#12`` is an issue, ``owner/name`` a repository, anything else an address already."""
    if "://" in link:
        return link
    repository, _, issue = link.partition("#")
    return f"https://github.com/{repository}/issues/{issue}" if issue else f"https://github.com/{repository}"


def find_guards(folder: Path = ROOT / "tests") -> dict[str, list[Guard]]:
    """The guards of every case that has some, by number, in the order of files and lines."""
    guards: dict[str, list[Guard]] = defaultdict(list)
    for file in sorted(folder.rglob("test_*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        name = file.relative_to(folder.parent).as_posix()
        whole = any(ast.unparse(node) == "pytestmark = pytest.mark.long" for node in tree.body)
        for path, function in _functions(tree.body):
            for number, processes in _marks(function):
                guards[number].append(Guard(f"{name}::{path}", processes, whole or "long" in _mark_names(function)))
    return {number: list(dict.fromkeys(found)) for number, found in guards.items()}


def _functions(body: Sequence[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}::")
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield prefix + node.name, node


def _marks(function: ast.FunctionDef) -> Iterator[tuple[str, bool]]:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.guards":
            processes = any(word.arg == "processes" and ast.literal_eval(word.value) for word in decorator.keywords)
            for number in decorator.args:
                yield str(ast.literal_eval(number)), processes


def _mark_names(function: ast.FunctionDef) -> set[str]:
    marks = (decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in function.decorator_list)
    return {mark.attr for mark in marks if isinstance(mark, ast.Attribute)}


def faults(cases: Sequence[Case], guards: dict[str, list[Guard]]) -> list[str]:
    """What is wrong with the table: a case without a line, a line without a guard or a reason, an unknown number."""
    known = {case.number: case for case in cases}
    found = [f"case {number} has no line" for number in NUMBERS if number not in known]
    found += [f"case {number} is none of the {len(NUMBERS)}" for number in known if number not in NUMBERS]
    found += [
        f"{guard.test} guards {number}, which is no case"
        for number in guards
        if number not in known
        for guard in guards[number]
    ]
    for case in cases:
        guarded = case.number in guards
        if not guarded and case.number in MUST:
            found.append(f"case {case.number} must be guarded")
        elif not guarded and not case.later:
            found.append(f"case {case.number} has neither a guard nor a reason for later")
        elif guarded and case.later:
            found.append(f"case {case.number} is guarded, and its line still says why it is not")
    return found


def parts(cases: Sequence[Case], guards: dict[str, list[Guard]]) -> Iterator[list[str]]:
    """Yield the page: a paragraph about it, then every case with its guards or the reason why it has none."""
    count = sum(case.number in guards for case in cases)
    yield [
        f"Things that went wrong for users of Megatron and of its extensions, {len(cases)} in all, each with where it was "
        f"told in public. {count} are *guarded*: the named tests fail when the case can happen here. The others are for "
        "*later*, with the reason. *Processes* says that the test starts processes of its own; *long* that it runs with "
        "`make test-long`.",
    ]
    group = ""
    for case in cases:
        if case.group != group:
            group = case.group
            yield [f"## {group}"]
        links = ", ".join(f"[{_short(link)}]({link})" for link in case.links)
        tests = [f"- *guarded* by `{guard.test}`{_notes(guard)}" for guard in guards.get(case.number, ())]
        yield [f"**{case.number}.** {case.sentence} ({links})", "", *(tests or [f"- *later*: {case.later}"])]


def _short(link: str) -> str:
    path = link.removeprefix("https://github.com/")
    return path.replace("/issues/", "#")


def _notes(guard: Guard) -> str:
    notes = [word for word, given in (("processes", guard.processes), ("long", guard.long)) if given]
    return f" ({', '.join(notes)})" if notes else ""


GUARDS: Final = MadePage("Guards", "tests/cases.yaml", lambda catalog: parts(read_cases(), find_guards()))
