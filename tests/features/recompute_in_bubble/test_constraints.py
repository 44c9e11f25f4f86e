"""Requirements of recompute-in-bubble."""

from tests.features.resolving import active, refusals

NAME = "recompute-in-bubble"


def test_a_limit_below_the_sets_that_wait_for_weight_gradients_is_refused_with_the_least() -> None:
    for engine, fix in (
        ("nano-pipe", ", or --set nano-pipe.lag=0.0 (a shorter delay of weight gradients)"),
        ("zero-bubble", ""),
    ):
        (text,) = refusals(NAME, engine, pp=4, settings={NAME: {"limit": 3}})
        assert text == (
            f"MS304 {engine}: deferred weight gradients need the activations of 4 forward passes, "
            f"but recompute-in-bubble keeps those of at most 3 (its setting limit) | "
            f"--set recompute-in-bubble.limit=4{fix}"
        )
        assert NAME in active(NAME, engine, pp=4, settings={NAME: {"limit": 4}})
        assert NAME in active(NAME, engine, pp=4)
    assert active(NAME, pp=4, settings={NAME: {"limit": 1}})[-1] == NAME
