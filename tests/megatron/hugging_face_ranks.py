"""Load tiny random models of Hugging Face into models of Megatron on several ranks, and print a line of JSON for each.

    python -m tests.megatron.hugging_face_ranks FOLDER local llama:tp2 qwen3-moe:ep2

Ranks are forked from a process that has the packages.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

import mindspeed
from mindspeed.problems import RunError
from tests.features.transformer_engine_layers.client import made
from tests.forked_ranks import run_ranks

LIMIT: Final = 300.0
LAYOUTS: Final = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
}
_ROWS: Final = 96
"""Rows of the embedding, more than the vocabulary has."""
_LESS: Final = 62
"""Rows of an embedding that the vocabulary does not fit into."""
MISSING: Final = "model.norm.weight"
"""A weight of the last stage, which a second folder lacks."""


def main(folder: str, layers: str, *cases: str) -> None:
    """Print for each case the largest difference of logits, and the weights that are exported otherwise."""
    import mbridge  # noqa: F401

    for case in cases:
        name, _, layout = case.partition(":")
        path = Path(folder) / case.replace(":", "-")
        _, tokens, logits = made(name, path)
        _copy_without(MISSING, path)
        find = partial(_found, path, layers == "engine", LAYOUTS[layout], tokens, logits)
        statuses = [*run_ranks(2, partial(_write, find, path), LIMIT).values()]
        text = (path / "rank1.json").read_text() if not any(statuses) else json.dumps({"error": f"exit status {statuses}"})
        print(json.dumps({"case": case} | json.loads(text)), flush=True)


def _copy_without(name: str, path: Path) -> None:
    """Save the model of a folder once more below it, without one weight."""
    from safetensors.torch import load_file, save_file

    (path / "less").mkdir()
    (path / "less" / "config.json").write_text((path / "config.json").read_text())
    weights = load_file(path / "model.safetensors")
    del weights[name]
    save_file(weights, path / "less" / "model.safetensors")


def _write(find: Any, path: Path, rank: int) -> int:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    (path / f"rank{rank}.json").write_text(json.dumps(find(rank)))
    return 0


def _found(path: Path, engine: bool, sizes: dict[str, int], tokens: Any, logits: Any, rank: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, model_parallel_cuda_manual_seed
    from safetensors.torch import load_file

    from mindspeed.megatron.hugging_face_weights import bridge_of, load_weights, named_chunks

    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1)
    config = _config(json.loads((path / "config.json").read_text()), sizes)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=engine, normalization="RMSNorm")
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    build = partial(GPTModel, config, spec, max_sequence_length=64, pre_process=first, post_process=last)
    build = partial(build, position_embedding_type="rope", share_embeddings_and_output_weights=False)
    model = build(_ROWS)
    load_weights([model], str(path))
    model.eval()
    positions = torch.arange(tokens.shape[1])[None].expand(2, -1)
    with torch.no_grad():
        if not first:
            hidden = torch.empty(tokens.shape[1], 2, config.hidden_size)
            dist.recv(hidden, 0)
            model.set_input_tensor(hidden)
        output = model(tokens, positions, None)
        if not last:
            dist.send(output, 1)
    difference = 0.0
    if last:
        found = gather_from_tensor_model_parallel_region(output)[..., : logits.shape[-1]]
        difference = (found - logits).abs().max().item()
    bridge = bridge_of([model], str(path))
    exported = dict(bridge.export_weights(named_chunks([model], bridge)))
    expected = load_file(path / "model.safetensors")
    unequal = [key for key, value in expected.items() if key not in exported or not torch.equal(exported[key], value)]
    refused = [_refused(build(_LESS), path), _refused(build(_ROWS), path / "less")]
    return {"difference": difference, "unequal": unequal, "weights": len(expected), "refused": refused}


def _refused(model: Any, path: Path) -> list[str]:
    """Return the message and the fix of the error with which a model is not loaded."""
    from mindspeed.megatron.hugging_face_weights import load_weights

    try:
        load_weights([model], str(path))
    except RunError as error:
        return [f"{problem.code} {problem.message} | {problem.fix_text}" for problem in error.problems]
    return []


def _config(given: dict[str, Any], sizes: dict[str, int]) -> Any:
    """Make the configuration of the same model, as Megatron-LM's arguments give it."""
    import torch
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    options: dict[str, Any] = {
        "num_layers": given["num_hidden_layers"],
        "hidden_size": given["hidden_size"],
        "ffn_hidden_size": given["intermediate_size"],
        "num_attention_heads": given["num_attention_heads"],
        "layernorm_epsilon": given["rms_norm_eps"],
        "normalization": "RMSNorm",
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "pipeline_dtype": torch.float32,
        "qk_layernorm": given["model_type"] not in ("llama", "qwen2"),
        "add_qkv_bias": given["model_type"] == "qwen2",
    }
    counts = (given.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    if experts := next(filter(None, counts), None):
        dense = given.get("first_k_dense_replace", 0)
        options |= {
            "num_moe_experts": experts,
            "moe_router_topk": given["num_experts_per_tok"],
            "moe_ffn_hidden_size": given["moe_intermediate_size"],
            "moe_layer_freq": [0] * dense + [1] * (given["num_hidden_layers"] - dense),
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
        }
    if "kv_lora_rank" not in given:
        return TransformerConfig(
            kv_channels=given["head_dim"], num_query_groups=given["num_key_value_heads"], **options, **sizes
        )
    options |= {
        "q_lora_rank": given["q_lora_rank"],
        "kv_lora_rank": given["kv_lora_rank"],
        "qk_head_dim": given["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": given["qk_rope_head_dim"],
        "v_head_dim": given["v_head_dim"],
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": given["n_group"],
        "moe_router_group_topk": given["topk_group"],
        "moe_router_topk_scaling_factor": given["routed_scaling_factor"],
        "moe_shared_expert_intermediate_size": given["moe_intermediate_size"] * given["n_shared_experts"],
    }
    return MLATransformerConfig(**options, **sizes)


if __name__ == "__main__":
    engine = sys.argv[2] == "engine"
    names = ["transformer-engine-layers"] if engine else []
    mindspeed.activate(mindspeed.plan(names, platform="cpu", world={"transformer_engine_layers": engine}))
    main(*sys.argv[1:])
