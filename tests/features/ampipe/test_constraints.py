from typing import Any

import pytest

from tests.features.resolving import active, ask, refusals

WORLD: dict[str, Any] = {"num_experts": 8, "ep": 2, "multi_latent_attention": False}


def refused(*names: str, groups: int | None = 4, world: dict[str, Any] | None = None, **settings: Any) -> list[str]:
    values = {"deepspeed-moe": {"groups": groups}} if groups else {}
    return refusals("ampipe", "deepspeed-moe", *names, settings={**values, "ampipe": settings}, **WORLD | (world or {}))


def test_layers_that_fit_are_accepted():
    assert refused() == []
    assert refused(parts=4, overlap=True, world={"tp": 2}, groups=16) == []
    assert "ampipe" in active("ampipe", "moe-alltoall-overlap", **WORLD)
    assert "ampipe" in active("ampipe", "deepspeed-moe", settings={"deepspeed-moe": {"groups": 2}}, **WORLD)


def test_selective_recomputation_is_refused_and_full_one_is_not():
    def problems(granularity: str, **more: Any) -> list[str]:
        values = {"deepspeed-moe": {"groups": 4}, "recompute": {"granularity": granularity, **more}}
        return refusals("ampipe", "deepspeed-moe", "recompute", settings=values, **WORLD)

    assert problems("full", method="uniform", num_layers=1) == []
    (problem,) = problems("selective")
    assert problem.startswith("MS304 ampipe: selective recomputation expects modules that run once per layer, ")


MASKS = "ampipe computes only causal or full attention, but that feature passes a mask or document ends to attention"
MODULES = "ampipe calls layers once per sequence chunk, but that feature expects one call per micro-batch"
EXPERTS = "ampipe sends tokens to experts chunk by chunk, but that feature handles the tokens of a whole micro-batch"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            "nano-pipe",
            "features with a pipeline schedule defer weight gradients, but ampipe computes them chunk by chunk in backward",
        ),
        (
            "mc2",
            "features that replace linear layers (coc, mc2, tensor-parallel-2d and others) also replace the linear layer after "
            "attention, which ampipe computes chunk by chunk",
        ),
        ("eod-reset", MASKS),
        ("shared-attention-mask", MASKS),
        ("norm-recompute", MODULES),
        ("activation-recompute", MODULES),
        ("swap-attention", MODULES),
        ("adaptive-recompute", MODULES),
        ("moe-zero-memory", EXPERTS),
        ("moe-adaptive-recompute", EXPERTS),
        ("moe-load-report", EXPERTS),
    ],
)
def test_features_that_do_not_fit_are_refused(other: str, reason: str):
    first, second = sorted(("ampipe", other))
    text = f"MS202 {first} conflicts with {second}, because {reason} | remove {first} or {second}"
    assert text in refused(other)


def test_what_nobody_said_is_not_checked():
    resolution = ask("ampipe", "deepspeed-moe", model={}, settings={"deepspeed-moe": {"groups": 4}}, ep=2)
    assert [row.text for row in resolution.rows if row.kind == "not-checked" and row.feature == "ampipe"]
