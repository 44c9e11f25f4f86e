"""A training loop over megatron-core's model, gradient buffers and optimizer, without any hook of a training loop."""

import ctypes
import hashlib
import json
from typing import Any

STEPS = 3


_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def used_bytes() -> int:
    """The bytes that the C library has given out."""
    count = ctypes.CDLL(None).mallinfo2
    count.restype = _Mallinfo2
    found = count()
    return int(found.uordblks + found.hblkhd)


def train(evaluates: bool = False) -> dict[str, Any]:
    """Return losses and a digest of the weights, and the bytes that a forward pass leaves and that rest between steps."""
    import gc

    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    gc.collect()
    start = used_bytes()
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        masked_softmax_fusion=False,
    )
    gpt = Float16Module(config, GPTModel(config, get_gpt_layer_local_spec(), 64, 256, position_embedding_type="rope").cuda())
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), gpt)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16), [chunk]
    )
    tokens = torch.arange(512, device="cuda").view(2, 256) % 13
    places = torch.arange(256, device="cuda").expand(2, 256)
    mask = torch.ones(1, 1, 256, 256, dtype=torch.bool, device="cuda").triu_(1)
    losses, kept, rest = [], [], []

    def loss_of() -> torch.Tensor:
        return chunk(tokens, places, mask, labels=tokens.roll(-1, 1)).float().mean()

    for _ in range(STEPS):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        gc.collect()
        rest.append(used_bytes() - start)
        loss = loss_of()
        kept.append(used_bytes() - start - rest[-1])
        loss.backward()
        chunk.finish_grad_sync()
        optimizer.step()
        losses.append(loss.item())
        if evaluates:
            chunk.eval()
            with torch.no_grad():
                loss_of()
            chunk.train()
    weights = hashlib.sha256()
    for parameter in chunk.parameters():
        weights.update(parameter.detach().float().cpu().numpy().tobytes())
    return {"losses": losses, "weights": weights.hexdigest(), "kept": kept[-1], "rest": rest[-1]}


if __name__ == "__main__":
    import torch
    from megatron.core import parallel_state

    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel()
    print(json.dumps([train(), train(evaluates=True)]))
