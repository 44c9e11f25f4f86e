"""Whole steps with lists of operations against Megatron's own schedules: models and losses beyond those of the claims."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed import registry
from mindspeed.engine.resolution.request import Layer
from mindspeed.workbench.verification.pool import WorkerPool

pytestmark = pytest.mark.long

STAGES, MICRO_BATCHES = 2, 4
MESSAGE = 12 * 2 * 16 * 4
"""Bytes of a message between stages: sequence, samples of a micro-batch, hidden size, fp32."""


def on_rank(name: str, *arguments: Any) -> Any:
    """Run a function of `steps_job`, which imports Megatron, on this rank."""
    from tests.pipeline import steps_job

    return getattr(steps_job, name)(*arguments)


def plan(
    feature: str, vpp: int, settings: dict[str, Any], *also: str, cpu: dict[str, Any] | None = None, world_size: int = STAGES
) -> Any:
    world = {"world_size": world_size, "pp": STAGES, "vpp": vpp, "num_layers": 8, "micro_batch_size": 2}
    batch = {"global_batch_size": world_size * MICRO_BATCHES, "tied_embeddings": False, "mtp_num_layers": 0}
    names = (feature, *also, *(["virtual-pipeline"] if vpp > 1 else []))
    values = {feature: settings, "device-emulation": cpu or {}}
    layer = Layer("test", features=names, settings=values, world=world | batch, platform="cpu")
    return registry.resolve([layer])


def compared(pool: WorkerPool, feature: str, vpp: int, settings: dict[str, Any], tied: bool, arguments: dict[str, Any]) -> Any:
    return pool.call(on_rank, STAGES, "compared", feature, tied, arguments, plan=plan(feature, vpp, settings))


@pytest.mark.cover
@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize(
    ("tied", "arguments"),
    [
        (False, {}),
        (True, {"calculate_per_token_loss": True}),
        (False, {"mtp_num_layers": 1}),
        (True, {"mtp_num_layers": 1, "calculate_per_token_loss": True}),
    ],
    ids=["plain", "tied-per-token", "mtp", "tied-mtp-per-token"],
)
@pytest.mark.parametrize(
    ("feature", "settings"),
    [
        ("nano-pipe", {"lag": 2, "swap": True}),
        ("zero-bubble", {"recompute": "least", "limit": 3, "output_layer": True}),
    ],
)
def test_losses_and_gradients_around_an_evaluation_are_megatrons(
    pool: WorkerPool, feature: str, settings: dict[str, Any], tied: bool, arguments: dict[str, Any], vpp: int
) -> None:
    ranks = compared(pool, feature, vpp, settings, tied, arguments)
    hops = STAGES * vpp - 1
    assert [rank["different"] for rank in ranks] == [[], []]
    spare = {"output_layer.weight"} if tied else set()  # that of the embedding is used
    assert all({name.partition("module.")[2] for name in rank["zero"]} <= spare for rank in ranks)
    assert all(expected == actual for expected, actual in (rank["losses"] for rank in ranks))
    assert [len(rank["losses"][1]) for rank in ranks] == [0, 3 * MICRO_BATCHES]
    assert all(rank["recomputed"] == rank["listed"] for rank in ranks)
    assert sum(rank["bytes"] for rank in ranks) == 2 * MICRO_BATCHES * hops * MESSAGE


@pytest.mark.cover
@pytest.mark.parametrize(
    ("feature", "vpp", "behind"),
    [("zero-bubble", 1, [False, True]), ("nano-pipe", 1, [False, True]), ("zero-bubble", 2, [True, True])],
)
def test_reductions_overlap_gradients_on_the_first_rank_with_one_chunk(
    pool: WorkerPool, feature: str, vpp: int, behind: list[bool]
) -> None:
    """Other ranks start them behind their last operation, as Megatron does for a function that starts all of a chunk."""
    ranks = pool.call(on_rank, STAGES, "reductions", feature, {}, plan=plan(feature, vpp, {}))
    assert [rank["outside"] > 0 for rank in ranks] == behind
    assert [rank["inside"] > 0 for rank in ranks] == [not late for late in behind]


def test_reductions_overlap_the_last_backward_pass_without_a_pipeline(pool: WorkerPool) -> None:
    world = {"world_size": 2, "ep": 2, "num_layers": 8, "micro_batch_size": 2, "global_batch_size": 4 * MICRO_BATCHES}
    shape = {"num_experts": 4, "tied_embeddings": False, "mtp_num_layers": 0}
    layer = Layer("test", features=("moe-fb-overlap",), world=world | shape, platform="cpu")
    experts = {"num_moe_experts": 4, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
    more = {"add_bias_linear": False, "moe_router_load_balancing_type": "none"}
    for rank in pool.call(on_rank, 2, "reductions", "moe-fb-overlap", experts | more, plan=registry.resolve([layer])):
        assert rank["inside"] > 0 == rank["outside"]


@pytest.mark.cover
@pytest.mark.parametrize(("feature", "settings"), [("dualpipev", {}), ("zero-bubble", {"placement": "v"})])
def test_the_last_rank_of_a_v_logs_the_losses_of_multi_token_prediction(
    pool: WorkerPool, feature: str, settings: dict[str, Any]
) -> None:
    """Each group of data-parallel ranks averages them on the same ranks."""
    ranks = pool.call(on_rank, 4, "predicted", feature, plan=plan(feature, 2, settings, world_size=4))
    saved = [rank["saved"] for rank in ranks]
    assert min(saved[:2]) > 0 == max(saved[2:])
    mean = pytest.approx(sum(saved[:2]) / 2)
    assert [rank["logged"] for rank in ranks] == [{}, {}, {"mtp_1 loss": mean}, {"mtp_1 loss": mean}]


@pytest.mark.parametrize("feature", ["nano-pipe", "zero-bubble"])
def test_a_stage_before_the_last_one_predicts_several_tokens(pool: WorkerPool, feature: str) -> None:
    """It sends the hidden states of all depths, so the tensors of stages differ in shape."""
    layout = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ettttttttm|L"}
    for rank in compared(pool, feature, 1, {}, False, {"mtp_num_layers": 1, **layout}):
        assert rank["different"] == []
        assert rank["losses"][0] == rank["losses"][1]


def test_a_v_predicts_several_tokens_in_the_last_stage_alone(pool: WorkerPool) -> None:
    def apart(layout: str) -> list[Any]:
        return pool.call(on_rank, STAGES, "predicted_apart", layout, plan=plan("dualpipev", 2, {}))

    assert apart("Ettt|ttt|tt|mL") == [False, False]
    assert (
        apart("Ettt|ttt|ttm|L")
        == [
            "dualpipev: dualpipev needs multi-token prediction in the stage of the output layer, but the layout has it in an "
            "earlier one | let pipeline_model_parallel_layout end with mL, such as Et|tt|tt|mL, or remove dualpipev"
        ]
        * STAGES
    )


WAITS: dict[str, dict[str, Any]] = {
    "batched": {},
    "one-by-one": {"batch_p2p_comm": False},
    "overlapped": {"batch_p2p_comm": False, "overlap_p2p_comm": True},
}


@pytest.mark.cover
@pytest.mark.parametrize(
    ("vpp", "waits"), [(1, "batched"), (1, "one-by-one"), (2, "batched"), (2, "one-by-one"), (2, "overlapped")]
)
@pytest.mark.parametrize(
    ("feature", "settings"),
    [
        ("recompute-in-advance", {}),
        ("recompute-in-advance", {"granularity": "selective"}),
        ("recompute-in-bubble", {"limit": 1}),
    ],
    ids=["full", "selective", "bubble"],
)
def test_gradients_recomputed_ahead_under_megatrons_own_schedule_are_its_own(
    pool: WorkerPool, tmp_path: Path, feature: str, settings: dict[str, Any], vpp: int, waits: str
) -> None:
    asked = plan(feature, vpp, settings | {"trace": str(tmp_path)})
    assert not any("pipeline-schedule" in row.slots for row in asked.features)
    ranks = pool.call(on_rank, STAGES, "recomputed_ahead", feature, "", WAITS[waits], plan=asked)
    for rank in ranks:
        assert rank["different"] == [] == rank["zero"]
        assert rank["losses"][0] == rank["losses"][1]
        assert rank["recomputed"] == rank["listed"]
        assert sorted(rank["recorded"]) == sorted(kind for kind in rank["kinds"] if kind != "R") + ["R"] * rank["listed"]
    assert ranks[0]["recomputed"] > 0


@pytest.mark.cover
@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize(("feature", "settings"), [("recompute-in-advance", {}), ("recompute-in-bubble", {"limit": 2})])
@pytest.mark.parametrize("engine", ["nano-pipe", "zero-bubble"])
def test_a_list_of_operations_takes_recomputation_over(
    pool: WorkerPool, engine: str, feature: str, settings: dict[str, Any], vpp: int
) -> None:
    ranks = pool.call(on_rank, STAGES, "recomputed_ahead", feature, engine, {}, plan=plan(feature, vpp, settings, engine))
    for rank in ranks:
        assert rank["different"] == [] == rank["zero"]
        assert rank["losses"][0] == rank["losses"][1]
        assert rank["recomputed"] == rank["listed"]
        assert "W" in rank["kinds"]
    dropped = feature == "recompute-in-advance" or vpp > 1  # of one chunk a rank keeps no more than two sets
    assert (sum(rank["recomputed"] for rank in ranks) > 0) == dropped


def events_of(folder: Path) -> Iterator[dict[str, Any]]:
    """What the ranks have logged of their asynchronous collectives."""
    for rank in range(STAGES):
        yield from map(json.loads, (folder / f"log.{rank}").read_text().splitlines())


def assert_waits(folder: Path) -> None:
    """Every message that was used had been waited for."""
    events = list(events_of(folder))
    received = {event["t"] for event in events if event["event"] == "launch" and event["kind"] == "irecv"}
    uses = [event for event in events if event["event"] == "use"]
    assert len(received) >= 2 * MICRO_BATCHES
    assert len(uses) >= MICRO_BATCHES
    assert [event for event in uses if not event["waited"]] == []


@pytest.mark.parametrize(
    ("feature", "settings", "vpp"),
    [
        ("nano-pipe", {"lag": 3, "swap": True, "output_layer": True}, 1),
        ("zero-bubble", {"recompute": "all", "output_layer": True}, 2),
        ("zero-bubble", {"recompute": "least", "limit": 3}, 2),
    ],
    ids=["nano-pipe-swap", "zero-bubble-all", "zero-bubble-least"],
)
def test_no_message_of_a_list_is_used_before_its_wait(
    pool: WorkerPool, tmp_path: Path, feature: str, settings: dict[str, Any], vpp: int
) -> None:
    cpu = {"poison": True, "collective_log": str(tmp_path / "log.{rank}")}
    for rank in pool.call(on_rank, STAGES, "compared", feature, False, {}, plan=plan(feature, vpp, settings, cpu=cpu)):
        assert rank["different"] == [] == rank["zero"]
        assert rank["losses"][0] == rank["losses"][1]
        assert rank["recomputed"] == rank["listed"]
    assert_waits(tmp_path)


@pytest.mark.parametrize("engine", ["", "nano-pipe"], ids=["megatron", "nano-pipe"])
@pytest.mark.parametrize(("feature", "settings"), [("recompute-in-advance", {}), ("recompute-in-bubble", {"limit": 2})])
def test_no_gradient_is_used_before_its_wait_where_forward_passes_are_repeated_ahead(
    pool: WorkerPool, tmp_path: Path, feature: str, settings: dict[str, Any], engine: str
) -> None:
    cpu = {"poison": True, "collective_log": str(tmp_path / "log.{rank}")}
    asked = plan(feature, 2, settings, *([engine] if engine else []), cpu=cpu)
    waits = {} if engine else WAITS["overlapped"]
    for rank in pool.call(on_rank, STAGES, "recomputed_ahead", feature, engine, waits, plan=asked):
        assert rank["different"] == [] == rank["zero"]
        assert rank["losses"][0] == rank["losses"][1]
        assert rank["recomputed"] == rank["listed"]
    assert_waits(tmp_path)


def test_a_step_keeps_the_queue_on_the_host_but_for_two_chunk_steps(pool: WorkerPool) -> None:
    """By the meter: four units wait behind the last backward pass, and no more bytes are there than with three that wait."""
    first, second = pool.call(on_rank, STAGES, "swapped", "nano-pipe", plan=plan("nano-pipe", 1, {"swap": True}))
    three, four, moved = second
    assert [[case["most"] for case in rank] for rank in (first, second)] == [[1, 1, 1], [3, 4, 2]]
    assert [case["bytes"] > 0 for case in second] == [False, False, True]
    assert moved["peak"] <= three["peak"] * 1.02, second
    assert four["peak"] - three["peak"] > 0.9 * three["unit"], second


@pytest.mark.parametrize("vpp", [1, 2])
def test_as_many_activation_sets_are_alive_as_the_simulator_says(pool: WorkerPool, vpp: int) -> None:
    ranks = compared(pool, "nano-pipe", vpp, {"output_layer": True}, False, {})
    assert [rank["peak"] for rank in ranks] == [rank["planned"] for rank in ranks]


def test_one_weight_gradient_out_of_order_is_refused_and_changes_the_bits(pool: WorkerPool) -> None:
    ranks = pool.call(on_rank, STAGES, "out_of_order", "nano-pipe", plan=plan("nano-pipe", 1, {}))
    for rank in ranks:
        assert rank["problem"].startswith("nano-pipe: rank 1: W of chunk 0 has micro-batch 1 after 2")
    assert ranks[0]["different"] == []
    assert ranks[1]["different"] != []


def test_communication_of_the_caller_and_tensors_of_another_shape_are_refused(pool: WorkerPool) -> None:
    first, second = pool.call(on_rank, STAGES, "refused", "nano-pipe", plan=plan("nano-pipe", 1, {}))
    assert first[:2] == second
    assert second == [
        (
            f"nano-pipe: the caller passes {name}, but the schedule replaces the communication",
            "remove nano-pipe, or remove that argument",
        )
        for name in ("p2p_communicator", "adjust_tensor_shapes_fn")
    ]
    assert first[2] == (
        "nano-pipe: a stage produced a tensor of shape (12, 2, 16), but the schedule expects (13, 2, 16)",
        "add dynamic-shapes, or give all micro-batches the same length",
    )
