"""A rank's GPTModel without layers: losses and gradients of tokens that count differently, as SFT and RL weigh them."""

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

HIDDEN, VOCABULARY, BATCH, LENGTH = 8, 32, 3, 10


def masked_steps(ranks: int, sequence_parallel: bool, tied: bool) -> dict[str, list[Tensor]]:
    """Return the losses of tokens and the gradients of parameters, by the kind of their weights."""
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=ranks,
        sequence_parallel=sequence_parallel,
    )
    idle = ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules())
    model = GPTModel(config, idle, VOCABULARY, LENGTH, share_embeddings_and_output_weights=tied)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    mask = (torch.rand(BATCH, LENGTH) > 0.4).float()
    labels = torch.where(mask > 0, tokens.roll(-1, 1), -100)
    found = {}
    for kind, loss_mask, weights in (
        ("masked", mask, mask / mask.sum()),
        ("masked without the model's knowledge", None, mask / mask.sum()),
        ("weighed by advantages", mask, mask * torch.randn(BATCH, LENGTH)),
        ("ignored", torch.zeros_like(mask), torch.zeros_like(mask)),
    ):
        model.zero_grad()
        losses = model(tokens, positions, None, labels=labels, loss_mask=loss_mask)
        (losses * weights).sum().backward()
        found[kind] = [losses.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    with torch.no_grad():
        found["evaluated"] = [model(tokens, positions, None, labels=labels)]
        found["logits"] = [model(tokens, positions, None)]
    return found
