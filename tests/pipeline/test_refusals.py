"""Models, worlds and other features that a list of operations cannot run with, and those that it can."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from mindspeed.job.config import world_of_config
from mindspeed.pipeline.conditions import foreign_modules, sharded_modules
from mindspeed.pipeline.megatron import Engine
from mindspeed.pipeline.synthesis import megatron
from mindspeed.plugins.conditions import ModelCondition
from mindspeed.problems import RunError
from tests.engine.test_one_answer import by_plan, surroundings
from tests.features.resolving import CATALOG, active, refusals

LISTS, AHEAD = ("nano-pipe", "zero-bubble"), ("recompute-in-advance", "recompute-in-bubble")
FULL: dict[str, dict[str, Any]] = {
    "recompute": {"granularity": "full", "method": "uniform", "num_layers": 1},
    "adaptive-recompute": {"budget_mb": 1000},
}


def a_class(name: str, module: str) -> type[nn.Linear]:
    return type(name, (nn.Linear,), {"__module__": module})


def found(*chunks: nn.Module) -> list[str]:
    feature: Any = None
    return foreign_modules(feature, chunks)


def test_layers_of_transformer_engine_are_refused_and_norms_and_plain_layers_are_not() -> None:
    package = "megatron.core.extensions.transformer_engine"
    linear, norm = a_class("TERowParallelLinear", package), a_class("TENorm", package)
    assert found(nn.Sequential(nn.Linear(2, 2), norm(2, 2))) == []
    assert found(nn.Sequential(linear(2, 2), linear(2, 2))) == [
        "the model has TERowParallelLinear: linear layers of Transformer Engine compute both gradients at once"
    ]


def test_fully_sharded_parameters_are_refused_and_data_parallel_ones_are_not() -> None:
    reason = "fully sharded parameters are gathered in the order of Megatron's schedule"
    feature: Any = None
    for name, module in (
        ("FullyShardedDataParallel", "megatron.core.distributed.fsdp.mcore_fsdp_adapter"),
        ("TorchFullyShardedDataParallel", "megatron.core.distributed.torch_fully_sharded_data_parallel"),
    ):
        sharded = a_class(name, module)(2, 2)
        assert found(sharded) == sharded_modules(feature, [sharded]) == [f"the model has {name}: {reason}"]
    assert found(a_class("DistributedDataParallel", "megatron.core.distributed.distributed_data_parallel")(2, 2)) == []


def test_every_feature_of_pipelines_asks_the_model() -> None:
    asked = {
        name: ",".join(one.function for one in CATALOG.specs[name].constraints if isinstance(one, ModelCondition))
        for name in (*LISTS, *AHEAD)
    }
    lists, ahead = (f"mindspeed.pipeline.conditions:{name}" for name in ("foreign_modules", "sharded_modules"))
    repeated = "mindspeed.memory.model_layers:unsuited_optimizers", "mindspeed.pipeline.post_validation:late_gathers"
    later = {"zero-bubble": ",".join((lists, *repeated))}
    assert asked == dict.fromkeys(LISTS, lists) | dict.fromkeys(AHEAD, ahead) | later


def shared(slot: str, *names: str) -> str:
    """The problem of features that hold one slot."""
    first, second = sorted(names)
    role = f"both hold the slot {slot}, a role that only one feature can have"
    return f"MS203 {first} and {second} {role} | remove {first} or {second}"


def test_two_schedules_are_refused_in_both_orders() -> None:
    for names in (LISTS, LISTS[::-1]):
        assert refusals(*names, pp=2) == [shared("linear", *names), shared("pipeline-schedule", *names)]
    for name in LISTS:
        assert name in active(name, pp=2)


@pytest.mark.parametrize("other", ["coc", "mc2", "tensor-parallel-2d"])
@pytest.mark.parametrize("name", LISTS)
def test_another_backward_pass_of_linear_layers_is_refused_in_both_orders(name: str, other: str) -> None:
    for names in ((name, other), (other, name)):
        assert refusals(*names, pp=2, tp=2) == [shared("linear", *names)]
    assert other in active(other, *AHEAD[:1], pp=2, tp=2)


@pytest.mark.parametrize("other", ["recompute", "adaptive-recompute", AHEAD[1]])
def test_another_recompute_policy_is_refused_in_both_orders(other: str) -> None:
    for names in ((AHEAD[0], other), (other, AHEAD[0])):
        assert refusals(*names, pp=2, settings=FULL) == [shared("recompute-policy", *names)]
    assert other in active(other, "nano-pipe", pp=2, settings=FULL)


@pytest.mark.parametrize("other", ["recompute", "adaptive-recompute", *AHEAD])
def test_a_list_that_recomputes_itself_and_another_policy_are_refused_in_both_orders(other: str) -> None:
    settings = FULL | {"zero-bubble": {"recompute": "all"}}
    first, second = sorted(("zero-bubble", other))
    for names in (("zero-bubble", other), (other, "zero-bubble")):
        assert refusals(*names, pp=2, settings=settings) == [
            (
                f"MS202 {first} conflicts with {second}, because zero-bubble.recompute already decides which activations "
                f"are recomputed. adaptive-recompute, recompute-in-advance, recompute-in-bubble and recompute with "
                f"granularity=full decide this too | --set zero-bubble.recompute=none, or remove {first} or {second}"
            )
        ]
    assert other in active(other, "zero-bubble", pp=2, settings=FULL)


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({"num_microbatches_with_partial_activation_checkpoints": 2}, {"partial_checkpoints"}),
        ({"use_ring_exchange_p2p": True}, {"ring_exchange"}),
        ({"defer_embedding_wgrad_compute": True}, {"deferred_embedding_gradients"}),
        ({"delay_wgrad_compute": True}, {"delayed_weight_gradients"}),
        ({"fine_grained_activation_offloading": True}, {"fine_grained_offloading"}),
        ({"cpu_offloading": True}, {"cpu_offloading"}),
    ],
)
def test_a_configuration_tells_these_fields(config: dict[str, Any], fields: set[str]) -> None:
    assert {name for name, value in world_of_config(SimpleNamespace(**config)).items() if value is True} == fields


ONLY_OWN_SCHEDULES = (
    "partial_checkpoints",
    "ring_exchange",
    "delayed_weight_gradients",
    "deferred_embedding_gradients",
    "hybrid_context_parallel",
    "overlapped_micro_batches",
    "fine_grained_offloading",
)
"""Fields of Megatron's arguments that only its own schedules follow."""
SCHEDULES = sorted(name for name, spec in CATALOG.specs.items() if "pipeline-schedule" in spec.slots)


