"""Arguments of Megatron-LM that a feature cannot run with are refused where the command line is planned."""

from shlex import split

import pytest

from mindspeed import registry
from mindspeed.engine.inspection.cli_arguments import surface
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.megatron_lm.given_arguments import given_arguments
from mindspeed.megatron_lm.training_plan import refused
from mindspeed.plugins.problems import ResolutionError

SHAPE = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --global-batch-size 8"
PIPELINE = f"{SHAPE} --untie-embeddings-and-output-weights --pipeline-model-parallel-size 2"
V = {"world_size": 2, "pp": 2, "vpp": 2, "num_layers": 8, "tied_embeddings": False, "mtp_num_layers": 0}

OFFLOADED = "offloaded activations come back in the order of Megatron's schedule"
SHARDED = "fully sharded parameters are gathered in the order of Megatron's schedule"
FOR_ALL = {
    "--fine-grained-activation-offloading": OFFLOADED,
    "--cpu-offloading-num-layers 1": OFFLOADED,
    "--use-megatron-fsdp": SHARDED,
    "--use-torch-fsdp2": SHARDED,
}
FOR_LISTS = {
    "--defer-embedding-wgrad-compute": "Megatron defers the weight gradient of the output layer with a queue of its own",
    "--use-ring-exchange-p2p": "ring exchange sends and receives at once",
}
IN_WORLD = {
    "--cuda-graph-impl local": (
        "layers are captured as CUDA graphs: "
        "a CUDA graph replays forward and backward in the order in which they were captured",
        "--no-cuda-graphs (Megatron-LM: --cuda-graph-impl none)",
    ),
    "--overlap-moe-expert-parallel-comm": (
        "Megatron hides the transfers of experts: expert communication overlaps in combined forward and backward steps",
        "--no-overlapped-micro-batches (Megatron-LM: no --overlap-moe-expert-parallel-comm)",
    ),
}
LISTS, AHEAD = ("nano-pipe", "zero-bubble"), ("recompute-in-advance", "recompute-in-bubble")
IN_V = {
    "--pipeline-model-parallel-layout Ettt|tt|tt|tL": "layers are dealt out by a layout",
    "--decoder-first-pipeline-num-layers 3": "the first stage has a number of layers of its own",
    "--decoder-last-pipeline-num-layers 3": "the last stage has a number of layers of its own",
    "--account-for-embedding-in-pipeline-split": "the embedding counts as a layer",
    "--account-for-loss-in-pipeline-split": "the output layer counts as a layer",
}


def refusals(plan, line):
    """``"CODE message | fix"`` of every problem of a command line for two processes."""
    try:
        plan(line, 2)
    except ResolutionError as error:
        return [f"{problem.code} {problem.message} | {problem.fix_text}" for problem in error.problems]
    return []


def refusal(name, argument, reason):
    option = argument.split()[0]
    return f"MS304 {name}: Megatron's {option} is given: {reason} | remove {option} or {name}"


def line(*arguments):
    return " ".join((PIPELINE, *arguments))


@pytest.mark.parametrize("name", [*LISTS, *AHEAD])
def test_arguments_that_keep_an_order_of_their_own_are_refused_all_at_once(plan, name):
    asked = FOR_LISTS | FOR_ALL
    expected = asked if name in LISTS else FOR_ALL
    found = refusals(plan, line(*asked, "--features", name))
    assert sorted(found) == sorted(refusal(name, argument, reason) for argument, reason in expected.items())


@pytest.mark.parametrize("name", [*LISTS, *AHEAD])
def test_arguments_that_a_world_knows_are_refused(plan, name):
    assert refusals(plan, line(*IN_WORLD, "--features", name)) == [
        f"MS304 {name}: {reason} | {fix}, or remove {name}" for reason, fix in IN_WORLD.values()
    ]


def test_a_v_refuses_arguments_with_uneven_stages_and_a_loop_does_not():
    given = given_arguments(split(" ".join(IN_V)), surface("0.16.1"))
    found = {}
    for placement in ("loop", "v"):
        layer = Layer("test", features=("zero-bubble",), settings={"zero-bubble": {"placement": placement}}, world=V)
        made = registry.resolve([layer], environment=made_up("cpu", "0.16.1"))
        found[placement] = [
            f"{one.code} {one.message} | {one.fix_text}" for one in refused(given, made, registry.catalog_for(made.names))
        ]
    assert found["loop"] == []
    assert found["v"] == [
        refusal("zero-bubble", argument, f"placement v has equal stages, and {reason}") for argument, reason in IN_V.items()
    ]


def test_without_the_features_and_with_values_that_mean_nothing_no_argument_is_refused(plan):
    assert refusals(plan, line(*FOR_ALL, *FOR_LISTS, *IN_WORLD)) == []
    nothing = ("--cpu-offloading-num-layers 0", "--cuda-graph-impl none", "--transformer-impl local")
    for name in (*LISTS, *AHEAD):
        assert refusals(plan, line(*nothing, "--features", name)) == []
