"""What tensor parallelism changes in Megatron alone: ``torchrun --nproc-per-node 2 stock_tensor_parallel.py``.

The loss of a model whose logits are gathered, the loss with label smoothing, and the norm of the gradients of learnable
attention sinks. Printed is each on the ranks beside the one of one process. Needs no mindspeed, no GPU and no Transformer
Engine.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

HIDDEN, HEADS, VOCABULARY, LENGTH = 8, 4, 16, 4


def config(ranks: int, **fields: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        tensor_model_parallel_size=ranks,
        **fields,
    )


def loss(ranks: int, gathered: bool = False) -> float:
    """The loss of a model whose layer does nothing: embedding and output layer, from the same weights in each layout."""
    torch.manual_seed(0)
    idle = ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules())
    model = GPTModel(config(ranks), idle, VOCABULARY, LENGTH, parallel_output=not gathered)
    tokens = torch.arange(LENGTH)[None]
    return float(model(tokens, tokens, None, labels=(tokens + 1) % VOCABULARY).mean())


def smoothed_loss(ranks: int) -> float:
    """The cross entropy with label smoothing, of logits whose vocabulary is in shares, on the first rank."""
    group = parallel_state.get_tensor_model_parallel_group()
    assert group.size() == ranks
    logits = torch.randn(LENGTH, 1, VOCABULARY, generator=torch.Generator().manual_seed(0))
    share = logits.chunk(group.size(), dim=-1)[group.rank()].clone()
    return float(vocab_parallel_cross_entropy(share, torch.arange(LENGTH)[:, None], label_smoothing=0.1).mean())


def norm_of_sinks(ranks: int) -> float:
    """The norm that clipping uses, of the gradients 1, 2, ... of the heads."""
    attention = DotProductAttention(config(ranks, softmax_type="learnable"), 1, AttnMaskType.causal, "self")
    group, offset = parallel_state.get_tensor_model_parallel_group(), attention.softmax_offset
    first = group.rank() * len(offset)
    gradient = torch.arange(first, first + len(offset)) + 1.0
    given = (offset, group)[: len(signature(param_is_not_tensor_parallel_duplicate).parameters)]
    square = gradient.square().sum() if param_is_not_tensor_parallel_duplicate(*given) else torch.zeros(())
    dist.all_reduce(square, group=group)
    return float(square.sqrt())


QUANTITIES: dict[str, Callable[[int], float]] = {
    "loss of logits in shares": loss,
    "loss of gathered logits": partial(loss, gathered=True),
    "loss with label smoothing": smoothed_loss,
    "norm of attention sinks": norm_of_sinks,
}


def measured(ranks: int, names: Iterable[str]) -> dict[str, float]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    found = {name: QUANTITIES[name](ranks) for name in names}
    parallel_state.destroy_model_parallel()
    return found


def main(names: Iterable[str] = tuple(QUANTITIES)) -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    whole, shared = measured(1, names), measured(ranks, names)
    for name in whole if dist.get_rank() == 0 else ():
        print(f"{name}: {shared[name]:.3f} on {ranks} ranks, {whole[name]:.3f} on one", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
