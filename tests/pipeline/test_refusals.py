"""Models, worlds and other features that a list of operations cannot run with, and those that it can."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from mindspeed.pipeline.refusals import can_place_v, model_refusals
from tests.features.resolving import CATALOG, active, refusals

LISTS, AHEAD = ("nano-pipe", "zero-bubble"), ("recompute-in-advance", "recompute-in-bubble")
FULL: dict[str, dict[str, Any]] = {
    "recompute": {"granularity": "full", "method": "uniform", "num_layers": 1},
    "adaptive-recompute": {"budget_mb": 1000},
}


def a_class(name: str, module: str) -> type[nn.Linear]:
    return type(name, (nn.Linear,), {"__module__": module})


def test_layers_of_transformer_engine_are_refused_and_norms_and_plain_layers_are_not() -> None:
    package = "megatron.core.extensions.transformer_engine"
    linear, norm = a_class("TERowParallelLinear", package), a_class("TENorm", package)
    assert model_refusals([nn.Sequential(nn.Linear(2, 2), norm(2, 2))]) == set()
    assert model_refusals([nn.Sequential(linear(2, 2), linear(2, 2))]) == {
        "the model has TERowParallelLinear: linear layers of Transformer Engine compute both gradients at once"
    }


def test_fully_sharded_parameters_are_refused_and_data_parallel_ones_are_not() -> None:
    reason = "fully sharded parameters are gathered in the order of Megatron's schedule"
    for name, module in (
        ("FullyShardedDataParallel", "megatron.core.distributed.fsdp.mcore_fsdp_adapter"),
        ("TorchFullyShardedDataParallel", "megatron.core.distributed.torch_fully_sharded_data_parallel"),
    ):
        assert model_refusals([a_class(name, module)(2, 2)]) == {f"the model has {name}: {reason}"}
    assert (
        model_refusals([a_class("DistributedDataParallel", "megatron.core.distributed.distributed_data_parallel")(2, 2)])
        == set()
    )


def test_a_v_is_placed_where_megatron_asks_by_chunk() -> None:
    versions = ("0.12.1", "0.14.0", "0.16.1", "0.18.2", "0.19.0")
    assert [can_place_v(version) for version in versions] == [False, True, True, True, False]


def shared(slot: str, *names: str) -> str:
    """The problem of features that hold one slot."""
    first, second = sorted(names)
    return f"MS203 {first} and {second} all hold the slot {slot} | remove {first} or {second}"


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
            f"MS202 {first} and {second} exclude each other, because zero-bubble.recompute recomputes itself | "
            f"remove {first} or {second}"
        ]
    assert other in active(other, "zero-bubble", pp=2, settings=FULL)


IN_WORLD = {
    "cuda_graphs": (
        "layers are captured as CUDA graphs: "
        "a CUDA graph replays forward and backward in the order in which they were captured",
        "--no-cuda-graphs (Megatron-LM: --cuda-graph-impl none)",
    ),
    "overlapped_micro_batches": (
        "Megatron hides the transfers of experts: expert communication overlaps in combined forward and backward steps",
        "--no-overlapped-micro-batches (Megatron-LM: no --overlap-moe-expert-parallel-comm)",
    ),
}


@pytest.mark.parametrize("field", IN_WORLD)
@pytest.mark.parametrize("name", [*LISTS, *AHEAD])
def test_a_world_with_an_order_of_its_own_is_refused_and_one_that_is_not_known_is_not(name: str, field: str) -> None:
    reason, fix = IN_WORLD[field]
    assert refusals(name, pp=2, **{field: True}) == [f"MS304 {name}: {reason} | {fix}, or remove {name}"]
    assert refusals(name, pp=2, **{field: False}) == refusals(name, pp=2) == []


@pytest.mark.parametrize(
    ("names", "world", "texts"),
    [
        (
            ("dynamic-shapes", "ring-attention"),
            {"cp": 2, "seq_length": 62},
            [
                "MS304 dynamic-shapes: a sequence of 62 tokens does not divide into 2 x cp = 2 x 2 pieces | "
                "pad every micro-batch to a multiple of 2 x 2 tokens"
            ],
        ),
        (
            ("dynamic-shapes", "sequence-parallel"),
            {"tp": 4, "seq_length": 62},
            [
                "MS304 sequence-parallel: sequence length 62 is not a multiple of tp x cp = 4 x 1 | "
                "use a --seq-length that is a multiple of 4 x 1"
            ],
        ),
    ],
    ids=["cp", "sp"],
)
def test_lengths_that_cannot_be_divided_are_refused(names: tuple[str, ...], world: dict[str, int], texts: list[str]) -> None:
    found = refusals(*names, pp=2, **world)
    assert [text for text in found if text in texts] == texts
    assert names[0] in active(*names, pp=2, **world | {"seq_length": 64})


def test_every_feature_of_pipelines_refuses_one_stage() -> None:
    for name in (*LISTS, *AHEAD):
        assert refusals(name) == [
            f"MS304 {name}: one pipeline stage waits for no other, and there is 1 | --pp 2 or more, or remove {name}"
        ]


def test_features_that_take_layers_apart_are_those_that_are_tried() -> None:
    holders = {name for name, spec in CATALOG.specs.items() if {"linear", "pipeline-schedule"} & spec.slots}
    assert holders == {*LISTS, "coc", "mc2", "tensor-parallel-2d"}
    assert {name for name, spec in CATALOG.specs.items() if "recompute-policy" in spec.slots} == {*FULL, *AHEAD}
