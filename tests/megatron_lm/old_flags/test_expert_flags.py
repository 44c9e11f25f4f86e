import pytest

from mindspeed.compat.old_flags.flags import _FULL_PRECISION, BY_DEST, in_new_meaning, read_old_flags
from mindspeed.megatron_lm.argument_words import ArgumentWords
from mindspeed.registry import catalog
from tests.features.resolving import refusals

SIZES = ["--tensor-model-parallel-size", "2", "--expert-model-parallel-size=4"]


def test_the_sequential_dispatcher_is_the_one_that_there_is():
    made = ArgumentWords(["--moe-token-dispatcher-type", "alltoall_seq", "--lr", "1"])
    in_new_meaning(made, extends=False)
    assert made.words == ["--moe-token-dispatcher-type", "alltoall", "--lr", "1"]
    (note,) = made.notes
    assert note == (
        "--moe-token-dispatcher-type alltoall_seq is replaced by alltoall, the only all-to-all dispatcher since Megatron 0.14"
    )


@pytest.mark.parametrize(("extends", "ranks"), [(True, 8), (False, 4)])
def test_the_expert_parallel_size_is_multiplied_where_it_counts_per_tensor_rank(extends, ranks):
    made = ArgumentWords(SIZES)
    in_new_meaning(made, extends)
    assert made.words == [*SIZES[:2], f"--expert-model-parallel-size={ranks}"]
    assert made.notes == (
        ["--expert-model-parallel-size 4 with --moe-tp-extend-ep is 8 ranks with experts, 4 x tp 2"] if extends else []
    )


def test_old_flags_of_experts_are_read_with_them():
    old = read_old_flags([*SIZES, "--moe-tp-extend-ep", "--moe-token-dispatcher-type=alltoall_seq"], (), catalog())
    assert old.rest == (*SIZES[:2], "--expert-model-parallel-size=8", "--moe-token-dispatcher-type=alltoall")
    assert old.layer.features == ("moe-tp-extend-ep",)
    switch = read_old_flags(["--moe-permutation-async-comm", "--moe-token-dispatcher-type", "alltoall_seq"], (), catalog())
    assert switch.layer.features == ("moe-alltoall-dispatcher",)


@pytest.mark.parametrize("low", ["--fp8-format", "--fp4-format"])
def test_flags_that_serve_no_low_precision_are_left_out_with_it(low):
    flags = ["--moe-permutation-async-comm", "--gemm-gradient-accumulation-fusion"]
    old = read_old_flags([*flags, "--moe-token-dispatcher-type", "alltoall", low, "e4m3"], (), catalog())
    assert (old.layer.features, old.problems) == ((), ())
    (left,) = old.left_out
    assert left.message == (
        f"{', '.join(flags)} are skipped: mindspeed has no feature for {low}; Megatron's layers compute the same result"
    )
    assert read_old_flags(flags, (), catalog()).left_out == ()


def test_passes_of_stages_without_chunks_are_not_paired_and_the_others_are():
    flags = ["--moe-fb-overlap", "--pipeline-model-parallel-size"]
    (left,) = read_old_flags([*flags, "2"], (), catalog()).left_out
    assert left.message.startswith("--moe-fb-overlap is skipped: pipeline stages pair micro-batches only in")
    for more in (["1"], ["2", "--num-layers-per-virtual-pipeline-stage", "1"]):
        old = read_old_flags([*flags, *more], (), catalog())
        assert (old.left_out, "moe-fb-overlap" in old.layer.features) == ((), True)


def test_dualpipev_has_two_chunks_and_pairs_passes_itself():
    words = (
        "--schedules-method dualpipev --moe-fb-overlap --dualpipev-dw-detach --pipeline-model-parallel-size 2 --num-layers 8"
    )
    old = read_old_flags(
        [*words.split(), "--recompute-activation-function", "--recompute-activation-function-num-layers", "3"], (), catalog()
    )
    assert set(old.layer.features) == {"dualpipev", "activation-recompute"}
    assert old.layer.settings == {"dualpipev": {"split_weights": True}}
    assert old.rest[-2:] == ("--num-virtual-stages-per-pipeline-rank", "2")
    assert any("covers all 2 layers of a model chunk" in note for note in old.notes)
    assert any("--moe-fb-overlap is part of the feature dualpipev" in note for note in old.notes)


def test_every_flag_that_serves_no_low_precision_stands_for_features_that_refuse_it():
    for dest in _FULL_PRECISION:
        for feature in BY_DEST[dest].features:
            found = refusals(feature, num_experts=4, grouped_experts=True, ep=2, low_precision=True)
            assert any("fp8 or fp4" in text for text in found), (feature, found)
