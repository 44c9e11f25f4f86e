"""The linter of prose finds what makes a text a riddle, and nothing in a plain one."""

from __future__ import annotations

import pytest

from tools.prose import Text, findings, written


def text_in(source: str) -> Text:
    """Return the first text in the source of a module."""
    return next(text for text in written(source, "x") if text.text)


LONG = "The schedule sends the gradient of a stage one step earlier than Megatron does " + "and then " * 6 + "it waits"

RIDDLES = {
    "a banned word of the table": (
        Text("setting", "x", "what waits is in host memory"),
        ["'what waits': write queued, deferred"],
    ),
    "a flag that stands for a feature": (
        Text("data", "x", "--use-x stands for the feature x"),
        ["'stands for': write maps to"],
    ),
    "a piece": (Text("help", "x", "Number of pieces"), ["'pieces': write chunk, partition"]),
    "a reason of nobody": (
        Text("reason", "x", "nobody reads the mask"),
        ["'nobody': write no other code, another package, or the name"],
    ),
    "a long sentence": (Text("hook", "x", LONG), [f"a sentence of 28 words: {LONG[:50]!r}"]),
    "an expression of Python": (
        Text("condition", "x", "the condition <lambda> does not hold"),
        ["<lambda>: write a sentence"],
    ),
    "a message without a subject": (
        Text("problem", "x", "it changes modules that run once"),
        ["begins with 'it': begin with a subject or a verb"],
    ),
    "a docstring that begins with a question": (
        Text("docstring", "x", "What a rank keeps."),
        ["begins with 'What': begin with a subject or a verb"],
    ),
    "a message that is glued": (
        text_in('Problem("MS307", f"{meaning} is not known", fix=fix)'),
        ["'is not known' is glued to another text: write a sentence"],
    ),
    "a problem without a fix": (text_in('Problem("MS301", "tp is 3", where="job file")'), ["no fix"]),
}


@pytest.mark.parametrize("name", RIDDLES)
def test_a_planted_riddle_is_found(name: str) -> None:
    text, found = RIDDLES[name]
    assert list(findings(text)) == found


@pytest.mark.parametrize(
    "text",
    [
        Text("problem", "x", "6 attention heads are not divisible by tp=4"),
        Text("setting", "x", "Interval in steps at which digests are logged (0 = never)"),
        Text("docstring", "x", "Return the arguments of a plan."),
        Text("help", "x", "Names of features, as `--stands for` has them"),
        text_in('Problem("MS301", "tp is 3", fix=Fix.give_field("tp", 2))'),
        text_in('"""Common parts of schedules.\n\nWhat is below is not read."""'),
    ],
)
def test_a_plain_text_passes(text: Text) -> None:
    assert list(findings(text)) == []
