"""Which gradient latent attention has in Megatron alone: ``torchrun --nproc-per-node 2 stock_latent_attention.py``.

The part of the keys that has positions is one for all heads. With local layers its gradient is the sum over the heads of one
tensor-parallel rank alone, so that the weight that makes it gets another gradient than in one process (NVIDIA/Megatron-LM
#1699). Printed is the difference over the norm in one process, for each weight. Needs no mindspeed, no GPU and no Transformer
Engine.
"""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig

TOKENS, HIDDEN = 8, 32


class Attention(DotProductAttention):
    """Megatron's local attention for heads of 16 numbers, of which values have 8: it takes no widths by itself."""

    def __init__(self, *args: object, k_channels: int = 0, v_channels: int = 0, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels


def gradients(ranks: int, groups: ProcessGroupCollection) -> dict[str, torch.Tensor]:
    """The whole gradients of an attention's weights, which are numbered alike on any number of ranks."""
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_head_dim=8,
        qk_pos_emb_head_dim=8,
        v_head_dim=8,
        rope_type="rope",
        attention_dropout=0.0,
        add_bias_linear=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=ranks,
    )
    spec = get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention
    spec.submodules.core_attention = Attention
    attention = build_module(spec, config=config, layer_number=1)
    for name, weight in attention.named_parameters():
        axis = getattr(weight, "partition_dim", -1)
        shape = [size * ranks if number == axis else size for number, size in enumerate(weight.shape)]
        seed = torch.Generator().manual_seed(sum(map(ord, name)))
        whole = torch.randn(shape, generator=seed) / math.sqrt(shape[-1]) if len(shape) > 1 else torch.ones(shape)
        weight.data = whole.chunk(ranks, axis)[groups.tp.rank()].clone() if axis >= 0 else whole
    hidden = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)
    output, _ = attention(hidden, attention_mask=mask)
    (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    found = {}
    for name, weight in attention.named_parameters():
        parts = [torch.empty_like(weight.grad) for _ in range(ranks)]
        dist.all_gather(parts, weight.grad.contiguous(), group=groups.tp)
        axis = getattr(weight, "partition_dim", -1)
        found[name] = torch.cat(parts, axis) if axis >= 0 else parts[0]
    return found


def _cpu() -> torch.device:
    return torch.device("cpu")


def _no_random_numbers(*_: object) -> AbstractContextManager[None]:
    return nullcontext()


def main() -> None:
    """Print the table on rank 0."""
    dist.init_process_group("gloo")
    torch.cuda.current_device = _cpu  # which Megatron's rotary embedding asks for
    CudaRNGStatesTracker.fork = _no_random_numbers  # without dropout
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.TELinear = type("TELinear", (), {})  # no layer is one without Transformer Engine
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    split = gradients(2, groups)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    alone = gradients(1, ProcessGroupCollection.use_mpu_process_groups())
    if dist.get_rank() == 0:
        for name, gradient in alone.items():
            print(f"{name:30} {float((split[name] - gradient).norm() / gradient.norm()):.2g}")


if __name__ == "__main__":
    main()
