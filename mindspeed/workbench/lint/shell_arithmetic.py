"""Arithmetic of a shell: whole numbers of 64 bits, without variables."""

from __future__ import annotations

import ast
import operator
from typing import Final

MAX_EXPRESSION: Final = 200


def calculated(expression: str) -> int | None:
    """The value of an expression of numbers; None where it is none, or too long."""
    try:
        return _number(ast.parse(expression.strip(), mode="eval").body) if len(expression) <= MAX_EXPRESSION else None
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
        return None


def _quotient(left: int, right: int) -> int:
    """Divide as bash does, toward zero."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _remainder(left: int, right: int) -> int:
    return left - right * _quotient(left, right)


def _power(left: int, right: int) -> int:
    return pow(left, right, 1 << 64)


_CALCULATED: Final = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: _remainder,
    ast.Pow: _power,
}


def _number(node: ast.AST) -> int:
    """Calculate with the 64 bits of bash."""
    match node:
        case ast.Constant(value=int(value)):
            number = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = -_number(operand)
        case ast.BinOp(left=left, op=sign, right=right):
            number = _CALCULATED[type(sign)](_number(left), _number(right))
        case _:
            raise ValueError("not a calculation")
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
