"""Requirements of zero-bubble: stages, costs, a limit that a list can keep, and a model that fits a V."""

from typing import Any

import pytest

from mindspeed.features.zero_bubble.feature import CONSTRAINTS, ZeroBubbleArgs
from mindspeed.job.world import World
from mindspeed.pipeline.operations import Costs, PipelineShape
from mindspeed.pipeline.search import fastest
from mindspeed.plugins.conditions import Condition, failure
from tests.features.resolving import MODEL, active, ask, refusals

V: dict[str, Any] = {"pp": 2, "vpp": 2, "tied_embeddings": False, "mtp_num_layers": 0}
HYBRID: dict[str, Any] = {"hybrid_layer_pattern": "*-|*-|*-|*-", "engine_over_local": True}


def of(**settings: object) -> dict[str, dict[str, object]]:
    return {"zero-bubble": settings}


def test_a_limit_that_no_list_keeps_is_refused_with_the_least_and_the_least_is_not() -> None:
    (text,) = refusals("zero-bubble", pp=4, vpp=2, settings=of(limit=4))
    assert text == (
        "MS304 zero-bubble: with zero-bubble.recompute=none, every schedule keeps the activations of at least 5 forward "
        "passes, but zero-bubble.limit is 4 | --set zero-bubble.limit=5, or --set zero-bubble.recompute=least (recomputes the "
        "passes that exceed the limit)"
    )
    assert active("zero-bubble", pp=4, vpp=2, settings=of(limit=5))[-1] == "zero-bubble"
    assert active("zero-bubble", pp=4, vpp=2, settings=of(limit=4, recompute="least"))[-1] == "zero-bubble"
    assert active("zero-bubble", pp=4, settings=of(limit=1))[-1] == "zero-bubble"


def test_the_least_limit_counts_the_micro_batches_of_a_group() -> None:
    (text,) = refusals("zero-bubble", pp=4, vpp=2, micro_batch_group=8, settings=of(limit=8))
    assert "keeps the activations of at least 9 forward passes, but zero-bubble.limit is 8" in text
    assert active("zero-bubble", pp=4, vpp=2, micro_batch_group=8, settings=of(limit=9))[-1] == "zero-bubble"
    assert fastest(PipelineShape(4, 2, 16, group=8), Costs(), limit=9)[1].problems == ()


def test_a_cost_of_zero_is_refused_and_measured_costs_are_not() -> None:
    assert refusals("zero-bubble", pp=4, settings=of(costs=[1, 0, 1, 1])) == [
        "MS301 zero-bubble.costs is [1, 0, 1, 1]: every duration must be greater than 0 | --set zero-bubble.costs=measured"
    ]
    assert active("zero-bubble", pp=4, settings=of(costs="measured"))[-1] == "zero-bubble"


@pytest.mark.parametrize(
    ("world", "text"),
    [
        ({"vpp": 1}, "placement=v needs two model chunks on each rank, but vpp is 1 | --vpp 2, or"),
        ({"vpp": 4}, "placement=v needs two model chunks on each rank, but vpp is 4 | --vpp 2, or"),
        (
            {"first_stage_layers": 2},
            "placement=v needs the same number of layers in every stage or a layout of the stages, but",
        ),
    ],
)
def test_a_v_refuses_models_that_do_not_fit_and_takes_those_that_do(world: dict[str, Any], text: str) -> None:
    (refused,) = refusals("zero-bubble", settings=of(placement="v"), **V | world)
    assert refused.startswith(f"MS304 zero-bubble: {text}")
    assert active("zero-bubble", settings=of(placement="v"), **V)[-1] == "zero-bubble"
    assert active("zero-bubble", settings=of(placement="loop"), **V | world)[-1] == "zero-bubble"


@pytest.mark.parametrize("world", [{"tied_embeddings": True}, {"mtp_num_layers": 1}, {"pipeline_layout": True}])
def test_a_v_takes_shared_weights_and_layouts(world: dict[str, Any]) -> None:
    assert active("zero-bubble", settings=of(placement="v"), **V | world)[-1] == "zero-bubble"


