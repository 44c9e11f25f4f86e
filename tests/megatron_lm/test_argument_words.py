"""Tests of fixes in Megatron-LM's arguments."""

import pytest

from mindspeed.megatron_lm.command_line_fixes import MegatronCommandLine
from mindspeed.problems import Fix

VIRTUAL = "remove --num-virtual-stages-per-pipeline-rank and --num-layers-per-virtual-pipeline-stage"
WORDS = MegatronCommandLine("0.16.1")


@pytest.mark.parametrize(
    ("fix", "text"),
    [
        (Fix.give_field("tp", 2), "--tensor-model-parallel-size 2"),
        (Fix.give_field("tp"), "--tensor-model-parallel-size N"),
        (Fix.give_field("vpp", 2), "--num-virtual-stages-per-pipeline-rank 2"),
        (Fix.give_field("vpp", 2, or_more=True), "--num-virtual-stages-per-pipeline-rank 2 or more"),
        (Fix.give_field("vpp", 1, or_more=True), VIRTUAL),
        (Fix.give_field("dtype", "bf16"), "--bf16"),
        (Fix.give_field("dtype", "fp32"), "remove --bf16 and --fp16"),
        (Fix.give_field("rotary", True), "--position-embedding-type rope"),
        (Fix.give_field("rotary", False), "remove --position-embedding-type and --use-rotary-position-embeddings"),
        (Fix.give_field("num_query_groups", 2), "--num-query-groups 2 --group-query-attention"),
        (Fix.give_field("tied_embeddings", False), "--untie-embeddings-and-output-weights"),
        (Fix.give_field("linear_bias", False), "--disable-bias-linear"),
        (Fix.give_field("linear_bias", True), "remove --disable-bias-linear"),
        (Fix.give_field("cuda_graphs", False), "remove --cuda-graph-impl, --enable-cuda-graph and --external-cuda-graph"),
        (Fix.together((Fix.give_field("activation", "silu"), Fix.give_field("gated_linear_unit", True))), "--swiglu"),
        (
            Fix.together((Fix.give_field("tp", 2), Fix.give_field("pp", 1))),
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1",
        ),
        (Fix.give_field("first_stage_layers", 0), "remove --decoder-first-pipeline-num-layers"),
        (Fix.drop_field("num_experts"), "remove --num-experts"),
        (Fix.give_setting("ring-attention.window", 1), "--set ring-attention.window=1"),
        (Fix.give_field("world_size", 4), "--world-size 4"),
    ],
)
def test_a_field_is_the_argument_that_gives_it(fix, text):
    assert WORDS((fix,)) == text


def test_a_feature_is_the_option_with_the_value_that_switches_it_on():
    names = ("ring-attention", "adaptive-cp", "ulysses-attention", "async-ddp")
    assert WORDS(tuple(map(Fix.add_feature, names))) == (
        "--cp-comm-type p2p, or add adaptive-cp to the features, or --cp-comm-type a2a, or --overlap-grad-reduce"
    )


def test_of_several_arguments_those_on_the_command_line_are_removed():
    words = MegatronCommandLine("0.16.1", frozenset({"bf16", "enable_cuda_graph"}))
    assert (
        words((Fix.give_field("dtype", "fp32"), Fix.give_field("cuda_graphs", False)))
        == "remove --bf16, or remove --enable-cuda-graph"
    )


def test_of_fields_that_get_their_defaults_the_given_options_are_removed():
    ends = Fix.together(Fix.give_field(name, 0) for name in ("first_stage_layers", "last_stage_layers"))
    both = frozenset({"decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"})
    removed = "remove --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
    assert MegatronCommandLine("0.16.1", both)((ends,)) == removed
    assert MegatronCommandLine("0.16.1", both - {"decoder_last_pipeline_num_layers"})((ends,)) == removed.partition(" and")[0]


def test_fields_of_which_any_value_serves_are_not_one_switch():
    fix = Fix.together(map(Fix.give_field, ("seq_length", "micro_batch_size")))
    assert MegatronCommandLine(version="0.16.1")((fix,)) == "--seq-length N --micro-batch-size N"
