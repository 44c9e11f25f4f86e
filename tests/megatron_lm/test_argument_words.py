"""Tests of fixes in Megatron-LM's arguments."""

import pytest

from mindspeed.megatron_lm.command_line_fixes import MegatronCommandLine
from mindspeed.problems.fixes import DropField, GiveField, GiveSetting, Together

WORDS = MegatronCommandLine("0.16.1")


@pytest.mark.parametrize(
    ("fix", "text"),
    [
        (GiveField("tp", 2), "--tensor-model-parallel-size 2"),
        (GiveField("tp"), "--tensor-model-parallel-size N"),
        (GiveField("vpp", 2), "--num-virtual-stages-per-pipeline-rank 2"),
        (GiveField("dtype", "bf16"), "--bf16"),
        (GiveField("dtype", "fp32"), "remove --bf16 and --fp16"),
        (GiveField("rotary", True), "--position-embedding-type rope"),
        (GiveField("rotary", False), "remove --position-embedding-type and --use-rotary-position-embeddings"),
        (GiveField("num_query_groups", 2), "--num-query-groups 2 --group-query-attention"),
        (GiveField("tied_embeddings", False), "--untie-embeddings-and-output-weights"),
        (GiveField("linear_bias", False), "--disable-bias-linear"),
        (GiveField("linear_bias", True), "remove --disable-bias-linear"),
        (GiveField("cuda_graphs", False), "remove --cuda-graph-impl, --enable-cuda-graph and --external-cuda-graph"),
        (Together((GiveField("activation", "silu"), GiveField("gated_linear_unit", True))), "--swiglu"),
        (Together((GiveField("tp", 2), GiveField("pp", 1))), "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1"),
        (DropField("num_experts"), "remove --num-experts"),
        (GiveSetting("ring-attention.window", 1), "--set ring-attention.window=1"),
        (GiveField("world_size", 4), "--world-size 4"),
    ],
)
def test_a_field_is_the_argument_that_gives_it(fix, text):
    assert WORDS((fix,)) == text


def test_of_several_arguments_those_on_the_command_line_are_removed():
    words = MegatronCommandLine("0.16.1", frozenset({"bf16", "enable_cuda_graph"}))
    assert (
        words((GiveField("dtype", "fp32"), GiveField("cuda_graphs", False))) == "remove --bf16, or remove --enable-cuda-graph"
    )
