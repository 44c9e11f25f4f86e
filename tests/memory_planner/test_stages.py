from dataclasses import replace

import pytest

from mindspeed.job.arithmetic import LayerCounts
from mindspeed.job.world import UnknownValue, World
from mindspeed.memory_planner.plans import passes_with
from mindspeed.memory_planner.stages import Passes, live_passes, parameters, stages
from mindspeed.memory_planner.tensors import JobOptions, chunk_tensors
from mindspeed.pipeline.operations import PipelineShape
from mindspeed.pipeline.simulator import peak_sets
from mindspeed.pipeline.synthesis import megatron
from mindspeed.plugins.answers import changed_tensors
from mindspeed.plugins.discovery import discover
from mindspeed.plugins.saved_tensors import SavedTensor, in_backward, leave, resized
from mindspeed.workbench.verification.shape import GPT, LLAMA, MOE, GptShape

MLA = replace(GPT, multi_latent_attention=True)


def world(shape: GptShape = GPT, **values):
    batch = {"micro_batch_size": 1, "global_batch_size": 8, "world_size": 1, "dtype": "fp32"}
    return World({**shape.world(), **batch, **values})


@pytest.mark.parametrize(
    ("shape", "dtype", "dropout", "names", "measured"),
    [
        (GPT, "fp32", True, (), 309_240),
        (GPT, "bf16", True, (), 176_280),
        (LLAMA, "fp32", True, (), 422_808),
        (LLAMA, "bf16", False, (), 229_272),
        (LLAMA, "bf16", False, ("rms-norm", "swiglu", "flash-attention", "rotary-embedding"), 94_872),
        (MLA, "fp32", False, (), 246_264),
        (MLA, "bf16", False, (), 163_992),
        (MLA, "fp32", False, ("flash-attention",), 203_256),
        (MOE, "fp32", True, (), 480_568),
        (MOE, "bf16", False, (), 261_304),
    ],
)
def test_activations_are_those_that_a_meter_counted(shape, dtype, dropout, names, measured):
    job, known = world(shape, dtype=dtype), discover(only=())
    made = [known.feature(name) for name in names]
    changes = [changed_tensors(feature, "saved_tensors", feature.Args(), job) for feature in made]
    (stage,) = stages(job, JobOptions(on_cpu=True, dropout=dropout), changes)
    assert stage.activations == pytest.approx(measured, rel=0.01 if shape.num_experts else 0)  # tokens go where routers send


FULL = {"granularity": "full", "method": "uniform", "num_layers": 1}


@pytest.mark.parametrize(("dtype", "measured"), [("fp32", 389_784), ("bf16", 245_400)])
def test_recomputed_up_projections_keep_what_a_meter_counted(dtype, measured):
    job = world(replace(LLAMA, num_query_groups=4, multi_latent_attention=True), dtype=dtype)
    feature = discover(only=()).feature("recompute")
    changes = [changed_tensors(feature, "saved_tensors", feature.Args(modules=["mla_up_proj"]), job)]
    (stage,) = stages(job, JobOptions(on_cpu=True, dropout=True), changes)
    assert stage.activations == measured


@pytest.mark.parametrize(("absorb", "measured"), [(None, 482_056), (True, 415_240)])
def test_sparse_attention_keeps_what_a_meter_counted(absorb, measured):
    job = world(replace(MLA, indexer_topk=5), indexer_heads=16)
    feature = discover(only=()).feature("mla-split")
    changes = [changed_tensors(feature, "saved_tensors", feature.Args(absorb=True), job)] if absorb else []
    (stage,) = stages(job, JobOptions(on_cpu=True), changes)
    assert stage.activations == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize(
    ("shape", "depths", "dtype", "dropout", "names", "measured"),
    [
        (GPT, 1, "fp32", True, {}, 409_404),
        (LLAMA, 2, "fp32", True, {}, 695_520),
        (LLAMA, 1, "bf16", True, {}, 353_340),
        (LLAMA, 1, "bf16", False, {"rms-norm": {}, "swiglu": {}, "norm-recompute": {}}, 203_580),
        (replace(LLAMA, num_layers=2), 1, "fp32", True, {"swap-attention": {}}, 319_164),
        (replace(LLAMA, num_layers=2), 1, "bf16", True, {"recompute": FULL}, 37_212),
    ],
)
def test_multi_token_prediction_keeps_what_a_meter_counted(shape, depths, dtype, dropout, names, measured):
    job, known = world(shape, dtype=dtype, mtp_num_layers=depths), discover(only=())
    made = [(known.feature(name), settings) for name, settings in names.items()]
    changes = [changed_tensors(feature, "saved_tensors", feature.Args(**settings), job) for feature, settings in made]
    (stage,) = stages(job, JobOptions(on_cpu=True, dropout=dropout), changes)
    assert measured - stage.activations == 12 * depths  # scalars of its losses


