"""Ten commands in MindSpeed's words, each of the kind that it publishes and small, train by the one import line."""

import math
from shlex import split

import pytest

from tests.megatron_lm.checkout import Checkout

MODERN = (
    "--use-mcore-models --normalization RMSNorm --swiglu --ffn-hidden-size 96 --position-embedding-type rope "
    "--group-query-attention --num-query-groups 4 --disable-bias-linear --untie-embeddings-and-output-weights "
    "--use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-flash-attn --transformer-impl local"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --expert-model-parallel-size 2"
COMMANDS = {
    "llama2 on two tensor-parallel ranks": (
        2,
        f"{MODERN} --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --ai-framework pytorch "
        "--optimizer-selection fused_adamw --no-shared-storage --shape-order BNSD",
        {"tensor-parallel", "sequence-parallel", "rms-norm", "swiglu", "rotary-embedding"},
    ),
    "a long sequence on a ring": (
        2,
        f"{MODERN} --context-parallel-size 2 --context-parallel-algo megatron_cp_algo --use-fused-ring-attention-update "
        "--use-cp-send-recv-overlap --cp-attention-mask-type causal",
        {"context-parallel", "ring-attention", "ring-attention-update"},
    ),
    "a long sequence with the algorithm that MindSpeed takes by itself": (
        2,
        f"{MODERN} --context-parallel-size 2 --use-fused-ring-attention-update",
        {"context-parallel", "ring-attention"},
    ),
    "ulysses": (
        2,
        f"{MODERN} --context-parallel-size 2 --context-parallel-algo ulysses_cp_algo --kv-head-repeat-before-uly-alltoall",
        {"context-parallel", "ulysses-attention"},
    ),
    "hybrid attention on four ranks": (
        4,
        f"{MODERN} --context-parallel-size 4 --context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2",
        {"context-parallel", "hybrid-attention"},
    ),
    "a pipeline that recomputes in advance": (
        2,
        f"{MODERN} --pipeline-model-parallel-size 2 --recompute-in-advance --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1 --variable-seq-lengths --optimize-send-recv-comm",
        {"pipeline-parallel", "recompute-in-advance"},
    ),
    "llama31 in uneven stages": (
        2,
        f"{MODERN} --pipeline-model-parallel-size 2 --num-layer-list 3,1 --rope-scaling-type llama3 --rope-scaling-factor 8.0 "
        "--low-freq-factor 1.0 --high-freq-factor 4.0 --original-max-position-embeddings 8192",
        {"pipeline-parallel"},
    ),
    "qwen3 with experts": (
        2,
        f"{MODERN} {EXPERTS} --qk-layernorm --norm-topk-prob --moe-grouped-gemm --moe-permutation-async-comm "
        "--moe-token-dispatcher-type alltoall_seq --fix-router --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec",
        {"expert-parallel", "moe-alltoall-dispatcher"},
    ),
    "deepseek3 with a dense first layer": (
        2,
        "--use-mcore-models --normalization RMSNorm --swiglu --ffn-hidden-size 96 --position-embedding-type rope "
        "--disable-bias-linear --untie-embeddings-and-output-weights --multi-latent-attention --q-lora-rank 16 "
        "--kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 10 --rope-scaling-type yarn "
        "--rope-scaling-factor 40 --beta-fast 2 --beta-slow 1 --rope-scaling-mscale 1.0 --rope-scaling-mscale-all-dim 1.0 "
        f"--rope-scaling-original-max-position-embeddings 64 --mla-fa-without-pad --mla-mm-split {EXPERTS} --moe-fb-overlap "
        "--moe-token-dispatcher-type alltoall --first-k-dense-replace 1 --moe-layer-freq 1 "
        "--moe-router-score-function sigmoid --seq-aux --norm-topk-prob "
        "--spec mindspeed_llm.tasks.models.spec.deepseek_spec layer_spec --transformer-impl local",
        {"expert-parallel"},
    ),
    "memory": (
        2,
        f"{MODERN} --bf16 --tensor-model-parallel-size 2 --reuse-fp32-param --recompute-activation-function "
        "--recompute-norm --recompute-norm-num-layers 9 --use-distributed-optimizer",
        {"activation-recompute", "norm-recompute"},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_a_small_command_in_mindspeeds_words_trains(tmp_path, name):
    processes, words, features = COMMANDS[name]
    run = Checkout(tmp_path).adapted(processes, *split(words), "--train-iters", "3").ended_well()
    assert {row["name"] for row in run.report["features"]} >= features
    assert [row for row in run.report["problems"] if features & set(row["features"])] == []
    assert not any("beta_fast" in row["message"] for row in run.report["problems"]), "no configuration took it"
    assert len(set(run.losses)) == 3
    assert all(map(math.isfinite, run.losses))
