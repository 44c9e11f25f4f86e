"""The training commands of Megatron-LM's functional tests, at sizes that a CPU trains in a second on at most two ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import split
from typing import Any, Final
from zlib import crc32

import yaml

_FOLDERS: Final = ("gpt", "moe", "mixtral")
_OTHER_SCRIPTS: Final = ("inference", "--perform-rl-step", "--export-", "--num-tokens-to-generate", "fp8", "fp4", "mxfp8")
"""What runs another script than pretrain_gpt.py or needs the arithmetic of a GPU."""
_LEFT_OUT: Final = (
    "--log-",
    "--tensorboard",
    "--timing-",
    "--wandb",
    "--profile",
    "--save",
    "--load",
    "--exit-",
    "--ckpt-",
    "--dist-ckpt",
    "--no-ckpt",
    "--async-save",
    "--use-checkpoint",
    "--use-persistent-ckpt",
    "--auto-detect-ckpt",
    "--no-load",
    "--finetune",
    "--override-opt",
    "--data-",
    "--vocab-file",
    "--merge-file",
    "--tokenizer",
    "--tiktoken",
    "--fim-",
    "--mock-data",
    "--split",
    "--num-workers",
    "--no-mmap",
    "--train-samples",
    "--step-batch-size-schedule",
    "--lr-decay-samples",
    "--lr-warmup-samples",
    "--lr-decay-iters",
    "--lr-warmup-iters",
    "--rampup-batch-size",
    "--bf16",
    "--fp16",
    "--rerun-mode",
    "--error-injection",
    "--distributed-backend",
    "--transformer-impl",
    "--pipeline-model-parallel-layout",
    "--straggler",
    "--inference",
    "--manual-gc",
    "--check-weight-hash",
    "--test-mode",
    "--use-tp-pp-dp-mapping",
    "--overlap-param-gather-with-optimizer-step",
    "--hierarchical-context-parallel-sizes",
    "--cp-comm-type",
    "--num-distributed-optimizer-instances",
)
"""Beginnings of options for files, logs, schedules of samples and low precision, and of sizes that two ranks cannot have."""
_SIZES: Final[dict[str, Any]] = {
    "--hidden-size": 64,
    "--num-attention-heads": 4,
    "--num-query-groups": 2,
    "--kv-channels": 16,
    "--ffn-hidden-size": 96,
    "--moe-ffn-hidden-size": 32,
    "--moe-shared-expert-intermediate-size": 32,
    "--num-experts": 4,
    "--moe-router-topk": 2,
    "--moe-router-num-groups": 2,
    "--moe-router-group-topk": 1,
    "--q-lora-rank": 16,
    "--kv-lora-rank": 12,
    "--qk-head-dim": 8,
    "--qk-pos-emb-head-dim": 4,
    "--v-head-dim": 10,
    "--linear-key-head-dim": 16,
    "--linear-value-head-dim": 16,
    "--linear-num-key-heads": 2,
    "--linear-num-value-heads": 4,
    "--seq-length": 32,
    "--max-position-embeddings": 32,
    "--expert-tensor-parallel-size": 2,
    "--micro-batch-size": 1,
    "--recompute-num-layers": 1,
    "--decoder-first-pipeline-num-layers": 1,
    "--decoder-last-pipeline-num-layers": 1,
    "--num-layers-per-virtual-pipeline-stage": 1,
    "--wgrad-deferral-limit": 1,
    "--microbatch-group-size-per-virtual-pipeline-stage": 2,
}
_TENSOR, _STAGES = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_CONTEXT, _EXPERT = "--context-parallel-size", "--expert-model-parallel-size"
_ONLY_WITH: Final = {
    _TENSOR: ("--sequence-parallel", "--expert-tensor-parallel-size", "--no-async-tensor", "--tp-comm"),
    _STAGES: (
        "--num-layers-per-virtual",
        "--num-virtual-stages",
        "--decoder-first",
        "--decoder-last",
        "--account-for",
        "--overlap-p2p",
        "--microbatch-group",
        "--defer-embedding",
        "--wgrad-deferral",
    ),
    _EXPERT: ("--overlap-moe-expert-parallel",),
}
"""Options that need more than one rank in a layout."""
_FIXED: Final = split(
    "--train-iters 2 --lr-decay-iters 4 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 90,5,5 "
    "--make-vocab-size-divisible-by 32 --num-workers 0 --log-interval 1 --eval-interval 1000 --eval-iters 0"
)


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its name, its processes, its flags and its variables."""

    name: str
    nproc: int
    flags: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]


