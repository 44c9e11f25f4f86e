"""The problems of checked commands as annotations of GitHub and as SARIF."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed._version import __version__

if TYPE_CHECKING:
    from mindspeed.cli.check import CheckedCommand
    from mindspeed.plugins.problems import Problem

_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


def _located(checked: list[CheckedCommand]) -> Iterator[tuple[CheckedCommand, Problem, int]]:
    for one in checked:
        lines = one.lines or (one.line,) * len(one.problems)
        yield from ((one, problem, line or 1) for problem, line in zip(one.problems, lines, strict=True))


def _text(one: CheckedCommand, problem: Problem) -> str:
    fix = one.words(problem.fix) if one.words else problem.fix_text
    return "\n".join([problem.message, *problem.chain, *([f"fix: {fix}"] if fix else [])])


def github(checked: list[CheckedCommand]) -> str:
    """Write one workflow command ``::error`` for each problem."""
    return "".join(
        f"::error file={_escaped(one.file, ':,')},line={line},title={problem.code}::{_escaped(_text(one, problem))}\n"
        for one, problem, line in _located(checked)
    )


def _escaped(text: str, more: str = "") -> str:
    for sign in "%\r\n" + more:
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text


def sarif(checked: list[CheckedCommand]) -> str:
    """A log of SARIF 2.1.0 with one run."""
    from mindspeed.plugins.problems import error_codes

    results = [
        {
            "ruleId": problem.code,
            "level": "error",
            "message": {"text": _text(one, problem)},
            "locations": [
                {"physicalLocation": {"artifactLocation": {"uri": one.file}, "region": {"startLine": line}}},
            ],
        }
        for one, problem, line in _located(checked)
    ]
    codes = sorted({problem.code for _, problem, _ in _located(checked)})
    rules = [{"id": code, "fullDescription": {"text": error_codes()[code]}} for code in codes]
    driver = {"name": "mindspeed", "version": __version__, "rules": rules}
    log = {"$schema": _SARIF, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
    return json.dumps(log, indent=2)
