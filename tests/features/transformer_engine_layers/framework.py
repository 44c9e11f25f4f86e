"""Train a tiny model of Hugging Face as a framework does, and print a line of JSON.

    python -m tests.features.transformer_engine_layers.framework verl-mbridge FOLDER qwen2

The frameworks are checkouts on the path. verl and ms-swift pack sequences and call ``repatch`` in their own order; the
adapter of ROLL has one shape for all sequences.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from tests.features.transformer_engine_layers.client import made

LENGTHS: Final = (16, 9)
"""Lengths of the two sequences."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What a framework makes: its model, log-probabilities, a training step, and its weights by Hugging Face's names."""

    model: torch.nn.Module
    log_probabilities: Callable[[], torch.Tensor]
    step: Callable[[], float]
    weights: Callable[[], Iterable[tuple[str, torch.Tensor]]]


def by_verl(bridge: str, folder: str, tokens: torch.Tensor) -> Engine:
    """Make verl's engine for Ascend, whose constructor calls ``repatch`` with the model's groups open."""
    from verl.utils import tensordict_utils
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.mindspeed.transformer_impl import MindspeedEngineWithLMHead

    _open_group()
    model = HFModelConfig(path=folder, load_tokenizer=False, override_config={"attn_implementation": "eager"})
    model.tokenizer = Namespace(pad_token_id=0)
    config = McoreEngineConfig(vanilla_mbridge=bridge == "mbridge", dtype="bfloat16", use_dynamic_bsz=False)
    engine = MindspeedEngineWithLMHead(model, config, McoreOptimizerConfig(lr=1e-3, lr_decay_steps=10), None)
    engine.initialize()
    parts = [row[:length] for row, length in zip(tokens, LENGTHS, strict=True)]

    def batch() -> Any:
        positions = [torch.arange(length) for length in LENGTHS]
        columns = {"input_ids": parts, "loss_mask": [torch.ones_like(part) for part in parts], "position_ids": positions}
        nested = {key: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for key, rows in columns.items()}
        data = tensordict_utils.get_tensordict(nested, non_tensor_dict={})
        options = {"temperature": 1.0, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
        tensordict_utils.assign_non_tensor(data, **options)
        return data

    def loss(model_output: Any, data: Any, dp_group: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return -model_output["log_probs"].values().mean(), {}

    def log_probabilities() -> torch.Tensor:
        with engine.eval_mode():
            rows = engine.infer_batch(batch())["model_output"]["log_probs"].unbind()
        return torch.cat([row[:-1] for row in rows]).float()

    def step() -> float:
        with engine.train_mode():
            return float(engine.train_batch(batch(), loss)["loss"][0])

    export = engine.bridge.export_weights if bridge == "mbridge" else engine.bridge.export_hf_weights
    return Engine(engine.module[0], log_probabilities, step, partial(export, engine.module))


def by_ms_swift(folder: str, tokens: torch.Tensor) -> Engine:
    """Make the model of ms-swift, whose patches for Ascend surround ``repatch``."""
    from swift.model.npu_patch.mindspeed import apply_mindspeed_patches

    apply_mindspeed_patches({"use_flash_attn": True, "context_parallel_size": 1, "tensor_model_parallel_size": 1})
    from megatron.core.packed_seq_params import PackedSeqParams
    from swift.megatron.model.utils import get_mcore_model
    from transformers import AutoConfig

    _open_group()
    _open_model_groups()
    given = AutoConfig.from_pretrained(folder)
    names = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "fp4_param_gather", "fp8_param_gather")
    other = {"task_type": "causal_lm", "router_replay_mode": "disabled", "bridge_backend": "mcore-bridge", "padding_free": True}
    args = Namespace(**dict.fromkeys(names), **other, megatron_extra_kwargs=None, torch_dtype=torch.float32, bf16=False)
    args.megatron_model_meta = Namespace(model_type=None)
    args.moe_grouped_gemm = True
    (model,) = models = get_mcore_model(args, given)
    model.config.bridge.load_weights(models, folder)
    packed = torch.cat([row[:length] for row, length in zip(tokens, LENGTHS, strict=True)])[None]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    starts = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32)
    options = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": LENGTHS[0], "max_seqlen_kv": LENGTHS[0]}
    run = partial(model, packed, positions, None, packed_seq_params=PackedSeqParams(qkv_format="thd", **options))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def log_probabilities() -> torch.Tensor:
        with torch.no_grad():
            return _of_tokens(run()[0].split(LENGTHS), packed[0].split(LENGTHS))

    def step() -> float:
        optimizer.zero_grad()
        loss = run(labels=packed).mean()
        loss.backward()
        optimizer.step()
        return float(loss)

    return Engine(model, log_probabilities, step, partial(model.config.bridge.export_weights, models))


