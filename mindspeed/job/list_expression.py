"""Compute expressions of whole numbers and lists, such as ``[0]*1+[1]*2``, as Megatron-LM's parser does."""

from __future__ import annotations

import ast
from typing import Any


def computed(text: str) -> Any:
    """Return the value of an expression, None for one with anything else than lists, whole numbers, ``+`` and ``*``."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError):
        return None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(int(number)):
            return number
        case ast.List(items):
            return [_value(item) for item in items]
        case ast.BinOp(left, ast.Add(), right):
            return _value(left) + _value(right)
        case ast.BinOp(left, ast.Mult(), right):
            return _value(left) * _value(right)
    raise TypeError(f"{ast.unparse(node)} is neither a number nor a list")
