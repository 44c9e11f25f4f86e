"""The problems of checked commands as annotations of GitHub and as SARIF."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed._version import __version__

if TYPE_CHECKING:
    from mindspeed.cli.check import CheckedCommand
    from mindspeed.problems.problem import Problem
    from mindspeed.workbench.lint.traps import Trap

_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


def _located(checked: list[CheckedCommand]) -> Iterator[tuple[CheckedCommand, Problem, int]]:
    for one in checked:
        lines = one.lines or (one.line,) * len(one.problems)
        yield from ((one, problem, line or 1) for problem, line in zip(one.problems, lines, strict=True))


def _text(one: CheckedCommand, problem: Problem) -> str:
    fix = one.words(problem.fix) if one.words else problem.fix_text
    return "\n".join([problem.message, *problem.chain, *([f"fix: {fix}"] if fix else [])])


def github(checked: list[CheckedCommand]) -> str:
    """Write one workflow command ``::error`` for each problem, ``::warning`` or ``::notice`` for each trap."""
    errors = [("error", one, line, problem.code, _text(one, problem)) for one, problem, line in _located(checked)]
    traps = [
        (_LEVELS.get(trap.consequence, "warning"), one, one.line or 1, trap.name, str(trap)) for one, trap in _traps(checked)
    ]
    return "".join(
        f"::{level} file={_escaped(one.file, ':,')},line={line},title={title}::{_escaped(text)}\n"
        for level, one, line, title, text in (*errors, *traps)
    )


_LEVELS = {"note": "notice"}


def _traps(checked: list[CheckedCommand]) -> Iterator[tuple[CheckedCommand, Trap]]:
    yield from ((one, trap) for one in checked for trap in one.traps)


def _escaped(text: str, more: str = "") -> str:
    for sign in "%\r\n" + more:
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text


def sarif(checked: list[CheckedCommand]) -> str:
    """A log of SARIF 2.1.0 with one run."""
    from mindspeed.problems.problem import error_codes

    results = [_result(problem.code, "error", _text(one, problem), one, line) for one, problem, line in _located(checked)]
    for one, trap in _traps(checked):
        results.append(_result(trap.name, "note" if trap.consequence == "note" else "warning", str(trap), one, one.line or 1))
    described = {problem.code: error_codes()[problem.code] for _, problem, _ in _located(checked)}
    described |= {trap.name: trap.text for _, trap in _traps(checked)}
    rules = [{"id": name, "fullDescription": {"text": text}} for name, text in sorted(described.items())]
    driver = {"name": "mindspeed", "version": __version__, "rules": rules}
    log = {"$schema": _SARIF, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
    return json.dumps(log, indent=2)


def _result(rule: str, level: str, text: str, one: CheckedCommand, line: int) -> dict[str, Any]:
    place = {"physicalLocation": {"artifactLocation": {"uri": one.file}, "region": {"startLine": line}}}
    return {"ruleId": rule, "level": level, "message": {"text": text}, "locations": [place]}
