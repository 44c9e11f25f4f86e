"""Every trap has a public source, catches the command that it is about, and lets that with its fix pass."""

import pytest

from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.environment import made_up, version_in
from mindspeed.job.fields import FIELDS
from mindspeed.megatron_lm.given_arguments import given_arguments, surface_or_nearest
from mindspeed.workbench.lint.judgement import CheckedJob, check_jobs
from mindspeed.workbench.lint.launched_command import training_commands
from mindspeed.workbench.lint.traps import CONSEQUENCES, known_traps, traps_of

EXPERTS = "--num-experts 8"
PER_TOKEN = "--calculate-per-token-loss --num-experts 8 --moe-aux-loss-coeff 1e-2 --context-parallel-size 2"
Z_LOSS = "--calculate-per-token-loss --num-experts 8 --moe-z-loss-coeff 1e-3 --tensor-model-parallel-size 2"
BIAS = "--num-experts 8 --moe-router-enable-expert-bias --moe-aux-loss-coeff 1e-2"
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

CASES = [
    ("expert-overlap-on-one-queue", "0.16.1", "--overlap-moe-expert-parallel-comm", ONE_QUEUE, True),
    (
        "expert-overlap-on-one-queue",
        "0.16.1",
        "--overlap-moe-expert-parallel-comm",
        {"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        False,
    ),
    ("gradient-overlap-on-one-queue", "0.16.1", "--overlap-grad-reduce", ONE_QUEUE, True),
    ("gradient-overlap-on-one-queue", "0.16.1", "--overlap-grad-reduce --tensor-model-parallel-size 2", ONE_QUEUE, False),
    ("gradient-overlap-on-one-queue", "0.16.1", "--overlap-grad-reduce", {}, False),
    ("router-losses-per-token", "0.16.1", PER_TOKEN, {}, True),
    ("router-losses-per-token", "0.19.0", PER_TOKEN, {}, False),
    ("router-losses-per-token", "0.16.1", PER_TOKEN.replace("--context-parallel-size 2", ""), {}, False),
    ("router-z-loss-per-token", "0.16.1", Z_LOSS, {}, True),
    ("router-z-loss-per-token", "0.19.0", Z_LOSS, {}, False),
    ("auxiliary-loss-of-other-experts-by-bias", "0.16.1", BIAS, {}, True),
    ("auxiliary-loss-of-other-experts-by-bias", "0.16.1", f"{BIAS} --moe-router-load-balancing-type none", {}, False),
    ("auxiliary-loss-of-other-experts-by-groups", "0.16.1", "--moe-router-num-groups 4 --moe-aux-loss-coeff 1e-2", {}, True),
    ("auxiliary-loss-of-other-experts-by-groups", "0.16.1", "--moe-router-num-groups 4", {}, False),
    ("auxiliary-loss-below-the-epsilon", "0.16.1", "--moe-router-score-function sigmoid --moe-aux-loss-coeff 1", {}, True),
    ("auxiliary-loss-below-the-epsilon", "0.16.1", "--moe-router-score-function sigmoid", {}, False),
    ("experts-with-a-fused-gelu-since-0.17", "0.19.0", EXPERTS, {}, True),
    ("experts-with-a-fused-gelu-since-0.17", "0.19.0", f"{EXPERTS} --hybrid-layer-pattern *E", {}, False),
    ("masks-that-flash-attention-does-not-take", "0.16.1", "--reset-attention-mask --attention-backend flash", {}, True),
    ("masks-that-flash-attention-does-not-take", "0.16.1", "--reset-attention-mask --attention-backend fused", {}, False),
]

GEMM = "--num-experts 8 --moe-grouped-gemm"
HEADS = "--hidden-size 64 --num-attention-heads"
GROUPS = "--num-attention-heads 4 --group-query-attention --num-query-groups"
MASKS = "--reset-attention-mask --no-create-attention-mask-in-dataloader"
WIDE = "--num-experts 8 --tensor-model-parallel-size 2 --expert-model-parallel-size"
GRAPHS = "--cuda-graph-impl local"
WORKER = "--async-save --ckpt-format torch_dist"

SPARSE = "--experimental-attention-variant dsa"
INDEXER = {
    "indexer-without-heads": "--dsa-indexer-n-heads 8",
    "indexer-without-a-width": "--dsa-indexer-head-dim 64",
    "indexer-without-a-number-of-keys": "--dsa-indexer-topk 64",
}

PAIRS = [
    *((name, SPARSE, f"{SPARSE} {option}") for name, option in INDEXER.items()),
    ("experts-with-a-fused-gelu", "--num-experts 8", "--num-experts 8 --no-bias-gelu-fusion"),
    ("experts-with-a-fused-gelu", "--num-experts 8", "--num-experts 8 --swiglu"),
    ("experts-with-a-fused-gelu", GEMM, f"{GEMM} --no-bias-gelu-fusion"),
    ("grouped-experts-with-fused-dropout", GEMM, f"{GEMM} --disable-bias-linear"),
    ("grouped-experts-with-fused-dropout", GEMM, f"{GEMM} --no-bias-dropout-fusion"),
    ("grouped-experts-with-fused-dropout", GEMM, f"{GEMM} --transformer-impl local"),
    ("query-groups-without-the-switch", "--num-query-groups 2", "--num-query-groups 2 --group-query-attention"),
    ("heads-that-do-not-divide-the-hidden-size", f"{HEADS} 5", f"{HEADS} 5 --kv-channels 12"),
    ("heads-that-do-not-divide-the-hidden-size", f"{HEADS} 5", f"{HEADS} 4"),
    ("query-groups-that-do-not-divide-the-heads", f"{GROUPS} 3", f"{GROUPS} 2"),
    ("resets-without-a-mask", MASKS, "--reset-attention-mask"),
    ("position-resets-under-rotary-embedding", "--reset-position-ids --position-embedding-type rope", "--reset-position-ids"),
    ("fp8-parameters-under-fsdp2", "--use-torch-fsdp2 --fp8-param-gather", "--fp8-param-gather"),
    ("gradients-reduced-in-bf16", "--bf16 --grad-reduce-in-bf16", "--bf16"),
    ("no-check-for-nan-with-a-dynamic-scale", "--fp16", "--fp16 --loss-scale 1024"),
    ("yarn-factor-without-latent-attention", "--rotary-scaling-factor 4", "--rotary-scaling-factor 4 --multi-latent-attention"),
    ("yarn-scale-without-latent-attention", "--mscale-all-dim 0.7", "--mscale-all-dim 0.7 --multi-latent-attention"),
    ("sequence-parallel-without-tensor-parallel", "--sequence-parallel", "--sequence-parallel --tensor-model-parallel-size 2"),
    (
        "expert-overlap-with-tensor-or-context-parallelism",
        "--overlap-moe-expert-parallel-comm --context-parallel-size 2",
        "--overlap-moe-expert-parallel-comm",
    ),
    (
        "torch-fsdp2-with-tensor-or-context-parallelism",
        "--use-torch-fsdp2 --tensor-model-parallel-size 2",
        "--use-torch-fsdp2",
    ),
    (
        "megatron-fsdp-with-tensor-or-context-parallelism",
        "--use-megatron-fsdp --tensor-model-parallel-size 2",
        "--use-megatron-fsdp",
    ),
    ("expert-width-of-the-dense-layer", "--num-experts 8", "--num-experts 8 --moe-ffn-hidden-size 64"),
    ("parallel-save-that-is-the-default", "--ckpt-fully-parallel-save", ""),
    ("distributed-checkpoints-by-the-old-option", "--use-dist-ckpt", "--ckpt-format torch_dist"),
    ("checkpoint-format-by-the-old-option", "--dist-ckpt-format torch_dist", "--ckpt-format torch_dist"),
    (
        "checkpoints-of-one-layout",
        "--no-ckpt-fully-parallel-save --use-distributed-optimizer",
        "--no-ckpt-fully-parallel-save",
    ),
    ("asynchronous-save-without-its-worker", WORKER, f"{WORKER} --use-persistent-ckpt-worker"),
    ("replication-jump-without-replication", "--replication-jump 2", "--replication-jump 2 --replication"),
    ("many-experts-with-a-low-precision-router", "--num-experts 32", "--num-experts 32 --moe-router-dtype fp32"),
    ("many-experts-with-a-low-precision-router", "--num-experts 32", "--num-experts 31"),
    (
        "recompute-of-fused-attention",
        "--recompute-granularity selective",
        "--recompute-granularity selective --recompute-modules moe_act",
    ),
    (
        "recompute-method-without-granularity",
        "--recompute-method block",
        "--recompute-method block --recompute-granularity full",
    ),
    (
        "recompute-layers-without-granularity",
        "--recompute-num-layers 1",
        "--recompute-num-layers 1 --recompute-granularity full",
    ),
    ("balancing-loss-of-weight-zero", "--num-experts 8", "--num-experts 8 --moe-aux-loss-coeff 1e-2"),
    ("experts-one-by-one", "--num-experts 8", "--num-experts 8 --moe-grouped-gemm"),
    ("expert-and-tensor-parallelism-beyond-a-node", f"{WIDE} 8", f"{WIDE} 4"),
    (
        "pipeline-without-virtual-stages",
        "--pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    ("bucket-size-without-overlap", "--ddp-bucket-size 9", "--ddp-bucket-size 9 --overlap-grad-reduce"),
    (
        "gradients-reduced-behind-the-backward",
        "--use-distributed-optimizer",
        "--use-distributed-optimizer --overlap-grad-reduce",
    ),
    ("split-of-the-data-by-default", "--data-path x", "--data-path x --split 1,0,0"),
    ("random-numbers-under-cuda-graphs", GRAPHS, f"{GRAPHS} --te-rng-tracker"),
]
EXPERTS = "--num-experts 8 --tensor-model-parallel-size 2"
WHOLE = "--num-experts 8 --transformer-impl local"
LATENT = "--multi-latent-attention --tensor-model-parallel-size 2"
SINKS = "--softmax-type learnable --tensor-model-parallel-size 2 --transformer-impl"
GLOBAL = "--num-experts 8 --moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type"
TIED = "--mtp-num-layers 1 --pipeline-model-parallel-size 2 --ckpt-format torch_dist --save x"
PAIRS += [
    ("expert-gradients-of-other-shards", f"{EXPERTS} --expert-tensor-parallel-size 1", EXPERTS),
    (
        "expert-gradients-of-other-shards",
        f"{EXPERTS} --expert-tensor-parallel-size 1",
        f"{EXPERTS} --expert-model-parallel-size 2",
    ),
    ("biases-of-experts-that-a-rank-holds-whole", WHOLE, f"{WHOLE} --disable-bias-linear"),
    ("biases-of-experts-that-a-rank-holds-whole", WHOLE, f"{WHOLE} --expert-model-parallel-size 2"),
    ("latent-attention-keys-of-one-rank", LATENT, f"{LATENT} --sequence-parallel"),
    ("attention-sinks-of-one-rank-in-the-norm", f"{SINKS} local", f"{SINKS} transformer_engine"),
    ("global-auxiliary-loss-by-replicas", f"{GLOBAL} global_aux_loss", f"{GLOBAL} aux_loss"),
    ("sinkhorn-by-layout", f"{EXPERTS} --moe-router-load-balancing-type sinkhorn", EXPERTS),
    ("training-without-an-end", "--lr 1e-4", "--lr 1e-4 --train-samples 8"),
    ("training-without-a-learning-rate", "--train-iters 4", "--train-iters 4 --lr 1e-4"),
    ("training-without-a-tokenizer", "--train-iters 4 --lr 1e-4", "--train-iters 4 --lr 1e-4 --tokenizer-type NullTokenizer"),
    ("no-evaluation-interval", "--train-iters 4", "--train-iters 4 --eval-interval 10"),
    ("prediction-checkpoints-with-tied-embeddings", TIED, f"{TIED} --untie-embeddings-and-output-weights"),
]
SEQUENCES = f"{PER_TOKEN} --moe-router-load-balancing-type seq_aux_loss --micro-batch-size"
SIGMOID = "--bf16 --num-experts 8 --moe-router-score-function sigmoid --moe-aux-loss-coeff 1e-2"
INDEXER = "--experimental-attention-variant dsa"
LOSSES = "--mtp-num-layers 1 --dsa-indexer-loss-coeff 1"
UPCYCLED = "--moe-use-upcycling --pipeline-model-parallel-size 2"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 --num-layers"
DELTA_NET = "--experimental-attention-variant gated_delta_net --tensor-model-parallel-size 2"
FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --pipeline-model-parallel-size 2"
GROUPED = f"{EXPERTS} --expert-model-parallel-size 2"
SHARDS = f"{EXPERTS} --expert-tensor-parallel-size 1 --save x --ckpt-format"
PAIRS += [
    ("learning-rates-of-groups-after-a-resume", "--decoupled-lr 1e-4 --load x", "--decoupled-lr 1e-4"),
    ("sequence-auxiliary-loss-by-micro-batch-size", f"{SEQUENCES} 2", f"{SEQUENCES} 1"),
    ("auxiliary-scores-in-bf16", SIGMOID, f"{SIGMOID} --moe-router-dtype fp32"),
    ("indexer-loss-by-micro-batches", f"{INDEXER} --dsa-indexer-loss-coeff 0.1", INDEXER),
    ("upcycling-of-virtual-stages", f"{UPCYCLED} --num-layers-per-virtual-pipeline-stage 1", UPCYCLED),
    ("layers-that-do-not-divide-in-recomputation", f"{RECOMPUTED} 7", f"{RECOMPUTED} 8"),
    ("overlap-of-transfers-without-transformer-engine", "--tp-comm-overlap --transformer-impl local", "--tp-comm-overlap"),
    ("experimental-attention-of-local-layers", f"{DELTA_NET} --transformer-impl local", DELTA_NET),
    ("sparse-attention-without-a-layer", "--experimental-attention-variant dsa", DELTA_NET),
    ("sparse-attention-without-its-package", INDEXER, DELTA_NET),
    ("predictions-without-sparse-attention", f"{INDEXER} --mtp-num-layers 1", INDEXER),
    ("indexer-losses-of-predictions", f"{INDEXER} {LOSSES}", f"{INDEXER} --mtp-num-layers 1"),
    ("steps-of-torch-fsdp2", "--use-torch-fsdp2", ""),
    ("output-norm-of-gated-delta-net", DELTA_NET, f"{DELTA_NET} --sequence-parallel"),
    ("layers-of-other-stages-under-megatron-fsdp", f"{FSDP} --load x", FSDP),
    ("experts-of-transformer-engine-in-the-norm", f"{GROUPED} --moe-grouped-gemm", GROUPED),
    ("copies-of-transformer-engine-in-the-norm", LATENT, f"{LATENT} --transformer-impl local"),
    ("lost-shards-of-legacy-checkpoints", f"{SHARDS} torch", f"{SHARDS} torch_dist"),
]
FSDP = "--use-megatron-fsdp --use-distributed-optimizer"
SINKHORN = "--num-experts 8 --moe-router-load-balancing-type sinkhorn"
SHARED = "--num-experts 8 --moe-shared-expert-intermediate-size 64"
WEIGHED = "--num-experts 8 --moe-apply-probs-on-input --moe-router-topk"
PREDICTED = "--mtp-num-layers 1 --recompute-granularity full --recompute-num-layers 2 --recompute-method"
PAIRS += [
    ("warm-up-beyond-the-decay", "--lr-decay-iters 9 --lr-warmup-iters 9", "--lr-decay-iters 9 --lr-warmup-iters 8"),
    ("warm-up-of-the-whole-training", "--train-iters 9 --lr-warmup-iters 9", "--train-iters 9 --lr-warmup-iters 8"),
    ("warm-up-of-the-whole-training", "--train-iters 9 --lr-warmup-iters 9", "--train-samples 9"),
    ("wsd-without-its-last-steps", "--lr-decay-style WSD", "--lr-decay-style WSD --lr-wsd-decay-iters 2"),
    ("distributed-optimizer-of-sgd", "--optimizer sgd --use-distributed-optimizer", "--optimizer sgd"),
    ("megatron-fsdp-without-shards", FSDP, f"{FSDP} --data-parallel-sharding-strategy optim_grads"),
    ("xavier-initialization", "--init-method-xavier-uniform", ""),
    ("latent-attention-with-an-l2-norm", "--multi-latent-attention --qk-l2-norm", "--qk-l2-norm"),
    ("sinkhorn-with-an-auxiliary-loss", f"{SINKHORN} --moe-aux-loss-coeff 1e-2", SINKHORN),
    ("shared-experts-with-biases", SHARED, f"{SHARED} --disable-bias-linear"),
    ("weighed-inputs-of-several-experts", f"{WEIGHED} 2", f"{WEIGHED} 1"),
    ("predictions-recomputed-in-groups", f"{PREDICTED} uniform", f"{PREDICTED} block"),
]
DECAY = "--train-samples 9 --lr-decay-samples 5 --lr-warmup-samples"
RATES = "--lr 1e-4 --lr-warmup-init"
FALLING = "--weight-decay-incr-style linear --end-weight-decay 0.1 --start-weight-decay"
GROUPED = "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk"
LAYERS = "--num-experts 8 --num-layers 4 --moe-layer-freq"
LINEAR = "--experimental-attention-variant gated_delta_net --num-layers 4 --linear-attention-freq"
SHARING = "--num-experts 8 --expert-tensor-parallel-size 2"
SPLIT = "--num-experts 8 --tensor-model-parallel-size 2 --moe-ffn-hidden-size"
LATENT_EXPERTS = "--num-experts 8 --moe-latent-size 64 --transformer-impl"
ROTARY = "--position-embedding-type rope --hidden-size 66 --num-attention-heads 2"
LEGACY = "--use-rotary-position-embeddings --kv-channels"
PAIRS += [
    ("warm-up-of-samples-beyond-the-decay", f"{DECAY} 5", f"{DECAY} 4"),
    ("warm-up-of-all-samples", "--train-samples 9 --lr-warmup-samples 9", "--train-samples 9 --lr-warmup-samples 8"),
    ("warm-up-from-above", f"{RATES} 1e-3", f"{RATES} 1e-4"),
    ("weight-decay-that-falls", f"{FALLING} 0.2", f"{FALLING} 0.1"),
    ("more-experts-per-token-than-experts", "--num-experts 8 --moe-router-topk 9", "--num-experts 8 --moe-router-topk 8"),
    ("more-experts-per-token-than-in-its-groups", f"{GROUPED} 1 --moe-router-topk 3", f"{GROUPED} 1 --moe-router-topk 2"),
    ("more-groups-than-experts-per-token", f"{GROUPED} 3 --moe-router-topk 2", f"{GROUPED} 4 --moe-router-topk 2"),
    ("expert-layers-of-another-number", f"{LAYERS} [0,1,1]", f"{LAYERS} [0,1,1,1]"),
    ("expert-layers-of-another-number", f"{LAYERS} ([0]+[1]*2)*2", f"{LAYERS} ([0]+[1])*2"),
    ("expert-layers-of-another-number", f"{LAYERS} ([1]*5)", f"{LAYERS} 3"),
    ("linear-attention-layers-of-another-number", f"{LINEAR} [1]*3", f"{LINEAR} [1]*3+[0]"),
    ("experts-that-tensor-ranks-cannot-share", f"{SHARING} --ffn-hidden-size 65", f"{SHARING} --moe-ffn-hidden-size 64"),
    ("experts-that-all-tensor-ranks-cannot-share", f"{SPLIT} 65", f"{SPLIT} 65 --expert-tensor-parallel-size 1"),
    ("latent-experts-without-transformer-engine", f"{LATENT_EXPERTS} local", f"{LATENT_EXPERTS} transformer_engine"),
    ("positions-of-images-in-a-text-model", "--position-embedding-type mrope", "--position-embedding-type rope"),
    ("rotary-embedding-of-an-odd-width", f"{LEGACY} 33", f"{LEGACY} 34"),
    ("rotary-embedding-of-an-odd-width", f"{LEGACY} 33", f"{LEGACY} 33 --rotary-percent 0.5"),
    ("rotary-embedding-of-heads-of-an-odd-width", ROTARY, f"{ROTARY} --kv-channels 34"),
    ("rotary-part-of-an-odd-width", "--multi-latent-attention --qk-pos-emb-head-dim 15", "--multi-latent-attention"),
]
CONTEXT = "--num-experts 8 --moe-aux-loss-coeff 1e-2 --context-parallel-size 2"
CASES += [
    ("auxiliary-losses-under-context-parallelism", "0.15.3", CONTEXT, {}, True),
    ("auxiliary-losses-under-context-parallelism", "0.16.1", CONTEXT, {}, False),
    ("grouped-experts-with-biases", "0.14.0", GEMM, {}, True),
    ("grouped-experts-with-biases", "0.14.0", f"{GEMM} --disable-bias-linear", {}, False),
    ("grouped-experts-with-fused-dropout", "0.19.0", GEMM, {}, True),
    ("prediction-loss-by-replica", "0.19.0", "--mtp-num-layers 1 --calculate-per-token-loss", {}, True),
    ("prediction-loss-by-replica", "0.16.1", "--mtp-num-layers 1 --calculate-per-token-loss", {}, False),
    *((name, "0.16.1", words, {}, caught) for name, wrong, right in PAIRS for words, caught in ((wrong, True), (right, False))),
    ("ramp-up-without-an-effect", "0.19.0", "--rampup-batch-size 8 8 99", {}, True),
    ("ramp-up-without-an-effect", "0.16.1", "--rampup-batch-size 8 8 99", {}, False),
    ("num-layers-with-a-hybrid-pattern", "0.19.0", "--hybrid-layer-pattern M*M- --num-layers 4", {}, True),
    ("num-layers-with-a-hybrid-pattern", "0.19.0", "--hybrid-layer-pattern M*M-", {}, False),
    ("fault-tolerance-without-its-launcher", "0.16.1", "--enable-ft-package", {}, True),
    ("fault-tolerance-without-its-launcher", "0.16.1", "", {}, False),
    ("restart-in-process-under-one-agent", "0.16.1", "--inprocess-restart", {}, True),
    ("restart-in-process-under-one-agent", "0.16.1", "", {}, False),
    *(
        (f"{kernel}-attention-against-the-environment", "0.16.1", words, {f"NVTE_{kernel.upper()}_ATTN": "0"}, caught)
        for kernel in ("fused", "flash", "unfused")
        for words, caught in (("", True), (f"--attention-backend {kernel}", True), ("--attention-backend local", False))
    ),
]


@pytest.mark.parametrize(("name", "version", "words", "environ", "caught"), CASES)
def test_a_trap_catches_what_its_source_is_about(name, version, words, environ, caught):
    known = surface_or_nearest(version)
    given = {dest: argument.value for dest, argument in given_arguments(words.split(), known).items()}
    (platforms,) = [trap.platforms for trap in known_traps() if trap.name == name]
    platform = "cuda" if "cuda" in platforms else platforms[0]
    names = [trap.name for trap in traps_of(given, known, environ, platform, "torchrun", "pretrain_gpt.py")]
    assert (name in names) is caught


def test_every_trap_is_tested_both_ways_and_has_a_source():
    assert len(known_traps()) >= 40
    for trap in known_traps():
        assert {caught for name, *_, caught in CASES if name == trap.name} == ({True, False} if trap.when else set())
        assert trap.source.startswith("https://github.com/")
        assert trap.consequence in CONSEQUENCES
        known = surface_or_nearest("0.16.1" if version_in("0.16.1", trap.megatron) else "0.19.0")
        names = [name for names in trap.when for name in names.split(" * ")]
        assert all(name in known.by_dest or name.removeprefix("job.") in FIELDS for name in names)


@pytest.mark.parametrize(
    ("launcher", "found"), [("torchrun", ["fault-tolerance-without-its-launcher"]), ("ft_launcher", []), ("", [])]
)
def test_a_trap_of_a_launcher_is_one_under_it_alone(launcher, found):
    traps = traps_of({"enable_ft_package": True}, surface_or_nearest("0.16.1"), {}, "cuda", launcher)
    assert [trap.name for trap in traps if trap.launchers] == found


def test_a_trap_of_a_program_is_one_in_it_alone():
    words = {"position_embedding_type": "mrope"}
    found = {
        program: [trap.name for trap in traps_of(words, surface_or_nearest("0.16.1"), {}, "npu", "", program)]
        for program in ("examples/pretrain_gpt.py", "pretrain_vlm.py", "")
    }
    assert {program for program, names in found.items() if "positions-of-images-in-a-text-model" in names} == {
        "examples/pretrain_gpt.py"
    }


def test_a_trap_is_none_where_a_value_that_it_reads_is_unknown():
    for more, caught in (("", True), ("--eval-interval $1", False)):
        (command,) = training_commands(f"torchrun --nproc-per-node 2 pretrain_gpt.py --train-iters 5 {more}\n", "x.sh")
        ((_, traps),) = check_jobs([CheckedJob(command, made_up("cuda", "0.16.1"))])
        assert ("no-evaluation-interval" in [trap.name for trap in traps]) is caught


def test_a_plan_warns_of_the_traps_of_its_script():
    script = (
        "export CUDA_DEVICE_MAX_CONNECTIONS=1\ntorchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 2 --hidden-size 64 "
        "--num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --overlap-grad-reduce "
        "\n"
    )
    (command,) = training_commands(script, "x.sh")
    ((plan, _),) = check_jobs([CheckedJob(command, made_up("cuda", "0.16.1"))])
    assert isinstance(plan, ActivationPlan)
    (text,) = [row.text for row in plan.rows if row.kind == "warning" and row.feature == "megatron-lm"]
    assert text.startswith("slow: with CUDA_DEVICE_MAX_CONNECTIONS=1, --overlap-grad-reduce overlaps no communication")
    assert text.endswith("fix: unset CUDA_DEVICE_MAX_CONNECTIONS (https://github.com/NVIDIA/Megatron-LM/issues/1468)")
