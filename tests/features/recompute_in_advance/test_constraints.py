"""Requirements of recompute-in-advance."""

from __future__ import annotations

from tests.features.resolving import active, refusals

NAME = "recompute-in-advance"


def test_one_stage_is_refused_and_two_are_not() -> None:
    (text,) = refusals(NAME)
    assert text.startswith(f"MS304 {NAME}: one pipeline stage waits for no other, and there is 1 | --pp 2 or more")
    assert active(NAME, pp=2)[-1] == NAME


def test_groups_that_do_not_fill_a_chunk_are_refused() -> None:
    settings = {NAME: {"num_layers": 3}}
    (text,) = refusals(NAME, pp=2, settings=settings)
    assert text.startswith(f"MS304 {NAME}: groups of 3 layers do not fill every model chunk: they have (4, 4) layers")
    assert active(NAME, pp=2, settings={NAME: {"num_layers": 2}})[-1] == NAME


def test_modules_of_experts_need_experts() -> None:
    settings = {NAME: {"granularity": "selective", "modules": ["moe"]}}
    (text,) = refusals(NAME, pp=2, settings=settings)
    assert text.startswith(f"MS304 {NAME}: moe and shared_experts are modules of a MoE model, and this one is dense")
