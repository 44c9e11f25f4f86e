"""A mistake that Megatron's rules and conditions of features both know is one problem, with the fix that can be typed."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mindspeed.cli import main
from tests.megatron_lm.upstream.checkouts import ARGUMENTS, MISSING, make

RULES = """
    total_model_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    assert args.world_size % total_model_size == 0, "the world does not divide"
    if args.num_query_groups is None:
        args.num_query_groups = args.num_attention_heads
    if args.num_attention_heads % args.tensor_model_parallel_size != 0:
        raise ValueError("the heads do not divide")
    if args.num_query_groups % args.tensor_model_parallel_size and args.tensor_model_parallel_size % args.num_query_groups:
        raise ValueError("the groups do not divide")
"""
PARSER = """
    for name in ("pipeline-model-parallel-size", "context-parallel-size", "num-attention-heads", "num-query-groups"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--world-size", type=int, default=8)
    return parser"""
JOB = (
    "--num-layers 4 --hidden-size 96 --ffn-hidden-size 96 --num-attention-heads 16 --group-query-attention "
    "--num-query-groups 8 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --tensor-model-parallel-size 3"
)


@pytest.mark.budget(20)
def test_tp_3_of_16_heads_is_told_once_for_each_rule(tmp_path: Path) -> None:
    arguments = ARGUMENTS.replace("\n    return parser", PARSER).replace("defaults={}):\n", "defaults={}):" + RULES)
    make(tmp_path, arguments)
    words = ["check", "--json", "--platform", "cuda", "--checkout", str(tmp_path)]
    command = ["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", *JOB.split()]
    result = CliRunner().invoke(main, [*words, "--", *command])
    found = [(problem["message"].rpartition(": ")[2], problem["fix"]) for problem in json.loads(result.stdout)["problems"]]
    assert found == [
        ("the world does not divide", "--nproc-per-node 9, or --tensor-model-parallel-size 2"),
        ("the heads do not divide", "--tensor-model-parallel-size 1, or --tensor-model-parallel-size 2 (a divisor of 16)"),
        ("the groups do not divide", "--tensor-model-parallel-size 1, or --tensor-model-parallel-size 2 (a divisor of 8)"),
    ]


@pytest.mark.budget(20)
def test_a_missing_value_is_told_with_the_problems_of_the_plan(tmp_path: Path) -> None:
    make(tmp_path, MISSING)
    words = ["check", "--json", "--platform", "cuda", "--checkout", str(tmp_path), "--features", "nano-pipe,zero-bubble"]
    result = CliRunner().invoke(main, [*words, "--", "torchrun", "--nproc-per-node", "1", "pretrain_gpt.py"])
    problems = json.loads(result.stdout)["problems"]
    assert {problem["code"] for problem in problems} >= {"MS115", "MS203"}
    assert [problem["fix"] for problem in problems if problem["code"] == "MS115"] == [
        "--num-layers N, or --encoder-num-layers N"
    ]
