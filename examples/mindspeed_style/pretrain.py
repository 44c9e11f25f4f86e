"""A few steps of a small GPT on one process, in plain megatron-core."""

import tiny_repository.adaptor  # noqa: F401, I001 - first, before anything of Megatron

import argparse
import os

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from mindspeed.arguments import process_args

VOCABULARY, LENGTH = 64, 32


def main():
    parser = process_args(argparse.ArgumentParser(description=__doc__, allow_abbrev=False))
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = make_model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}  loss {loss.item():.4f}", flush=True)
    largest = model.decoder.layers[0].mlp.linear_fc1.weight.abs().max().item()
    print(f"largest weight of the first layer: {largest:.3f}")


def make_model():
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH)


def loss_of(model):
    """The same eight sequences in every step: what a model of this size learns by heart."""
    tokens = torch.randint(VOCABULARY, (8, LENGTH + 1), generator=torch.Generator().manual_seed(0)).cuda()
    positions = torch.arange(LENGTH).unsqueeze(0).cuda()
    mask = (torch.tril(torch.ones(1, 1, LENGTH, LENGTH)) < 0.5).cuda()
    return model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous()).mean()


if __name__ == "__main__":
    main()
