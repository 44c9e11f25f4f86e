"""What the resolver answers to the requests of ``requests.txt``, which has claims, requests and answers.

A claim is a line that begins with #. A request is a line of features, settings ``feature.name=value`` and fields of the job
``name=value``. The indented lines after it are its problems: code, features, values at fault, and after the bar the fixes; a
request without any is fine. Sentences are left to their declarations, so that rewording one changes no answer. In place of
problems are the features of the plan (``active:``), what cannot be decided without a model (``unchecked:``), or the arguments
that Megatron gets of a feature with settings ``name=value`` (``sets:``). A request with ``<one|two>`` is one for each of them,
and ``{it}`` elsewhere in the request or in its answers is the value.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from tests.features.resolving import active, not_checked, outlines, overrides

Row = tuple[str, list[str]]


def claims() -> dict[str, list[Row]]:
    """Return the requests of each claim, with their answers."""
    found: dict[str, list[Row]] = {}
    for line in Path(__file__).with_name("requests.txt").read_text().splitlines():
        if line.startswith("# "):
            found[line[2:]] = rows = []
        elif line.startswith("    "):
            rows[-1][1].append(line.strip())
        else:
            rows.append((line, []))
    return {claim: [each for row in rows for each in alternatives(*row)] for claim, rows in found.items()}


def alternatives(request: str, answers: list[str]) -> list[Row]:
    """Return a request with its answers for each of the alternatives that it has in angle brackets."""
    before, found, rest = request.partition("<")
    if not found:
        return [(request, answers)]
    words, _, after = rest.partition(">")
    return [
        (before + word + after.replace("{it}", it), [answer.replace("{it}", it) for answer in answers])
        for word in words.split("|")
        for it in [word.partition("=")[2] or word]
    ]


def answers_to(request: str, expected: list[str]) -> list[str]:
    """Return the answers to a request, of the kind that is expected."""
    names, settings, fields = read_request(request)
    kind = expected[0].partition(" ")[0] if expected else ""
    if kind == "active:":
        return [f"active: {' '.join(active(*names, settings=settings, **fields))}"]
    if kind == "unchecked:":
        return [f"unchecked: {text}" for text in not_checked(*names, settings=settings, **fields)]
    if kind == "sets:":
        return [f"sets: {overrides(*names, **fields)}"]
    return outlines(*names, settings=settings, **fields)


def read_request(request: str) -> tuple[list[str], dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the features, the settings and the fields of the job of a request."""
    names: list[str] = []
    settings: dict[str, dict[str, Any]] = {}
    fields: dict[str, Any] = {}
    for word in request.split():
        name, given, value = word.partition("=")
        feature, dot, setting = name.partition(".")
        if not given:
            names.append(word)
        elif dot:
            settings.setdefault(feature, {})[setting] = read_value(value)
        else:
            fields[name] = read_value(value)
    return names, settings, fields


def read_value(text: str) -> Any:
    """Return a Python literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


CLAIMS = claims()


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_request_gets_its_answers(claim: str) -> None:
    assert [(request, answers_to(request, answers)) for request, answers in CLAIMS[claim]] == CLAIMS[claim]