def test_multi_token_prediction_is_on_the_last_stage_with_an_embedding_of_its_own():
    plain, predicted = ({"pp": 2, "world_size": 2, "mtp_num_layers": depths} for depths in (0, 1))
    before, after = ([parameters(world(LLAMA, **job), [stage]) for stage in range(2)] for job in (plain, predicted))
    layer, embedding = (before[0][0] - 64 * 32) // 2, 64 * 32
    assert before[0] == after[0]
    assert after[1][0] - before[1][0] == layer + embedding + 2 * 32 * 32 + 3 * 32
    joined = [
        {row.name for row in stage.rows} & {"prediction: joined"} for stage in stages(world(LLAMA, **predicted), JobOptions())
    ]
    assert joined == [set(), {"prediction: joined"}]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"granularity": "full", "method": "uniform", "num_layers": 1}, 4),
        ({"granularity": "full", "method": "uniform", "num_layers": 2}, 2),
    ],
)
def test_full_recomputation_keeps_the_inputs_of_groups_and_brings_one_back(settings, kept):
    job, feature = world(), discover(only=()).feature("recompute")
    (stage,) = stages(job, JobOptions(), [changed_tensors(feature, "saved_tensors", feature.Args(**settings), job)])
    rows = {row.name: row for row in stage.rows if row.held in ("kept", "in backward")}
    assert rows["layer input"].bytes == kept * 24 * 32 * 4
    assert rows["layers that come back"].held == "in backward"
    assert not any(name.startswith(("attention: q", "mlp")) for name in rows)


@pytest.mark.parametrize(
    ("shape", "dropout", "elements"),
    [
        (GPT, False, 24 * (32 + 64)),  # the layer's output, and the activation's output
        (GPT, True, 24 * (2 * 32 + 64)),  # the former times the dropout mask as well
        (LLAMA, True, 24 * (32 + 2 * 64)),  # both inputs of a gated activation, when the masked gradient is freed
        (MOE, False, 24 * (32 + 2 * 2 * 32)),  # two experts of each token
    ],
    ids=["plain", "dropout", "gated", "experts"],
)
def test_the_gradients_of_one_layer_count_once_at_the_peak(shape, dropout, elements):
    for size, dtype in ((4, "fp32"), (2, "bf16")):
        two = world(shape, dtype=dtype, pp=2, world_size=2)
        for stage in stages(two, JobOptions(dropout=dropout)):
            (row,) = (row for row in stage.rows if row.name == "gradients of a layer")
            assert (row.bytes, row.live, row.held) == (size * elements, 1, "in backward")
            assert stage.peak == sum(row.bytes * row.live for row in stage.rows)


def test_a_dropped_pass_keeps_what_is_outside_of_its_layers():
    options = JobOptions(dropout=True)
    kept, dropped = (
        {
            row.name
            for row in stages(world(), options, passes=Passes([[int(is_kept)]], [[int(not is_kept)]]))[0].rows
            if row.live
        }
        for is_kept in (True, False)
    )
    outside = {"layer input", "embedding: dropout mask", "final norm: input", "loss: logits", "loss: targets"}
    assert outside <= dropped < kept
    assert not any(name.startswith(("input norm", "mlp", "pre-mlp norm", "attention: dropout")) for name in dropped)


def test_uneven_chunks_and_given_passes_have_rows_of_their_own():
    split = World({**world(pp=2, world_size=2).known()}, layer_split=(1, 3))
    first, last = stages(split, JobOptions(), passes=Passes([[2], [1]], [[3], [0]]))
    rows = {row.name: row for row in first.rows}
    assert (rows["layer input"].live, rows["mlp: activation input"].live) == (5, 2)
    assert next(row.bytes for row in last.rows if row.name == "layer input") == 3 * rows["layer input"].bytes


