"""What is refused, what the plan says, and the bytes that the memory planner expects."""

from typing import Any

import pytest
import torch

import mindspeed
from mindspeed.features.chunked_loss.chunks import default_chunks
from mindspeed.features.chunked_loss.linear_cross_entropy import Mode
from mindspeed.job.world import World
from mindspeed.memory_planner.stages import Stage, stages
from mindspeed.memory_planner.tensors import JobOptions
from mindspeed.ops import native_library
from mindspeed.plugins.answers import changed_tensors
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import GPT
from tests.features.chunked_loss import ranks
from tests.features.chunked_loss.ranks import MODES, ROWS, WIDTH, measured_bytes, peak_of_loss
from tests.features.resolving import CATALOG, ask, refusals

NAME = "chunked-loss"
TOKENS, HIDDEN, VOCABULARY = 24, 32, 64


def stage_of(settings: dict[str, Any] | None, **values: Any) -> Stage:
    """The stage of the tiny model on one rank, with the feature unless ``settings`` is None."""
    batch = {"micro_batch_size": 1, "global_batch_size": 8, "world_size": 1, "dtype": "fp32"}
    job, feature = World({**GPT.world(), **batch, **values}), CATALOG.feature(NAME)
    changes = [] if settings is None else [changed_tensors(feature, "saved_tensors", feature.Args(**settings), job)]
    (stage,) = stages(job, JobOptions(on_cpu=True, sequence_parallel=values.get("tp", 1) > 1), changes)
    return stage


def test_a_chunk_has_one_size() -> None:
    assert refusals(NAME, settings={NAME: {"chunks": 2, "chunk_size": 8}}) == [
        f"MS301 {NAME}: chunks=2 and chunk_size=8 both set the size of a chunk | "
        f"remove the setting {NAME}.chunk_size, or remove the setting {NAME}.chunks"
    ]


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        (
            "mtp_num_layers",
            1,
            "mode=accumulate does not support multi-token prediction, because each depth has another loss mask",
        ),
        ("cuda_graphs", True, f"layers are captured as CUDA graphs, which {NAME} does not support"),
    ],
)
def test_gradients_in_forward_are_refused_where_recomputation_works(field: str, value: Any, sentence: str) -> None:
    assert refusals(NAME, **{field: value}) == []
    (problem,) = refusals(NAME, settings={NAME: {"mode": "accumulate"}}, **{field: value})
    assert problem == f"MS304 {NAME}: {sentence} | --set {NAME}.mode=recompute, or remove {NAME}"


@pytest.mark.parametrize("schedule", ["nano-pipe", "zero-bubble"])
def test_a_schedule_does_not_defer_the_weight_gradient_of_the_output_layer(schedule: str) -> None:
    assert refusals(NAME, schedule, pp=2) == []
    assert refusals(NAME, schedule, pp=2, settings={schedule: {"output_layer": True}}) == [
        f"MS304 {NAME}: {schedule} defers the weight gradient of the output layer (its setting output_layer), but {NAME} "
        f"computes it in chunks | --set {schedule}.output_layer=false, or remove {NAME}"
    ]


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"chunks": 3}, "the loss is computed in 3 chunks of at most 22 tokens"),
        ({"chunk_size": 20}, "the loss is computed in 4 chunks of at most 16 tokens"),
        ({}, "the loss is computed in 8 chunks of at most 8 tokens, chosen from the sizes of vocabulary and hidden states"),
    ],
)
def test_the_plan_says_how_many_chunks_there_are(settings: dict[str, Any], note: str) -> None:
    assert note in [row.text for row in ask(NAME, settings={NAME: settings}).rows]


def test_the_logits_of_a_default_chunk_are_not_larger_than_the_hidden_states() -> None:
    for vocabulary, width in ((512, 64), (513, 64), (32, 64), (129_280, 7_168)):
        chunks = default_chunks(vocabulary, width)
        assert vocabulary <= chunks * width
        assert chunks == 1 or vocabulary > (chunks - 1) * width


@pytest.mark.parametrize("chunks", [1, 2, 4, 24])
def test_planned_logits_are_not_kept(chunks: int) -> None:
    plain, chunked = stage_of(None), stage_of({"chunks": chunks})
    assert plain.activations - chunked.activations == TOKENS * (4 * VOCABULARY + 1)
    assert [row.by for row in chunked.rows if row.name == "loss: logits" and row.held == "recomputed"] == [NAME]


@pytest.mark.parametrize(
    ("dtype", "settings", "name"), [("fp32", {"chunks": 4}, "loss: chunk"), ("bf16", {"chunks": 1}, "gradients of a layer")]
)
def test_the_larger_of_loss_and_layers_is_planned(dtype: str, settings: dict[str, Any], name: str) -> None:
    stage = stage_of(settings, dtype=dtype, ffn_hidden_size=64 if name == "loss: chunk" else 512)
    assert [row.name for row in stage.rows if row.held == "in backward"] == [name]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", [1, 4, 64])
def test_planned_bytes_of_the_loss_are_those_that_are_measured(mode: Mode, chunks: int, dtype: str) -> None:
    measured = peak_of_loss(mode, getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[dtype]), chunks)
    assert 0 <= measured - planned_bytes(mode, chunks, dtype) <= not_planned(chunks)


def test_planned_bytes_of_ranks_are_those_that_are_measured(pool: WorkerPool) -> None:
    plan = mindspeed.plan(platform="cpu", world={"world_size": 2, "tp": 2})
    for found in pool.call(measured_bytes, 2, 2, True, plan=plan):
        for (mode, dtype, chunks), measured in found.items():
            transferred = (
                4 * 4 * ranks.TOKENS // chunks * WIDTH
            )  # gradients of up to four chunks on their way to the other rank
            left = measured - planned_bytes(mode, chunks, dtype, tp=2)
            assert 0 <= left <= not_planned(chunks) + transferred, (mode, dtype, chunks)


def not_planned(chunks: int) -> int:
    """Return the most bytes that are not planned: some numbers for each token, and copies of logits without a kernel."""
    return ranks.TOKENS * (128 + (0 if native_library.loaded() else 3 * 4 * ROWS // chunks // 8))


def planned_bytes(mode: Mode, chunks: int, dtype: str, tp: int = 1) -> int:
    """Return what a stage with the measured loss has of it at the peak, but for targets."""
    sizes = {"seq_length": ranks.TOKENS, "hidden_size": WIDTH, "vocab_size": ROWS, "tp": tp, "world_size": tp}
    stage = stage_of({"chunks": chunks, "mode": mode}, dtype=dtype, **sizes)
    return sum(row.bytes for row in stage.rows if row.name in ("loss: chunk", "loss: gradients"))


def test_planned_gradients_of_forward_are_kept() -> None:
    recomputed, accumulated = stage_of({"chunks": 4}), stage_of({"chunks": 4, "mode": "accumulate"})
    assert accumulated.activations - recomputed.activations == (TOKENS + VOCABULARY) * HIDDEN * 4 - TOKENS * 8


def test_each_depth_of_multi_token_prediction_keeps_no_logits() -> None:
    plain, chunked = stage_of(None, mtp_num_layers=2), stage_of({"chunks": 4}, mtp_num_layers=2)
    assert plain.activations - chunked.activations == 3 * TOKENS * (4 * VOCABULARY + 1) - 2 * TOKENS * 8