def test_a_v_takes_a_feature_that_deals_out_layers() -> None:
    settings = of(placement="v") | {"noop-layers": {"layers": (0, 7)}}
    assert not ask("zero-bubble", "noop-layers", settings=settings, model=MODEL | V | {"num_layers": 6}).problems


EVEN = ("--first-stage-layers", "--last-stage-layers", "--embedding-is-layer", "--loss-is-layer")


@pytest.mark.parametrize(
    ("job", "text"),
    [
        ({"first_stage_layers": 2}, "gives the first stage 2 layers"),
        ({"last_stage_layers": 2}, "gives the last stage 2 layers"),
        (
            {"embedding_is_layer": True, "loss_is_layer": True, "num_layers": 6},
            "counts the embedding as a layer and counts the output layer as a layer",
        ),
    ],
)
def test_a_v_refuses_uneven_stages_of_megatron(job: dict[str, Any], text: str) -> None:
    assert refusals("zero-bubble", settings=of(placement="v"), **V | job) == [
        "MS304 zero-bubble: placement=v needs the same number of layers in every stage or a layout of the stages, but the job "
        f"{text} | --set zero-bubble.placement=loop{''.join(f', or remove {field}' for field in EVEN)}"
    ]
    assert refusals("zero-bubble", **V | job) == []


def test_a_v_refuses_a_layout_with_predictions_before_the_last_stage() -> None:
    layout = V | {"pipeline_layout": True, "mtp_num_layers": 1, "mtp_standalone": True}
    assert refusals("zero-bubble", settings=of(placement="v"), **layout) == [
        "MS304 zero-bubble: placement=v needs multi-token prediction in the stage of the output layer, but the layout has it "
        "in an earlier one | let pipeline_model_parallel_layout end with mL, such as Et|tt|tt|mL, or "
        "--set zero-bubble.placement=loop"
    ]
    assert refusals("zero-bubble", **layout) == []


def test_a_v_refuses_a_hybrid_model() -> None:
    assert refusals("zero-bubble", settings=of(placement="v"), **V | HYBRID) == [
        "MS304 zero-bubble: placement=v does not support a HybridModel, whose layers Megatron assigns to ranks by the "
        "pattern | --set zero-bubble.placement=loop"
    ]


@pytest.mark.parametrize(
    ("version", "fits"), [("0.12.1", False), ("0.14.0", True), ("0.16.1", True), ("0.18.2", True), ("0.19.0", False)]
)
def test_a_v_is_placed_where_megatron_asks_by_chunk(version: str, fits: bool) -> None:
    answers = [
        failure(condition, "zero-bubble", ZeroBubbleArgs(placement="v"), World(V | {"megatron": version}))
        for condition in CONSTRAINTS
        if isinstance(condition, Condition) and "placement=v supports Megatron" in condition.message
    ]
    text = f"placement=v supports Megatron 0.14 to 0.18, but the version is {version}"
    assert [answer and answer.message for answer in answers] == [None if fits else text]


@pytest.mark.parametrize(
    ("also", "world", "code"),
    [
        ((), {"offloaded_optimizer": True}, "MS304"),
        ((), {"qk_clip": True}, "MS304"),
        ((), {"optimizer": "muon"}, "MS304"),
        ((), {"megatron": "0.18.2"}, "MS304"),
        ((), {"precision_aware_optimizer": True, "engine_installed": True, "platform": "cuda"}, "MS304"),
        (("swap-optimizer",), {"dtype": "bf16"}, "MS202"),
        (("reuse-fp32-param",), {"dtype": "bf16"}, "MS202"),
        (("async-param-gather",), {"world_size": 4}, "MS202"),
        (("moe-load-report",), {"num_experts": 4}, "MS202"),
    ],
)
def test_a_step_that_cannot_be_repeated_is_refused(also: tuple[str, ...], world: dict[str, Any], code: str) -> None:
    for on in (True, False):
        found = refusals("zero-bubble", *also, settings=of(post_validation=on), **{"pp": 2} | world)
        assert any(code in text for text in found) == on, found
        assert all("post_validation" in text for text in found)
