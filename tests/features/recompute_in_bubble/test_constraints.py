"""Requirements of recompute-in-bubble."""

from __future__ import annotations

from tests.features.resolving import active, refusals

NAME = "recompute-in-bubble"


def test_a_limit_below_the_sets_that_wait_for_weight_gradients_is_refused_with_the_least() -> None:
    for engine, fix in (("nano-pipe", ", or a smaller nano-pipe.lag"), ("zero-bubble", "")):
        (text,) = refusals(NAME, engine, pp=4, settings={NAME: {"limit": 3}})
        assert text == (
            f"MS304 {engine}: 4 activation sets wait for weight gradients at once, and recompute-in-bubble.limit is 3 | "
            f"--set recompute-in-bubble.limit=4{fix}"
        )
        assert NAME in active(NAME, engine, pp=4, settings={NAME: {"limit": 4}})
        assert NAME in active(NAME, engine, pp=4)
    assert active(NAME, pp=4, settings={NAME: {"limit": 1}})[-1] == NAME


def test_a_list_that_recomputes_itself_is_refused() -> None:
    settings = {"zero-bubble": {"recompute": "all"}}
    (text,) = refusals(NAME, "zero-bubble", pp=2, settings=settings)
    assert "zero-bubble.recompute recomputes itself" in text
    assert NAME in active(NAME, "zero-bubble", pp=2)


def test_one_stage_is_refused_and_two_are_not() -> None:
    (text,) = refusals(NAME)
    assert text.startswith(f"MS304 {NAME}: one pipeline stage waits for no other, and there is 1 | --pp 2 or more")
    assert active(NAME, pp=2)[-1] == NAME
