"""Both dispatcher features give expert parallelism their dispatcher, and refuse the same configurations."""

from __future__ import annotations

import pytest

from mindspeed.plugins import MindSpeedError, World
from tests.features.resolving import CATALOG, ask, refusals
from tests.moe.configurations import config

WORLD = {"world_size": 2, "ep": 2, "num_experts": 4}
KINDS = {"allgather": "alltoall", "alltoall": "allgather"}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_it_gives_expert_parallelism_its_dispatcher(kind):
    name = f"moe-{kind}-dispatcher"
    (planned,) = [feature for feature in ask(name, **WORLD).features if feature.name == "expert-parallel"]
    assert planned.args["dispatcher"] == kind
    assert planned.settings["dispatcher"].source == f"required by {name}"


def test_another_dispatcher_of_the_user_is_refused(kind):
    name, other = f"moe-{kind}-dispatcher", KINDS[kind]
    assert refusals(name, **WORLD, settings={"expert-parallel": {"dispatcher": kind}}) == []
    spelled = {"allgather": "all-gather", "alltoall": "all-to-all"}[kind]
    assert refusals(name, **WORLD, settings={"expert-parallel": {"dispatcher": other}}) == [
        f"MS212 {name} requires expert-parallel.dispatcher={kind}, because it is the {spelled} dispatcher that is exchanged, "
        f"and it is {other} (command line) | --set expert-parallel.dispatcher={kind}, or remove {name}"
    ]


def test_both_dispatchers_are_refused():
    gathers, sends = (f"moe-{kind}-dispatcher" for kind in KINDS)
    assert refusals(sends, gathers, **WORLD) == [
        f"MS212 {gathers} requires expert-parallel.dispatcher=allgather, because it is the all-gather dispatcher that is "
        f"exchanged, and it is alltoall (required by {sends}) | remove {gathers} or {sends}",
        f"MS203 {gathers} and {sends} all hold the slot token-permutation | remove {gathers} or {sends}",
    ]


def test_a_dense_model_is_refused(kind):
    name = f"moe-{kind}-dispatcher"
    assert refusals(name, world_size=1) == [
        "MS304 expert-parallel: there are no experts to spread, the model is dense "
        "| --num-experts with a multiple of 1, or remove expert-parallel",
        f"MS304 {name}: there are no experts to send tokens to, the model is dense | --num-experts N, or remove {name}",
    ]


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"moe_token_dispatcher_type": "flex"}, "moe_token_dispatcher_type is flex, not {kind},"),
        ({"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm is set"),
        ({"cuda_graph_impl": "local"}, "CUDA graphs are set"),
        ({"moe_router_padding_for_quantization": True}, "moe_router_padding_for_quantization is set"),
        ({"fp8": "hybrid"}, "fp8 or fp4 is set"),
        ({"moe_latent_size": 8}, "moe_latent_size is set"),
    ],
)
def test_a_configuration_that_it_cannot_serve_is_refused(kind, option, reason):
    name = f"moe-{kind}-dispatcher"
    cls = CATALOG.feature(name)
    feature = cls(cls.Args(), World({}))
    feature.config_ready(config(moe_token_dispatcher_type=kind))
    with pytest.raises(MindSpeedError) as error:
        feature.config_ready(config(**{"moe_token_dispatcher_type": kind} | option))
    assert str(error.value) == f"MS304 {name}: {reason.format(kind=kind)} in a model that is being built\n  fix: remove {name}"


UNSERVED = {
    "low_precision": (
        True,
        "linear layers multiply in fp8 or fp4",
        "--no-low-precision (Megatron-LM: no --fp8-format, --fp4-format)",
    ),
    "cuda_graphs": (True, "layers are captured as CUDA graphs", "--no-cuda-graphs (Megatron-LM: --cuda-graph-impl none)"),
    "latent_expert_size": (
        8,
        "experts work on latent vectors",
        "--latent-expert-size 0 (Megatron-LM: no --moe-latent-size)",
    ),
    "overlapped_micro_batches": (
        True,
        "Megatron hides the transfers behind another micro-batch (overlap_moe_expert_parallel_comm)",
        "--no-overlapped-micro-batches (Megatron-LM: no --overlap-moe-expert-parallel-comm)",
    ),
}


@pytest.mark.parametrize("field", UNSERVED)
def test_a_world_that_it_cannot_serve_is_refused_in_the_plan(kind, field):
    name, (value, sentence, fix) = f"moe-{kind}-dispatcher", UNSERVED[field]
    assert refusals(name, **WORLD) == refusals(name, **WORLD, **{field: type(value)(0)}) == []
    assert refusals(name, **WORLD, **{field: value}) == [
        f"MS304 {name}: {sentence}, which {name} does not serve | {fix}, or remove {name}"
    ]


@pytest.mark.parametrize("name", ["moe-alltoall-overlap", "moe-allgather-overlap", "moe-zero-memory"])
def test_what_stands_on_a_dispatcher_is_refused_with_it(name):
    kind = "allgather" if "allgather" in name else "alltoall"
    sentence, fix = UNSERVED["cuda_graphs"][1:]
    dispatcher = f"moe-{kind}-dispatcher"
    assert refusals(name, **WORLD) == []
    assert refusals(name, **WORLD, cuda_graphs=True) == [
        f"MS304 {dispatcher}: {sentence}, which {dispatcher} does not serve | {fix}, or remove {dispatcher}"
    ]


def test_gathered_tokens_are_not_padded():
    name, factor = "moe-allgather-dispatcher", {"expert_capacity_factor": 1.0}
    assert refusals(name, **WORLD, **factor) == refusals(name, **WORLD, **factor, padded_experts=False) == []
    assert refusals(name, **WORLD, **factor, padded_experts=True) == [
        f"MS304 {name}: experts are padded to their capacity, and gathered tokens have no such rows "
        f"| --no-padded-experts (Megatron-LM: no --moe-pad-expert-input-to-capacity), or remove {name}"
    ]
    assert refusals("moe-alltoall-dispatcher", **WORLD, **factor, padded_experts=True) == []
