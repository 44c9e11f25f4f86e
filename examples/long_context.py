"""A sequence of 16,384 tokens over several CPU processes, without Megatron.

    torchrun --nproc-per-node 2 examples/long_context.py
    torchrun --nproc-per-node 4 examples/long_context.py --attention ulysses

Each rank holds a share of every sequence; only attention looks beyond it. The loss of a token counts once however many
ranks there are: gradients are summed over ranks and divided by the number of tokens of the whole sequence.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mindspeed.context_parallel.layout import Layout, zigzag
from mindspeed.context_parallel.ring import ring_attention
from mindspeed.features.kv_allgather_cp.attention import kv_allgather_attention
from mindspeed.features.ulysses_attention.attention import contiguous, ulysses_attention
from mindspeed.ops import npu_rotary_position_embedding, rms_norm, swiglu

ALGORITHMS = {
    "ring": (ring_attention, zigzag),
    "ulysses": (ulysses_attention, contiguous),
    "kv-allgather": (kv_allgather_attention, zigzag),
}
HEADS, KV_HEADS, HEAD_WIDTH = 4, 2, 32
WIDTH, INNER, LAYERS, VOCABULARY = HEADS * HEAD_WIDTH, 384, 2, 256


class Block(nn.Module):
    """A decoder layer on a share of the tokens, [tokens here, batch, width]."""

    def __init__(self, attend) -> None:
        super().__init__()
        self.attend = attend
        self.norms = nn.ParameterList([torch.ones(WIDTH), torch.ones(WIDTH)])
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.qkv(rms_norm(x, self.norms[0])).unflatten(-1, (-1, HEAD_WIDTH))
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 2)
        q, k = (npu_rotary_position_embedding(part, cos, sin) for part in (q, k))
        x = x + self.out(self.attend(q, k, v.contiguous(), dist.group.WORLD).flatten(2))
        return x + self.down(swiglu(self.up(rms_norm(x, self.norms[1]))))


class Model(nn.Module):
    def __init__(self, attend) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(attend) for _ in range(LAYERS)])
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits of [tokens here, batch] at their ``positions`` in the whole sequence."""
        angles = torch.outer(positions, 10000 ** (-torch.arange(0, 1, 2 / HEAD_WIDTH)))
        table = torch.cat((angles, angles), -1)[:, None, None]
        cos, sin = table.cos(), table.sin()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(rms_norm(x, self.norm))


def text() -> Tensor:
    """Bytes of the standard library's top-level modules."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def share(layout: Layout, start: int, length: int, data: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's inputs, targets and positions of the sequence that begins at ``start``; every rank sees the same start."""
    positions = layout.take(torch.arange(length), dist.get_rank())
    piece = data[start : start + length + 1].long()
    return piece[positions][:, None], piece[positions + 1][:, None], positions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", choices=ALGORITHMS, default="ring")
    parser.add_argument("--tokens", type=int, default=16384, help="of a sequence, over all ranks")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("this example runs in the processes of a launcher: torchrun --nproc-per-node 2 examples/long_context.py")
    dist.init_process_group("gloo")
    attend, kind = ALGORITHMS[options.attention]
    layout, data = kind(dist.get_world_size()), text()
    torch.manual_seed(1)  # the same weights and the same sequences on every rank
    model = Model(attend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    begin = time.perf_counter()
    for step in range(1, options.steps + 1):
        start = int(torch.randint(len(data) - options.tokens - 1, ()))
        inputs, targets, positions = share(layout, start, options.tokens, data)
        loss = F.cross_entropy(model(inputs, positions).flatten(0, 1), targets.flatten(), reduction="sum") / options.tokens
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0 and (step in (1, options.steps) or step % 5 == 0):
            rate = step * options.tokens / (time.perf_counter() - begin)
            print(f"step {step}  loss {total.item():.4f}  {rate:.0f} tokens/s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