def test_widths_of_latent_attention_that_nobody_gave_are_named():
    with pytest.raises(UnknownValue) as error:
        stages(World({**world().known(), "multi_latent_attention": True}), JobOptions())
    assert error.value.fields == ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def test_a_feature_moves_its_tensors():
    def change(tensors):
        return leave(tensors, ["mlp: activation output"], "recomputed", "acme", 3)

    (before,), (after,) = stages(world(), JobOptions()), stages(world(), JobOptions(), [change])
    assert before.peak - after.peak == 3 * 24 * 64 * 4
    assert {(row.held, row.by) for row in after.rows} == {("kept", ""), ("in backward", ""), ("recomputed", "acme")}


def test_tensors_leave_in_some_layers_and_shrink_in_all():
    tensors = (SavedTensor("a", 8, 4, ends=True), SavedTensor("b", 2, 4))
    assert leave(tensors, ["a"], "swapped", "acme", spare=1) == (
        SavedTensor("a", 8, 3, "swapped", "acme", ends=True),
        SavedTensor("a", 8, 1, ends=True),
        SavedTensor("b", 2, 4),
    )
    assert leave(tensors, ["a"], "swapped", "acme", layers=9)[0] == SavedTensor("a", 8, 4, "swapped", "acme", ends=True)
    assert resized(tensors, {"a": 0, "b": 1}) == (SavedTensor("b", 1, 4),)


def test_what_comes_back_has_the_sizes_that_other_features_give_it():
    def moved(tensors):
        return in_backward(leave(tensors, ["mlp: activation output", "mlp: activation inner"], "recomputed", "acme"), "acme", 2)

    def smaller(tensors):
        return resized(tensors, {"mlp: activation inner": 0})

    gated = world(gated_linear_unit=True)
    first, second = (
        chunk_tensors(gated, JobOptions(), order, LayerCounts(4, 4, 0)) for order in ([moved, smaller], [smaller, moved])
    )
    assert [replace(t, parts=()) for t in first] == [replace(t, parts=()) for t in second]
    sizes = {t.name: (t.bytes, t.layers) for t in first}
    assert sizes["layers that come back"] == (sizes["mlp: activation output"][0], 2)
    nothing = chunk_tensors(gated, JobOptions(), [lambda t: in_backward(t, "acme")], LayerCounts(4, 4, 0))
    assert "layers that come back" not in {t.name for t in nothing}


def test_earlier_stages_have_more_micro_batches_in_flight():
    four = world(world_size=4, pp=4)
    assert [live_passes(four, stage) for stage in range(4)] == [[4], [3], [2], [1]]
    two = world(world_size=2, pp=2, vpp=2)
    assert [live_passes(two, stage) for stage in range(2)] == [[3, 2], [2, 1]]


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (4, 2), (4, 3)])
@pytest.mark.parametrize("more", [0, 1, 4])
@pytest.mark.parametrize("micro_batches", [8, 9, 24])
def test_passes_in_flight_are_those_of_the_schedule_with_its_group(pp, vpp, more, micro_batches):
    job = world(world_size=pp, pp=pp, vpp=vpp, micro_batch_group=pp + more, global_batch_size=micro_batches)
    assert job.num_micro_batches == micro_batches
    schedule = megatron(PipelineShape(pp, vpp, micro_batches, group=pp + more))
    assert [sum(live_passes(job, rank)) for rank in range(pp)] == [peak_sets(ops) for ops in schedule.ops]


@pytest.mark.parametrize(("group", "passes"), [(0, 5), (8, 11)])
def test_passes_of_a_schedule_feature_count_the_micro_batches_of_a_group(group, passes):
    feature = discover(only=()).feature("nano-pipe")
    job = world(world_size=2, pp=2, vpp=2, micro_batch_group=group, global_batch_size=16)
    assert sum(passes_with(job, {"nano-pipe": (feature, feature.Args())}).full[0]) == passes


