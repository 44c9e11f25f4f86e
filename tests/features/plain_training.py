"""A training loop that uses megatron-core's model alone: torch's optimizer, no data-parallel wrapper, no gradient buffers."""

from typing import Any

LLAMA = {"normalization": "RMSNorm", "activation": "silu", "gated": True, "bias": False, "rotary": True}
GPT2 = {"normalization": "LayerNorm", "activation": "gelu", "gated": False, "bias": True, "rotary": False}


def train(model: dict[str, Any], steps: int = 3) -> tuple[list[float], list[str]]:
    """The losses of a few steps, and the problems of the active plan's report."""
    import torch
    import torch.nn.functional as F
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from mindspeed.engine.runtime import session

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    experts = {key: value for key, value in model.items() if "moe" in key}
    further = {key: value for key, value in model.items() if key.startswith("activation_func_")}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        normalization=model["normalization"],
        activation_func=getattr(F, model["activation"]),
        gated_linear_unit=model["gated"],
        add_bias_linear=model["bias"],
        **experts,
        **further,
    )
    spec = get_gpt_layer_local_spec(
        model.get("num_moe_experts"), bool(experts.get("moe_grouped_gemm")), normalization=model["normalization"]
    )
    positions = "rope" if model["rotary"] else "learned_absolute"
    gpt = GPTModel(config, spec, 64, 16, position_embedding_type=positions).to("cuda")
    optimizer = torch.optim.SGD(gpt.parameters(), 0.1)
    tokens = torch.arange(32, device="cuda").view(2, 16) % 13
    place = torch.arange(16, device="cuda").expand(2, 16)
    hidden = torch.ones(1, 1, 16, 16, dtype=torch.bool, device="cuda").triu_(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = gpt(tokens, place, hidden, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    report = session.report()
    return losses, [] if report is None else [f"{problem.code} {problem.message}" for problem in report.problems]
