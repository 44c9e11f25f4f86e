"""Load tiny random models of Hugging Face into Megatron through a client, and print a line of JSON for each.

    python -m tests.features.transformer_engine_layers.client mbridge tp2 FOLDER llama qwen2

The clients build Transformer Engine's layers, here those in its roles. Ranks are forked from a process that has the client.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import mindspeed
from tests.forked_ranks import run_ranks

LIMIT: Final = 600.0
"""Seconds for a model."""
_SIZES: Final = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
_LATENT: Final = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "head_dim": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "num_nextn_predict_layers": 0,
    "rope_theta": 10000.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3-moe": ("Qwen3Moe", _EXPERTS),
    "deepseek-v3": ("DeepseekV3", _LATENT),
}
LAYOUTS: Final[dict[str, tuple[int, dict[str, int]]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
}
Sizes = dict[str, int]
Loaded = tuple[Any, Iterable[tuple[str, Any]]]
"""A model of Megatron, and its weights under the names of Hugging Face."""


def by_mbridge(folder: str, sizes: Sizes) -> Loaded:
    """Load as mbridge does it."""
    import torch
    from mbridge import AutoBridge

    bridge = AutoBridge.from_pretrained(folder)
    bridge.dtype = torch.float32
    bridge.config = bridge._build_config()
    model = bridge.get_model(bf16=False)
    bridge.load_weights(model, folder)
    return model[0], bridge.export_weights(model)


def by_megatron_bridge(folder: str, sizes: Sizes) -> Loaded:
    """Load as Megatron-Bridge does it, with the fused kernels that are its defaults."""
    import torch
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(folder)
    provider = bridge.to_megatron_provider()
    provider.params_dtype, provider.bf16, provider.fp16 = torch.float32, False, False
    vars(provider).update(sizes, sequence_parallel="tensor_model_parallel_size" in sizes)
    provider.finalize()
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    return model[0], bridge.export_hf_weights(model, show_progress=False)


def by_mcore_bridge(folder: str, sizes: Sizes) -> Loaded:
    """Load as mcore-bridge does it."""
    import torch
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
    from transformers import AutoConfig

    options = hf_to_mcore_config(AutoConfig.from_pretrained(folder))
    sequence_parallel = "tensor_model_parallel_size" in sizes
    config = ModelConfig(params_dtype=torch.float32, bf16=False, sequence_parallel=sequence_parallel, **sizes, **options)
    models = get_mcore_model(config)
    config.bridge.load_weights(models, folder)
    return models[0], config.bridge.export_weights(models)


CLIENTS: Final[dict[str, tuple[str, Callable[[str, Sizes], Loaded]]]] = {
    "mbridge": ("mbridge", by_mbridge),
    "megatron-bridge": ("megatron.bridge", by_megatron_bridge),
    "mcore-bridge": ("mcore_bridge.model", by_mcore_bridge),
}


def main(client: str, layout: str, folder: str, *models: str) -> None:
    """Print for each model what the first rank found, or why a rank ended."""
    package, load = CLIENTS[client]
    import_module(package)
    for name in models:
        path = Path(folder) / name
        expected = made(name, path)
        count, sizes = LAYOUTS[layout]
        find = partial(_found, load, path, sizes, *expected)
        statuses = [*run_ranks(count, partial(_write, find, path), LIMIT).values()]
        text = (path / "rank0.json").read_text() if not any(statuses) else json.dumps({"error": f"exit status {statuses}"})
        print(json.dumps({"client": client, "layout": layout, "model": name} | json.loads(text)), flush=True)


def made(name: str, path: Path) -> tuple[Any, Any, Any]:
    """Save a random model, and return its weights, tokens and its logits."""
    import torch
    import transformers

    torch.manual_seed(0)
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**_SIZES | options)
    given = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    given.save_pretrained(path)
    tokens = torch.randint(0, 64, (2, 16))
    with torch.no_grad():
        return given.state_dict(), tokens, given(tokens).logits


def _write(find: Callable[[], dict[str, Any]], path: Path, rank: int) -> int:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    (path / f"rank{rank}.json").write_text(json.dumps(find()))
    return 0


def _found(
    load: Callable[[str, Sizes], Loaded], path: Path, sizes: Sizes, expected: dict[str, Any], tokens: Any, logits: Any
) -> dict[str, Any]:
    """Return the largest difference of logits, the weights that are exported otherwise, two losses, and the layers."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1)
    model, weights = load(str(path), sizes)
    positions = torch.arange(16)[None].expand(2, -1)
    with torch.no_grad():
        found = gather_from_tensor_model_parallel_region(model(tokens, positions, None))
    exported = dict(weights)
    unequal = [key for key, value in expected.items() if key not in exported or not torch.equal(exported[key], value)]
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(tokens, positions, None, labels=tokens).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    layers = sorted({type(module).__name__ for module in model.modules() if type(module).__name__.startswith("TE")})
    return {"difference": (found - logits).abs().max().item(), "unequal": unequal, "losses": losses, "layers": layers}


if __name__ == "__main__":
    mindspeed.activate(mindspeed.plan(["transformer-engine-layers"], platform="cpu", world={"transformer_engine_layers": True}))
    main(*sys.argv[1:])
