"""A Llama model of torchtitan with ring attention and the swapped optimizer of mindspeed, under FSDP2.

python examples/torchtitan_model.py --attention sdpa
torchrun --nproc-per-node 2 examples/torchtitan_model.py

The attention is a part of torchtitan's configuration, so nothing of torchtitan is changed. Each rank has a part of the tokens
of every row. Both commands print the same losses. Needs torchtitan.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs
from torchtitan.protocols.module import Module

from mindspeed.nn import ContextParallelAttention
from mindspeed.optim import SwapOptimizer

LAYERS, ROWS, TOKENS, STEPS = 2, 4, 64, 3


class RingAttention(Module):
    """The inner attention of a torchtitan layer, over the tokens of all ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        core: Any

    def __init__(self, config):
        super().__init__()
        self.core = config.core

    def forward(self, query, key, value, **_):
        return self.core(query, key, value)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", choices=["ring", "sdpa"], default="ring")
    options = parser.parse_args()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29514"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ring = ContextParallelAttention(mesh)

    torch.manual_seed(1)
    config = llama3_configs["debugmodel"]("flex")
    del config.layers[LAYERS:]
    for layer in config.layers:
        chosen = RingAttention.Config(core=ring) if options.attention == "ring" else ScaledDotProductAttention.Config()
        layer.attention.inner_attention = chosen
    model = config.build()
    model.init_states()
    fully_shard(model, mesh=mesh)
    optimizer = SwapOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), parts=4)

    data = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    batches = data[: ROWS * STEPS * (TOKENS + 1)].view(STEPS, ROWS, TOKENS + 1)
    positions = ring.positions(TOKENS).expand(ROWS, -1)
    for step, rows in enumerate(batches, 1):
        logits = model(ring.shard(rows[:, :-1]), positions=positions)
        loss = F.cross_entropy(logits.flatten(0, 1), ring.shard(rows[:, 1:]).flatten())  # the tokens that follow
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step}  loss {mean.item():.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
