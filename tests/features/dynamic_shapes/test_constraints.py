"""Requirements of dynamic-shapes."""

from __future__ import annotations

from tests.features.resolving import active, refusals


def test_one_stage_is_refused_and_two_are_not() -> None:
    text = "MS304 dynamic-shapes: one stage receives no tensors, and there is 1 | --pp 2 or more, or remove dynamic-shapes"
    assert refusals("dynamic-shapes") == [text]
    assert active("dynamic-shapes", pp=2)[-1] == "dynamic-shapes"


def test_a_length_that_context_parallelism_cannot_divide_is_refused() -> None:
    found = refusals("dynamic-shapes", "ring-attention", pp=2, cp=2, world_size=8, seq_length=62)
    assert any(text.startswith("MS304 dynamic-shapes: a sequence of 62 tokens does not divide") for text in found)
