"""Errors of operator calls, in one form: the operator, what it needs, what it got."""

from __future__ import annotations

from typing import NoReturn

from mindspeed.problems import Fix, MindSpeedError, Problem


class OperatorError(MindSpeedError, ValueError):
    """An operator was called with tensors that it cannot take."""


def require(condition: bool, op: str, sentence: str) -> None:
    """Raise OperatorError (MS505) saying ``op: sentence`` unless ``condition`` holds."""
    if not condition:
        raise OperatorError([Problem("MS505", f"{op}: {sentence}", fix=Fix.advise(f"see the docstring of {op}"))])


def refuse(sentence: str, fix: str) -> NoReturn:
    """Raise OperatorError (MS505) with its fix."""
    raise OperatorError([Problem("MS505", sentence, fix=Fix.advise(fix))])
