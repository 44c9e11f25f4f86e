"""Load a tiny random model of Hugging Face into Megatron through a client, and print what differs.

    python -m tests.features.transformer_engine_layers.client mbridge llama FOLDER

The clients build Transformer Engine's layers, here those in its roles.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

import mindspeed

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
MODELS: Final = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3-moe": "Qwen3Moe"}
Loaded = tuple[Any, Iterable[tuple[str, Any]]]
"""A model of Megatron, and its weights under the names of Hugging Face."""


def by_mbridge(folder: str) -> Loaded:
    """Load as mbridge does it."""
    import torch
    from mbridge import AutoBridge

    bridge = AutoBridge.from_pretrained(folder)
    bridge.dtype = torch.float32
    bridge.config = bridge._build_config()
    model = bridge.get_model(bf16=False)
    bridge.load_weights(model, folder)
    return model[0], bridge.export_weights(model)


def by_megatron_bridge(folder: str) -> Loaded:
    """Load as Megatron-Bridge does it, without its fused kernels."""
    import torch
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(folder)
    provider = bridge.to_megatron_provider()
    provider.params_dtype, provider.bf16, provider.fp16 = torch.float32, False, False
    provider.apply_rope_fusion = provider.gradient_accumulation_fusion = provider.moe_permute_fusion = False
    provider.finalize()
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    return model[0], bridge.export_hf_weights(model, show_progress=False)


CLIENTS: Final[dict[str, Callable[[str], Loaded]]] = {
    "mbridge": by_mbridge,
    "megatron-bridge": by_megatron_bridge,
}


def main(client: str, name: str, folder: str) -> None:
    """Print the largest difference of logits, the names of weights that are exported otherwise, and two losses."""
    import torch
    import transformers

    from tests.features.transformer_engine_layers.single_rank import single_rank

    torch.manual_seed(0)
    kind = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**_SIZES, **_EXPERTS if name == "qwen3-moe" else {})
    given = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    given.save_pretrained(folder)
    with single_rank():
        model, weights = CLIENTS[client](folder)
        tokens = torch.randint(0, 64, (2, 16))
        positions = torch.arange(16)[None].expand(2, -1)
        mask = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)[None, None]
        difference = (model(tokens, positions, mask) - given(tokens).logits).abs().max()
        expected = given.state_dict()
        exported = dict(weights)
        unequal = [key for key, value in expected.items() if key not in exported or not torch.equal(exported[key], value)]
        losses = []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(tokens, positions, mask, labels=tokens).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        layers = sorted({type(module).__name__ for module in model.modules() if type(module).__name__.startswith("TE")})
    print(json.dumps({"difference": difference.item(), "unequal": unequal, "losses": losses, "layers": layers}))


if __name__ == "__main__":
    mindspeed.activate(mindspeed.plan(["transformer-engine-layers"], platform="cpu", world={"transformer_engine_layers": True}))
    main(*sys.argv[1:])