def by_roll(folder: str, tokens: torch.Tensor) -> Engine:
    """Make the model of ROLL's mcore_adapter."""
    from mcore_adapter.models import AutoModel
    from safetensors.torch import load_file

    import mindspeed.megatron_adaptor  # noqa: F401

    _open_group()
    _open_model_groups()
    models = AutoModel.from_pretrained(folder)
    (model,) = models.models
    positions = torch.arange(tokens.shape[1])[None].expand(2, -1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def log_probabilities() -> torch.Tensor:
        with torch.no_grad():
            logits = model(tokens, positions, None).float()
        cut = [(logits[row, :length], tokens[row, :length]) for row, length in enumerate(LENGTHS)]
        return _of_tokens(*zip(*cut, strict=True))

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens, positions, None).float().flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        return float(loss)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        saved = Path(folder, "exported")
        models.save_pretrained_as_hf(str(saved))
        for file in saved.glob("*.safetensors"):
            yield from load_file(file).items()

    return Engine(model, log_probabilities, step, weights)


FRAMEWORKS: Final[dict[str, Callable[[str, torch.Tensor], Engine]]] = {
    "verl-mbridge": partial(by_verl, "mbridge"),
    "verl-megatron-bridge": partial(by_verl, "megatron-bridge"),
    "ms-swift": by_ms_swift,
    "roll": by_roll,
}


def main(framework: str, folder: str, *models: str) -> None:
    """Print for a model the largest difference of log-probabilities, weights exported otherwise, losses and layers."""
    (name,) = models
    expected, tokens, logits = made(name, Path(folder) / name)
    engine = FRAMEWORKS[framework](str(Path(folder) / name), tokens)
    cut = [(logits[row, :length], tokens[row, :length]) for row, length in enumerate(LENGTHS)]
    reference = _of_tokens(*zip(*cut, strict=True))
    difference = (engine.log_probabilities() - reference).abs().max().item()
    exported = dict(engine.weights())
    unequal = [key for key, value in expected.items() if not _is_equal(exported.get(key), value)]
    losses = [engine.step() for _ in range(3)]
    layers = sorted({type(part).__name__ for part in engine.model.modules() if type(part).__name__.startswith("TE")})
    row = {"framework": framework, "model": name, "difference": difference, "unequal": unequal}
    print("\n" + json.dumps(row | {"losses": losses, "layers": layers}), flush=True)


def _of_tokens(logits: Iterable[torch.Tensor], tokens: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the log-probability of every token but the first of each sequence."""
    return torch.cat(list(_rows(logits, tokens)))


def _rows(logits: Iterable[torch.Tensor], tokens: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for scores, row in zip(logits, tokens, strict=True):
        yield scores[:-1].log_softmax(-1).gather(-1, row[1:, None])[:, 0]


def _is_equal(exported: torch.Tensor | None, given: torch.Tensor) -> bool:
    return exported is not None and torch.equal(exported, given.to(exported.dtype))


def _open_group() -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def _open_model_groups() -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