@pytest.mark.parametrize("field", ONLY_OWN_SCHEDULES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_refuses_arguments_that_only_megatrons_schedules_follow(name: str, field: str) -> None:
    layer = surroundings(CATALOG.feature(name))
    assert by_plan(layer, {}, name) == set()
    (refusal,) = by_plan(layer, {field: True}, name)
    assert name in refusal


@pytest.mark.parametrize(("iterators", "count"), [(iter([]), 1), ([iter([])], 1), ([None, None, None], 3)])
def test_a_number_of_data_iterators_other_than_that_of_chunks_is_refused(iterators: Any, count: int) -> None:
    links: Any = None
    engine = Engine("zero-bubble", lambda shape, costs: megatron(shape), links)
    with pytest.raises(RunError) as refusal:
        engine(
            forward_step_func=None,
            data_iterator=iterators,
            model=[nn.Linear(2, 2), nn.Linear(2, 2)],
            num_microbatches=4,
            seq_length=8,
            micro_batch_size=1,
        )
    assert str(refusal.value.problems[0]).splitlines() == [
        f"MS651 zero-bubble: each model chunk needs a data iterator, but the rank has {count} for 2 chunks",
        "  fix: pass data_iterator as a list with one iterator for each model chunk",
    ]


def test_features_that_take_layers_apart_are_those_that_are_tried() -> None:
    holders = {name for name, spec in CATALOG.specs.items() if {"linear", "pipeline-schedule"} & spec.slots}
    assert holders == {*LISTS, "moe-fb-overlap", "dualpipev", "coc", "mc2", "mla-split", "tensor-parallel-2d"}
    assert {name for name, spec in CATALOG.specs.items() if "recompute-policy" in spec.slots} == {*FULL, *AHEAD}
