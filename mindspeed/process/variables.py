"""Environment variables that the processes of a feature must have from their start."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mindspeed.problems import Problem, advice


@dataclass(frozen=True, slots=True)
class ProcessVariable:
    """A value that a launcher gives its processes, and a pattern of the values that serve as well."""

    value: str
    pattern: str = ""

    def accepts(self, value: str) -> bool:
        """Return whether a process with this value is as the feature needs it."""
        return value == self.value or bool(self.pattern and re.fullmatch(self.pattern, value))


Variables = Mapping[str, ProcessVariable]


def unset_variables(needed: Iterable[Variables], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ``environ`` lacks, with their values."""
    return {name: variable.value for variables in needed for name, variable in variables.items() if name not in environ}


def variable_problems(needed: Mapping[str, Variables], environ: Mapping[str, str]) -> list[Problem]:
    """List MS517 for every feature whose ``needed`` variables ``environ`` lacks or has otherwise, with the line to export."""
    problems = []
    for feature, variables in needed.items():
        wrong = {
            name: variable.value
            for name, variable in variables.items()
            if not (name in environ and variable.accepts(environ[name]))
        }
        if wrong:
            found = ", ".join(f"{name} is {environ[name]!r}" if name in environ else f"{name} is not set" for name in wrong)
            fix = f"export {' '.join(f'{name}={value}' for name, value in wrong.items())}"
            text = f"{feature} needs environment variables that must be set before the process starts: {found}"
            problems.append(Problem("MS517", text, (feature,), where="environment of this process", fix=advice(fix)))
    return problems
