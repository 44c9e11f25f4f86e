"""Requirements of zero-bubble: stages, costs, a limit that a list can keep, and a model that fits a V."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed.features.zero_bubble.feature import ZeroBubble
from mindspeed.features.zero_bubble.settings import ZeroBubbleArgs
from mindspeed.job.world import World
from mindspeed.plugins import MindSpeedError
from tests.features.resolving import MODEL, active, ask, refusals

V: dict[str, Any] = {"pp": 2, "vpp": 2, "tied_embeddings": False, "mtp_num_layers": 0}


def of(**settings: object) -> dict[str, dict[str, object]]:
    return {"zero-bubble": settings}


def test_one_stage_is_refused_and_two_are_not() -> None:
    text = "MS304 zero-bubble: one pipeline stage waits for no other, and there is 1 | --pp 2 or more, or remove zero-bubble"
    assert refusals("zero-bubble") == [text]
    assert active("zero-bubble", pp=2)[-1] == "zero-bubble"


def test_a_limit_that_no_list_keeps_is_refused_with_the_least_and_the_least_is_not() -> None:
    (text,) = refusals("zero-bubble", pp=4, settings=of(limit=3))
    assert text == (
        "MS304 zero-bubble: no list of operations keeps 3 activation sets, and the least possible is 4 | "
        "--set zero-bubble.limit=4, or a smaller one with --set zero-bubble.recompute=least"
    )
    assert active("zero-bubble", pp=4, settings=of(limit=4))[-1] == "zero-bubble"
    assert active("zero-bubble", pp=4, settings=of(limit=3, recompute="least"))[-1] == "zero-bubble"


def test_a_cost_of_zero_is_refused_and_measured_costs_are_not() -> None:
    (text,) = refusals("zero-bubble", pp=4, settings=of(costs=[1, 0, 1, 1]))
    assert text == "MS304 zero-bubble: a duration of (1.0, 0.0, 1.0, 1.0) is not above 0 | --set zero-bubble.costs=[1,1,1,1]"
    assert active("zero-bubble", pp=4, settings=of(costs="measured"))[-1] == "zero-bubble"


def test_two_schedules_and_another_recompute_policy_are_refused() -> None:
    assert any("pipeline-schedule" in text for text in refusals("zero-bubble", "nano-pipe", pp=2))
    settings = {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}
    for name in ("recompute-in-advance", "recompute-in-bubble"):
        assert any("recompute-policy" in text for text in refusals(name, "recompute", pp=2, settings=settings))
        assert active(name, pp=2)[-1] == name


@pytest.mark.parametrize(
    ("world", "text"),
    [
        ({"vpp": 1}, "a V has two model chunks on each rank, and vpp is 1 | --vpp 2"),
        ({"vpp": 4}, "a V has two model chunks on each rank, and vpp is 4 | --vpp 2"),
        (
            {"tied_embeddings": True},
            "placement v has the embedding and the output layer in two chunks of one rank, where Megatron does not tie them",
        ),
        ({"mtp_num_layers": 1}, "placement v has no place for the 1 layers of multi-token prediction | --mtp-num-layers 0"),
    ],
)
def test_a_v_refuses_models_that_do_not_fit_and_takes_those_that_do(world: dict[str, Any], text: str) -> None:
    (refused,) = refusals("zero-bubble", settings=of(placement="v"), **V | world)
    assert refused.startswith(f"MS304 zero-bubble: {text}")
    assert active("zero-bubble", settings=of(placement="v"), **V)[-1] == "zero-bubble"
    assert active("zero-bubble", settings=of(placement="loop"), **V | world)[-1] == "zero-bubble"


def test_a_v_refuses_a_feature_that_deals_out_layers() -> None:
    settings = of(placement="v") | {"noop-layers": {"layers": (0, 7)}}
    world = MODEL | V | {"num_layers": 6}
    problems = ask("zero-bubble", "noop-layers", settings=settings, model=world).problems
    assert [problem.message for problem in problems] == [
        "zero-bubble: placement v has equal stages, and another feature deals out (1, 2, 2, 1) layers"
    ]
    assert not ask("zero-bubble", "noop-layers", settings={**settings, **of(placement="loop")}, model=world).problems


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pipeline_model_parallel_layout", "Et|t|t|tL"),
        ("num_layers_in_first_pipeline_stage", 1),
        ("account_for_loss_in_pipeline_split", True),
        ("mtp_num_layers", 1),
    ],
)
def test_a_v_refuses_configurations_with_uneven_stages(name: str, value: object) -> None:
    config = SimpleNamespace(**{name: value})
    with pytest.raises(MindSpeedError, match=f"MS304 zero-bubble: placement v with {name}="):
        ZeroBubble(ZeroBubbleArgs(placement="v"), World(V)).config_ready(config)
    ZeroBubble(ZeroBubbleArgs(), World(V)).config_ready(config)