def test_main_weights_and_states_are_shared_by_the_distributed_optimizer():
    job = world(LLAMA, dtype="bf16", world_size=4)
    count = sum(parameters(job, [0]))
    rows = {row.name: row.bytes for row in stages(job, JobOptions(distributed_optimizer=True))[0].rows}
    assert rows["weights"] == 2 * count
    assert rows["main weights"] == count
    assert rows["states"] == 2 * count


def test_gradients_of_all_ranks_arrive_on_the_cpu_behind_the_passes():
    def stage(**values):
        options = JobOptions(on_cpu=values.pop("on_cpu", True), distributed_optimizer=True)
        return stages(world(LLAMA, dtype="bf16", **values), options)[0]

    alone, on_device = stage(), stage(world_size=2, on_cpu=False)
    assert not {row.name for row in (*alone.rows, *on_device.rows)} & {"gradients that arrive"}
    shared = stage(world_size=2, seq_length=8)
    arriving = [row for row in shared.rows if row.name == "gradients that arrive"]
    assert [(row.bytes, row.held) for row in arriving] == [(4 * sum(parameters(world(LLAMA), [0])), "behind backward")]
    resting = sum(row.bytes for row in shared.rows if row.name in ("weights", "gradients", "main weights", "states"))

    def in_passes(found):
        return sum(row.bytes * row.live for row in found.rows if row.held in ("kept", "in backward")) - resting

    assert shared.peak == resting + arriving[0].bytes > resting + in_passes(shared)
    longer = stage(world_size=2)
    assert longer.peak == resting + in_passes(longer)


def test_features_of_the_optimizer_replace_and_move_what_it_keeps():
    job, known = world(LLAMA, dtype="bf16"), discover(only=())
    count = sum(parameters(job, [0]))

    def rows(*names):
        made = [known.feature(name) for name in names]
        changes = [changed_tensors(feature, "resting", feature.Args(), job) for feature in made]
        resting = ("main weights", "residuals", "states")
        return [(r.name, r.bytes, r.held) for r in stages(job, JobOptions(), (), changes)[0].rows if r.name in resting]

    assert rows("reuse-fp32-param") == [("residuals", 2 * count, "kept"), ("states", 8 * count, "kept")]
    assert rows("swap-optimizer") == [("main weights", 4 * count, "swapped"), ("states", 8 * count, "swapped")]
    assert rows("reuse-fp32-param", "swap-optimizer") == [("residuals", 2 * count, "swapped"), ("states", 8 * count, "swapped")]


def test_a_size_that_nobody_gave_is_named():
    with pytest.raises(UnknownValue) as error:
        stages(World({"num_layers": 4}), JobOptions())
    assert error.value.fields[:2] == ("world_size", "hidden_size")


@pytest.mark.parametrize("shape", [GPT, LLAMA, MOE, MLA], ids=["dense", "gated", "experts", "latent"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("pp", [1, 2])
def test_a_hybrid_model_needs_the_bytes_of_the_transformer_with_its_layers(shape: GptShape, dtype: str, pp: int):
    layers = {"dtype": dtype, "pp": pp, "world_size": pp}
    transformer, hybrid = (stages(world(model, **layers), JobOptions()) for model in (shape, shape.as_hybrid()))
    assert [stage.peak for stage in transformer] == [stage.peak for stage in hybrid]
    assert [stage.activations for stage in transformer] == [stage.activations for stage in hybrid]


def test_each_segment_of_a_pattern_needs_the_bytes_of_its_own_layers():
    def weights(pattern: str) -> list[int]:
        found = stages(world(MOE.as_hybrid(pattern), pp=2, world_size=2, vocab_size=0), JobOptions())
        return [row.bytes for stage in found for row in stage.rows if row.name == "weights"]

    attention, mlp, experts = (weights(f"{layer}|{layer}")[0] for layer in "*-E")
    norm = 4 * MOE.hidden_size * (2 if MOE.normalization == "LayerNorm" else 1)
    assert weights("**-|E-") == [2 * attention + mlp, experts + mlp + norm]
    assert mlp < experts


def test_layers_without_attention_that_mix_tokens_are_not_estimated():
    for layer in "MGD":
        with pytest.raises(UnknownValue, match="hybrid_layer_pattern is not set"):
            stages(world(GPT.as_hybrid(f"*-{layer}-")), JobOptions())
