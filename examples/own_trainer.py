"""A training loop of your own, without Megatron: single features of mindspeed in a GPT of plain torch.

python examples/own_trainer.py --use ring swap-optimizer
torchrun --nproc-per-node 4 examples/own_trainer.py --use all
torchrun --nproc-per-node 2 examples/own_trainer.py --use ring chunked-loss --wrapper fsdp

Without `--use`, this is the plain loop. With features, and on 1, 2 or 4 processes, it prints the same losses.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from plain_gpt import EXPERTS, FFN, GPT, TOP_K, VOCABULARY, WIDTH
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mindspeed.nn import ContextParallelAttention, LinearCrossEntropyLoss, MoE
from mindspeed.optim import SwapOptimizer
from mindspeed.parallel import Checkpoint, Pipeline, SwapActivations

FEATURES = ["ring", "moe", "chunked-loss", "recompute", "swap", "swap-optimizer", "pipeline"]
ROWS, TOKENS, MICRO_BATCHES = 8, 32, 2


class Recomputed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return Checkpoint(self.inner, [x]).run()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--use", nargs="*", default=[], choices=[*FEATURES, "all"])
    parser.add_argument("--wrapper", choices=["ddp", "fsdp"])
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    use = FEATURES if "all" in options.use else options.use
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    stages = min(2, dist.get_world_size()) if "pipeline" in use else 1
    mesh = init_device_mesh("cpu", (stages, dist.get_world_size() // stages), mesh_dim_names=("pp", "dp"))
    shares, share, stage = mesh["dp"].size(), mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()

    torch.manual_seed(1)
    model = GPT(TOKENS)
    blocks, ring, experts = model.layers[1:-1], ContextParallelAttention(mesh["dp"]), []
    for block in blocks:
        if "ring" in use:
            block.core, block.positions = ring, ring.positions(TOKENS)
        if "moe" in use:
            whole = block.experts.state_dict()
            block.experts = MoE(WIDTH, FFN, EXPERTS, TOP_K, mesh=mesh["dp"], chunks=2 if shares < EXPERTS else 1)
            own = {name: whole[name].chunk(shares)[share] for name in ("up", "down")}
            block.experts.load_state_dict(whole | own)
            experts += block.experts.expert_parameters()
        if "recompute" in use:
            block.experts = Recomputed(block.experts)
    if "chunked-loss" in use:
        loss = LinearCrossEntropyLoss(WIDTH, VOCABULARY, chunks=4)
        loss.linear, model.loss = model.loss.linear, loss
    mine = list(model.layers)[stage * len(model.layers) // stages : (stage + 1) * len(model.layers) // stages]
    if "swap" in use:
        SwapActivations([layer for layer in mine if layer in set(blocks)])
    pipeline = Pipeline([nn.Sequential(*mine)], mesh["pp"], MICRO_BATCHES, schedule="zb-h1") if "pipeline" in use else None
    if options.wrapper == "fsdp":
        fully_shard(model, mesh=mesh["dp"])
    run = DistributedDataParallel(model, process_group=mesh["dp"].get_group()) if options.wrapper == "ddp" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    if "swap-optimizer" in use:
        optimizer = SwapOptimizer(optimizer, parts=4)

    data = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    for step in range(options.steps):
        starts = torch.randint(len(data) - TOKENS - 1, (ROWS,), generator=torch.Generator().manual_seed(step))
        rows = torch.stack([data[start : start + TOKENS + 1] for start in starts.tolist()])
        batch = [rows[:, :-1], rows[:, 1:]]  # tokens, and the tokens that follow them
        inputs, targets = (ring.shard(x) if "ring" in use else x.chunk(shares)[share] for x in batch)
        optimizer.zero_grad()
        if pipeline is None:
            losses = [run(inputs, targets)]
            losses[0].backward()
        else:
            parts = targets.chunk(MICRO_BATCHES)
            losses = pipeline.step(inputs.chunk(MICRO_BATCHES), lambda x, n: model.loss(x, parts[n]) / MICRO_BATCHES)  # noqa: B023
        for parameter in [] if options.wrapper else model.parameters():
            if parameter.grad is not None:
                parameter.grad /= shares
                if not any(parameter is expert for expert in experts):
                    dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
        optimizer.step()
        total = torch.stack([x.detach() for x in losses] or [torch.zeros(())]).sum() / shares
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {total.item():.7f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
