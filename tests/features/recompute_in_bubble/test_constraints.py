"""Requirements of recompute-in-bubble."""

from __future__ import annotations

from tests.features.resolving import active, refusals

NAME = "recompute-in-bubble"


def test_one_stage_is_refused_and_two_are_not() -> None:
    (text,) = refusals(NAME)
    assert text.startswith(f"MS304 {NAME}: one pipeline stage waits for no other, and there is 1 | --pp 2 or more")
    assert active(NAME, pp=2)[-1] == NAME
