#!/usr/bin/env bash
# Pretrain a GPT with Megatron-LM and mindspeed. Run it on every node; all of it can be set from outside:
#
#   MEGATRON_LM_PATH=~/Megatron-LM bash examples/pretrain_gpt_distributed.sh
#   TP=2 PP=4 FEATURES=rms-norm,swiglu DATA_PATH=/data/corpus_text_document bash examples/pretrain_gpt_distributed.sh
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash examples/pretrain_gpt_distributed.sh      (on the second of two nodes)
#
# Words after the script's name go to pretrain_gpt.py, flags of Megatron-LM and of mindspeed alike:
#
#   bash examples/pretrain_gpt_distributed.sh --set recompute.granularity=selective --bf16
set -euo pipefail

MEGATRON_LM_PATH=${MEGATRON_LM_PATH:?"name a checkout of Megatron-LM (tag core_v0.16.1)"}
PYTHON=${PYTHON:-python}

# processes
NPROC=${NPROC:-8}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-29500}

# layout: the data-parallel size is what the others leave
TP=${TP:-1}
PP=${PP:-1}
VPP=${VPP:-1}
EP=${EP:-1}

# features of mindspeed beside those that the layout switches on; `mindspeed features list` shows all
FEATURES=${FEATURES:-rms-norm,swiglu}
LEVEL=${LEVEL:-2}

# model
LAYERS=${LAYERS:-24}
HIDDEN=${HIDDEN:-2048}
FFN=${FFN:-5504}
HEADS=${HEADS:-16}
QUERY_GROUPS=${QUERY_GROUPS:-8}
SEQ_LENGTH=${SEQ_LENGTH:-4096}
EXPERTS=${EXPERTS:-0}

# training
MICRO_BATCH=${MICRO_BATCH:-1}
GLOBAL_BATCH=${GLOBAL_BATCH:-64}
ITERATIONS=${ITERATIONS:-1000}
LR=${LR:-3e-4}
SAVE=${SAVE:-}
LOAD=${LOAD:-}

# data: without DATA_PATH and TOKENIZER, made-up tokens
DATA_PATH=${DATA_PATH:-}
TOKENIZER=${TOKENIZER:-}
VOCAB=${VOCAB:-32000}

export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

layout=(--tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP")
if [ "$TP" -gt 1 ]; then layout+=(--sequence-parallel); fi
if [ "$VPP" -gt 1 ]; then layout+=(--num-virtual-stages-per-pipeline-rank "$VPP"); fi
if [ "$((NPROC * NNODES))" -gt "$((TP * PP))" ]; then
    layout+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
fi

model=(
    --num-layers "$LAYERS" --hidden-size "$HIDDEN" --ffn-hidden-size "$FFN" --num-attention-heads "$HEADS"
    --group-query-attention --num-query-groups "$QUERY_GROUPS" --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
    --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
)
if [ "$EXPERTS" -gt 0 ]; then
    model+=(--num-experts "$EXPERTS" --expert-model-parallel-size "$EP" --moe-router-topk 2 --moe-token-dispatcher-type alltoall)
fi

training=(
    --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH" --train-iters "$ITERATIONS"
    --lr "$LR" --min-lr 3e-5 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95
    --log-interval 1 --eval-iters 1 --eval-interval 1000
)
if [ -n "$SAVE" ]; then training+=(--save "$SAVE" --save-interval 500 --async-save); fi
if [ -n "$LOAD" ]; then training+=(--load "$LOAD"); fi

if [ -n "$DATA_PATH" ]; then
    : "${TOKENIZER:?"name the tokenizer that DATA_PATH was made with"}"
    data=(--data-path "$DATA_PATH" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER" --split 99,1,0)
else
    data=(--mock-data --tokenizer-type NullTokenizer --vocab-size "$VOCAB" --split 98,1,1)
fi

ours=(--optimization-level "$LEVEL")
if [ -n "$FEATURES" ]; then ours+=(--features "$FEATURES"); fi

if [ "$NNODES" -gt 1 ]; then
    nodes=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
else
    nodes=()
fi

exec "$PYTHON" -m mindspeed run --nproc "$NPROC" ${nodes[@]+"${nodes[@]}"} -- "$MEGATRON_LM_PATH/pretrain_gpt.py" \
    "${layout[@]}" "${model[@]}" "${training[@]}" "${data[@]}" "${ours[@]}" "$@"
