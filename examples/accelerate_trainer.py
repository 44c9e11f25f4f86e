"""A loop with Hugging Face's Accelerate around a model with ring attention, and the swapped optimizer of mindspeed.

python examples/accelerate_trainer.py
torchrun --nproc-per-node 2 examples/accelerate_trainer.py

Each rank has a part of the tokens of every row. Both commands print the same losses. Needs accelerate.
"""

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from plain_gpt import GPT
from torch.distributed.device_mesh import init_device_mesh

from mindspeed.nn import ContextParallelAttention
from mindspeed.optim import SwapOptimizer

ROWS, TOKENS, STEPS = 4, 32, 3


def main():
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29513")
    torch.distributed.init_process_group("gloo")
    accelerator = Accelerator(cpu=True)
    ring = ContextParallelAttention(init_device_mesh("cpu", (accelerator.num_processes,)))

    torch.manual_seed(1)
    model = GPT(TOKENS)
    for block in model.layers[1:-1]:
        block.core, block.positions = ring, ring.positions(TOKENS)
    optimizer = SwapOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4), parts=4)
    model, optimizer = accelerator.prepare(model, optimizer)

    data = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    for step in range(STEPS):
        rows = data[: ROWS * STEPS * (TOKENS + 1)].view(STEPS, ROWS, TOKENS + 1)[step]
        loss = model(ring.shard(rows[:, :-1]), ring.shard(rows[:, 1:]))  # tokens, and the tokens that follow them
        accelerator.backward(loss)  # which averages gradients over the parts of the rows
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step + 1}  loss {accelerator.reduce(loss.detach(), 'mean').item():.7f}", flush=True)
    accelerator.end_training()  # which ends the process group too


if __name__ == "__main__":
    main()
