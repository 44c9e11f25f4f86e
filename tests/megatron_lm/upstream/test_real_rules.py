"""The rules of a real Megatron-LM: an accepted command has no problem, and one wrong option is told."""

import os

import pytest

from mindspeed.megatron_lm.given_arguments import surface_or_nearest
from mindspeed.megatron_lm.upstream.rules import Checkout, Command, RulesVerdict, find_checkout, judge
from tests.megatron_lm.checkout import VARIABLE

pytestmark = [pytest.mark.long, pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no checkout")]

ACCEPTED = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 --bf16 "
    "--micro-batch-size 2 --global-batch-size 32 --train-iters 10 --lr 1e-4 --use-distributed-optimizer "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 9"
)
MOE = "--num-experts 8 --moe-router-topk 2 --disable-bias-linear --sequence-parallel --expert-model-parallel-size 2"
MUTATIONS = (
    "--fp16",
    "--hidden-size 500",
    "--num-attention-heads 7",
    "--tensor-model-parallel-size 3",
    "--pipeline-model-parallel-size 3",
    "--num-layers 7",
    "--max-position-embeddings 512",
    "--min-lr 1",
    "--group-query-attention --num-query-groups 3",
    "--expert-model-parallel-size 2",
    "--num-experts 7 --expert-model-parallel-size 2",
    "--overlap-param-gather",
    "--recompute-granularity selective --recompute-method uniform",
    "--recompute-granularity full",
    "--num-layers-per-virtual-pipeline-stage 3",
    "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 2",
    "--lr-warmup-fraction 0.1 --lr-warmup-iters 2",
    "--train-samples 100",
    "--context-parallel-size 3",
    "--fp8-param-gather",
    "--save-interval 4 --save x --save-retain-interval 3",
    "--weight-decay-incr-style linear",
    "--use-torch-fsdp2",
    "--mtp-num-layers 1 --position-embedding-type learned_absolute",
    "--account-for-embedding-in-pipeline-split",
    "--tp-comm-overlap",
    "--delay-wgrad-compute",
    "--overlap-moe-expert-parallel-comm",
    "--swiglu --squared-relu",
)


@pytest.fixture(scope="module")
def checkout() -> Checkout:
    found = find_checkout("pretrain_gpt.py", {}, os.environ[VARIABLE])
    assert found is not None
    return found


def verdicts(checkout: Checkout, *more: str) -> list[RulesVerdict]:
    commands = [Command(f"{ACCEPTED} {words}".split(), 16, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}) for words in more]
    return judge(checkout, commands, surface_or_nearest(checkout.version), "9.0")


def test_accepted_commands_have_no_problem_and_nine_of_ten_rules_are_decided(checkout: Checkout) -> None:
    for verdict in verdicts(checkout, "", MOE):
        assert verdict.problems == ()
        assert len(verdict.undecided) <= len(verdict.decided) // 9
        assert len(verdict.decided) > 200


def test_every_wrong_option_is_told(checkout: Checkout) -> None:
    found = verdicts(checkout, *MUTATIONS)
    assert [words for words, verdict in zip(MUTATIONS, found, strict=True) if not verdict.problems] == []
    assert all(problem.code == "MS115" and ":" in problem.where for verdict in found for problem in verdict.problems)
