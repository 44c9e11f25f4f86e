"""A process of `benchmarks.levels` without mindspeed: a loop by hand over unmodified megatron-core on the CPU.

Replaced is only what asks for a GPU at each call: the current device, and the random state of dropout, which is off. In bf16
the optimizer has copies of the weights in fp32, as Megatron's has.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import silu

VOCABULARY = 320


def build(dtype: torch.dtype, shape: dict[str, Any]) -> GPTModel:
    """Build the model that ``mindspeed pretrain`` makes of these sizes."""
    config = TransformerConfig(
        num_layers=shape["num_layers"],
        hidden_size=shape["hidden_size"],
        num_attention_heads=shape["num_attention_heads"],
        num_query_groups=shape["num_attention_heads"] // 2,
        ffn_hidden_size=1376,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    options = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
    return GPTModel(config, spec, VOCABULARY, shape["seq_length"], **options).to(dtype)


class Loop:
    """Steps over random tokens."""

    def __init__(self, model: GPTModel, shape: dict[str, Any]) -> None:
        self.model, self.shape = model, shape
        self.weights = list(model.parameters())
        is_wide = self.weights[0].dtype is torch.float32
        self.copies = self.weights if is_wide else [weight.detach().float().requires_grad_() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.copies, lr=1e-3, fused=True)
        length = shape["seq_length"]
        self.positions = torch.arange(length)[None]
        self.mask = torch.triu(torch.ones(1, 1, length, length), 1).bool()

    def step(self) -> float:
        """Make an optimizer step and return the loss of its last micro-batch."""
        count = self.shape["global_batch_size"] // self.shape["micro_batch_size"]
        for _ in range(count):
            tokens = torch.randint(VOCABULARY, (self.shape["micro_batch_size"], self.shape["seq_length"] + 1))
            loss = self.model(tokens[:, :-1], self.positions, self.mask, labels=tokens[:, 1:]).mean()
            (loss / count).backward()
        if self.copies is not self.weights:
            for weight, copy in zip(self.weights, self.copies, strict=True):
                copy.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.copies, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.copies is not self.weights:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.copies)
        return float(loss)


def main(dtype: str, shape: dict[str, Any]) -> None:
    """Make a step for every line that comes."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    megatron_random.initialize_rng_tracker()
    megatron_random._CUDA_RNG_STATE_TRACKER = SimpleNamespace(fork=lambda *_: nullcontext())
    loop = Loop(build(torch.float32 if dtype == "fp32" else torch.bfloat16, shape), shape)
    print(json.dumps({"features": []}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = loop.step()
        print(json.dumps({"seconds": time.perf_counter() - start, "loss": loss}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