def commands(root: Path) -> Iterator[Command]:
    """Yield every command of a checkout that runs pretrain_gpt.py without fp8."""
    for folder in _FOLDERS:
        for file in sorted((root / "tests" / "functional_tests" / "test_cases" / folder).glob("*/model_config.yaml")):
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
            options = content.get("MODEL_ARGS") or {}
            text = f"{file.parent.name} {' '.join(map(str, options))}"
            if "--num-layers" in options and not any(part in text for part in _OTHER_SCRIPTS):
                yield shrunk(f"{folder}/{file.parent.name}", options, content.get("ENV_VARS") or {})


def shrunk(name: str, options: Mapping[str, Any], variables: Mapping[str, Any]) -> Command:
    """Return a command at small sizes; of several parallel dimensions the name decides which one has two ranks."""
    wide = [size for size in (_TENSOR, _STAGES, _CONTEXT, _EXPERT) if int(options.get(size, 1)) > 1]
    needs_stages = [size for size in wide if size == _STAGES and any(_has(options, part) for part in _ONLY_WITH[_STAGES])]
    chosen = next(iter(needs_stages or wide[crc32(name.encode()) % len(wide) :][:1]), "") if wide else ""
    nproc = 2 if chosen or "--use-distributed-optimizer" in options else 1
    dropped = [*_LEFT_OUT, *(part for size, parts in _ONLY_WITH.items() if size != chosen for part in parts)]
    filled_in = {option for option, value in options.items() if "${" in str(value)}
    kept = {option: value for option, value in options.items() if not option.startswith(tuple(dropped))}
    kept = {option: value for option, value in kept.items() if option not in filled_in}
    kept |= {option: value for option, value in _SIZES.items() if option in kept}
    kept |= {size: 2 if size == chosen else 1 for size in (_TENSOR, _STAGES, _CONTEXT, _EXPERT) if size in kept}
    for option in ("--train-iters", "--eval-interval", "--eval-iters", "--vocab-size", "--make-vocab-size-divisible-by"):
        kept.pop(option, None)
    kept["--num-layers"] = _layers(kept, chosen)
    kept["--global-batch-size"] = 4
    if "--moe-layer-freq" in kept:
        kept["--moe-layer-freq"] = f"([0]*1+[1]*{kept['--num-layers'] - 1})"
    flags = [text for option, value in kept.items() for text in _words(option, value)]
    flags += ["--features", "ring-attention"] if chosen == _CONTEXT else []
    given = {key: str(value) for key, value in variables.items() if not key.startswith("CUDA_DEVICE")}
    return Command(name, nproc, (*flags, *_FIXED), tuple(sorted(given.items())))


def _layers(kept: Mapping[str, Any], chosen: str) -> int:
    """Return a number of layers that two stages, and their chunks, share evenly; two each where activations are offloaded."""
    chunks = int(kept.get("--num-virtual-stages-per-pipeline-rank", 2 if _has(kept, "--num-layers-per-virtual") else 1))
    taken = _has(kept, "--account-for-embedding") + _has(kept, "--account-for-loss")
    layers = 2 * chunks if chosen == _STAGES else 2
    if _has(kept, "--fine-grained-activation-offloading"):  # Megatron 0.19 mistakes the only layer of a stage for another
        layers *= 2
    return layers if not taken else 2 * layers - taken


def _has(options: Mapping[str, Any], beginning: str) -> bool:
    return any(option.startswith(beginning) for option in options)


def _words(option: str, value: Any) -> list[str]:
    """Return the words of an option; a value that is true is a switch."""
    if value is True or value is False or value is None:
        return [option] if value is not False else []
    values = value if isinstance(value, list) else value.strip("[]").split() if isinstance(value, str) else [value]
    return [option, *map(str, values)]
