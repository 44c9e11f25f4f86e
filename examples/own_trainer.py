"""A training loop of one's own, without Megatron, on five of mindspeed's operators.

    python examples/own_trainer.py --steps 200

A byte-level decoder (RMSNorm, rotary positions, grouped-query attention, a mixture of SwiGLU experts) learns the text of
Python's standard library. The operators are plain functions of tensors: nothing is activated and no plan is needed.
`mindspeed ops build` makes them fast on this processor; without it the same program runs on their references.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mindspeed.ops import (
    fusion_attention,
    npu_fused_moe_token_permute,
    npu_fused_moe_token_unpermute,
    npu_gmm,
    npu_rotary_position_embedding,
    rms_norm,
    swiglu,
)

HEADS, KV_HEADS, HEAD_WIDTH = 4, 2, 32
WIDTH = HEADS * HEAD_WIDTH
EXPERTS, TOP_K, EXPERT_WIDTH = 4, 2, 192
LAYERS, SEQUENCE, VOCABULARY = 2, 128, 256


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)


class Attention(nn.Module):
    """Causal attention with fewer key and value heads; the score matrix is never made."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("hidden", torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, -1, HEAD_WIDTH)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 2)
        q, k = (npu_rotary_position_embedding(part, cos, sin) for part in (q, k))
        attended = fusion_attention(q, k, v, HEADS, "BSND", atten_mask=self.hidden, scale=HEAD_WIDTH**-0.5, sparse_mode=2)[0]
        return self.out(attended.reshape(batch, length, WIDTH))


class Experts(nn.Module):
    """Each token goes to the best two experts; a grouped product computes all experts at once."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * EXPERT_WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, EXPERT_WIDTH, WIDTH) * EXPERT_WIDTH**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        probs, chosen = self.router(tokens).softmax(-1).topk(TOP_K)
        ends = torch.bincount(chosen.flatten(), minlength=EXPERTS).cumsum(0)
        rows, places = npu_fused_moe_token_permute(tokens, chosen)
        rows = swiglu(npu_gmm(rows, self.up, group_list=ends))
        rows = npu_gmm(rows, self.down, group_list=ends)
        return npu_fused_moe_token_unpermute(rows, places, probs / probs.sum(-1, keepdim=True)).view_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([Norm(), Norm()])
        self.attention = Attention()
        self.experts = Experts()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), cos, sin)
        return x + self.experts(self.norms[1](x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(SEQUENCE), 10000 ** (-torch.arange(0, 1, 2 / HEAD_WIDTH)))
        tables = torch.cat((angles, angles), -1).view(1, SEQUENCE, 1, HEAD_WIDTH)
        self.register_buffer("cos", tables.cos(), persistent=False)
        self.register_buffer("sin", tables.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def text() -> Tensor:
    """Bytes of the standard library's top-level modules."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batches(data: Tensor, size: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - SEQUENCE - 1, (size,))
    pieces = torch.stack([data[start : start + SEQUENCE + 1] for start in starts.tolist()]).long()
    return pieces[:, :-1], pieces[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(1)
    model, data = Model(), text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        inputs, targets = batches(data, options.batch)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (1, options.steps) or step % 20 == 0:
            rate = step * inputs.numel() / (time.perf_counter() - start)
            print(f"step {step}  loss {loss.item():.3f}  {rate:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
